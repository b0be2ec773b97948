"""Collectives on numbers and on objects, for what has no framework at hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from horovodlike import basics, ops
from horovodlike._native import ffi
from horovodlike.errors import HorovodInternalError
from horovodlike.ops import DType, Kind, ReduceOp, Request

__all__ = ["broadcast_object", "highest"]

# Sent in place of a length by a root whose object cannot be pickled, so that no rank waits for it.
_PICKLING_FAILED = -1

_unnamed = itertools.count()
_abandoned: list[tuple[int, Any]] = []  # memory that the engine may still use though nobody waits for it


def _count_from_zero(_: object) -> None:
    global _unnamed
    _unnamed = itertools.count()


basics.on_init(_count_from_zero)


def highest(name: str, numbers: Sequence[int]) -> list[int]:
    """Return, for each number, the highest that any rank has given.

    Collective over all ranks of the job.

    Args:
        name: What the ranks match the operation by; not in flight at the same time.
        numbers: As many on all ranks, each of 64 bits at most.

    Raises:
        HorovodInternalError: The job is broken or shut down, or the ranks gave different amounts of numbers.
        ValueError: Not initialised.
    """
    memory = ffi.new("int64_t[]", list(numbers))
    request = Request(Kind.ALLREDUCE, name, [(DType.INT64, (len(numbers),))], op=ReduceOp.MAX)
    _carry_out(request, memory)
    return list(memory)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: int = 0) -> Any:
    """Return the root's object: the object itself on the root, a copy of it elsewhere.

    Collective over the ranks of a process set. Objects travel as cloudpickle, and unpickling runs code that the sender
    chose: all ranks of a job hold its secret key and trust each other.

    Args:
        obj: Anything that cloudpickle can serialize; ignored on the other ranks.
        root_rank: The rank whose object is sent, by its number in the job.
        name: What the ranks match the operation by; counted if None.
        process_set: The id of a set that this rank is a member of.

    Raises:
        HorovodInternalError: The job is broken; or the root could not pickle its object (on the root, the cause).
        ValueError: Not initialised, or there is no such rank.
    """
    name = f"horovodlike.object.{next(_unnamed)}" if name is None else name
    root_rank = ops.root_rank_of(name, root_rank)
    is_root = basics.rank() == root_rank
    data, problem = _pickled(obj) if is_root else (b"", None)
    length = ffi.new("int64_t[]", [_PICKLING_FAILED if problem else len(data)])
    described = [(DType.INT64, (1,))]
    _carry_out(Request(Kind.BROADCAST, f"{name}.sz", described, root_rank=root_rank, process_set=process_set), length)
    if problem is not None:
        raise problem
    if length[0] == _PICKLING_FAILED:
        raise HorovodInternalError(f"{name}: rank {root_rank} could not pickle its object")
    memory = ffi.new("uint8_t[]", data if is_root else length[0])
    described = [(DType.UINT8, (length[0],))]
    _carry_out(Request(Kind.BROADCAST, f"{name}.t", described, root_rank=root_rank, process_set=process_set), memory)
    return obj if is_root else cloudpickle.loads(ffi.buffer(memory))


def _pickled(obj: object) -> tuple[bytes, Exception | None]:
    """The object as bytes; or no bytes, and why it cannot be pickled."""
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:  # whatever __reduce__ and __getstate__ raise
        return b"", error


def _carry_out(request: Request, memory: Any) -> None:
    """Enqueue a request on memory of ours and wait. A signal handler that raises must not free it too early."""
    _abandoned[:] = [each for each in _abandoned if ops.is_in_flight(each[0])]
    handle = request.enqueue_inplace(int(ffi.cast("uintptr_t", memory)))
    try:
        ops.wait_done(handle)
    except BaseException:
        if ops.is_in_flight(handle):
            _abandoned.append((handle, memory))
        raise
