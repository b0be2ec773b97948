"""The common part of all collectives: checks of their arguments, and calls of TensorFlow ops."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes

from horovodlike import basics
from horovodlike._engine import ops as engine_ops
from horovodlike._engine.arguments import check_compression, check_name, factor, no_adasum, op_of_average, reduce_op
from horovodlike.basics import Adasum, Average, Sum
from horovodlike.process_set import ProcessSet, check_registered, global_process_set, members, registered_id
from horovodlike.tensorflow._ops.native import ops
from horovodlike.tensorflow.compression import Compression, Compressor

DTYPES = frozenset(tf.as_dtype(dtype.name) for dtype in engine_ops.DType)

_PREFIX = "tensorflow."  # keeps the names apart from names of another framework in the same process


Encoded = Any  # a tf.Tensor or a string


class NotAMemberError(tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]  # has no annotations
    """This rank is not in the process set of a collective. The class is one of TensorFlow's errors and a ValueError."""


class UnsupportedReductionError(tf.errors.AbortedError, ValueError):  # type: ignore[misc]  # has no annotations
    """This operation does not support the requested reduction. Nothing was sent."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise the engine's error in place of TensorFlow's, if the job is broken or shut down.

    Such an error is recognized by the engine's message, which TensorFlow puts into its own. Other errors are not
    changed, for instance the error of a collective after which the job continues.

    Raises:
        HorovodInternalError: The job has ended; its `__cause__` is the error that TensorFlow has raised.
    """
    try:
        yield
    except tf.errors.OpError as error:
        ended = engine_ops.has_ended()
        if ended is None or str(ended) not in error.message:
            raise
        raise ended from error


class Description(NamedTuple):
    """The arguments of a collective, apart from its kind and its tensors."""

    name: str
    numbered: bool  # the name receives a number when the op runs
    process_set: int  # its id
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = -1

    def encode(self) -> Encoded:
        """Return the description as text: in eager mode as a tensor on the host, in a graph as a string."""
        factors = struct.unpack("2q", struct.pack("2d", self.prescale, self.postscale))  # the bits, so they stay exact
        numbers = (self.process_set, int(self.numbered), self.op, self.root_rank, *factors)
        text = " ".join(map(str, (*numbers, self.name)))
        if not tf.executing_eagerly():
            return text
        with tf.device("CPU:0"):
            return tf.constant(text)

    @classmethod
    def of(cls, op: Any) -> Description:
        """Return the description with which an op was made."""
        *numbers, name = op.get_attr("description").decode().split(" ", 6)
        process_set, numbered, reduce_op, root_rank, *factors = map(int, numbers)
        prescale, postscale = struct.unpack("2d", struct.pack("2q", *factors))
        return cls(name, bool(numbered), process_set, reduce_op, prescale, postscale, root_rank)


def set_id_of(process_set: ProcessSet) -> int:
    """Return the id of a process set of which this rank is a member.

    Raises:
        NotAMemberError: This rank is not a member.
        ValueError: The set is not registered.
        TypeError: The argument is not a process set.
    """
    if process_set is global_process_set:
        return 0
    check_registered(process_set)
    try:
        return registered_id(process_set)
    except ValueError as error:
        raise NotAMemberError(None, None, str(error)) from error


