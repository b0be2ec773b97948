"""Variables and objects brought to the same value on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import tensorflow as tf

from horovodlike import basics
from horovodlike._arguments import check_name, integer
from horovodlike.errors import HorovodInternalError
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.tensorflow._calls import ranks_of
from horovodlike.tensorflow.mpi_ops import grouped_allgather, grouped_broadcast

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

# Variables are sent in groups of about so many bytes, whose values exist twice for a moment.
_GROUP_BYTES = 64 << 20


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give variables the root's values.

    Args:
        variables: `tf.Variable` or Keras variables, of the same shapes, dtypes and order on all ranks.
        root_rank: The rank whose values are sent, by its number in the job.
        process_set: The ranks that take part.
        inplace: Not needed.

    Returns:
        In a graph of TensorFlow 1 the op that does it, else None.

    Raises:
        ValueError: An argument cannot be used.
        tf.errors.OpError: The ranks have different variables, or the job is broken; see `mpi_ops`.
    """
    del inplace
    assignments = []
    for number, group in enumerate(_groups(list(variables))):
        values = [tf.convert_to_tensor(variable) for variable in group]
        name = f"broadcast_variables.{number}" if tf.executing_eagerly() else None
        results = grouped_broadcast(values, root_rank, name, process_set=process_set)
        assignments += [variable.assign(value) for variable, value in zip(group, results, strict=True)]
    if tf.compat.v1.executing_eagerly_outside_functions():
        return None
    return tf.group(*(assignment for assignment in assignments if assignment is not None))


def _groups(variables: Sequence[Any]) -> list[list[Any]]:
    groups: list[list[Any]] = []
    left = 0
    for variable in variables:
        if left <= 0:
            groups.append([])
            left = _GROUP_BYTES
        groups[-1].append(variable)
        left -= _bytes_of(variable)
    return groups


def _bytes_of(variable: Any) -> int:
    elements = tf.TensorShape(variable.shape).num_elements()
    if elements is None:  # shape=[None, 3], say: the value knows, which a graph that is being traced does not have
        elements = int(tf.size(variable, tf.int64)) if tf.executing_eagerly() else 0
    return int(elements) * int(tf.as_dtype(variable.dtype).size)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the op that gives all global variables of the graph of TensorFlow 1 the root's values.

    Raises:
        RuntimeError: Eagerly there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not work eagerly, where there are no global variables; use "
            "hvd.broadcast_variables(model.weights, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """For sessions of TensorFlow 1: gives all global variables the root's values when a session has been made.

    Args:
        root_rank: The rank whose values are sent.
        device: Not needed.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        del device
        super().__init__()
        self.root_rank = root_rank
        self._broadcast: tuple[Any, Any] | None = None  # the graph and its op

    def begin(self) -> None:
        """Add the op to the graph, once."""
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast[0] is not graph:
            self._broadcast = (graph, broadcast_global_variables(self.root_rank))

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        del coord
        assert self._broadcast is not None
        session.run(self._broadcast[1])


def _pickled(obj: object) -> tuple[bytes, Exception | None]:
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:  # whatever __reduce__ and __getstate__ raise
        return b"", error


def _gather_bytes(data: bytes, ok: bool, name: str, process_set: ProcessSet) -> dict[int, bytes | None]:
    """Return what each rank has, by rank in ascending order; None for those that are not ok.

    Ranks that have joined are missing.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise RuntimeError(f"{name}: objects are sent eagerly; call it outside of graphs of TensorFlow 1")
        with tf.device("CPU:0"):
            mine = tf.constant([[basics.rank(), len(data), int(ok)]], tf.int64)
            parts = [mine, tf.constant(np.frombuffer(data, np.uint8))]
            described, everything = (part.numpy() for part in grouped_allgather(parts, name, process_set=process_set))
    ends = np.cumsum(described[:, 1])
    return {
        rank: everything[end - count : end].tobytes() if is_ok else None
        for end, (rank, count, is_ok) in zip(ends, described.tolist(), strict=True)
    }


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object: the object itself on the root, a copy of it elsewhere. Runs eagerly.

    Args:
        obj: Anything that cloudpickle can serialize; ignored on the other ranks.
        root_rank: The rank whose object is sent, by its number in the job.
        session: Not needed.
        name: What the ranks match the operation by.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The root could not pickle its object (on the root, the cause), or has joined.
        ValueError: An argument cannot be used.
        tf.errors.UnknownError: The job is broken or shut down.
    """
    del session
    check_name(name, "broadcast_object")
    name = f"broadcast_object.{name or 'noname'}"
    ranks = ranks_of(process_set)
    root_rank = integer(root_rank, "root_rank", name)
    if root_rank not in ranks:
        raise ValueError(f"{name}: the root rank {root_rank} is not one of the ranks {ranks}")
    is_root = basics.rank() == root_rank
    data, error = _pickled(obj) if is_root else (b"", None)
    gathered = _gather_bytes(data, error is None, name, process_set)
    if error is not None:
        raise error
    if root_rank not in gathered:
        raise HorovodInternalError(f"{name}: the root, rank {root_rank}, has joined; take a rank that has not")
    sent = gathered[root_rank]
    if sent is None:
        raise HorovodInternalError(f"{name}: rank {root_rank} could not pickle its object")
    return obj if is_root else cloudpickle.loads(sent)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that does what `broadcast_object` does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks. The own object is a copy as well. Runs eagerly.

    There are none of ranks that have joined.

    Args:
        obj: Anything that cloudpickle can serialize.
        session: Not needed.
        name: What the ranks match the operation by.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: A rank could not pickle its object (on that rank, the cause).
        ValueError: An argument cannot be used.
        tf.errors.UnknownError: The job is broken or shut down.
    """
    del session
    check_name(name, "allgather_object")
    name = f"allgather_object.{name or 'noname'}"
    data, error = _pickled(obj)
    gathered = _gather_bytes(data, error is None, name, process_set)
    if error is not None:
        raise error
    failed = [rank for rank, part in gathered.items() if part is None]
    if failed:
        raise HorovodInternalError(f"{name}: ranks {failed} could not pickle their objects")
    return [cloudpickle.loads(part) for part in gathered.values() if part is not None]
