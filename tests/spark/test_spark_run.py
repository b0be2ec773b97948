"""`horovodlike.spark.run` on classic Spark, in local mode."""

from __future__ import annotations

import io
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from spark_programs import ranks_left, wait_until

import horovodlike.spark as hvd_spark
from horovodlike.errors import ConfigError
from horovodlike.launcher.errors import HostsError, RankFailedError, UsageError
from horovodlike.launcher.run import RemoteTraceback
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.spark import _driver, _task, runner
from horovodlike.spark._task import ranks_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def collective(base: int, *, factor: int) -> tuple[Any, ...]:
    import numpy as np

    import horovodlike as hvd

    hvd.init()
    print(f"rank {hvd.rank()} runs")
    first = hvd.allreduce(np.array([base + hvd.rank()]), op=hvd.Sum)
    hvd.shutdown()
    hvd.init()
    second = hvd.allreduce(np.array([factor]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), int(first[0]), int(second[0]), os.getppid()


def test_results_by_rank_and_output(spark: Any) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    found = hvd_spark.run(collective, (10,), {"factor": 3}, num_proc=2, stdout=stdout, stderr=stderr)
    assert [each[:6] for each in found] == [(0, 2, 0, 2, 21, 6), (1, 2, 1, 2, 21, 6)]
    assert found[0][6] != found[1][6], "each rank has an agent of its own"
    assert sorted(stdout.getvalue().splitlines()) == ["[0]<stdout>: rank 0 runs", "[1]<stdout>: rank 1 runs"]
    assert stderr.getvalue() == ""


def test_output_arrives_while_the_job_runs(spark: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if self.getvalue().count("waits") == 2:
                seen.touch()
            return written

    def wait(path: Path) -> bool:
        print("waits", flush=True)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        print("ends without a newline", end="")
        return path.exists()

    stdout = Stream()
    assert hvd_spark.run(wait, (seen,), num_proc=2, stdout=stdout, prefix_output_with_timestamp=True) == [True, True]
    for rank in (0, 1):
        mine = [line[24:] for line in stdout.getvalue().splitlines() if f"[{rank}]<stdout>: " in line]
        assert mine == [f"[{rank}]<stdout>: waits", f"[{rank}]<stdout>: ends without a newline"]


def test_notes_of_earlier_jobs_are_removed(spark: Any) -> None:
    from pyspark import SparkFiles

    for _ in range(3):
        hvd_spark.run(print, num_proc=1, verbose=0)
    notes = [name for name in os.listdir(SparkFiles.getRootDirectory()) if name.startswith(".horovodlike-")]
    assert len(notes) == 1, "of the last job"


def test_an_exception_is_raised_as_itself(spark: Any) -> None:
    def fail() -> None:
        import numpy as np

        import horovodlike as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("of rank 1")
        hvd.allreduce(np.zeros(3))

    with pytest.raises(LookupError, match="of rank 1") as caught:
        hvd_spark.run(fail, num_proc=2, verbose=0)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert caught.value.__cause__.rank == 1


def test_a_rank_that_is_killed_ends_the_job(spark: Any) -> None:
    mark = secrets.token_hex(8)

    def die() -> None:
        import time

        if os.environ["HOROVODLIKE_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 0 .*killed by signal 9"):
        hvd_spark.run(die, num_proc=2, env={"SPARK_TEST_MARK": mark}, verbose=0)
    assert time.monotonic() - begin < 20
    assert wait_until(lambda: not ranks_left(mark), 10)


def test_what_cannot_be_sent_is_named(spark: Any) -> None:
    def returns_a_generator() -> Any:
        return (number for number in range(3))

    with pytest.raises(TypeError, match="what the function has returned on rank 0 cannot be sent"):
        hvd_spark.run(returns_a_generator, num_proc=1, verbose=0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        hvd_spark.run(print, (open(os.devnull, "wb"),), num_proc=1)  # noqa: SIM115


def test_too_few_slots_is_an_error_with_both_numbers(spark: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError, match="num_proc=3 needs 3 slots .* the cluster has 2 "):
        hvd_spark.run(print, num_proc=3)
    assert time.monotonic() - begin < 2


def test_arguments_are_checked(spark: Any) -> None:
    with pytest.raises(UsageError, match="only allow one set True"):
        hvd_spark.run(print, num_proc=1, use_mpi=True, use_gloo=True)
    with pytest.raises(UsageError, match="num_proc=0"):
        hvd_spark.run(print, num_proc=0)
    with pytest.raises(UsageError, match="start_timeout=-1"):
        hvd_spark.run(print, num_proc=1, start_timeout=-1)
    with pytest.raises(UsageError, match="min_num_proc=3 <= num_proc=2"):
        hvd_spark.run_elastic(print, num_proc=2, min_num_proc=3)


def test_a_bad_environment_is_an_error_at_once(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (hvd_spark.run, hvd_spark.run_elastic):
        with pytest.raises(ConfigError, match="HOROVOD_CYCLE_TIME"):
            call(print, num_proc=1, env={"HOROVOD_CYCLE_TIME": "soon"})
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="HOROVOD_SPARK_START_TIMEOUT=soon"):
        hvd_spark.run(print, num_proc=1)


def test_only_lost_executors_and_workers_count_as_lost() -> None:
    for reason in ("ExecutorLostFailure (executor 1 exited)", "SparkException: Python worker exited unexpectedly"):
        assert isinstance(_driver.failure_of(f"Stage failed\n{reason}"), _driver.TasksLostError)
    other = _driver.failure_of("Stage failed\nModuleNotFoundError: No module named 'horovodlike'")
    assert type(other) is HostsError and "No module named" in str(other)


class _Counted(_driver.Cluster):
    """A cluster that does not tell its slots, as Spark Connect: each count finds the next of these numbers."""

    def __init__(self, *counts: int) -> None:
        super().__init__(None)
        self.counts = list(counts)

    @property
    def default_parallelism(self) -> int | None:
        return None

    def slots(self) -> int | None:
        return None

    def count(self, most: int) -> int:
        return min(most, self.counts.pop(0) if len(self.counts) > 1 else self.counts[0])

    def watch(self, name: str) -> _driver.Watch:
        raise NotImplementedError


def test_an_elastic_job_waits_for_slots_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = [_driver.TasksLostError("gone"), _driver.NotStartedError("late"), None]
    sizes: list[int] = []

    def submit(cluster: Any, size: int, *_: Any) -> Outcome:
        sizes.append(size)
        error = given.pop(0)
        if error is not None:
            raise error
        return Outcome(0)

    monkeypatch.setattr(runner, "_submit", submit)
    monkeypatch.setattr(runner, "unpack_results", lambda outcome, ranks: list(ranks))
    monkeypatch.setattr(_driver, "find_cluster", lambda: _Counted(0, 1, 2, 3))
    assert hvd_spark.run_elastic(print, num_proc=4, min_num_proc=2, stderr=io.StringIO()) == [0, 1, 2]
    assert sizes == [4, 2, 3], "nothing is begun with fewer slots than the least, and a late start is tried again"

    given[:] = [_driver.NotStartedError("never")]
    with pytest.raises(_driver.NotStartedError, match="never"):
        hvd_spark.run_elastic(print, num_proc=2)
    given[:] = [_driver.TasksLostError("gone")]
    monkeypatch.setattr(_driver, "find_cluster", lambda: _Counted(1))
    with pytest.raises(UsageError, match="min_num_proc=2 needs 2 slots .* the cluster has 1 "):
        hvd_spark.run_elastic(print, num_proc=2, elastic_timeout=0.3, stderr=io.StringIO())


def test_old_releases_are_named() -> None:
    with pytest.raises(ConfigError, match=r"PySpark 3\.5\.1 .* at least 4\.0"):
        _driver.check_version("3.5.1")
    _driver.check_version("4.0.0")
    _driver.check_version("4.1.0.dev1")


def test_ranks_of_one_host_are_neighbours() -> None:
    assert ranks_of(["b", "a", "b", "a", "c"]) == [0, 2, 1, 3, 4]


def test_a_retried_stage_is_recognised() -> None:
    def member(attempt: int, *earlier: int) -> _task._Member:
        return _task._Member("a", "1", attempt, earlier, {})

    assert not _task._is_retry([member(4, 5), member(5)]), "these see each other"
    assert _task._is_retry([member(6, 4), member(7)])


def test_other_releases_on_executors_are_refused() -> None:
    request = _task.Request("job", "0.2", b"", {}, None, "", 1.0, False)
    assert "0.1 is installed on executor host a, but 0.2" in str(
        _task._why_not(request, [_task._Member("a", "0.1", 0, (), {})])
    )


def test_a_member_tells_its_trouble_and_never_shows_the_key() -> None:
    request = _task.Request("job", "0.2", b"", {}, None, "", 1.0, False)
    members = [_task._Member("a", "0.2", 0, (), {"key": "abc"}), _task._Member("b", "0.2", 1, (), {"trouble": "bad"})]
    assert _task._why_not(request, members) == "bad"
    assert "abc" not in repr(members)
    assert "abc" not in repr(replace(request, secret="abc"))


def test_a_task_that_fails_early_leaves_no_thread() -> None:
    with ExitStack() as stack:
        request = _task.Request("job", "0.2", b"", {"HOROVOD_CYCLE_TIME": "soon"}, None, "", 1.0, False)
        with pytest.raises(ConfigError):
            _task._Task(request, 0, [_task._Member("a", "0.2", 0, (), {"key": "00" * 32})], (), stack)
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdrun-writer"]


def test_gpus_of_the_task_and_secrets_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("PYTHON_WORKER_FACTORY_SECRET", "_SPARK_AUTH_SECRET", "SPARK_AUTH_SOCKET", "_SPARK_SSL_RPC_KEY_PASSWORD")
    for name in secret:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    made = _task._environment({"A": "b"}, ("2", "3"))
    assert not made.keys() & set(secret)
    assert (made["CUDA_VISIBLE_DEVICES"], made["A"]) == ("2,3", "b")


def test_horovods_names_lead_here() -> None:
    from horovodlike.compat import counterpart

    for name, module in {"": "", ".torch": ".torch", ".common.store": ".store", ".common.backend": ".backend"}.items():
        row = counterpart(f"horovod.spark{name}")
        assert row is not None and row.module == f"horovodlike.spark{module}"


def test_nothing_of_spark_is_imported_by_the_package() -> None:
    text = "import sys, horovodlike, horovodlike.launcher.cli; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)
