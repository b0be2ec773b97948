"""Operations of a process group that move data and reduce nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from horovodlike._engine.ops import Kind
from horovodlike.torch._ops.tensor import in_memory, is_in_memory
from horovodlike.torch.distributed._operations import Operations, Tensors, copy_all, place_of_root
from horovodlike.torch.distributed._tensors import flat, one_tensor, place_in, seconds_of, to_move
from horovodlike.torch.distributed._work import HvdWork


class Movements(Operations):
    """The methods of torch's `ProcessGroup` that move data."""

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> HvdWork:
        """Overwrite a tensor with the root's."""
        tensor = to_move(one_tensor(tensors, "broadcast"), "broadcast")
        place = place_of_root(opts)
        work = in_memory(tensor)

        def finish() -> None:
            copy_all([work], [tensor])

        return self.start(
            Kind.BROADCAST,
            (work.dtype, work.shape),
            [work],
            [work],
            [tensor],
            opts,
            timeout,
            root=self.root_of(place, "broadcast"),
            finish=finish,
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> HvdWork:
        """Gather tensors of the same shape from all ranks, one after the other, into one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HvdWork:
        """Gather several tensors from each rank as one operation."""
        sent = [flat(to_move(one, "all_gather")).unsqueeze(0) for one in inputs]
        gathered = [to_move(one, "all_gather") for one in outputs]
        for one, whole in zip(sent, gathered, strict=True):
            if whole.numel() != one.numel() * self._team.size or whole.dtype != one.dtype:
                raise ValueError(
                    f"all_gather: an output of {whole.numel()} elements of {whole.dtype} is not the size for "
                    f"{self._team.size} inputs of {one.numel()} of {one.dtype}"
                )
        received = [one if is_in_memory(one) else in_memory(one) for one in gathered]

        def finish() -> None:
            copy_all(received, gathered)

        signature = tuple((one.dtype, one.shape) for one in sent)
        return self._gather(signature, sent, received, gathered, finish, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather(
        self,
        signature: Any,
        sent: Tensors,
        received: Tensors,
        results: Tensors,
        finish: Callable[[], None],
        opts: Any,
    ) -> HvdWork:
        destinations = place_in(received)
        operation = self._team.start(
            Kind.ALLGATHER,
            signature,
            sent,
            (),
            [*results, *received],
            destinations=destinations,
            finish=finish,
            timeout=seconds_of(getattr(opts, "timeout", None)),
        )
        operation.outputs = results
        return self.work_of(operation, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> HvdWork:
        """Gather a tensor from each rank into a list of tensors; the shapes may differ between ranks."""
        sent = to_move(one_tensor(inputs, "all_gather"), "all_gather")
        given = outputs if isinstance(outputs[0], torch.Tensor) else outputs[0]
        if len(given) != self._team.size:
            raise ValueError(f"all_gather: a list of {len(given)} tensors for {self._team.size} ranks")
        results = [to_move(one, "all_gather") for one in given]
        mine = results[self._team.rank]
        if mine.numel() != sent.numel() or mine.dtype != sent.dtype:
            raise ValueError(
                f"all_gather: this rank's place in the list has {mine.numel()} elements of {mine.dtype}, but its "
                f"tensor {sent.numel()} of {sent.dtype}"
            )
        sizes = [one.numel() for one in results]
        whole = torch.empty(sum(sizes), dtype=sent.dtype, device=sent.device)

        def finish() -> None:
            copy_all(
                [part.view(one.shape) for part, one in zip(torch.split(whole, sizes), results, strict=True)], results
            )

        is_even = len(set(sizes)) == 1
        block = flat(sent).unsqueeze(0) if is_even else flat(sent)
        return self._gather((sent.dtype, tuple(sizes)), [block], [whole], results, finish, opts)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> HvdWork:
        """Gather several tensors from each rank into a list of tensors for each rank."""
        if len(output_lists) != self._team.size or any(len(outputs) != len(inputs) for outputs in output_lists):
            raise ValueError(
                f"all_gather_coalesced: {len(inputs)} tensors need as many outputs for each of {self._team.size} "
                f"ranks, got {[len(outputs) for outputs in output_lists]}"
            )
        works = [
            self.allgather([list(outputs)], [one], opts) for *outputs, one in zip(*output_lists, inputs, strict=True)
        ]
        operations = [operation for work in works for operation in work.operations]
        return HvdWork(operations, [one for outputs in output_lists for one in outputs])

    def gather(self, outputs: Any, inputs: Any, opts: Any, timeout: timedelta | None = None) -> HvdWork:
        """Gather tensors of the same shape from all ranks into a list of tensors on the root."""
        sent = to_move(one_tensor(inputs, "gather"), "gather")
        place = place_of_root(opts)
        results: Tensors = ()
        if place == self._team.rank:
            given = outputs if isinstance(outputs[0], torch.Tensor) else outputs[0]
            results = [to_move(one, "gather") for one in given]
            if len(results) != self._team.size or any(one.numel() != sent.numel() for one in results):
                raise ValueError(
                    f"gather: the root needs {self._team.size} tensors of {sent.numel()} elements, got "
                    f"{[one.numel() for one in results]}"
                )
        whole = torch.empty(len(results) * sent.numel(), dtype=sent.dtype, device=sent.device)

        def finish() -> None:
            if results:
                parts = torch.split(whole, sent.numel()) if sent.numel() else [whole] * len(results)
                copy_all([part.view(one.shape) for part, one in zip(parts, results, strict=True)], results)

        operation = self._team.start(
            Kind.GATHER,
            (sent.dtype, sent.numel()),
            [flat(sent).unsqueeze(0)],
            (),
            [*results, whole],
            root=self.root_of(place, "gather"),
            destinations=place_in([whole]),
            finish=finish,
            timeout=seconds_of(getattr(opts, "timeout", timeout)),
        )
        operation.outputs = results
        return self.work_of(operation, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any, timeout: timedelta | None = None) -> HvdWork:
        """Send one tensor of the root's list to each rank. All tensors have the same shape."""
        result = to_move(one_tensor(outputs, "scatter"), "scatter")
        place = place_of_root(opts)
        received = (
            torch.empty_like(result, memory_format=torch.contiguous_format) if not is_in_memory(result) else result
        )
        sent, whole = received, received
        if place == self._team.rank:
            given = inputs if isinstance(inputs[0], torch.Tensor) else inputs[0]
            parts = [flat(to_move(one, "scatter")) for one in given]
            wanted = result.numel(), result.dtype
            if len(parts) != self._team.size or any((one.numel(), one.dtype) != wanted for one in parts):
                raise ValueError(
                    f"scatter: the root needs {self._team.size} tensors of {result.numel()} elements of "
                    f"{result.dtype}, got {[(one.numel(), one.dtype) for one in parts]}"
                )
            whole = torch.cat(parts)
            sent = whole[: result.numel()]

        def finish() -> None:
            copy_all([received], [result])

        operation = self._team.start(
            Kind.SCATTER,
            (result.dtype, result.numel()),
            [sent.view(-1)],
            [received],
            [result, whole],
            root=self.root_of(place, "scatter"),
            finish=finish,
            timeout=seconds_of(getattr(opts, "timeout", timeout)),
        )
        operation.outputs = [result]
        return self.work_of(operation, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> HvdWork:
        """Send rows of a tensor to each rank, and receive rows from each."""
        sent, received = to_move(input, "all_to_all"), to_move(output, "all_to_all")
        from_each = self._rows(received, output_splits, "output")
        to_each = self._rows(sent, input_splits, "input")
        rows, whole = flat(sent).view(sent.shape[0], math.prod(sent.shape[1:])), in_memory(received)

        def finish() -> None:
            copy_all([whole], [received])

        return self._all_to_all(rows, to_each, whole, from_each, [received], finish, opts)

    alltoall_base = all_to_all_single

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int], which: str) -> list[int]:
        size = self._team.size
        if tensor.dim() == 0:
            raise ValueError(f"all_to_all: the {which} is a scalar, which has no rows")
        rows = tensor.shape[0]
        if not splits:
            if rows % size:
                raise ValueError(f"all_to_all: {rows} rows of the {which} cannot be divided among {size} ranks")
            return [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(f"all_to_all: the {which} has {rows} rows, and {which}_split_sizes {list(splits)}")
        return list(splits)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HvdWork:
        """Send one tensor of a list to each rank, and receive a tensor from each rank into a list."""
        sent = [flat(to_move(one, "all_to_all")) for one in inputs]
        results = [to_move(one, "all_to_all") for one in outputs]
        if not len(sent) == len(results) == self._team.size:
            raise ValueError(
                f"all_to_all: lists of {len(sent)} inputs and {len(results)} outputs for {self._team.size} ranks"
            )
        sizes = [one.numel() for one in results]
        whole = torch.empty(sum(sizes), dtype=results[0].dtype, device=results[0].device)

        def finish() -> None:
            copy_all(
                [part.view(one.shape) for part, one in zip(torch.split(whole, sizes), results, strict=True)], results
            )

        rows = torch.cat(sent).unsqueeze(1)
        return self._all_to_all(rows, [one.numel() for one in sent], whole, sizes, results, finish, opts)

    def _all_to_all(
        self,
        rows: torch.Tensor,
        to_each: list[int],
        whole: torch.Tensor,
        from_each: list[int],
        results: Tensors,
        finish: Callable[[], None],
        opts: Any,
    ) -> HvdWork:
        counts = torch.empty(self._team.size, dtype=torch.int32, device="cpu")

        def check_and_finish() -> None:
            if counts.tolist() != from_each:
                raise ValueError(
                    f"all_to_all: this rank expects {from_each} rows from the ranks, but they have sent "
                    f"{counts.tolist()}"
                )
            finish()

        operation = self._team.start(
            Kind.ALLTOALL,
            rows.dtype,  # shapes and splits may differ between ranks
            [rows],
            (),
            [*results, whole, counts],
            arguments=to_each,
            destinations=place_in([whole, counts]),
            finish=check_and_finish,
            timeout=seconds_of(getattr(opts, "timeout", None)),
        )
        operation.outputs = results
        return self.work_of(operation, opts)
