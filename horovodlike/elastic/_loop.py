"""``run``: calls the training function again whenever the members of the job have changed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from horovodlike import basics
from horovodlike._bootstrap import driver_client
from horovodlike.elastic._membership import agree_to_start, preemption
from horovodlike.elastic._state import State
from horovodlike.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError, UnsupportedReductionError

__all__ = ["run", "run_translated"]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a training function so that it is called again when ranks have been lost or added.

    The wrapped function takes a :class:`State` and further arguments, and returns the result of ``func``. It brings all
    ranks to the same state and calls ``func``. When a rank is lost, the state goes back to its last commit; when ranks
    are added, or leave at a commit, the state is kept. Then ``func`` is called again, on the current ranks.

    Call ``init()`` before it, and collectives only inside, except those that reset callbacks call too. Without a
    driver (``hvdrun --min-np``) a job has a fixed size, and a rank that is lost ends it. If its state is persistent,
    SIGTERM to any rank has all of them leave at the next commit, from which the next job continues.

    Raises:
        HorovodInternalError: The job is broken and has no driver; or an operation does not support its reduction.
        MismatchError: The ranks disagree about a tensor again, in the same way and without a commit in between.
        RendezvousError: The driver is lost.
        SystemExit: This worker is not needed any more, or was asked to leave (status 0); or the job has ended. Without
            a driver, the ranks were asked to leave (status 143). Newer work than the commit on disk is lost (75).
        ValueError: ``init()`` was not called.
    """
    return run_translated(func, contextlib.nullcontext)


def run_translated(
    func: Callable[..., Result], translated: Callable[[], AbstractContextManager[object]]
) -> Callable[..., Result]:
    """Wrap a training function as `run` does, if its framework replaces the engine's errors by its own; for bindings.

    Args:
        func: The training function.
        translated: Returns a context manager that raises the engine's error in place of the framework's.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        worker = driver_client.current()
        try:
            with state._departure():
                if worker is not None:
                    worker.begin()
                result = _train(func, translated, worker, state, args, kwargs)
        except BaseException as error:
            basics.shutdown(error)  # the others must not wait for this rank
            raise
        if worker is not None:
            worker.finish()
        return result

    return wrapper


def _train(
    func: Callable[..., Result],
    translated: Callable[[], AbstractContextManager[object]],
    worker: driver_client.Worker | None,
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Result:
    needs_sync, is_first = True, True
    last_mismatch: tuple[int, str] | None = None
    while True:
        try:
            with translated():  # also reset callbacks may communicate
                _begin(state, needs_sync, is_first)
                return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            if isinstance(error, UnsupportedReductionError):
                raise  # a mistake of the script: it would happen again and again
            if worker is None:
                raise _explain(error) from error
            if preemption().noted:
                raise
            mismatch = (state._commits, str(error)) if isinstance(error, MismatchError) else None
            if mismatch is not None and mismatch == last_mismatch:
                raise  # a mistake of the script: it would happen again and again
            last_mismatch = mismatch
            worker.explain("broken", str(error))
            state.restore()
            needs_sync = True
        except HostsUpdatedInterrupt as interrupt:
            if worker is not None:
                worker.explain("changed", str(interrupt))
            needs_sync = not interrupt.skip_sync
        basics.restart()
        is_first = False


def _begin(state: State, needs_sync: bool, is_first: bool) -> None:
    """Bring all ranks to one state: if any rank needs to synchronise, all of them do."""
    if not is_first:
        state.on_reset()  # first, as in Horovod: a new rank's script calls the same collectives
    needs_sync, has_commits = agree_to_start(needs_sync, state._commits)
    if not has_commits:
        state._resume()
    if needs_sync:
        basics.reach_fault_point("sync", state._commits)
        state.sync()
    if has_commits:
        state._write_commit()
    basics.reach_fault_point("step", state._commits)


def _explain(error: HorovodInternalError) -> HorovodInternalError:
    return type(error)(
        f"{error}. This job has a fixed number of ranks, so it cannot go on without one: start it with hvdrun --min-np "
        "to have it continue from the last commit with those that are left"
    )
