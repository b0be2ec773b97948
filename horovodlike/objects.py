"""Collectives without tensors: on numbers and on Python objects, barriers and joins.

Numbers and objects are authenticated before they are read (:mod:`horovodlike._net.object_seal`). Each collective on
them is one allgather: this sends the length of each rank's data over the control plane, which is authenticated, so
that the length cannot be changed.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from horovodlike import basics, process_set
from horovodlike._engine import ops
from horovodlike._engine.arguments import integer
from horovodlike._engine.ops import Kind, Request
from horovodlike._net.object_seal import NO_ROOT, Context, ObjectSeal, Opened, dumps
from horovodlike.errors import HorovodInternalError, MismatchError
from horovodlike.process_set import UnnamedCounter, forget_numbers

__all__ = ["allgather_object", "barrier", "broadcast_object", "highest", "join"]

_unnamed = UnnamedCounter()
_seals: dict[int, ObjectSeal] = {}  # the seal of the current generation, by its number
basics.on_shutdown(_seals.clear)


@lru_cache(maxsize=256)
def _barrier_request(set_id: int, name: str | None) -> Request:
    return Request(Kind.BARRIER, f"barrier.{name or 'noname'}", [], process_set=set_id)


def barrier(process_set: int = 0, name: str | None = None) -> None:
    """Block until all ranks of the process set with this id have called this function with this name.

    Raises:
        HorovodInternalError: The job is broken or shut down.
        ValueError: Not initialised.
    """
    ops.carry_out(_barrier_request(process_set, name))


def join(process_set: int = 0) -> int:
    """Declare that this rank has no more data, and wait until all ranks of the set have; return the last rank to join.

    Args:
        process_set: The id of a set of which this rank is a member.

    Raises:
        HorovodInternalError: The job is broken or shut down.
        ValueError: Not initialised, or another thread of this rank is joining already.
    """
    (output,) = ops.carry_out(Request(Kind.JOIN, "join", [], process_set=process_set))
    forget_numbers(process_set)  # the ranks may have made different numbers of calls
    return int.from_bytes(output.memory[:], "little")


def highest(name: str, numbers: Sequence[int]) -> list[int]:
    """Return, for each position in ``numbers``, the highest number of any rank.

    Collective over all ranks of the job.

    Args:
        name: The name by which the ranks match the operation; it must not be in flight already.
        numbers: Signed integers of 64 bits at most; as many on all ranks.

    Raises:
        HorovodInternalError: The job is broken or shut down, the ranks gave different counts of numbers, or the
            numbers were changed on their way.
        ValueError: Not initialised.
    """
    given = [each.data or b"" for each in _gather(name, struct.pack(f">{len(numbers)}q", *numbers), NO_ROOT, 0)]
    if {len(data) for data in given} != {8 * len(numbers)}:
        raise MismatchError(f"{name}: the ranks gave {', '.join(str(len(data) // 8) for data in given)} numbers")
    return [max(of_all) for of_all in zip(*(struct.unpack(f">{len(numbers)}q", data) for data in given), strict=True)]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: int = 0) -> Any:
    """Return the root's object: the object itself on the root, a copy of it elsewhere.

    Collective over the ranks of a process set. Objects are sent as cloudpickle, and unpickling runs code that the
    sender chose: all ranks of a job hold its secret key and trust each other.

    Args:
        obj: On the root, anything that cloudpickle can serialize; ignored on the other ranks.
        root_rank: The rank whose object is sent, by its number in the job.
        name: The name by which the ranks match the operation; None for a name with the number of the unnamed call.
        process_set: The id of a set of which this rank is a member.

    Raises:
        IntegrityError: The received data differs from the data that the ranks have sent.
        HorovodInternalError: The job is broken; or the root could not pickle its object (the root raises the cause), or
            has joined.
        ValueError: Not initialised, or ``root_rank`` is not in the set.
    """
    name = f"horovodlike.object.{_unnamed.next(process_set)}" if name is None else name
    root_rank = integer(root_rank, "root_rank", name)
    ranks = _members(process_set)
    if root_rank not in ranks:
        raise ValueError(f"{name}: the root rank {root_rank} is not one of the ranks {ranks}")
    is_root = basics.rank() == root_rank
    data, problem = _pickled(obj) if is_root else (None, None)
    opened = _gather(name, data, root_rank, process_set)
    if problem is not None:
        raise problem
    sent = {each.rank: each.data for each in opened}
    if root_rank not in sent:
        raise HorovodInternalError(f"{name}: the root, rank {root_rank}, has joined; take a rank that has not")
    root_data = sent[root_rank]
    if root_data is None:
        raise HorovodInternalError(f"{name}: rank {root_rank} could not pickle its object")
    return obj if is_root else pickle.loads(root_data)


def allgather_object(obj: Any, name: str, process_set: int = 0) -> list[Any]:
    """Return the objects of all ranks of a process set by rank; all are copies, also this rank's object.

    Ranks that have joined have no object in the list.

    Args:
        obj: Anything that cloudpickle can serialize.
        name: The name by which the ranks match the operation.
        process_set: The id of a set of which this rank is a member.

    Raises:
        IntegrityError: The received data differs from the data that the ranks have sent.
        HorovodInternalError: The job is broken; or a rank could not pickle its object (that rank raises the cause).
        ValueError: Not initialised.
    """
    data, problem = _pickled(obj)
    opened = _gather(name, data, NO_ROOT, process_set)
    if problem is not None:
        raise problem
    failed = [each.rank for each in opened if each.data is None]
    if failed:
        raise HorovodInternalError(f"{name}: ranks {failed} could not pickle their objects")
    return [pickle.loads(each.data) for each in opened if each.data is not None]


def _pickled(obj: object) -> tuple[bytes | None, Exception | None]:
    """Return the pickled object and None; or None and the error if it cannot be pickled."""
    try:
        return dumps(obj), None
    except Exception as error:  # __reduce__ and __getstate__ may raise any error
        return None, error


def _members(set_id: int) -> list[int]:
    return process_set.members(set_id) if set_id else list(range(basics.size()))


def _gather(name: str, data: bytes | None, root: int, set_id: int) -> list[Opened]:
    """Gather ``data`` from all ranks; return the verified data of each, in the order of the ranks."""
    context = Context(name, set_id, process_set.registration(set_id), _members(set_id))
    key = basics.object_key()
    if key is None and basics.size() > 1:
        raise HorovodInternalError(f"{name}: this job has no key to authenticate objects with")
    # Made here and not in init(), as this module may be imported later. All threads use the seal of the first thread.
    seal = _seals.setdefault(basics.generation(), ObjectSeal(key, basics.rank()))
    opened = seal.open(context, ops.allgather_bytes(name, seal.seal(context, data, root), set_id))
    roots = {each.root: each.rank for each in reversed(opened)}
    if len(roots) > 1:
        wanted = ", ".join(
            f"rank {rank} calls {'allgather_object' if of == NO_ROOT else f'broadcast_object with root {of}'}"
            for of, rank in sorted(roots.items(), key=lambda item: item[1])
        )
        raise MismatchError(f"{name}: the ranks do not agree: {wanted}")
    return opened
