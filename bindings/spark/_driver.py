"""The part of a job that runs on the driver: submits a barrier stage, watches it, and reads its rows."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horovodlike.errors import ConfigError
from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.errors import HostsError, UsageError, counted
from horovodlike.launcher.planning.addresses import LOOPBACK
from horovodlike.launcher.supervisor.failure_attribution import Failure
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.spark._output import CallerOutput, Row

if TYPE_CHECKING:
    from horovodlike.spark._task import Request

_MINIMUM = (4, 0)
"""The lowest release of PySpark."""
NO_NUM_PROC = "num_proc is missing: Spark Connect does not tell spark.default.parallelism"
_LOOK_S = 0.2
_SETTLE_S = 20.0
"""For how long no executor must have come before a cluster with too few slots is taken for complete."""
_CANCEL_S = 30.0
_LAST_LINES = 6
_REASON_S = 3.0
"""How long Spark may take to say why a stage has failed."""
_PROBE_S = 5
_LONGEST_PROBE_S = 10.0
_LOSSES = ("ExecutorLostFailure", "Python worker exited unexpectedly")
"""Spark's words for an executor and for a Python worker that have died."""


_ended: deque[str] = deque(maxlen=64)
"""The last jobs of this process that have ended: the next one removes the notes that they left on executors."""


class TasksLostError(HostsError):
    """Spark has lost a task of the job: an executor or a Python worker has died, or was taken away."""


class NotStartedError(HostsError):
    """No task of the job has started in time."""


class _ProbeOverError(Exception):
    """A probe has found out enough, or has taken too long."""


class Cluster(ABC):
    """A Spark session as jobs see it; classic Spark and Spark Connect have different means."""

    def __init__(self, session: Any) -> None:
        self.session = session

    @property
    @abstractmethod
    def default_parallelism(self) -> int | None:
        """The value of ``spark.default.parallelism``; None if it is not known."""

    @abstractmethod
    def slots(self) -> int | None:
        """Return how many tasks can run at the same time now; None if that is not known."""

    @abstractmethod
    def count(self, most: int) -> int:
        """Return how many of ``most`` tasks can run at the same time now; may take some seconds to find out."""

    def address(self) -> tuple[str, str] | None:
        """Return the address on which this process can listen for executors, and the one by which they know it."""
        return None

    @abstractmethod
    def watch(self, name: str) -> Watch:
        """Return the watch of a job."""


class Watch(ABC):
    """The state of one submitted job, as far as Spark tells. Made and used by one thread, but for :meth:`enter`."""

    @abstractmethod
    def enter(self) -> None:
        """Give the jobs of the calling thread a name by which they are found."""

    @abstractmethod
    def tasks_run(self) -> bool:
        """Return whether tasks of the job have started."""

    @abstractmethod
    def failure(self) -> HostsError | None:
        """Return the failure of the stage if Spark restarts it; else None."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the job."""

    def close(self) -> None:  # noqa: B027 - one has nothing to release
        """Release the resources of the watch."""


def find_cluster() -> Cluster:
    """Return the active Spark session.

    Raises:
        ConfigError: There is none, or PySpark is too old.
    """
    try:
        import pyspark
    except ImportError as error:
        raise ConfigError(f"horovodlike.spark needs PySpark: pip install 'horovodlike[spark]' ({error})") from error
    check_version(pyspark.__version__)
    from pyspark.sql.utils import is_remote

    if is_remote():
        from pyspark.sql.connect.session import SparkSession as ConnectSession

        active = ConnectSession.getActiveSession()
        if active is None:
            raise _no_session()
        return _ConnectCluster(active)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        raise _no_session()
    return _ClassicCluster(SparkSession.getActiveSession() or SparkSession.builder.getOrCreate())