def ranks_of(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a process set of which this rank is a member, ascending.

    Raises:
        NotAMemberError: This rank is not a member.
        ValueError: Not initialised, or the set is not registered.
        TypeError: The argument is not a process set.
    """
    basics.size()  # raises before init()
    return members(set_id_of(process_set))


def reduction(op: Any, average: bool | None, operation: str, *, adasum: bool = True) -> int:
    """Return the reduction that a script asks for by `op`, or in the old way by `average`.

    Raises:
        UnsupportedReductionError: `op` is Adasum, which this operation does not support.
        ValueError: Both `op` and `average` are given, or `op` is not a known reduction.
    """
    if average is not None:
        return handle_average_backwards_compatibility(op, average)
    if op is None:
        return Average
    chosen = reduce_op(op, operation)
    if chosen == Adasum and not adasum:
        raise UnsupportedReductionError(None, None, no_adasum(operation))
    return chosen


def factors_of(prescale: Any, postscale: Any, operation: str) -> tuple[float, float]:
    """Return the factors of a reduction, checked.

    Raises:
        TypeError: A factor is not a number.
        ValueError: A factor is not finite.
    """
    return factor(prescale, "prescale_factor", operation), factor(postscale, "postscale_factor", operation)


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the reduction that a script asks for by `op`, or in the old way by `average`; Average by default.

    Raises:
        ValueError: Both `op` and `average` are given.
    """
    if average is None:
        return Average if op is None else op
    return op_of_average(op, average, stacklevel=5)


def as_tensor(value: Any, operation: str) -> tf.Tensor:
    """Return a value as a tensor of a dtype that the engine supports.

    Raises:
        ValueError: The dtype is not supported; the message names it.
    """
    tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    if tensor.dtype not in DTYPES:
        supported = ", ".join(sorted(dtype.name for dtype in DTYPES))
        raise ValueError(
            f"{operation}: tensors of dtype {tensor.dtype.name} are not supported; supported are {supported}"
        )
    return tensor


def describe(
    operation: str,
    name: str | None,
    tensors: Sequence[tf.Tensor],
    ignore_name_scope: bool,
    process_set: ProcessSet,
    op: int = Sum,
    factors: tuple[float, float] = (1.0, 1.0),
    root_rank: int = -1,
) -> Encoded:
    """Return the encoded description of an operation.

    In a graph an unnamed operation is named after its tensor, and so has the same name on all ranks that trace the same
    function. In eager mode it receives a number when it runs.

    A given name is used without a prefix, so that ranks get an error if they run different operations under one name.
    In a graph this holds only for the first kind of operation under a name. Other kinds get a prefix, because they may
    run at the same time.

    Raises:
        TypeError: The name is not a string, or `process_set` is not a process set.
        ValueError: The process set cannot be used by this rank, or the name cannot be used.
        tf.errors.InvalidArgumentError: XLA would compile the graph.
    """
    set_id = set_id_of(process_set)
    check_name(name, operation)
    if tf.executing_eagerly():
        engine_ops.hand_over()  # other bindings send deferred requests before this thread waits
        is_whole = name is not None and bool(tensors)
        return _encoded_eagerly("" if is_whole else operation, name, set_id, op, *factors, root_rank)
    is_whole = name is not None and bool(tensors) and _is_first(operation, set_id, name)
    name = _name_in_graph(operation, name, tensors, ignore_name_scope)
    return _encoded("" if is_whole else operation, name, set_id, op, *factors, root_rank)


def _is_first(operation: str, set_id: int, name: str) -> bool:
    graph = outermost(tf.compat.v1.get_default_graph())
    if not hasattr(graph, "_horovodlike_named"):
        graph._horovodlike_named = {}  # by process set and name, the first operation
    return bool(graph._horovodlike_named.setdefault((set_id, name), operation) == operation)


def _encoded(
    prefix: str, name: str | None, set_id: int, op: int, prescale: float, postscale: float, root_rank: int
) -> Encoded:
    full_name = _PREFIX + ".".join(filter(None, (prefix, "noname" if name is None else name)))
    return Description(full_name, name is None, set_id, op, prescale, postscale, root_rank).encode()


_encoded_eagerly = lru_cache(maxsize=2048)(_encoded)


def _name_in_graph(operation: str, name: str | None, tensors: Sequence[tf.Tensor], ignore_name_scope: bool) -> str:
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"{operation}: collectives cannot be compiled by XLA; set jit_compile=False for the tf.function or in "
            "model.compile() of Keras",
        )
    if name is not None:
        return name
    of_what = tensors[0].op.name if tensors else "noname"
    return str(outermost(graph).unique_name(of_what.rpartition("/")[2] if ignore_name_scope else of_what))


def outermost(graph: Any) -> Any:
    """Return the outermost function graph around a graph, such as a branch's graph. Names are unique within it."""
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph


def unique_in_graph(name: str) -> str:
    """Return a name that no other operation of the graph has, because a graph runs its operations in any order.

    All ranks that trace the same function get the same names, under any name scope.
    """
    graph = outermost(tf.compat.v1.get_default_graph())
    with graph.name_scope(None):
        return str(graph.unique_name(name))


