"""Gradients in the hands of the engine: handed over as requests, and borrowed until they have been waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.ops import GpuStream, Kind, Request
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch._ops import gpu
from horovodlike.torch._ops.compressors import Compressor, NoneCompressor
from horovodlike.torch._ops.handles import Call, abandon, build_request
from horovodlike.torch._ops.loan import Loan, address_of, give_back, has_moved, lend, put
from horovodlike.torch._ops.sparse import SparseGathering
from horovodlike.torch._ops.tensor import in_memory_like
from horovodlike.torch._optimizer.gradient_state import GradientState, GradientStateBatch, Group

CURRENT: Mapping[
    GradientState, GpuStream
] = {}  # after the backward pass, the caller's stream has waited for all others


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
    """The gradients that one optimizer has submitted in this step. Its users let in one thread at a time."""

    def __init__(self, options: ReductionOptions, set_id: int) -> None:
        """Start without gradients; `set_id` is that of the process set, which may be registered again."""
        self.options = options
        self.plain = options.compression is NoneCompressor  # and no groups
        self.moved = False  # parameters are not where they were when their hooks were made; the reduction resets it
        self.borrowed: list[torch.Tensor] = []  # gradients
        self._loans: list[Loan] = []  # of those on which the caller does not wait at once
        self.sparse_dims: dict[int, int] = {}  # of the sparse ones, by the numbers of their slots
        self._set_id = set_id
        self._handles: list[int] = []  # of dense gradients
        self._sparse_handles: list[int] = []
        self._finishers: list[Callable[[], None]] = []
        self._batches: dict[GradientState, GradientStateBatch] = {}  # that were handed over last, by their first slot
        self._uses_gpu = False  # from the first gradient on a GPU on
        self._streams: set[GpuStream] = set()  # on which gradients of this step were handed over
        self._storages: list[torch.UntypedStorage] = []  # of gradients that are not lent
        self._works: list[torch.Tensor] = []  # what is reduced on a GPU in place of gradients

    def forget_requests(self, set_id: int) -> None:
        """Make requests for another process set from now on; those that slots and groups hold are forgotten by them."""
        self._set_id = set_id
        self._batches.clear()

    def submit(self, slots: list[GradientState], streams: Mapping[GradientState, GpuStream], waits: bool) -> None:
        """Hand over the gradients of these parameters as they are now, where there are any.

        Those on a GPU whose stream is not known, as their parameters have been moved there, are left for `CURRENT`.

        Args:
            slots: The parameters.
            streams: Of gradients on a GPU, on which they were made. `CURRENT`: all on the current one.
            waits: The caller waits at once, and does nothing to the gradients meanwhile: their storages are kept, but
                none is lent.
        """
        alike = [slot for slot in slots if slot.alike]
        for part in self._parts(alike, streams) if self._uses_gpu else [alike]:
            if not self._submit_alike(part, streams, waits):
                for slot in part:
                    slot.alike = False
        for slot in slots:
            if slot.alike:
                continue
            if slot.has_moved():
                self.moved = True
                if streams is not CURRENT and not slot.notes_stream:
                    continue
            stream = streams.get(slot)
            if stream is None:
                self._submit_other(slot, waits)
            else:
                with gpu.as_current(stream):  # of what is copied
                    self._submit_other(slot, waits)

    def _parts(
        self, slots: list[GradientState], streams: Mapping[GradientState, GpuStream]
    ) -> list[list[GradientState]]:
        """Divide slots by where their gradients are made."""
        parts: dict[GpuStream | bool, list[GradientState]] = {}
        for slot in slots:
            parts.setdefault(slot.on_gpu and streams.get(slot, True), []).append(slot)
        return list(parts.values())

    def _submit_alike(
        self, slots: list[GradientState], streams: Mapping[GradientState, GpuStream], waits: bool
    ) -> bool:
        # The hot path: hands over gradients that are like those of the step before, all together, or none of them. A
        # wrong address or size would corrupt memory, hence each of the checks.
        if not slots:
            return True
        batch = self._batches.get(slots[0])
        if batch is None or batch.slots != slots:
            batch = self._batches[slots[0]] = GradientStateBatch(slots)
        grads = [grad for grad in [slot.seen for slot in slots] if grad is not None]
        if len(grads) < len(slots):  # not all passes were counted
            grads = [grad for grad in [slot.gradient() for slot in slots] if grad is not None]
        if waits:
            memory = batch.memory(grads)
            if memory is None:
                return False
            addresses, storages = memory
            self._storages += storages
        elif batch.fits(grads):
            addresses = self._lend(grads, slots)
        else:
            return False
        self.borrowed += grads
        for slot, grad in zip(slots, grads, strict=True):
            slot.grad = grad
        if batch.on_gpu:
            stream = self._note_stream(streams.get(slots[0]) or gpu.current_stream(gpu.device_of(grads[0])))
            batch.requests.enqueue_inplace_on_stream(addresses, self._handles, stream)
        else:
            batch.requests.enqueue_inplace(addresses, self._handles)
        return True

    def _lend(self, grads: list[torch.Tensor], slots: list[GradientState]) -> list[int]:
        """Lend gradients, and return the addresses of what the engine gets."""
        loans = [lend(grad, slot.name) for grad, slot in zip(grads, slots, strict=True)]
        self._loans += loans
        return [address_of(kept) for _, kept, *_ in loans]

    def _lend_if_own(self, work: torch.Tensor, slot: GradientState, grad: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor with the memory that the engine uses: if it is that of the gradient itself, it is lent."""
        if work is not grad:
            return work
        loan = lend(work, slot.name)
        self._loans.append(loan)
        return loan[1]

    def _note_stream(self, stream: GpuStream) -> GpuStream:
        self._streams.add(stream)
        self._uses_gpu = True
        return stream

    def _submit_other(self, slot: GradientState, waits: bool) -> None:
        grad = slot.gradient()
        if grad is None:
            return
        if grad.layout is torch.sparse_coo and not self.options.sparse_as_dense and slot.group is None:
            return self._submit_sparse(slot, grad)
        dense = slot.dense_form_of(grad, self.options.sparse_as_dense)
        with torch.no_grad():
            compressed, ctx = self.options.compression.compress(dense)
            work, memory_format = in_memory_like(compressed, slot.param)
            lent = work if slot.group is not None or waits else self._lend_if_own(work, slot, grad)
        self.borrowed.append(grad)
        slot.grad = grad
        slot.ctx = ctx
        if slot.group is not None:
            slot.dense, slot.work, slot.format = dense, work, memory_format
            self._submit_member(slot, slot.group, waits)
            return
        on_gpu = gpu.is_on_gpu(work)
        described = (work.dtype, work.shape, on_gpu, memory_format)
        if slot.request is None or (slot.dtype, slot.shape, slot.on_gpu, slot.format) != described:
            self._batches.clear()  # they may hold the request that is replaced
            slot.request = build_request(self._call(slot.name), [work], [memory_format])
            slot.dtype, slot.shape, slot.on_gpu, slot.format = described
            slot.numel = work.numel()
        self._enqueue(slot.request, [lent])
        # Autograd may hand over a negated view of one element, so that is looked at each time.
        slot.alike = self.plain and work is grad and slot.numel > 1
        if slot.sparse or work is not dense:
            self._finishers.append(self._finisher(slot, dense, work))

    def _submit_sparse(self, slot: GradientState, grad: torch.Tensor) -> None:
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

    def _submit_member(self, slot: GradientState, group: Group, waits: bool) -> None:
        group.ready += 1
        if slot.work is not None and gpu.is_on_gpu(slot.work):
            group.streams.add(gpu.current_stream(gpu.device_of(slot.work)))
        if group.ready < len(group.slots):
            return
        own = [slot.work for slot in group.slots if slot.work is not None]
        works = lent = (
            own
            if waits
            else [self._lend_if_own(work, slot, slot.grad) for work, slot in zip(own, group.slots, strict=True)]
        )
        if group.streams:
            gpu.hold_up(group.streams)
            self._streams |= group.streams  # the memory is given out again for any of them
            works = _on_one_device(works)
        formats = [slot.format for slot in group.slots]
        described = [(gpu.is_on_gpu(work), work.dtype, work.shape) for work in works]
        if group.request is None or group.described != (described, formats):
            group.request = build_request(self._call(f"group.{group.slots[0].name}"), works, formats)
            group.described = described, formats
        self._enqueue(group.request, works)
        for member, work, before in zip(group.slots, works, lent, strict=True):
            if member.dense is not None and (member.sparse or member.work is not member.dense or work is not before):
                self._finishers.append(self._finisher(member, member.dense, work))

    def _enqueue(self, request: Request, works: list[torch.Tensor]) -> None:
        self._storages += map(torch.Tensor.untyped_storage, works)
        addresses = list(map(address_of, works))
        stream = None
        if gpu.is_on_gpu(works[0]):
            stream = self._note_stream(gpu.current_stream(gpu.device_of(works[0])))
            self._works += works
        try:
            if stream is not None:
                handle = request.enqueue_on_stream(addresses, addresses, stream)
            elif len(works) == 1:
                handle = request.enqueue_inplace(addresses[0])
            else:
                handle = request.enqueue(addresses, addresses)
            self._handles.append(handle)
        except BaseException:
            request.keep_if_enqueued([*works, *self._storages])
            raise

    def _call(self, name: str) -> Call:
        options = self.options
        return Call(Kind.ALLREDUCE, name, options.op, -1, options.prescale, options.postscale, self._set_id)

    def _finisher(self, slot: GradientState, dense: torch.Tensor, work: torch.Tensor) -> Callable[[], None]:
        decompress, ctx = self.options.compression.decompress, slot.ctx

        def finish() -> None:
            result = decompress(work, ctx)
            if slot.sparse:
                slot.param.grad = result.to(dense.device).to_sparse()
            else:
                put(result, dense, slot.name)

        return finish

    def has_been_changed(self) -> bool:
        """Return whether gradients have been written to, by others, since they were handed over."""
        return any(map(has_moved, self._loans))

    def wait(self, slots: Sequence[GradientState]) -> None:
        """Wait until everything is reduced, and give these parameters their gradients.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        if self._streams:
            self._wait_on_stream(next(iter(self._streams)).device)
        else:
            ops.wait_all(self._handles)
        # What was changed or replaced meanwhile gets what all ranks agree on.
        for loan in self._loans:
            give_back(loan)
        for slot in slots:
            if slot.grad is not None and slot.param.grad is not slot.grad:
                slot.param.grad = slot.grad
        if self._finishers:
            with torch.no_grad():
                for finisher in self._finishers:
                    finisher()

    def _wait_on_stream(self, device: int) -> None:
        stream = gpu.current_stream(device)
        try:
            ops.wait_all(self._handles, stream)
        finally:  # also if one has failed, since the others may be under way
            if self._streams != {stream}:
                gpu.keep_for(stream, [*self.borrowed, *self._works])

    def abandon(self, handle: int, borrowed: object) -> None:
        """Leave everything to the engine, which may still use it; and what one more operation has borrowed."""
        handles = [*self._handles, *self._sparse_handles, *filter(None, [handle])]
        kept = [*self._loans, *self._storages, *self._works, *self._finishers]
        abandon(handles, [*self.borrowed, *kept, borrowed])

    def clear(self) -> None:
        """Begin the next step."""
        self.borrowed.clear()
        self._loans.clear()
        self.sparse_dims.clear()
        self._handles.clear()
        self._sparse_handles.clear()
        self._finishers.clear()
        self._streams.clear()
        self._works.clear()
        self._storages.clear()


def _on_one_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, or copies on the CPU if they are on more than one device: a request has one."""
    devices = {gpu.is_on_gpu(tensor) and gpu.device_of(tensor) for tensor in tensors}
    return tensors if len(devices) == 1 else [tensor.cpu() for tensor in tensors]
