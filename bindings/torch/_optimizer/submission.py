"""Submitting gradients to the engine as requests; the engine borrows them until a thread has waited for the results."""

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
from horovodlike.weighting import Weight

CURRENT: Mapping[
    GradientState, GpuStream
] = {}  # all gradients are on the caller's stream, which has waited for other streams at the end of the backward pass


@dataclass(frozen=True)
class ReductionOptions:
    """The options of a reduction of gradients."""

    op: int
    compression: type[Compressor]
    prescale: float = 1.0
    postscale: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    weight: Weight = None


class Submission:
    """The gradients that one optimizer has submitted in this step. For one thread at a time."""

    def __init__(self, options: ReductionOptions, set_id: int) -> None:
        """Start without gradients; `set_id` is the current id of the process set."""
        self.options = options
        self.plain = options.compression is NoneCompressor  # no compression and, see Reduction.group(), no groups
        self.moved = False  # parameters are on another device than when their hooks were made; the reduction resets it
        self.borrowed: list[torch.Tensor] = []  # gradients
        self._loans: list[Loan] = []  # of gradients for which the caller does not wait at once
        self.sparse_dims: dict[int, int] = {}  # of sparse gradients, by GradientState.index
        self._set_id = set_id
        self._handles: list[int] = []  # of dense gradients
        self._sparse_handles: list[int] = []
        self._finishers: list[Callable[[], None]] = []
        self._batches: dict[GradientState, GradientStateBatch] = {}  # the last batch that begins with each state
        self._uses_gpu = False  # true from the first gradient on a GPU on
        self._streams: set[GpuStream] = set()  # on which gradients of this step were handed over
        self._storages: list[torch.UntypedStorage] = []  # of gradients that are not lent
        self._works: list[torch.Tensor] = []  # tensors on a GPU that are reduced in place of gradients

    def forget_requests(self, set_id: int) -> None:
        """Make requests for another process set from now on; the caller forgets those in states and groups."""
        self._set_id = set_id
        self._batches.clear()

    def submit(self, states: list[GradientState], streams: Mapping[GradientState, GpuStream], waits: bool) -> None:
        """Hand over the gradients of these parameters as they are now, where there are any.

        Gradients of parameters that have been moved to a GPU have no known stream: only `CURRENT` submits them.

        Args:
            states: The parameters.
            streams: The streams on which gradients on a GPU were made. `CURRENT`: the current one for all.
            waits: The caller waits at once, and does nothing to the gradients meanwhile: their storages are kept, but
                no gradient is lent.
        """
        alike = [state for state in states if state.alike]
        for part in self._parts(alike, streams) if self._uses_gpu else [alike]:
            if not self._submit_alike(part, streams, waits):
                for state in part:
                    state.alike = False
        for state in states:
            if state.alike:
                continue
            if state.has_moved():
                self.moved = True
                if streams is not CURRENT and not state.notes_stream:
                    continue
            stream = streams.get(state)
            if stream is None:
                self._submit_other(state, waits)
            else:
                with gpu.as_current(stream):  # so that copies are made on it
                    self._submit_other(state, waits)

    def _parts(
        self, states: list[GradientState], streams: Mapping[GradientState, GpuStream]
    ) -> list[list[GradientState]]:
        """Group the states by the stream on which the gradient is made; states on the CPU form one group."""
        parts: dict[GpuStream | bool, list[GradientState]] = {}
        for state in states:
            parts.setdefault(state.on_gpu and streams.get(state, True), []).append(state)
        return list(parts.values())

    def _submit_alike(
        self, states: list[GradientState], streams: Mapping[GradientState, GpuStream], waits: bool
    ) -> bool:
        # The hot path: hands over gradients that are like those of the previous step, all or none of them. A wrong
        # address or size would corrupt memory; each of the checks prevents that.
        if not states:
            return True
        batch = self._batches.get(states[0])
        if batch is None or batch.states != states:
            batch = self._batches[states[0]] = GradientStateBatch(states)
        grads = [grad for grad in [state.seen for state in states] if grad is not None]
        if len(grads) < len(states):  # not all passes were counted
            grads = [grad for grad in [state.gradient() for state in states] if grad is not None]
        if waits:
            memory = batch.memory(grads)
            if memory is None:
                return False
            addresses, storages = memory
            self._storages += storages
        elif batch.fits(grads):
            addresses = self._lend(grads, states)
        else:
            return False
        self.borrowed += grads
        for state, grad in zip(states, grads, strict=True):
            state.grad = grad
        if batch.on_gpu:
            stream = self._note_stream(streams.get(states[0]) or gpu.current_stream(gpu.device_of(grads[0])))
            batch.requests.enqueue_inplace_on_stream(addresses, self._handles, stream)
        else:
            batch.requests.enqueue_inplace(addresses, self._handles)
        return True

    def _lend(self, grads: list[torch.Tensor], states: list[GradientState]) -> list[int]:
        """Lend gradients, and return the addresses that the engine receives."""
        loans = [lend(grad, state.name) for grad, state in zip(grads, states, strict=True)]
        self._loans += loans
        return [address_of(kept) for _, kept, *_ in loans]

    def _lend_if_own(self, work: torch.Tensor, state: GradientState, grad: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor for the engine: `work`, or its loan if `work` is the gradient itself."""
        if work is not grad:
            return work
        loan = lend(work, state.name)
        self._loans.append(loan)
        return loan[1]

    def _note_stream(self, stream: GpuStream) -> GpuStream:
        self._streams.add(stream)
        self._uses_gpu = True
        return stream

    def _submit_other(self, state: GradientState, waits: bool) -> None:
        grad = state.gradient()
        if grad is None:
            return
        if grad.layout is torch.sparse_coo and not self.options.sparse_as_dense and state.group is None:
            return self._submit_sparse(state, grad)
        dense = state.dense_form_of(grad, self.options.sparse_as_dense)
        with torch.no_grad():
            compressed, ctx = self.options.compression.compress(dense)
            work, memory_format = in_memory_like(compressed, state.param)
            lent = work if state.group is not None or waits else self._lend_if_own(work, state, grad)
        self.borrowed.append(grad)
        state.grad = grad
        state.ctx = ctx
        if state.group is not None:
            state.dense, state.work, state.format = dense, work, memory_format
            self._submit_member(state, state.group, waits)
            return
        on_gpu = gpu.is_on_gpu(work)
        described = (work.dtype, work.shape, on_gpu, memory_format)
        if state.request is None or (state.dtype, state.shape, state.on_gpu, state.format) != described:
            self._batches.clear()  # a batch may have the request that is replaced
            state.request = build_request(self._call(state.name), [work], [memory_format])
            state.dtype, state.shape, state.on_gpu, state.format = described
            state.numel = work.numel()
        self._enqueue(state.request, [lent])
        # Autograd may make a negated view of one element, so such a gradient is checked in each step.
        state.alike = self.plain and work is grad and state.numel > 1
        if state.sparse or work is not dense:
            self._finishers.append(self._finisher(state, dense, work))

    def _submit_sparse(self, state: GradientState, grad: torch.Tensor) -> None:
        """Gather the sparse gradients of all ranks: concatenated, they are the sum."""
        options = self.options
        if options.op not in (basics.Average, basics.Sum):
            raise ValueError(f"{state.name}: a sparse gradient needs op=Average or op=Sum, or sparse_as_dense=True")
        state.sparse, state.alike, state.grad = True, False, grad
        self.sparse_dims[state.index] = grad.sparse_dim()
        self.borrowed.append(grad)
        # The name is a dense gradient's, so that it is an error if only some ranks have a sparse one.
        gathering = SparseGathering(state.name, grad, options.compression, options.process_set)
        self._sparse_handles.append(gathering.handle)
        divisor = gathering.num_ranks if options.op == basics.Average else 1
        factor = options.prescale * options.postscale / divisor

        def finish() -> None:
            state.param.grad = gathering.finish(factor)

        self._finishers.append(finish)

    def _submit_member(self, state: GradientState, group: Group, waits: bool) -> None:
        group.ready += 1
        if state.work is not None and gpu.is_on_gpu(state.work):
            group.streams.add(gpu.current_stream(gpu.device_of(state.work)))
        if group.ready < len(group.states):
            return
        own = [state.work for state in group.states if state.work is not None]
        works = lent = (
            own
            if waits
            else [self._lend_if_own(work, state, state.grad) for work, state in zip(own, group.states, strict=True)]
        )
        if group.streams:
            gpu.hold_up(group.streams)
            self._streams |= group.streams  # the allocator may reuse the memory on any of these streams
            works = _on_one_device(works)
        formats = [state.format for state in group.states]
        described = [(gpu.is_on_gpu(work), work.dtype, work.shape) for work in works]
        if group.request is None or group.described != (described, formats):
            group.request = build_request(self._call(f"group.{group.states[0].name}"), works, formats)
            group.described = described, formats
        self._enqueue(group.request, works)
        for member, work, before in zip(group.states, works, lent, strict=True):
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

    def _finisher(self, state: GradientState, dense: torch.Tensor, work: torch.Tensor) -> Callable[[], None]:
        decompress, ctx = self.options.compression.decompress, state.ctx

        def finish() -> None:
            result = decompress(work, ctx)
            if state.sparse:
                state.param.grad = result.to(dense.device).to_sparse()
            else:
                put(result, dense, state.name)

        return finish

    def has_been_changed(self) -> bool:
        """Return whether code other than the engine has written to gradients since they were handed over."""
        return any(map(has_moved, self._loans))

    def wait(self, states: Sequence[GradientState]) -> None:
        """Wait until all gradients are reduced, and give these parameters their gradients.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        if self._streams:
            self._wait_on_stream(next(iter(self._streams)).device)
        else:
            ops.wait_all(self._handles)
        # A gradient that was changed or replaced meanwhile receives the result that all ranks have.
        for loan in self._loans:
            give_back(loan)
        for state in states:
            if state.grad is not None and state.param.grad is not state.grad:
                state.param.grad = state.grad
        if self._finishers:
            with torch.no_grad():
                for finisher in self._finishers:
                    finisher()

    def _wait_on_stream(self, device: int) -> None:
        stream = gpu.current_stream(device)
        try:
            ops.wait_all(self._handles, stream)
        finally:  # even if one operation has failed, because others may still be in flight
            if self._streams != {stream}:
                gpu.keep_for(stream, [*self.borrowed, *self._works])

    def abandon(self, handle: int, borrowed: object) -> None:
        """Keep all memory that the engine may still use, and `borrowed`, the memory of the operation `handle`."""
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
    """Return the tensors, or copies on the CPU if they are on several devices: a request has one device."""
    devices = {gpu.is_on_gpu(tensor) and gpu.device_of(tensor) for tensor in tensors}
    return tensors if len(devices) == 1 else [tensor.cpu() for tensor in tensors]