def anchored(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Return the tensors as outputs of an op that prevents constant folding of a collective.

    The result of a collective is not constant, even if its input on this rank is.
    """
    if tf.executing_eagerly():
        return tensors
    graph = tf.compat.v1.get_default_graph()
    # The anchor is the output of a stateful op, which TensorFlow does not treat as a constant. It refers to its graph,
    # so it is stored in the graph only: any other reference to it would keep the graph alive.
    anchor = getattr(graph, "_horovodlike_anchor", None)
    if anchor is None:
        with graph.control_dependencies(None):  # this leaves loops and branches of TensorFlow 1 as well
            anchor = graph._horovodlike_anchor = ops.horovodlike_rank()
    return list(ops.horovodlike_anchored(tensors=tensors, anchor=anchor))


def run(kind: str, tensors: Sequence[tf.Tensor], description: Encoded) -> list[tf.Tensor]:
    """Run an op of this kind, or add it to the graph. It takes a list of tensors and returns a list."""
    if type(description) is not str and not could_possibly_record() and not _has_gpus():
        return list(_EAGER_OPS[kind](tensors, description))  # the same as call(), but a few per cent faster
    return list(call(kind, description, anchored(tensors)))


def call(kind: str, description: Encoded, *inputs: Any) -> Any:
    """Run an op of this kind with its inputs, or add it to the graph, and return its results."""
    if not isinstance(description, str):
        if could_possibly_record() and PossibleTapeGradientTypes(tf.nest.flatten(inputs)):
            arguments, attribute = inputs, description.numpy()  # the op's gradient reads the attribute
        else:
            arguments, attribute = (*inputs, description), None
        op = _in_function(kind, attribute, *map(_dtypes_of, arguments)) if _has_gpus() else _op(kind, attribute)
        return op(*arguments)
    results = _OPS[kind](*inputs, description)
    if _is_in_loop(tf.compat.v1.get_default_graph()):
        # TensorFlow may run iterations in parallel, and their collectives have the same name. An iteration waits for
        # the stateful ops of the previous iteration, so a stateful op is added that waits for the collective.
        with tf.control_dependencies(tf.nest.flatten([results])):
            ops.horovodlike_rank()
    return results


def _op(kind: str, attribute: bytes | None) -> Any:
    """Return the op that has its description as an attribute, or else as the last input."""
    return _EAGER_OPS[kind] if attribute is None else partial(_OPS[kind], description=attribute)


@lru_cache(maxsize=1)
def _has_gpus() -> bool:
    """Return whether eager ops may run on GPUs.

    TensorFlow passes those inputs of an eager op that are not on its GPU through a rendezvous of all threads, so a
    thread may get the inputs of another. A call of a function has its own rendezvous, so such ops are in functions.
    """
    return bool(tf.config.list_logical_devices("GPU"))


def _dtypes_of(value: Any) -> Any:
    return value.dtype if isinstance(value, tf.Tensor) else tuple(tensor.dtype for tensor in value)


@lru_cache(maxsize=1024)
def _in_function(kind: str, attribute: bytes | None, *dtypes: Any) -> Any:
    """Return the op as a function of arguments of these dtypes and any shapes."""

    def op(*arguments: Any) -> Any:
        results = _op(kind, attribute)(*arguments)
        return None if isinstance(results, tf.Operation) else results  # a barrier's, which no function can return

    signature = [
        [tf.TensorSpec(None, each) for each in dtype] if isinstance(dtype, tuple) else tf.TensorSpec(None, dtype)
        for dtype in dtypes
    ]
    return tf.function(op, input_signature=signature, autograph=False).get_concrete_function()


def _is_in_loop(graph: Any) -> bool:
    while graph is not None and not isinstance(graph, WhileBodyFuncGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


_KINDS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall", "barrier", "join")
_OPS = {kind: getattr(ops, f"horovodlike_{kind}") for kind in _KINDS}
_EAGER_OPS = {kind: getattr(ops, f"horovodlike_eager_{kind}") for kind in _KINDS}


def as_tensors(tensors: Sequence[Any], operation: str) -> list[tf.Tensor]:
    """Return values as tensors of dtypes that the engine supports.

    Raises:
        TypeError: `tensors` is one tensor, or not iterable.
        ValueError: As `as_tensor`.
    """
    if isinstance(tensors, (tf.Tensor, tf.Variable, str)) or not isinstance(tensors, Iterable):
        raise TypeError(f"{operation}: expected a list of tensors, got {type(tensors).__name__}")
    return [as_tensor(tensor, operation) for tensor in tensors]


def reduce(
    kind: str,
    operation: str,
    tensors: Sequence[tf.Tensor],
    compression: type[Compressor],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[tf.Tensor]:
    """Compress tensors, reduce them by an op of this kind, and return the decompressed results."""
    check_compression(compression, operation)
    description = describe(operation, name, tensors, ignore_name_scope, process_set, op, factors)
    if compression is Compression.none:
        return run(kind, tensors, description)
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = run(kind, [compressed for compressed, _ in pairs], description)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]
