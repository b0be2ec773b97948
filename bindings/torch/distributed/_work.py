"""Operations of a process group in flight: `dist.Work`, and the thread that completes futures."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from horovodlike import basics
from horovodlike._engine import ops

_LOOK_SECONDS = 0.005
"""The thread that completes futures waits so long for its first operation before it polls the others."""


class Operation:
    """An operation in the engine, until its result is in the caller's tensors. Any thread may use it.

    Args:
        handle: The engine's handle.
        outputs: The tensors that get the result.
        timeout: Seconds that a wait may take; None for no limit.
        on_timeout: Returns the error for a wait that has taken the given number of seconds.
        consume: Consumes the handle when the operation is complete, and puts the result into the tensors.
    """

    __slots__ = (
        "_completion",
        "_consume",
        "_done",
        "_error",
        "_error_of_future",
        "_future",
        "_handle",
        "_lock",
        "_on_timeout",
        "outputs",
        "timeout",
    )

    def __init__(
        self,
        handle: int,
        outputs: Sequence[torch.Tensor],
        timeout: float | None,
        on_timeout: Callable[[float], Exception],
        consume: Callable[[int], object],
    ) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._done = False
        self._error: Exception | None = None
        self._error_of_future: Exception | None = None  # of a future that ended before the operation
        self._completion: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None  # it follows `_completion`
        self._on_timeout, self._consume = on_timeout, consume
        self.timeout = timeout
        self.outputs = outputs

    def is_done(self) -> bool:
        """Return whether the result is there, or the operation has failed."""
        if not self._done:
            try:
                is_complete = ops.poll(self._handle)
            except KeyError:  # another thread finishes it, or it belongs to an earlier job
                is_complete = True
            if is_complete:
                self._finish()
        return self._done

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the result, for `seconds` at most; None: for the timeout of the operation.

        Raises:
            HorovodInternalError: The operation has failed.
            DistBackendError: The time is over; the operation is still in flight.
        """
        if not self._done:
            self._wait_for_engine(self.timeout if seconds is None else seconds)
            self._finish()
        if self._error is not None:
            raise self._error

    def help(self, seconds: float) -> bool:
        """Wait for the operation for `seconds` at most; return whether it is done."""
        if not self._done:
            with contextlib.suppress(KeyError):
                if not ops.wait_within(self._handle, seconds):
                    return False
            self._finish()
        return True

    def _wait_for_engine(self, seconds: float | None) -> None:
        try:
            if seconds is None:
                ops.wait_until_complete(self._handle)
            elif not ops.wait_within(self._handle, seconds):
                raise self._on_timeout(seconds)
        except KeyError:  # another thread finishes it
            pass

    def _finish(self) -> None:
        """Get the result from the engine, where the operation is complete, and put it into the tensors."""
        with self._lock:
            if self._done:
                return
            try:
                self._consume(self._handle)
            except Exception as error:
                self._error = error
            self._done = True
            completion, self._completion = self._completion, None
        if completion is not None:
            completion.set_result(None)

    def _value(self, _: object) -> list[torch.Tensor]:
        """Return the value of the future, or raise its error.

        C++ does not see an error that `set_exception` gives a future: it would take the exception for the value.
        """
        error = self._error or self._error_of_future
        if error is not None:
            raise error
        return list(self.outputs)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of this operation, whose value is the list of the outputs."""
        with self._lock:
            if self._future is not None:
                return self._future
            completion: torch.futures.Future[None] = torch.futures.Future(devices=_devices(self.outputs))
            future = completion.then(self._value)
            self._completion, self._future = completion, future
            is_done = self._done
        if is_done:
            completion.set_result(None)
        elif basics.overlaps() and threading.current_thread() is not _completer.thread:
            _completer.add(self)
        else:
            self._complete_future()
        return future

    def _complete_future(self) -> None:
        """Wait for the result in this thread.

        The future's callbacks then run in this thread and at this point of the program on all ranks. So operations that
        they start are in the same order on all ranks.
        """
        try:
            if self.help(math.inf if self.timeout is None else self.timeout):
                return
        except BaseException:
            _completer.add(self)
            raise
        self.expire()
        _completer.add(self)

    def expire(self) -> None:
        """End the future with the error of a time-out; the operation is still in flight."""
        if self._completion is not None:
            self.fail(self._on_timeout(self.timeout or 0.0))

    def fail(self, error: Exception) -> None:
        """End the future with an error, unless it is complete."""
        with self._lock:
            completion, self._completion = self._completion, None
            if not self._done:
                self._error_of_future = error
        if completion is not None:
            completion.set_result(None)

    @property
    def error(self) -> Exception | None:
        """The error of the operation, if it has failed."""
        return self._error

    def finish_later(self) -> None:
        """Have the completer thread put the result into the tensors, since no other thread waits for it."""
        if not self._done and self._future is None and not sys.is_finalizing():
            _completer.add(self)


def future_of(outputs: Sequence[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    """Return a complete future whose value is a list of these tensors."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=_devices(outputs))
    future.set_result(list(outputs))
    return future


