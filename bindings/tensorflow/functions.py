"""Broadcasts of variables, and broadcasts and allgathers of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovodlike import objects
from horovodlike._engine.arguments import check_name
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.tensorflow._ops.calls import set_id_of
from horovodlike.tensorflow.mpi_ops import grouped_broadcast

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

# Variables are sent in groups of about this size, because the values of a group exist twice while it is sent.
_GROUP_BYTES = 64 << 20


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Set the variables of all ranks to the root's values.

    Args:
        variables: `tf.Variable` or Keras variables, of the same shapes, dtypes and order on all ranks.
        root_rank: The rank whose values are sent, by its number in the job.
        process_set: The ranks that take part.
        inplace: Not needed.

    Returns:
        In a graph of TensorFlow 1 the op that sets the variables, else None.

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
    if elements is None:  # e.g. shape=[None, 3]: only the value has a size, and a graph that is traced has no value
        elements = int(tf.size(variable, tf.int64)) if tf.executing_eagerly() else 0
    return int(elements) * int(tf.as_dtype(variable.dtype).size)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an op that sets all global variables of the graph of TensorFlow 1 to the root's values.

    Raises:
        RuntimeError: This is eager mode, in which there are no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not work eagerly, where there are no global variables; use "
            "hvd.broadcast_variables(model.weights, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # has no annotations
    """A hook for sessions of TensorFlow 1: sets all global variables to the root's values in each new session.

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
        """Run the op in the new session."""
        del coord
        assert self._broadcast is not None
        session.run(self._broadcast[1])


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
        name: The name by which the ranks match the operation.
        process_set: The ranks that take part.

    Raises:
        IntegrityError: (A `HorovodInternalError`.) The object was changed on its way, and was not unpickled.
        HorovodInternalError: The job is broken; or the root could not pickle its object (the root raises the cause), or
            has joined.
        ValueError: An argument cannot be used.
    """
    del session
    check_name(name, "broadcast_object")
    name = f"tensorflow.broadcast_object.{name or 'noname'}"
    with tf.init_scope():
        _check_runs_eagerly(name)
        return objects.broadcast_object(obj, root_rank, name, set_id_of(process_set))


def _check_runs_eagerly(name: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(f"{name}: objects are sent eagerly; call it outside of graphs of TensorFlow 1")


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of one argument, the object, that works like `broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return copies of the objects of all ranks, also of this rank's, in the order of the ranks. Runs eagerly.

    Ranks that have joined have no object in the list.

    Args:
        obj: Anything that cloudpickle can serialize.
        session: Not needed.
        name: The name by which the ranks match the operation.
        process_set: The ranks that take part.

    Raises:
        IntegrityError: (A `HorovodInternalError`.) An object was changed on its way; none was unpickled.
        HorovodInternalError: The job is broken; or a rank could not pickle its object (that rank raises the cause).
        ValueError: An argument cannot be used.
    """
    del session
    check_name(name, "allgather_object")
    name = f"tensorflow.allgather_object.{name or 'noname'}"
    with tf.init_scope():
        _check_runs_eagerly(name)
        return objects.allgather_object(obj, name, set_id_of(process_set))
