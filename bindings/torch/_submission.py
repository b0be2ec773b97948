"""Gradients in the hands of the engine: handed over as requests, and borrowed until they have been waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from horovodlike import basics, ops
from horovodlike.ops import Kind
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch._engine import Call, abandon, build_request
from horovodlike.torch._slot import Group, Slot, SlotBatch
from horovodlike.torch._sparse import SparseGathering
from horovodlike.torch._tensor import in_memory
from horovodlike.torch.compression import Compressor, NoneCompressor


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced."""

    op: int
    compression: type[Compressor]
    prescale: float = 1.0
    postscale: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


class Submission:
    """What one optimizer has handed over in this step. Its users see to it that one thread at a time is in here."""

    def __init__(self, options: ReductionOptions, set_id: int) -> None:
        """Start without gradients; `set_id` is that of the process set, which may be registered again."""
        self.options = options
        self.plain = options.compression is NoneCompressor  # and no groups
        self.borrowed: list[torch.Tensor] = []  # gradients
        self.sparse_dims: dict[int, int] = {}  # of the sparse ones, by the numbers of their slots
        self._set_id = set_id
        self._handles: list[int] = []  # of dense gradients
        self._sparse_handles: list[int] = []
        self._finishers: list[Callable[[], None]] = []
        self._batches: dict[Slot, SlotBatch] = {}  # that were handed over last, by their first slot

    def forget_requests(self, set_id: int) -> None:
        """Make requests for another process set from now on; those that slots and groups hold are forgotten by them."""
        self._set_id = set_id
        self._batches.clear()

    def submit(self, slots: list[Slot]) -> None:
        """Hand over the gradients of these parameters as they are now, where there are any."""
        if not self._submit_alike([slot for slot in slots if slot.alike]):
            for slot in slots:
                slot.alike = False
        for slot in slots:
            if not slot.alike:
                self._submit_other(slot)

    def _submit_alike(self, slots: list[Slot]) -> bool:
        # The hot path: hands over gradients that are like those of the step before, all together, or none of them. A
        # wrong address or size would corrupt memory, hence each of the checks.
        if not slots:
            return True
        batch = self._batches.get(slots[0])
        if batch is None or batch.slots != slots:
            batch = self._batches[slots[0]] = SlotBatch(slots)
        grads = [grad for grad in [slot.param.grad for slot in slots] if grad is not None]
        if not batch.fits(grads):
            return False
        self.borrowed += grads
        for slot, grad in zip(slots, grads, strict=True):
            slot.grad = grad
        batch.requests.enqueue_inplace(list(map(torch.Tensor.data_ptr, grads)), self._handles)
        return True

    def _submit_other(self, slot: Slot) -> None:
        grad = slot.param.grad
        if grad is None:
            return
        if grad.layout is torch.sparse_coo and not self.options.sparse_as_dense and slot.group is None:
            return self._submit_sparse(slot, grad)
        dense = slot.dense_form_of(grad, self.options.sparse_as_dense)
        with torch.no_grad():
            compressed, ctx = self.options.compression.compress(dense)
            work = in_memory(compressed)
        self.borrowed.append(grad)
        slot.grad = grad
        slot.ctx = ctx
        if slot.group is not None:
            slot.dense, slot.work = dense, work
            self._submit_member(slot.group)
            return
        if slot.request is None or slot.dtype is not work.dtype or slot.shape != work.shape:
            self._batches.clear()  # they may hold the request that is replaced
            slot.request = build_request(self._call(slot.name), [work])
            slot.dtype, slot.shape, slot.numel = work.dtype, work.shape, work.numel()
        self._handles.append(slot.request.enqueue_inplace(work.data_ptr()))
        # Autograd may hand over a negated view of one element, so that is looked at each time.
        slot.alike = self.plain and work is grad and slot.numel > 1
        if slot.sparse or work is not dense:
            self._finishers.append(self._finisher(slot, dense, work))

    def _submit_sparse(self, slot: Slot, grad: torch.Tensor) -> None:
        """Gather what the ranks have; the sum is all of it together."""
        options = self.options
        if options.op not in (basics.Average, basics.Sum):
            raise ValueError(f"{slot.name}: a sparse gradient needs op=Average or op=Sum, or sparse_as_dense=True")
        slot.sparse, slot.alike, slot.grad = True, False, grad
        self.sparse_dims[slot.index] = grad.sparse_dim()
        self.borrowed.append(grad)
        # It has the name that a dense gradient would have, so ranks of which only some have a sparse one learn of it.
        gathering = SparseGathering(slot.name, grad, options.compression, options.process_set)
        self._sparse_handles.append(gathering.handle)
        divisor = gathering.num_ranks if options.op == basics.Average else 1
        factor = options.prescale * options.postscale / divisor

        def finish() -> None:
            slot.param.grad = gathering.finish(factor)

        self._finishers.append(finish)

    def _submit_member(self, group: Group) -> None:
        group.ready += 1
        if group.ready < len(group.slots):
            return
        works = [slot.work for slot in group.slots if slot.work is not None]
        described = [(work.dtype, work.shape) for work in works]
        if group.request is None or group.described != described:
            group.request, group.described = build_request(self._call(f"group.{group.slots[0].name}"), works), described
        addresses = [work.data_ptr() for work in works]
        self._handles.append(group.request.enqueue(addresses, addresses))
        for slot, work in zip(group.slots, works, strict=True):
            if slot.dense is not None and (slot.sparse or work is not slot.dense):
                self._finishers.append(self._finisher(slot, slot.dense, work))

    def _call(self, name: str) -> Call:
        options = self.options
        return Call(Kind.ALLREDUCE, name, options.op, -1, options.prescale, options.postscale, self._set_id)

    def _finisher(self, slot: Slot, dense: torch.Tensor, work: torch.Tensor) -> Callable[[], None]:
        decompress, ctx = self.options.compression.decompress, slot.ctx

        def finish() -> None:
            result = decompress(work, ctx)
            if slot.sparse:
                slot.param.grad = result.to(dense.device).to_sparse()
            else:
                dense.copy_(result)

        return finish

    def wait(self, slots: Sequence[Slot]) -> None:
        """Wait until everything is reduced, and give these parameters their gradients.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        ops.wait_all(self._handles)
        for slot in slots:
            if slot.grad is not None and slot.param.grad is not slot.grad:
                slot.param.grad = slot.grad  # it was replaced meanwhile, but this is what all ranks agree on
        if self._finishers:
            with torch.no_grad():
                for finisher in self._finishers:
                    finisher()

    def abandon(self, handle: int, borrowed: object) -> None:
        """Leave everything to the engine, which may still use it; and what one more operation has borrowed."""
        handles = [*self._handles, *self._sparse_handles, *filter(None, [handle])]
        abandon(handles, [*self.borrowed, *self._finishers, borrowed])

    def clear(self) -> None:
        """Begin the next step."""
        self.borrowed.clear()
        self.sparse_dims.clear()
        self._handles.clear()
        self._sparse_handles.clear()
        self._finishers.clear()
