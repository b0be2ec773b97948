"""``run`` and ``run_elastic``: a function on the executors of a Spark cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO, TypeVar

from horovodlike import config
from horovodlike.compat import named
from horovodlike.launcher.agent.host_probe import installed_version
from horovodlike.launcher.errors import HostsError, RankFailedError, UsageError
from horovodlike.launcher.options import check_arguments, take_integer
from horovodlike.launcher.run import unpack_results
from horovodlike.launcher.supervisor.failure_attribution import how_it_ended, is_consequence
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.spark import _driver
from horovodlike.spark._output import CallerOutput
from horovodlike.spark._task import Request

__all__ = ["run", "run_elastic"]

T = TypeVar("T")
_MakeOutput = Callable[[int, tuple[str, str] | None], CallerOutput]
"""Makes the output of a job from its number of ranks and the address of the driver."""

_START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"
_START_TIMEOUT_S = 60.0
_ELASTIC_TIMEOUT_S = 600.0


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Run a function in several tasks of Spark at the same time, which form a job.

    Needs an active session of classic Spark or of Spark Connect, 4.0 or later, and horovodlike on the executors. Each
    rank is a process of its own that the task starts. The function, its arguments and its result are sent by
    cloudpickle. The call blocks until all ranks have ended; an interrupt (KeyboardInterrupt) cancels the job.
    The function runs at most once on each rank, whatever ``spark.stage.maxConsecutiveAttempts`` says, except that Spark
    Connect restarts it if *all* executors of a job are lost at the same time. May be called from several threads.

    Args:
        fn: The function that each rank calls; it calls ``init()`` if it wants to communicate.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks; ``spark.default.parallelism`` if None.
        start_timeout: How long to wait, in seconds, for the tasks to start, and then for the ranks to find each other
            (60, or ``HOROVOD_SPARK_START_TIMEOUT``).
        use_mpi: No effect.
        use_gloo: No effect.
        extra_mpi_args: No effect.
        env: Variables for the ranks, besides the executor's own. Variables of this process are not sent.
        stdout: Receives the ranks' standard output; ``sys.stdout`` if None. On classic Spark at once, if the
            executors can connect to the driver; on Spark Connect when the job has ended, the last 4 MiB of each rank.
        stderr: Likewise for standard error; ``sys.stderr`` if None. The executors' logs have all output at once.
        verbose: 0: only errors; 1: the output of the ranks; 2: decisions are explained, too.
        nics: The network between the executors: names of interfaces, or networks such as ``10.0.0.0/8``.
        prefix_output_with_timestamp: Whether each line of output begins with the time at which it was written.
        executable: The Python interpreter of the ranks; the executor's if None.

    Returns:
        The return values of the function, by rank. Ranks on one host of Spark are neighbours.

    Raises:
        RankFailedError: A rank ended without a result, such as by a signal.
        HostsError: A task was lost, with its executor or alone; no task has started in time; or the tasks cannot reach
            each other. It is a RuntimeError.
        UsageError: There are fewer slots than ``num_proc``, or an argument cannot be used; it is a ValueError.
        ConfigError: There is no session, PySpark is too old, or ``env`` has a setting with a bad value.
        Exception: The function raised it on the rank that failed first; its cause is a
            ``horovodlike.launcher.run.RemoteTraceback``. Errors of Spark itself are raised as they are.
    """
    _check_mpi(use_mpi, use_gloo, extra_mpi_args)
    cluster = _driver.find_cluster()
    wanted = _number_of_ranks(cluster, num_proc)
    request = _request(fn, args, kwargs, start_timeout, env, nics, verbose, executable)
    _driver.wait_for_slots(cluster, wanted, request.start_timeout, "num_proc")
    outcome = _submit(cluster, wanted, request, _output_of(stdout, stderr, prefix_output_with_timestamp))
    return unpack_results(outcome, range(wanted))


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Run a function as :func:`run` does, and again whenever ranks are lost, with the slots that are left.

    The stage is the unit: if an executor or a rank is lost, all ranks end, and start again on ``min_num_proc`` to
    ``max_num_proc`` slots. Have the function keep its state with ``state.persist()`` in a folder that all executors
    share: it continues from the last commit there. New executors are used when the job restarts, not before.

    Args:
        fn: The function, with ``init()`` and a function that ``elastic.run`` has wrapped; run any number of times.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks at first; ``spark.default.parallelism`` if None.
        min_num_proc: The fewest ranks; ``num_proc`` if None.
        max_num_proc: The most ranks; ``num_proc`` if None.
        start_timeout: As for :func:`run`.
        elastic_timeout: How long to wait for ``min_num_proc`` slots after a loss, in seconds (600).
        reset_limit: How many times the job may restart; any number if None.
        env: As for :func:`run`.
        stdout: As for :func:`run`.
        stderr: As for :func:`run`.
        verbose: As for :func:`run`.
        nics: As for :func:`run`.
        prefix_output_with_timestamp: As for :func:`run`.
        min_np: Horovod's old name for ``min_num_proc``.
        max_np: Horovod's old name for ``max_num_proc``.

    Returns:
        The return values of the last run, by rank.

    Raises:
        RankFailedError: Ranks were lost more than ``reset_limit`` times.
        Exception: As for :func:`run`. An error of the function itself ends the job.
    """
    cluster = _driver.find_cluster()
    wanted = _number_of_ranks(cluster, num_proc)
    least = take_integer("min_num_proc", min_np if min_num_proc is None else min_num_proc) or wanted
    most = take_integer("max_num_proc", max_np if max_num_proc is None else max_num_proc) or max(wanted, least)
    if not 0 < least <= most or not least <= wanted <= most:
        raise UsageError(f"min_num_proc={least} <= num_proc={wanted} <= max_num_proc={most} is expected")
    limit = take_integer("reset_limit", reset_limit)
    request = _request(fn, args, kwargs, start_timeout, env, nics, verbose, None)
    patience = _ELASTIC_TIMEOUT_S if elastic_timeout is None else float(elastic_timeout)
    resets, until = 0, 0.0
    found = _driver.wait_for_slots(cluster, least, request.start_timeout, "min_num_proc")
    size = wanted if found is None else min(wanted, found)
    make_output = _output_of(stdout, stderr, prefix_output_with_timestamp)
    while True:
        reason: str | None = None
        try:
            outcome = _submit(cluster, size, request, make_output)
            if not _was_lost(outcome):
                return unpack_results(outcome, range(size))
            reason = _why(outcome)
        except _driver.TasksLostError as error:
            reason = str(error)
        except _driver.NotStartedError:  # Spark may count the slots of a lost executor for a while
            if time.monotonic() >= until:
                raise
        if reason is not None:
            resets += 1
            if limit is not None and resets > limit:
                raise RankFailedError(f"ranks were lost {resets} times, and reset_limit={limit}: {reason}", -1, 1)
            print(f"horovodlike: beginning anew: {reason}", file=stderr or sys.stderr)
            until = time.monotonic() + patience
        size = _next_size(cluster, least, most, until - time.monotonic())
        request = replace(request, job=secrets.token_hex(8))


def _next_size(cluster: _driver.Cluster, least: int, most: int, patience: float) -> int:
    """Return the number of ranks with which a job restarts."""
    found = _driver.wait_for_slots(cluster, least, patience, "min_num_proc", settle=patience)
    if found is None:
        return _driver.count_slots(cluster, least, most, patience, "min_num_proc")
    return min(most, found)


def _check_mpi(use_mpi: bool | None, use_gloo: bool | None, extra_mpi_args: str | None) -> None:
    if use_mpi and use_gloo:
        raise UsageError("Argument use_gloo and use_mpi only allow one set True.")
    for name, value in {"use_mpi": use_mpi, "use_gloo": use_gloo, "extra_mpi_args": extra_mpi_args}.items():
        if value is not None:
            warnings.warn(f"run(): {name} has no effect", DeprecationWarning, stacklevel=3)


def _number_of_ranks(cluster: _driver.Cluster, num_proc: int | None) -> int:
    found = take_integer("num_proc", num_proc)
    if found is None:
        found = cluster.default_parallelism
    if found is None:
        raise UsageError(_driver.NO_NUM_PROC)
    if found < 1:
        raise UsageError(f"num_proc={found} is no number of ranks")
    return found


def _request(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    nics: str | Sequence[str] | None,
    verbose: int,
    executable: str | None,
) -> Request:
    from horovodlike._net.object_seal import dumps

    check_arguments({"func": fn, "args": args, "kwargs": kwargs, "env": env, "executable": executable})
    named_fn = named(functools.partial(fn, *args, **dict(kwargs or {})))
    config.load(env or {})
    try:
        task = dumps((named_fn, (), {}))
    except Exception as error:
        raise TypeError(f"run(): fn, or something in args or kwargs, cannot be pickled: {error}") from error
    if start_timeout is None:
        text = os.environ.get(_START_TIMEOUT) or _START_TIMEOUT_S
        try:
            start_timeout = float(text)
        except ValueError:
            raise UsageError(f"{_START_TIMEOUT}={text} is no number of seconds") from None
    if not 0 < start_timeout < 1e6:
        raise UsageError(f"start_timeout={start_timeout} is no number of seconds")
    return Request(
        job=secrets.token_hex(8),
        version=installed_version(),
        task=task,
        environ=dict(env or {}),
        executable=executable,
        network_interface="" if nics is None else nics if isinstance(nics, str) else ",".join(nics),
        start_timeout=float(start_timeout),
        verbose=verbose >= 2,
        output=verbose > 0,
    )


def _output_of(stdout: TextIO | None, stderr: TextIO | None, timestamps: bool) -> _MakeOutput:
    return functools.partial(CallerOutput, stdout or sys.stdout, stderr or sys.stderr, timestamps=timestamps)


def _submit(cluster: _driver.Cluster, num_proc: int, request: Request, make_output: _MakeOutput) -> Outcome:
    """Run a job once; write its output to the caller's streams, and return how it has ended."""
    request = replace(request, log=not _driver.is_local(cluster))
    with _caller_output(cluster, num_proc, request, make_output) as output:
        outcome, lost, late = _driver.read_rows(_driver.submit(cluster, num_proc, request, output))
        if output is not None:
            output.take(late)
    if lost:
        raise _driver.TasksLostError(f"{outcome.trouble}: see the log of the driver")
    if outcome.trouble is not None:
        raise HostsError(outcome.trouble)
    return outcome


@contextlib.contextmanager
def _caller_output(
    cluster: _driver.Cluster, num_proc: int, request: Request, make_output: _MakeOutput
) -> Iterator[CallerOutput | None]:
    """Provide the receiver of a job's output; None if the caller wants none."""
    if not request.output:
        yield None
        return
    output = make_output(num_proc, cluster.address())
    try:
        yield output
    except BaseException:
        output.close(hurried=True)
        raise
    output.close()


def _was_lost(outcome: Outcome) -> bool:
    """Return whether a rank was killed, or failed because another one was lost: a restart may help."""
    return outcome.failure is not None and (outcome.failure.status < 0 or is_consequence(outcome.failure))


def _why(outcome: Outcome) -> str:
    failure = outcome.failure
    assert failure is not None
    return how_it_ended(failure.rank, failure.pid, failure.status, failure.host)
