"""The state of each parameter's gradient in a step, and of parameters whose gradients are reduced together."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle

from horovodlike._engine.ops import GpuStream, MemoryFormat, Request, RequestList
from horovodlike.torch._ops import fast_path, gpu, native_calls
from horovodlike.torch._ops.tensor import CHANNELS_LAST, check, have_memory

# Lending a gradient takes about a microsecond, so gradients below this size are handed over only when the step waits.
SMALL_BYTES = 1 << 14


class GradientState:
    """One parameter: its request, and the progress of its gradient in this step."""

    __slots__ = (
        "alike", "ctx", "dense", "dtype", "format", "grad", "group", "hands_over", "index", "is_last", "is_small",
        "name", "notes_stream", "numel", "on_gpu", "param", "passes", "registration", "request", "seen", "shape",
        "sparse", "work",
    )  # fmt: skip

    def __init__(self, param: torch.nn.Parameter, name: str) -> None:
        """Start with nothing submitted."""
        self.param = param
        self.name = name
        self.index = -1  # of its byte in the gradient mask
        self.request: Request | None = None
        self.dtype: torch.dtype | None = None  # dtype, shape, size, format and device for which the request was made
        self.shape: torch.Size | None = None
        self.numel = -1
        self.format = MemoryFormat.ROW_MAJOR
        self.on_gpu = False
        self.passes = 0  # backward passes that have been counted
        self.alike = False  # the gradient is likely to be reduced in place, by the request of the previous step
        self.sparse = False  # the gradient was sparse when it was last seen
        # The parameter's hook, and whether it hands gradients over, besides noting its own.
        self.registration: RemovableHandle | None = None
        self.hands_over = False
        self.is_last = False  # the gradient is usually the last of a backward pass
        self.is_small = param.numel() * param.element_size() < SMALL_BYTES
        self.notes_stream = False
        self.group: Group | None = None
        self.ctx: object = None  # of the compression
        self.seen: torch.Tensor | None = None  # the gradient as it was when it was counted as complete
        self.grad: torch.Tensor | None = None  # the gradient that has been handed over in this step
        # For a member of a group, or with a reducer: the dense gradient, and the tensor that is reduced in its place.
        self.dense: torch.Tensor | None = None
        self.work: torch.Tensor | None = None

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient that this step's backward passes made, even if `param.grad` is another tensor by now."""
        return self.param.grad if self.seen is None else self.seen

    def has_moved(self) -> bool:
        """Return whether the gradient is on a GPU and the hook was made for the CPU, or the other way round."""
        grad = self.gradient()
        return grad is not None and gpu.is_on_gpu(grad) != self.notes_stream

    def is_part_of_a_storage(self) -> bool:
        """Return whether the gradient is only a part of its storage, as in a flat buffer of all gradients."""
        grad = self.gradient()
        return grad is not None and grad.layout is torch.strided and grad.untyped_storage().nbytes() > grad.nbytes

    def dense_form_of(self, grad: torch.Tensor, sparse_as_dense: bool) -> torch.Tensor:
        """Return the gradient, or a dense copy of a sparse one; raise an error if it cannot be reduced."""
        self.sparse = grad.layout is not torch.strided
        if self.sparse and not sparse_as_dense:
            raise ValueError(f"{self.name}: its gradient is sparse; use sparse_as_dense=True")
        dense = grad.to_dense() if self.sparse else grad
        check(dense, self.name)
        return dense


class Group:
    """Parameters whose gradients are reduced by one request."""

    def __init__(self, states: list[GradientState]) -> None:
        """Make a group of parameters with these states."""
        self.states = states
        self.ready = 0  # members whose gradients are ready
        self.streams: set[GpuStream] = set()  # on which the members' gradients on a GPU are made
        self.request: Request | None = None
        self.described: tuple[list[tuple[bool, torch.dtype, torch.Size]], list[MemoryFormat]] = ([], [])
        for state in states:
            state.group = self


class GradientStateBatch:
    """Parameters whose gradients are handed over together, step after step. All are on the CPU, or all on a GPU."""

    def __init__(self, states: list[GradientState]) -> None:
        """Make a batch of states that have requests."""
        self.states = states
        self.on_gpu = states[0].on_gpu
        self.requests = RequestList([state.request for state in states if state.request is not None])
        self._contexts = [] if self.on_gpu else _contexts(states)
        self._dtypes = [state.dtype for state in states]
        self._numels = [state.numel for state in states]
        self._num_bytes = [state.numel * state.dtype.itemsize for state in states if state.dtype is not None]
        self._row_major = [state.format is MemoryFormat.ROW_MAJOR for state in states]
        self._channels_last = [
            (index, CHANNELS_LAST[len(state.shape or ())])
            for index, state in enumerate(states)
            if state.format is MemoryFormat.CHANNELS_LAST
        ]

    def memory(self, grads: list[torch.Tensor]) -> tuple[list[int], list[torch.UntypedStorage]] | None:
        """Return the gradients' addresses, and storages that keep the memory; None if they do not fit the requests."""
        memory = native_calls.memory(self._contexts, grads) if self._contexts else None
        if memory is None and self.fits(grads):
            memory = list(map(torch.Tensor.data_ptr, grads)), list(map(torch.Tensor.untyped_storage, grads))
        return memory

    def fits(self, grads: list[torch.Tensor]) -> bool:
        """Return whether the requests can be enqueued with the memory of these gradients."""
        # One pass for each property takes half the time of one pass with all of them.
        return (
            len(grads) == len(self.states)
            and [grad.dtype for grad in grads] == self._dtypes
            and {grad.layout for grad in grads} == {torch.strided}
            and all(map(gpu.is_on_gpu if self.on_gpu else gpu.is_on_cpu, grads))
            and list(map(torch.Tensor.numel, grads)) == self._numels
            and list(map(torch.Tensor.is_contiguous, grads)) == self._row_major
            and have_memory(grads, self._num_bytes)
            and all(grads[index].is_contiguous(memory_format=how) for index, how in self._channels_last)
            and (not self.on_gpu or len(set(map(gpu.device_of, grads))) == 1)
        )


def _contexts(states: list[GradientState]) -> list[object]:
    """Return a description of each gradient for `native_calls`; an empty list where there is no fast path."""
    contexts = []
    for state in states:
        if state.request is None or state.dtype is None or state.shape is None:
            return []
        is_channels_last = state.format is MemoryFormat.CHANNELS_LAST
        memory_format = CHANNELS_LAST[len(state.shape)] if is_channels_last else torch.contiguous_format
        contexts.append(fast_path.context(state.request, state.dtype, state.shape, memory_format))
    return [] if None in contexts else contexts