def _devices(tensors: Sequence[torch.Tensor]) -> list[int | str | torch.device]:
    return [torch.device(each) for each in sorted({str(one.device) for one in tensors if one.device.type != "cpu"})]


class _Completer:
    """The thread that completes futures of operations: C++ code that waits for a future runs no Python."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        self._pid = 0
        self.thread: threading.Thread | None = None
        self._lock = threading.RLock()  # in `add`, garbage collection may drop a work, which calls `add` again

    def add(self, operation: Operation) -> None:
        """Give an operation to the thread; start the thread if this process has none."""
        with self._lock:
            if self._pid != os.getpid():
                self._new = queue.SimpleQueue()
                self._pid = os.getpid()
                self.thread = threading.Thread(
                    target=self._run, args=(self._new,), name="horovodlike-torch", daemon=True
                )
                self.thread.start()
            self._new.put(operation)

    @staticmethod
    def _run(new: queue.SimpleQueue[Operation]) -> None:
        pending: dict[Operation, float] = {}  # with the deadline of each future
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    operation = new.get(block=not pending)
                    limit = math.inf if operation.timeout is None else operation.timeout
                    pending[operation] = time.monotonic() + limit
            first = next(iter(pending))
            for operation, deadline in list(pending.items()):
                try:
                    is_done = operation.help(_LOOK_SECONDS) if operation is first else operation.is_done()
                    if not is_done and time.monotonic() > deadline:
                        operation.expire()
                except Exception as error:  # it concerns only this operation
                    operation.fail(error)
                    is_done = True
                if is_done:
                    del pending[operation]


_completer = _Completer()


class HvdWork(dist.Work):
    """The `Work` that an operation of a process group returns.

    Args:
        operations: The operations that the call has started.
        outputs: The tensors that get the result.
    """

    def __init__(self, operations: Sequence[Operation], outputs: Sequence[torch.Tensor]) -> None:
        """Wrap operations in flight; none, if the call has carried them out."""
        super().__init__()
        self.operations = operations
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result; return True.

        Args:
            timeout: None or 0 for the operation's timeout.

        Raises:
            HorovodInternalError: The operation has failed.
            DistBackendError: The time is over; the message names the ranks that are missing.
        """
        for operation in self.operations:
            operation.wait(timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is over, successful or not."""
        return all([operation.is_done() for operation in self.operations])

    def is_success(self) -> bool:
        """Return whether the operation is over, and successful."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of the operation, if it has failed."""
        return next((operation.error for operation in self.operations if operation.error is not None), None)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future for the list of the outputs. If the engine does not overlap, it is complete already."""
        if len(self.operations) == 1:
            return self.operations[0].future()
        if not self.operations:
            return future_of(self._outputs)
        futures = torch.futures.collect_all([operation.future() for operation in self.operations])
        return futures.then(lambda done: [one for future in done.value() for one in future.value()])

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return list(self._outputs)

    def __del__(self) -> None:
        """Finish operations for which no thread has waited."""
        for operation in self.operations:
            operation.finish_later()
