"""Sums of sparse tensors, by an allgather of the positions and values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovodlike import basics
from horovodlike._engine.arguments import called, check_name, reduce_op
from horovodlike._engine.ops import Kind
from horovodlike.process_set import ProcessSet, global_process_set, members, registered_id
from horovodlike.torch._ops.compressors import Compressor, NoneCompressor
from horovodlike.torch._ops.handles import Call, full_name, synchronize
from horovodlike.torch._ops.variable_size import start_allgather


class SparseGathering:
    """An allgather in flight of a sparse tensor from each rank.

    Args:
        name: The full name by which the ranks match the operation.
        tensor: In coordinate format, coalesced or not, with the same number of sparse dimensions on all ranks.
        compression: Compresses the values that are sent.
        process_set: The ranks that take part.
    """

    def __init__(self, name: str, tensor: torch.Tensor, compression: type[Compressor], process_set: ProcessSet) -> None:
        """Start the allgather."""
        set_id = registered_id(process_set)
        self.num_ranks = len(members(set_id))
        self._name = name
        self._shape = tensor.shape
        self._device = tensor.device
        self._compression = compression
        with torch.no_grad():
            values, self._ctx = compression.compress(tensor._values())
            positions = tensor._indices().t()
            self.handle = start_allgather(
                Call(Kind.ALLGATHER, name, process_set=set_id), [positions, values], single=False
            )

    def finish(self, factor: float) -> torch.Tensor:
        """Return the sum over the ranks, times a factor; not coalesced: a position may occur more than once.

        Raises:
            HorovodInternalError: The ranks disagree, or the job is broken or shut down.
            ValueError: The result was returned before, or was an error.
            RuntimeError: Another rank's tensor has elements outside the shape of this rank's tensor.
        """
        gathered: Any = synchronize(self.handle)
        if gathered is None:
            raise ValueError(f"{self._name}: its result has been returned before, or was an error: wait for it once")
        positions, values = gathered
        values = self._compression.decompress(values, self._ctx)
        if factor != 1.0:
            values = values * factor
        # Ranks may have different shapes: unchecked, positions outside this shape would be written to.
        return torch.sparse_coo_tensor(positions.t(), values, self._shape, device=self._device, check_invariants=True)


def empty_sparse_like(tensor: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """Return a sparse tensor with the shape and dtype of `tensor`, without any element."""
    positions = torch.empty((sparse_dim, 0), dtype=torch.int64, device=tensor.device)
    values = torch.empty((0, *tensor.shape[sparse_dim:]), dtype=tensor.dtype, device=tensor.device)
    return torch.sparse_coo_tensor(positions, values, tensor.shape, check_invariants=False)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up sparse tensors, and return a function that waits for the sum and returns it.

    Args:
        tensor: In coordinate format, with the same shape and number of sparse dimensions on all ranks.
        name: The name by which the ranks match the operation; if None, a counter supplies one.
        op: Average, which divides by the number of ranks of the process set, or Sum.
        process_set: The ranks that take part.

    Returns:
        A function to be called once. The sum that it returns is sparse and not coalesced.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument cannot be used, or the name is in flight already.
    """
    check_name(name, "sparse_allreduce_async")
    label = called("sparse_allreduce_async", name)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{label}: expected a torch.Tensor, got {type(tensor).__name__}")
    op = reduce_op(op, label)
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async needs a tensor in coordinate format, got layout {tensor.layout}")
    if op not in (basics.Average, basics.Sum):
        raise ValueError(f"sparse_allreduce_async knows op=Average and op=Sum, got {op!r}")
    full = full_name("sparse_allreduce", name, registered_id(process_set))
    gathering = SparseGathering(full, tensor, NoneCompressor, process_set)
    factor = 1.0 / gathering.num_ranks if op == basics.Average else 1.0
    return lambda: gathering.finish(factor)
