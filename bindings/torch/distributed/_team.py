"""The ranks of a process group, and the start of their operations in the engine."""

from __future__ import annotations

import functools
import itertools
import math
import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from horovodlike import basics
from horovodlike._bootstrap.rendezvous_state import name_ranks
from horovodlike._engine import ops
from horovodlike._engine.ops import Destinations, Kind, Output, ReduceOp
from horovodlike.errors import MismatchError, ShutDownError
from horovodlike.torch._ops import fast_path, gpu
from horovodlike.torch._ops.handles import Call, Result, start, start_on_fast_path, synchronize
from horovodlike.torch._ops.variable_size import start_allgather
from horovodlike.torch.distributed._names import Name, Names
from horovodlike.torch.distributed._work import Operation

_ASK_SECONDS = 1.0
"""After a time-out, the other ranks have so long to report that they have timed out as well."""
_LARGEST_TAG = 2**31 - 1
_ALLREDUCE = int(Kind.ALLREDUCE)
_sequences = itertools.count(1)


@dataclass(eq=False)
class Team:
    """The ranks of a process group.

    Attributes:
        name: The group's name, for messages.
        rank: This rank's place in the group.
        ranks: By place in the group, the ranks in the job.
        set_id: The id of the engine's process set.
        timeout: Seconds that a wait may take.
        store: The group's store.
        engine_ends_stalls: True if the engine ends a stalled job, and names the missing ranks, before the timeout.
    """

    name: str
    rank: int
    ranks: Sequence[int]
    set_id: int
    timeout: float
    store: Store
    engine_ends_stalls: bool
    closed: str = field(default="", init=False)  # the reason why the group cannot be used any more
    _lost: str = field(default="", init=False)  # the reason why operations may have other names than on other ranks

    def __post_init__(self) -> None:
        """Begin without operations."""
        self._generation = basics.generation()
        self._names = Names(f"torch.{self.name}")
        self._sequence = next(_sequences)
        self._finished = itertools.count(1)  # threads may call next() at the same time
        self._tags = (zlib.crc32(self.name.encode()) & _LARGEST_TAG) << 31
        self._limit = None if self.engine_ends_stalls else self.timeout

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def count(self) -> int:
        """The number of operations that the group has started."""
        return self._names.count

    def set_timeout(self, seconds: float) -> None:
        """Set the limit of waits for operations that are started from now on."""
        self.timeout = seconds
        self._limit = seconds

    def start(
        self,
        kind: Kind,
        signature: Hashable,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        op: int = ReduceOp.SUM,
        prescale: float = 1.0,
        root: int = -1,
        arguments: Sequence[int] = (),
        destinations: Destinations | None = None,
        finish: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> Operation:
        """Give an operation to the engine.

        Args:
            kind: The kind of operation.
            signature: The attributes that are equal on all ranks, besides `kind`, `op`, `prescale` and `root`.
            inputs: Tensors in memory.
            outputs: Tensors in memory for the results; empty if there are `destinations`.
            results: The caller's tensors, which receive the result in the end.
            op: The reduction.
            prescale: The factor applied before the reduction.
            root: The root's rank in the job.
            arguments: The `arguments` of the request.
            destinations: The memory for the outputs of an allgather, gather or alltoall.
            finish: Puts the result into the caller's tensors.
            timeout: Seconds that a wait may take; None for the group's timeout.
        """
        self.check_open()
        key = int(kind), signature, op, prescale, root
        name = self._names.next(key)

        def end(_: list[Output]) -> Result:
            if destinations is not None:
                destinations.check(name.text)
            if finish is not None:
                finish()
            return None

        borrowed: list[object] = [*inputs, *outputs, *results, destinations]

        def enqueue(call: Call) -> int:
            return start(call, inputs, outputs, borrowed, end, arguments, destinations)

        return self._start_as(name, key, enqueue, results, timeout)

    def gather_rows(
        self,
        signature: Hashable,
        inputs: Sequence[torch.Tensor],
        result: torch.Tensor,
        finish: Callable[[Sequence[torch.Tensor]], None],
        timeout: float | None,
    ) -> Operation:
        """Start an allgather of tensors whose numbers of rows may differ between ranks.

        Args:
            signature: See `start`.
            inputs: Tensors on one device.
            result: The caller's tensor, which receives the result in the end.
            finish: Puts the result into the caller's tensor. It takes the rows of all ranks for each input.
            timeout: See `start`.
        """
        self.check_open()
        key = int(Kind.ALLGATHER), signature, int(ReduceOp.SUM), 1.0, -1

        def consume(handle: int) -> None:
            gathered: Any = synchronize(handle)
            finish(gathered)

        return self._start_as(
            self._names.next(key),
            key,
            lambda call: start_allgather(call, inputs, single=False, waits=True),
            [result],
            timeout,
            consume,
        )

    def _start_as(
        self,
        name: Name,
        key: tuple[int, Hashable, int, float, int],
        enqueue: Callable[[Call], int],
        results: Sequence[torch.Tensor],
        timeout: float | None,
        consume: Callable[[int], object] = synchronize,
    ) -> Operation:
        """Start an operation by `enqueue`, which takes its call and returns its handle."""
        number = self._names.count
        call = name.calls.get(key)
        if call is None:
            kind, _, op, prescale, root = key
            call = name.keep_call(
                key, Call(Kind(kind), name.text, op, root, prescale, process_set=self.set_id, sequence=self._sequence)
            )

        def on_timeout(seconds: float) -> Exception:
            return self._timed_out(name.text, call.kind, number, seconds)

        handle = enqueue(call)
        limit = self._limit if timeout is None else timeout
        return Operation(handle, results, limit, on_timeout, functools.partial(self._consume, consume, number))

    def allreduce(
        self, tensor: torch.Tensor, op: int, prescale: float, waits: bool, timeout: float | None
    ) -> Operation | None:
        """Start an in-place allreduce of a tensor in memory.

        Args:
            tensor: The tensor to reduce.
            op: The reduction.
            prescale: The factor applied before the reduction.
            waits: True to carry the operation out in this call.
            timeout: See `start`.

        Returns:
            The operation in flight; None if it has been carried out.
        """
        self.check_open()
        shape, dtype = tensor.shape, tensor.dtype
        key = _ALLREDUCE, (dtype, shape), op, prescale, -1
        name = self._names.next(key)
        is_fast = waits and timeout is None
        if is_fast:
            path = name.fast_paths.get(key)
            if path is not None and self._carry_out(path, tensor):
                return None
        tensors = [tensor]
        operation = self._start_as(
            name, key, lambda call: start(call, tensors, tensors, [*tensors], lambda _: None), tensors, timeout
        )
        if not waits:
            return operation
        if is_fast and key not in name.fast_paths and gpu.is_on_cpu(tensor):
            call = name.calls.get(key)  # another thread may have removed it
            request = None if call is None else call.requests.get((False, dtype, shape))
            if request is not None:
                num_bytes = math.prod(shape) * dtype.itemsize
                name.fast_paths[key] = fast_path.fast_paths(request, dtype, shape, num_bytes)[1]
        operation.wait()
        return None

    def _carry_out(self, path: fast_path.FastPath, tensor: torch.Tensor) -> bool:
        number = self._names.count
        handle = start_on_fast_path(path, tensor, True)
        if not handle:
            return False
        if self._limit is not None and not ops.wait_within(handle, self._limit):
            raise self._timed_out(path.request.name, Kind.ALLREDUCE, number, self._limit)
        self._consume(synchronize, number, handle)
        return True

    def _consume(self, consume: Callable[[int], object], number: int, handle: int) -> None:
        """Consume the handle of an operation; if the ranks disagreed about it, restart the names."""
        try:
            consume(handle)
        except MismatchError:
            if next(self._finished) == number and self._names.restart(number):
                self._sequence = next(_sequences)
            elif not self._lost:
                self._lost = f"the ranks disagreed about operation {number} or one before it, and others were in flight"
            raise
        except Exception:
            next(self._finished)
            raise
        next(self._finished)

    def tag_of(self, tag: int) -> int:
        """Return the engine's tag for a tag of this group; it differs between groups, which may share a process set.

        Raises:
            ValueError: The tag is negative, or has more than 31 bits.
        """
        if not 0 <= tag <= _LARGEST_TAG:
            raise ValueError(f"a tag must be from 0 to {_LARGEST_TAG}, got {tag}")
        return self._tags | tag

    def check_open(self) -> None:
        """Make sure that the group can be used.

        Raises:
            ShutDownError: The group was destroyed or aborted, or this process has joined another job since.
            MismatchError: This rank may have started other operations than other ranks.
        """
        if self.closed:
            raise ShutDownError(f"process group {self.name!r} {self.closed}")
        if self._lost:
            raise MismatchError(
                f"process group {self.name!r} cannot be used any more, since the ranks may not agree which operation "
                f"is next: {self._lost}"
            )
        if self._generation != basics.generation():
            raise ShutDownError(
                f"process group {self.name!r} is of the job before the last init(): call destroy_process_group() and "
                "init_process_group() after it"
            )

    def _timed_out(self, text: str, kind: Kind, number: int, seconds: float) -> Exception:
        missing = self.missing(f"late/{number}", _ASK_SECONDS)
        detail = (
            f"{name_ranks(missing)} of the job had not come to it"
            if missing
            else "all ranks have come to it, and wait as well"
        )
        what = f"{kind.name.lower()} {text!r} of process group {self.name!r}"
        return dist.DistBackendError(f"{what}: Timed out after {seconds:g} s: {detail}")

    def missing(self, key: str, seconds: float) -> list[int]:
        """Set this rank's key in the store, and return the ranks (in the job) that do not set theirs in time."""
        deadline = time.monotonic() + seconds
        self.store.set(f"{key}/{self.rank}", "1")
        found = []
        for place, rank in enumerate(self.ranks):
            left = max(0.01, deadline - time.monotonic())
            try:
                self.store.wait([f"{key}/{place}"], timedelta(seconds=left))
            except RuntimeError:  # the class depends on the store and on the release of torch
                found.append(rank)
        return found
