"""The collectives on torch tensors.

Most operations have a synchronous form, and a form that returns a handle at once (`*_async`). A trailing underscore
marks forms that work in place; the others return new tensors. The form for a list of tensors (`grouped_*`) is carried
out as a whole or not at all. Rules for all operations:

* Ranks match operations by name. Unnamed operations are numbered, so every rank has to call them in the same order. A
  name may be used again when its previous operation has been synchronized.
* Tensors may be of any dtype of docs/users/arrays.md, of any size, 0 elements included, of any strides (a tensor that
  is not contiguous is copied) and on the CPU or an NVIDIA GPU; tensors on other devices are copied to the CPU and back.
  A rank has one GPU. A tensor must be on the CPU on all ranks, or on a GPU on all ranks.
* On a GPU, an operation belongs to the current stream: it begins after the work that this stream already has, and
  `synchronize` makes the stream that is current at that time wait for the result, not the host. No operation may be
  captured into a CUDA graph.
* If the ranks disagree about an operation it raises `HorovodInternalError` on all of them, and the job continues.
* Do not change the tensors of an asynchronous operation before `synchronize`, which is to be called once for each
  handle. Such changes are lost: the operation uses the values at the time of its call, and the result of an in-place
  operation overwrites the tensor. If the tensor was resized so that the result does not fit, `synchronize` raises a
  `ValueError`.
* The synchronous forms that return new tensors are differentiable.
* Every operation takes a process set. Ranks outside this set do not need to call it.
* Any thread may call operations, as long as the names are the same on all ranks.
* In compiled functions, the synchronous forms are operators of the graph (see docs/users/compile.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horovodlike import basics, objects
from horovodlike._engine.arguments import op_of_average
from horovodlike._engine.ops import Kind
from horovodlike.basics import *  # scripts import these names from this module as well
from horovodlike.basics import Average
from horovodlike.errors import HorovodInternalError
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.timeline import start_timeline, stop_timeline
from horovodlike.torch._ops import disable_compile
from horovodlike.torch._ops.alltoall import alltoall, alltoall_async, grouped_alltoall, grouped_alltoall_async
from horovodlike.torch._ops.autograd import run
from horovodlike.torch._ops.calls import compressed, group, plain_call, reduction_call, result
from horovodlike.torch._ops.compressors import Compressor, NoneCompressor
from horovodlike.torch._ops.handles import (
    Call,
    poll,
    start_again_in_place,
    start_in_place,
    start_in_place_and_remember,
    start_reducescatter,
    start_to_new,
    synchronize,
)
from horovodlike.torch._ops.sparse import sparse_allreduce_async
from horovodlike.torch._ops.variable_size import start_allgather

__all__ = [
    "HorovodInternalError",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_alltoall",
    "grouped_alltoall_async",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += basics.__all__


def _allreduce_call(
    operation: str,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Call:
    if average is not None:
        op = op_of_average(op, average)
    return reduction_call(Kind.ALLREDUCE, operation, name, op, prescale, postscale, process_set)


def _reduce(call: Call, tensors: Sequence[torch.Tensor], compression: type[Compressor]) -> list[torch.Tensor]:
    pairs = compressed(compression, tensors, call.name)
    reduced = run(call, [sent for sent, _ in pairs])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and return the result as a new tensor.

    Differentiable for Average and Sum: the gradient is the allreduce of the gradient with the same op and factors.

    Args:
        tensor: The tensor to reduce, of the same shape and dtype on all ranks.
        average: Deprecated; use `op`.
        name: The name by which the ranks match the operation. None: a number that counts unnamed operations.
        compression: The `Compressor` class that compresses the tensor for sending.
        op: Average (the default), Sum, Min, Max or Product. Average truncates integers; bool has no Average. Or, for
            floating-point tensors, Adasum, the adaptive sum of Maleki et al. 2020 (https://arxiv.org/abs/2006.02924):
            the sum of orthogonal tensors, the mean of parallel ones; computed for each tensor of a group separately.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    call = _allreduce_call("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    [(sent, ctx)] = compressed(compression, [tensor], call.name)
    return compression.decompress(run(call, [sent])[0], ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an asynchronous `allreduce` and return a handle for `poll` and `synchronize`. Not differentiable."""
    call = _allreduce_call("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return start_to_new(call, [tensor], single=True)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do what `allreduce` does in place, and return the tensor. Not differentiable."""
    arguments = average, prescale_factor, postscale_factor, getattr(process_set, "process_set_id", None)
    handle = start_again_in_place(name, op, arguments, tensor, True)
    if not handle:
        call = _allreduce_call("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
        handle = start_in_place_and_remember(name, op, arguments, call, tensor, True)
    return result(handle, torch.Tensor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an asynchronous `allreduce_` and return a handle for `poll` and `synchronize`."""
    arguments = average, prescale_factor, postscale_factor, getattr(process_set, "process_set_id", None)
    handle = start_again_in_place(name, op, arguments, tensor, False)
    if not handle:
        call = _allreduce_call("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
        handle = start_in_place_and_remember(name, op, arguments, call, tensor, False)
    return handle


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do what `allreduce` does for a list of tensors, of any dtypes, as one operation; return a list."""
    call = _allreduce_call("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, group(tensors, call.name), compression)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an asynchronous `grouped_allreduce` and return a handle, whose result is a tuple."""
    call = _allreduce_call("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return start_to_new(call, group(tensors, call.name), single=False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do what `allreduce_` does for a list of tensors, of any dtypes, as one operation; return a list of them."""
    call = _allreduce_call("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return list(result(start_in_place(call, group(tensors, call.name), single=False, waits=True), tuple))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an asynchronous `grouped_allreduce_` and return a handle, whose result is a tuple."""
    call = _allreduce_call("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return start_in_place(call, group(tensors, call.name), single=False)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks joined along dimension 0, in the order of the ranks.

    Differentiable: a rank's gradient is its own rows of the gradient averaged over the ranks.

    Args:
        tensor: A tensor with at least one dimension. Only dimension 0 may differ between ranks; it may be 0.
        name: The name by which the ranks match the operation. None: a number that counts unnamed operations.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return run(plain_call(Kind.ALLGATHER, "allgather", name, process_set), [tensor])[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an asynchronous `allgather` and return a handle for `poll` and `synchronize`. Not differentiable."""
    return start_allgather(plain_call(Kind.ALLGATHER, "allgather", name, process_set), [tensor], single=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Do what `allgather` does for a list of tensors, of any dtypes, as one operation; return a tuple."""
    call = plain_call(Kind.ALLGATHER, "grouped_allgather", name, process_set)
    return run(call, group(tensors, call.name))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an asynchronous `grouped_allgather` and return a handle, whose result is a tuple."""
    call = plain_call(Kind.ALLGATHER, "grouped_allgather", name, process_set)
    return start_allgather(call, group(tensors, call.name), single=False)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor as a new tensor on every rank.

    Differentiable: the gradient is the average of the ranks' gradients on the root, and zero elsewhere.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks; only the root's values are used.
        root_rank: The (global) rank whose tensor is sent.
        name: The name by which the ranks match the operation. None: a number that counts unnamed operations.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    return run(plain_call(Kind.BROADCAST, "broadcast", name, process_set, root_rank), [tensor])[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an asynchronous `broadcast` and return a handle for `poll` and `synchronize`. Not differentiable."""
    return start_to_new(plain_call(Kind.BROADCAST, "broadcast", name, process_set, root_rank), [tensor], single=True)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite the tensor with the root's on every rank, and return it. Not differentiable."""
    call = plain_call(Kind.BROADCAST, "broadcast", name, process_set, root_rank)
    return result(start_in_place(call, [tensor], single=True, waits=True), torch.Tensor)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an asynchronous `broadcast_` and return a handle for `poll` and `synchronize`."""
    return start_in_place(plain_call(Kind.BROADCAST, "broadcast", name, process_set, root_rank), [tensor], single=True)


def grouped_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Do what `broadcast` does for a list of tensors, of any dtypes, as one operation; return a tuple."""
    call = plain_call(Kind.BROADCAST, "grouped_broadcast", name, process_set, root_rank)
    return run(call, group(tensors, call.name))


def grouped_broadcast_async(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an asynchronous `grouped_broadcast` and return a handle, whose result is a tuple. Not differentiable."""
    call = plain_call(Kind.BROADCAST, "grouped_broadcast", name, process_set, root_rank)
    return start_to_new(call, group(tensors, call.name), single=False)


def grouped_broadcast_(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Do what `broadcast_` does for a list of tensors, of any dtypes, as one operation; return a tuple of them."""
    call = plain_call(Kind.BROADCAST, "grouped_broadcast", name, process_set, root_rank)
    return result(start_in_place(call, group(tensors, call.name), single=False, waits=True), tuple)


def grouped_broadcast_async_(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an asynchronous `grouped_broadcast_` and return a handle, whose result is a tuple."""
    call = plain_call(Kind.BROADCAST, "grouped_broadcast", name, process_set, root_rank)
    return start_in_place(call, group(tensors, call.name), single=False)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks and return this rank's rows of the result.

    Dimension 0 is divided among the ranks in their order. If its size is no multiple of the number of ranks, the first
    ranks get one row more; if there are fewer rows than ranks, the last ranks get an empty tensor.

    Differentiable for Average and Sum: the gradient is the allgather of the gradients, times the factors and, for Sum,
    times the number of ranks. For either this is size() times the derivative of the sum of all ranks' losses, as in
    Horovod.

    Args:
        tensor: The tensor to reduce, with at least one dimension, and of the same shape and dtype on all ranks.
        name: The name by which the ranks match the operation. None: a number that counts unnamed operations.
        compression: The `Compressor` class that compresses the tensor for sending.
        op: Average, Sum, Min, Max or Product. Average truncates integers; bool has no Average.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Raises:
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
        UnsupportedReductionError: `op` is Adasum.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    call = reduction_call(Kind.REDUCESCATTER, "reducescatter", name, op, prescale_factor, postscale_factor, process_set)
    return _reduce(call, [tensor], compression)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start an asynchronous `reducescatter` and return a handle for `poll` and `synchronize`. Not differentiable."""
    call = reduction_call(Kind.REDUCESCATTER, "reducescatter", name, op, prescale_factor, postscale_factor, process_set)
    return start_reducescatter(call, [tensor], single=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do what `reducescatter` does for a list of tensors, of any dtypes, as one operation; return a list."""
    call = reduction_call(
        Kind.REDUCESCATTER, "grouped_reducescatter", name, op, prescale_factor, postscale_factor, process_set
    )
    return _reduce(call, group(tensors, call.name), compression)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start an asynchronous `grouped_reducescatter` and return a handle, whose result is a tuple."""
    call = reduction_call(
        Kind.REDUCESCATTER, "grouped_reducescatter", name, op, prescale_factor, postscale_factor, process_set
    )
    return start_reducescatter(call, group(tensors, call.name), single=False)


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until all ranks of the process set have called this. Barriers of several threads need names."""
    objects.barrier(registered_id(process_set), name)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Announce that this rank has no more data, and return when all ranks of the process set have joined.

    Until then the other ranks can continue with all operations; a joined rank contributes nothing. A sum is over the
    ranks that continue, an allgather has no rows of a joined rank, an alltoall sends it none, a reducescatter leaves
    its rows out. Average divides by the number of ranks that continue, or by the number of all ranks
    (`HOROVODLIKE_JOIN_AVERAGE=all`). A broadcast from a joined rank, and changes of process sets, fail.

    Args:
        device: Not needed; accepted for scripts that pass it.
        process_set: The ranks that join.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        HorovodInternalError: The job is broken or shut down.
        ValueError: Another thread of this rank is joining already.
    """
    del device
    return objects.join(registered_id(process_set))


disable_compile(*(globals()[name] for name in __all__ if name[0].islower()))
