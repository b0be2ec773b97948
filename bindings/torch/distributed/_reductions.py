"""Reductions of a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horovodlike._engine.ops import Kind, ReduceOp
from horovodlike.errors import MismatchError
from horovodlike.torch._ops.tensor import check, in_memory, is_in_memory
from horovodlike.torch.distributed._operations import Operations, Tensors, copy_all, place_of_root
from horovodlike.torch.distributed._tensors import flat, one_tensor, reduction, seconds_of, share_memory, to_reduce
from horovodlike.torch.distributed._work import HvdWork


class Reductions(Operations):
    """The methods of torch's `ProcessGroup` that reduce."""

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM, timeout: timedelta | None = None) -> HvdWork:
        """Reduce a tensor in place. Sparse tensors, in coordinate format, can only be summed; the sum is coalesced."""
        tensor = one_tensor(tensors, "allreduce")
        op, prescale = reduction(getattr(opts, "reduceOp", opts))
        waits = not getattr(opts, "asyncOp", True) and self._coalesced is None
        seconds = seconds_of(getattr(opts, "timeout", timeout))
        if tensor.is_sparse:
            return self._allreduce_sparse(tensor, op, prescale, opts, seconds)
        tensor = to_reduce(tensor, op, "allreduce")
        if not is_in_memory(tensor):
            return self._allreduce([tensor], op, prescale, opts, timeout)
        operation = self._team.allreduce(tensor, op, prescale, waits, seconds)
        return HvdWork((), (tensor,)) if operation is None else self.work_of(operation, opts)

    def _allreduce_sparse(
        self, tensor: torch.Tensor, op: int, prescale: float, opts: Any, seconds: float | None
    ) -> HvdWork:
        """Add up sparse tensors, by an allgather of the shapes, positions and values of all ranks."""
        if op != ReduceOp.SUM or prescale != 1.0:
            raise ValueError("allreduce: sparse tensors can be reduced by SUM only")
        mine = tensor.detach().coalesce()
        shape = torch.tensor([tensor.shape], device=tensor.device)
        inputs = [shape, mine.indices().t(), mine.values()]
        for each in inputs:
            check(each, "allreduce")

        def finish(gathered: Tensors) -> None:
            shapes, positions, values = gathered
            if (shapes != shape).any():
                raise MismatchError(
                    f"Mismatched shapes of sparse tensors for allreduce: by place in the group {shapes.tolist()}"
                )
            total = torch.sparse_coo_tensor(positions.t(), values, tensor.shape, check_invariants=True)
            with torch.no_grad():
                tensor.copy_(total.coalesce())

        signature = "sparse", tensor.dtype, tensor.shape, tensor.sparse_dim()
        return self.work_of(self._team.gather_rows(signature, inputs, tensor, finish, seconds), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = dist.ReduceOp.SUM) -> HvdWork:
        """Reduce several tensors in place, of any dtypes, as one operation."""
        op, prescale = reduction(getattr(opts, "reduceOp", opts))
        return self._allreduce([to_reduce(one, op, "allreduce_coalesced") for one in tensors], op, prescale, opts)

    def _allreduce(
        self, tensors: list[torch.Tensor], op: int, prescale: float, opts: Any, timeout: timedelta | None = None
    ) -> HvdWork:
        works = [in_memory(tensor) for tensor in tensors]

        def finish() -> None:
            copy_all(works, tensors)

        # For one tensor, the signature that `Team.allreduce` has on ranks where it is row-major: names depend on it.
        described = tuple((work.dtype, work.shape) for work in works)
        signature = described[0] if len(described) == 1 else described
        return self.start(
            Kind.ALLREDUCE,
            signature,
            works,
            works,
            tensors,
            opts,
            timeout,
            op=op,
            prescale=prescale,
            finish=finish,
        )

    def reduce(self, tensors: Any, opts: Any, op: Any = dist.ReduceOp.SUM, timeout: timedelta | None = None) -> HvdWork:
        """Reduce a tensor to the root; the tensors of the other ranks stay unchanged."""
        reduce_op, prescale = reduction(getattr(opts, "reduceOp", op))
        tensor = to_reduce(one_tensor(tensors, "reduce"), reduce_op, "reduce")
        place = place_of_root(opts)
        work = in_memory(tensor)

        def finish() -> None:
            if self._team.rank == place:
                copy_all([work], [tensor])

        return self.start(
            Kind.REDUCE,
            (work.dtype, work.shape),
            [work],
            [work],
            [tensor],
            opts,
            timeout,
            op=reduce_op,
            prescale=prescale,
            root=self.root_of(place, "reduce"),
            finish=finish,
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HvdWork:
        """Reduce a tensor; each rank receives its part of the elements."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HvdWork:
        """Reduce several tensors as one operation; each rank receives its part of the elements of each."""
        op, prescale = reduction(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        whole = [flat(to_reduce(one, op, "reduce_scatter")) for one in inputs]
        parts = [to_reduce(one, op, "reduce_scatter") for one in outputs]
        for part, one in zip(parts, whole, strict=True):
            if one.numel() != part.numel() * self._team.size or one.dtype != part.dtype:
                raise ValueError(
                    f"reduce_scatter: an input of {one.numel()} elements of {one.dtype} cannot be divided among "
                    f"{self._team.size} ranks with outputs of {part.numel()} of {part.dtype}"
                )
        return self._reduce_scatter(parts, whole, op, prescale, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, parts: Tensors, whole: Tensors, op: int, prescale: float, opts: Any) -> HvdWork:
        """Reduce flat tensors, and scatter the results to the caller's tensors `parts`, which may have gaps."""
        received = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            if not is_in_memory(part) or share_memory(part, one)
            else part
            for part, one in zip(parts, whole, strict=True)
        ]

        def finish() -> None:
            copy_all(received, parts)

        signature = tuple((one.dtype, one.numel()) for one in whole)
        return self.start(
            Kind.REDUCESCATTER,
            signature,
            whole,
            received,
            parts,
            opts,
            op=op,
            prescale=prescale,
            finish=finish,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HvdWork:
        """Reduce a list of tensors, of which each rank receives one."""
        output = one_tensor(outputs, "reduce_scatter")
        given = inputs if isinstance(inputs[0], torch.Tensor) else inputs[0]
        if len(given) != self._team.size:
            raise ValueError(f"reduce_scatter: {len(given)} tensors for {self._team.size} ranks")
        if any(one.dtype != output.dtype for one in given):
            raise ValueError(f"reduce_scatter: the output is of {output.dtype}, but not all inputs are")
        if given[self._team.rank].shape != output.shape:
            raise ValueError(
                f"reduce_scatter: the output has the shape {tuple(output.shape)}, but the input for this rank "
                f"{tuple(given[self._team.rank].shape)}"
            )
        op, prescale = reduction(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        part = to_reduce(output, op, "reduce_scatter")
        each = [flat(to_reduce(one, op, "reduce_scatter")) for one in given]
        if len({one.numel() for one in each}) == 1:
            return self._reduce_scatter([part], [torch.cat(each)], op, prescale, opts)
        whole = torch.cat(each)
        begin = sum(one.numel() for one in each[: self._team.rank])

        def finish() -> None:
            copy_all([whole[begin : begin + part.numel()].view(part.shape)], [part])

        signature = whole.dtype, whole.shape
        return self.start(
            Kind.ALLREDUCE,
            signature,
            [whole],
            [whole],
            [part],
            opts,
            op=op,
            prescale=prescale,
            finish=finish,
        )