def check_version(version: str) -> None:
    """Raise a ConfigError if a release of PySpark is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < _MINIMUM:
        raise ConfigError(
            f"PySpark {version} is installed, and horovodlike.spark needs at least {'.'.join(map(str, _MINIMUM))}: pip "
            "install -U pyspark, of the release of the cluster"
        )


def _no_session() -> ConfigError:
    return ConfigError(
        "Could not find an active SparkContext, are you running in a PySpark session? Make one first: "
        "SparkSession.builder.getOrCreate()"
    )


class _ClassicCluster(Cluster):
    @property
    def default_parallelism(self) -> int | None:
        return int(self.session.sparkContext.defaultParallelism)

    def slots(self) -> int:
        context = self.session.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return int(context.maxNumConcurrentTasks(profile))

    def count(self, most: int) -> int:
        return min(most, self.slots() or 0)

    def address(self) -> tuple[str, str]:
        if is_local(self):
            return LOOPBACK, LOOPBACK
        conf = self.session.sparkContext.getConf()
        host = str(conf.get("spark.driver.host"))
        return str(conf.get("spark.driver.bindAddress", host)).strip("[]"), host.strip("[]")

    def watch(self, name: str) -> Watch:
        return _ClassicWatch(self.session, name)


class _ClassicWatch(Watch):
    def __init__(self, session: Any, name: str) -> None:
        self._context, self._group = session.sparkContext, name
        self._tracker = self._context.statusTracker()
        self._ran = False
        self._failed_at: float | None = None

    def enter(self) -> None:
        self._context.setJobGroup(self._group, "horovodlike", interruptOnCancel=False)

    def _stages(self) -> Iterator[Any]:
        for job in self._tracker.getJobIdsForGroup(self._group):
            info = self._tracker.getJobInfo(job)
            for stage in () if info is None else info.stageIds:
                found = self._tracker.getStageInfo(stage)
                if found is not None:
                    yield found

    def tasks_run(self) -> bool:
        self._ran = self._ran or any(
            stage.numActiveTasks + stage.numCompletedTasks + stage.numFailedTasks > 0 for stage in self._stages()
        )
        return self._ran

    def failure(self) -> HostsError | None:
        for stage in self._stages():
            if stage.currentAttemptId > 0 or stage.numFailedTasks > 0:
                self._failed_at = self._failed_at or time.monotonic()
                reason = self._reason(stage.stageId)
                if reason is not None:
                    return failure_of(reason)
                if time.monotonic() > self._failed_at + _REASON_S:
                    return failure_of("the log of the driver says why")
        return None

    def _reason(self, stage: int) -> str | None:
        with contextlib.suppress(Exception):  # an interface of the JVM that Spark does not promise
            store, jvm = self._context._jsc.sc().statusStore(), self._context._jvm
            quantiles = self._context._gateway.new_array(jvm.double, 0)
            attempts = store.stageData(stage, False, jvm.java.util.ArrayList(), False, quantiles)
            for number in range(attempts.size()):
                reason = attempts.apply(number).failureReason()
                if reason.isDefined():
                    return str(reason.get())
        return None

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


def failure_of(reason: str) -> HostsError:
    """Return the error for a stage that has failed; only a lost executor or Python worker is a TasksLostError."""
    if any(words in reason for words in _LOSSES):
        return TasksLostError(f"Spark has lost a task of the job: {_shorten(reason)}")
    return HostsError(f"a task of the job has failed: {_shorten(reason)}")


def _shorten(reason: str) -> str:
    """Return the lines of a stage's failure that a user can act upon, without the frames of the JVM."""
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not line.startswith("\tat ")]
    return "\n".join(lines[:1] + lines[1:][-_LAST_LINES:])


class _ConnectCluster(Cluster):
    @property
    def default_parallelism(self) -> int | None:
        with contextlib.suppress(Exception):  # it is not set
            return int(self.session.conf.get("spark.default.parallelism"))
        return None

    def slots(self) -> int | None:
        return None

    def watch(self, name: str) -> Watch:
        return _ConnectWatch(self.session, name)

    def count(self, most: int) -> int:
        watch = _ConnectWatch(self.session, f"horovodlike-probe-{secrets.token_hex(8)}")
        deadline = time.monotonic() + _LONGEST_PROBE_S

        def check() -> None:
            if watch.tasks_run() or time.monotonic() > deadline:
                raise _ProbeOverError

        try:
            with contextlib.suppress(_ProbeOverError):
                _run_in_thread(self, lambda: _wait_job(self.session, most), watch, check)
        finally:
            watch.close()
        return watch.most_tasks


class _ConnectWatch(Watch):
    """The server reports the progress of each operation to the thread that waits for it, every two seconds."""

    def __init__(self, session: Any, name: str) -> None:
        self._session, self._tag = session, name
        self._thread: int | None = None
        self.most_tasks = 0
        self._any_done = False
        session.registerProgressHandler(self._progress)

    def enter(self) -> None:
        self._thread = threading.get_ident()
        self._session.addTag(self._tag)

    def _progress(self, stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        if threading.get_ident() == self._thread:
            self.most_tasks = max(self.most_tasks, inflight_tasks)
            self._any_done |= any(stage.num_completed_tasks for stage in stages or ())

    def tasks_run(self) -> bool:
        return self.most_tasks > 0 or self._any_done

    def failure(self) -> HostsError | None:
        return None  # the second attempt of the stage says so itself

    def cancel(self) -> None:
        self._session.interruptTag(self._tag)

    def close(self) -> None:
        self._session.removeProgressHandler(self._progress)


def _wait_job(session: Any, most: int) -> None:
    def wait(batches: Any) -> Any:
        import time

        for batch in batches:
            time.sleep(_PROBE_S)
            yield batch

    session.range(0, most, 1, most).mapInArrow(wait, "id long").collect()


def submit(cluster: Cluster, num_proc: int, request: Request, output: CallerOutput | None) -> list[Any]:
    """Run a job; return its rows when its stage has ended.

    Args:
        cluster: The cluster.
        num_proc: The number of ranks.
        request: The request to the tasks.
        output: Takes the output of the ranks meanwhile; None if the caller wants none.

    Raises:
        TasksLostError: Spark has lost a task of the job.
        NotStartedError: No task of the job has started in time.
        HostsError: A task has failed, and Spark would restart the stage.
        BaseException: An error of Spark; or an interrupt (KeyboardInterrupt), the job has been cancelled.
    """

    def rows_of(batches: Any) -> Any:
        from horovodlike.spark._task import run_task

        for _ in batches:
            pass
        yield from run_task(request)

    def collect() -> list[Any]:
        from horovodlike.spark._task import SCHEMA

        ids = cluster.session.range(0, num_proc, 1, num_proc)
        return list(ids.mapInArrow(rows_of, SCHEMA, barrier=True).collect())

    request = replace(request, ended=tuple(_ended), secret=None if output is None else output.secret)
    watch = cluster.watch(f"horovodlike-{request.job}")
    deadline = time.monotonic() + request.start_timeout

    def check() -> None:
        if (failure := watch.failure()) is not None:
            raise failure
        if not watch.tasks_run() and time.monotonic() > deadline:
            raise NotStartedError

    try:
        return list(_run_in_thread(cluster, collect, watch, check, output))
    except NotStartedError:  # the job is cancelled now, and its slots count as free
        raise _not_started(cluster, num_proc, request.start_timeout) from None
    except Exception as error:
        if not isinstance(error, HostsError) and isinstance(lost := failure_of(str(error)), TasksLostError):
            raise lost from error
        raise
    finally:
        _ended.append(request.job)
        watch.close()


def _not_started(cluster: Cluster, num_proc: int, seconds: float) -> NotStartedError:
    slots = cluster.slots()
    slots = cluster.count(num_proc) if slots is None else slots
    return NotStartedError(
        f"num_proc={num_proc} needs {num_proc} slots of Spark at the same time, and the cluster has {slots} (now, and "
        f"other jobs may use some of them): no task has started within {seconds:g} s. Use a smaller num_proc, add "
        "executors, or raise start_timeout"
    )


def _run_in_thread(
    cluster: Cluster,
    collect: Callable[[], Any],
    watch: Watch,
    check: Callable[[], None],
    output: CallerOutput | None = None,
) -> Any:
    """Run a job in a thread with the session's properties; call ``check`` meanwhile, and cancel if it raises."""
    from pyspark import inheritable_thread_target

    result: list[Any] = []
    failure: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            watch.enter()
            result.append(collect())
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()
            if output is not None:
                output.wake()

    thread = threading.Thread(
        target=inheritable_thread_target(cluster.session)(work), name="horovodlike-spark", daemon=True
    )
    thread.start()
    try:
        while not (ended.wait(_LOOK_S) if output is None else _serve(output, ended)):
            check()
    except BaseException:
        give_up = time.monotonic() + _CANCEL_S
        while not ended.wait(_LOOK_S) and time.monotonic() < give_up:
            watch.cancel()  # again and again: the job may not have been submitted yet
        raise
    thread.join()
    if failure:
        check()
        raise failure[0]
    return result[0]


def _serve(output: CallerOutput, ended: threading.Event) -> bool:
    """Take the output of ranks for some time; return whether the job has ended."""
    until = time.monotonic() + _LOOK_S
    while not ended.is_set() and (left := until - time.monotonic()) > 0:
        output.serve(left)
    return ended.is_set()


def wait_for_slots(cluster: Cluster, least: int, seconds: float, name: str, settle: float = _SETTLE_S) -> int | None:
    """Wait until the cluster has slots for a job; return how many there are, or None if that is not known.

    Args:
        cluster: The cluster.
        least: The fewest slots.
        seconds: How long to wait for them.
        name: The argument that asks for them.
        settle: Executors may still be starting: for how long none must have come before the wait ends.

    Raises:
        UsageError: There are too few; the message has both numbers.
    """
    found = cluster.slots()
    changed = time.monotonic()
    patience = min(seconds, 0.0 if is_local(cluster) else settle)
    deadline = changed + seconds
    while found is not None and found < least:
        now = time.monotonic()
        if now >= min(deadline, changed + patience):
            raise _too_few(name, least, found)
        time.sleep(_LOOK_S)
        before, found = found, cluster.slots()
        changed = changed if found == before else now
    return found


def count_slots(cluster: Cluster, least: int, most: int, seconds: float, name: str) -> int:
    """Count slots until there are ``least``; return how many, ``most`` at most. See :func:`wait_for_slots`."""
    deadline = time.monotonic() + seconds
    while (found := cluster.count(most)) < least:
        if time.monotonic() >= deadline:
            raise _too_few(name, least, found)
        time.sleep(_LOOK_S)
    return found


def _too_few(name: str, least: int, found: int) -> UsageError:
    return UsageError(
        f"{name}={least} needs {counted(least, 'slot')} of Spark at the same time, and the cluster has {found} "
        "(cores of executors, divided by spark.task.cpus; fewer if tasks take GPUs): use a smaller "
        f"{name}, or add executors"
    )


def is_local(cluster: Cluster) -> bool:
    """Return whether the driver is the only executor, which has started."""
    if not isinstance(cluster, _ClassicCluster):
        return False
    master = str(cluster.session.sparkContext.master)
    return master == "local" or master.startswith("local[")


def read_rows(rows: Sequence[Any]) -> tuple[Outcome, bool, list[Row]]:
    """Return how a job has ended, whether its stage was restarted, and the output that came with it, by time."""
    outcome, lost = Outcome(1, trouble="the task of rank 0 has not told how the job has ended"), False
    output: list[Row] = []
    results: dict[int, bytearray] = {}
    for row in rows:
        kind, piece = FrameKind(row["kind"]), bytes(row["piece"])
        if kind is FrameKind.RESULT:
            results.setdefault(row["rank"], bytearray()).extend(piece)
        elif kind is FrameKind.OUTCOME:
            told = json.loads(piece)
            lost = told["lost"]
            failure = told["failure"]
            if failure is not None:
                failure["last_lines"] = tuple(line.encode("latin-1") for line in failure["last_lines"])
                failure = Failure(**failure)
            outcome = Outcome(told["exit_code"], failure, told["trouble"])
        else:
            output.append((row["rank"], kind, row["at"], piece))
    outcome.results = results
    return outcome, lost, sorted(output, key=lambda row: row[2])
