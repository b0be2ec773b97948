"""Reducing the gradients of one optimizer: from the hooks that start it to the wait that ends it.

One step is an *epoch*: the hook of a parameter enqueues its gradient when it is complete, and `finish` waits for all.
Counting epochs instead of clearing flags keeps the work for each parameter to one hook of about a microsecond; in
`finish` there is none, unless a gradient was copied, is missing or failed.

A parameter may lack a gradient on some ranks. Each step therefore reduces, with Max, one byte for each parameter:
whether this rank has its gradient. It costs one small request, sent with the last gradient if none is missing, and
waits for nothing that the gradients would not wait for. A rank that lacks a gradient that another one has contributes
what does not change the sum (zeros; for Min, Max and Product their neutral value). A gradient that no rank has stays
None, so that weight decay and momentum do not move its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from horovodlike import basics, ops
from horovodlike.errors import MismatchError
from horovodlike.ops import Kind, Request
from horovodlike.torch._compile import leave_alone
from horovodlike.torch._engine import Call, abandon, build_request
from horovodlike.torch._tensor import check, in_memory
from horovodlike.torch.compression import Compressor, NoneCompressor

_NEUTRAL = {basics.Min: float("inf"), basics.Max: float("-inf"), basics.Product: 1.0}


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced."""

    op: int
    compression: type[Compressor]
    prescale: float = 1.0
    postscale: float = 1.0
    sparse_as_dense: bool = False


class Slot:
    """One parameter: its request, and how far its gradient is in which epoch."""

    __slots__ = (
        "ctx", "dtype", "epoch", "grad", "group", "handle", "index", "name", "numel", "param", "passes",
        "passes_epoch", "registration", "request", "shape", "sparse", "work",
    )  # fmt: skip

    def __init__(self, param: torch.nn.Parameter, name: str) -> None:
        """Nothing is submitted yet, in any epoch."""
        self.param = param
        self.name = name
        self.index = -1  # of its byte in the presence mask
        self.request: Request | None = None
        self.dtype: torch.dtype | None = None  # dtype, shape and size that the request was made for
        self.shape: torch.Size | None = None
        self.numel = -1
        self.epoch = -1  # in which the gradient was last submitted
        self.handle = 0  # of that submission
        self.passes = 0  # backward passes seen in `passes_epoch`
        self.passes_epoch = -1
        self.sparse = False  # the gradient was sparse when it was last seen
        self.registration: RemovableHandle | None = None
        self.group: Group | None = None
        # Of a member of a group between its own submission and that of the group:
        self.grad: torch.Tensor | None = None
        self.work: torch.Tensor | None = None
        self.ctx: object = None


class Group:
    """Parameters whose gradients are reduced by one request."""

    def __init__(self, slots: list[Slot]) -> None:
        """Take in the slots."""
        self.slots = slots
        self.epoch = -1
        self.ready = 0
        self.request: Request | None = None
        self.described: list[tuple[torch.dtype, torch.Size]] = []
        for slot in slots:
            slot.group = self


class Reduction:
    """The gradients of one optimizer and their reduction."""

    def __init__(self, options: ReductionOptions, passes: int) -> None:
        """Start without parameters."""
        self.options = options
        self.passes = passes
        self.slots: list[Slot] = []
        self.epoch = 0
        self.communicates = False
        self.direct = False  # hooks may enqueue gradients as they are
        self._plain = options.compression is NoneCompressor
        # In flight: the handles, and the gradients that have been submitted, one for each parameter.
        self.handles: list[int] = []
        self.borrowed: list[torch.Tensor] = []
        self._finishers: list[Callable[[], None]] = []
        self._presence = torch.empty(0, dtype=torch.uint8)
        self._presence_is_full = False
        self._presence_request: Request | None = None
        self._presence_handle = 0

    def add(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Slot]:
        """Take in parameters, of which those that require a gradient now will be reduced; return their slots."""
        added = [Slot(param, name) for name, param in named if param.requires_grad]
        self.slots += added
        for index, slot in enumerate(sorted(self.slots, key=lambda slot: slot.name)):
            slot.index = index
        self._presence = torch.ones(len(self.slots), dtype=torch.uint8)
        self._presence_is_full = True
        if self.slots:
            call = Call(Kind.ALLREDUCE, f"presence.{min(slot.name for slot in self.slots)}", basics.Max)
            self._presence_request = build_request(call, [self._presence])
        for slot in added:
            register = slot.param.register_post_accumulate_grad_hook
            slot.registration = register(self._hook(slot))  # type: ignore[no-untyped-call]
        return added

    def group(self, slots: list[Slot]) -> None:
        """Reduce the gradients of these parameters by one request."""
        Group(slots)
        self._plain = False

    def remove_hooks(self) -> None:
        """Let the parameters go: their gradients are not reduced any more."""
        for slot in self.slots:
            if slot.registration is not None:
                slot.registration.remove()

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        # The hot path. Everything that can be is bound here; a gradient like the one before goes to the engine with
        # a handful of attribute lookups. A wrong address or size would corrupt memory, hence each of the checks.
        reduction, slots, borrowed, strided = self, self.slots, self.borrowed, torch.strided
        add_handle, add_borrowed = self.handles.append, self.borrowed.append

        def hook(param: torch.Tensor) -> None:
            if not borrowed:
                reduction.begin()
            grad = param.grad
            if (
                grad is not None
                and reduction.direct
                and slot.epoch != reduction.epoch
                and grad.dtype is slot.dtype
                and grad.layout is strided
                and grad.numel() == slot.numel
                and grad.is_cpu
                and grad.is_contiguous()
                and (slot.numel > 1 or not grad.is_neg())  # autograd may hand over a negated view of one element
            ):
                try:
                    slot.handle = handle = slot.request.enqueue_inplace(grad.data_ptr())  # type: ignore[union-attr]
                except Exception:
                    reduction.abandon()
                    raise
                add_handle(handle)
                add_borrowed(grad)
                slot.epoch = reduction.epoch
                if len(borrowed) == len(slots):
                    reduction.announce()
            else:
                reduction.on_gradient(slot)

        leave_alone(hook)  # `backward` may be called by a function that is compiled
        return hook

    def begin(self) -> None:
        """Look at what may have changed since the last step; called before the first gradient of each."""
        self.communicates = basics.size() > 1
        self.direct = self.communicates and self._plain and self.passes == 1

    def on_gradient(self, slot: Slot) -> None:
        """Count a backward pass, and submit the gradient if it was the last one of the step."""
        if slot.passes_epoch != self.epoch:
            slot.passes_epoch, slot.passes = self.epoch, 0
        if slot.epoch == self.epoch or slot.passes >= self.passes:
            raise AssertionError(
                f"{slot.name}: more backward passes than backward_passes_per_step={self.passes} before step(); "
                "raise backward_passes_per_step to accumulate gradients, or call step() or synchronize() in between"
            )
        slot.passes += 1
        if slot.passes == self.passes:
            self.submit(slot)

    def passes_left(self, slot: Slot) -> int:
        """How many backward passes are to come before the parameter's gradient is submitted."""
        if slot.epoch == self.epoch:
            return 0
        return self.passes - (slot.passes if slot.passes_epoch == self.epoch else 0)

    def submit(self, slot: Slot) -> None:
        """Start the reduction of a parameter's gradient as it is now."""
        grad = slot.param.grad
        assert grad is not None
        try:
            if self.communicates:
                self._submit(slot, grad)
        except Exception:
            self.abandon()
            raise
        self.borrowed.append(grad)
        slot.epoch = self.epoch
        if len(self.borrowed) == len(self.slots):
            self.announce()

    def _submit(self, slot: Slot, grad: torch.Tensor) -> None:
        slot.sparse = grad.layout is not torch.strided
        if slot.sparse:
            if not self.options.sparse_as_dense:
                raise ValueError(f"{slot.name}: its gradient is sparse; use sparse_as_dense=True, or sparse=False")
            grad = grad.to_dense()
        check(grad, slot.name)
        with torch.no_grad():
            compressed, ctx = self.options.compression.compress(grad)
            work = in_memory(compressed)
        if slot.group is not None:
            slot.grad, slot.work, slot.ctx = grad, work, ctx
            self._submit_member(slot.group)
            return
        if slot.request is None or slot.dtype is not work.dtype or slot.shape != work.shape:
            slot.request = build_request(self._call(slot.name), [work])
            slot.dtype, slot.shape, slot.numel = work.dtype, work.shape, work.numel()
        slot.handle = slot.request.enqueue_inplace(work.data_ptr())
        self.handles.append(slot.handle)
        if slot.sparse or work is not grad:
            self._finishers.append(self._finisher(slot, grad, work, ctx))

    def _submit_member(self, group: Group) -> None:
        if group.epoch != self.epoch:
            group.epoch, group.ready = self.epoch, 0
        group.ready += 1
        if group.ready < len(group.slots):
            return
        works = [slot.work for slot in group.slots if slot.work is not None]
        described = [(work.dtype, work.shape) for work in works]
        if group.request is None or group.described != described:
            group.request, group.described = build_request(self._call(f"group.{group.slots[0].name}"), works), described
        addresses = [work.data_ptr() for work in works]
        handle = group.request.enqueue(addresses, addresses)
        self.handles.append(handle)
        for slot, work in zip(group.slots, works, strict=True):
            slot.handle = handle
            if slot.grad is not None and (slot.sparse or work is not slot.grad):
                self._finishers.append(self._finisher(slot, slot.grad, work, slot.ctx))
            slot.grad = slot.work = slot.ctx = None

    def _call(self, name: str) -> Call:
        options = self.options
        return Call(Kind.ALLREDUCE, name, options.op, -1, options.prescale, options.postscale)

    def _finisher(self, slot: Slot, grad: torch.Tensor, work: torch.Tensor, ctx: object) -> Callable[[], None]:
        decompress = self.options.compression.decompress

        def finish() -> None:
            result = decompress(work, ctx)
            if slot.sparse:
                slot.param.grad = result.to(grad.device).to_sparse()
            else:
                grad.copy_(result)

        return finish

    def finish(self) -> None:
        """Wait until the gradients of all parameters are reduced, and begin the next epoch.

        Raises:
            HorovodInternalError: A reduction failed. The optimizer can be used again after the next `init()`.
        """
        if not self.borrowed:
            self.begin()
        try:
            if len(self.borrowed) < len(self.slots):
                self._submit_late()
            if self.communicates and self.slots:
                self._agree_on_presence()
                self._wait()
        except BaseException:
            self.abandon()
            raise
        self._end_epoch()

    def _submit_late(self) -> None:
        # Fewer backward passes than announced, or a gradient that was set without a backward pass.
        for slot in self.slots:
            if slot.epoch != self.epoch and slot.param.grad is not None:
                self.submit(slot)

    def announce(self, absent: Sequence[Slot] = ()) -> None:
        """Tell the other ranks which gradients this one has."""
        if self._presence_handle or not self.communicates:
            return
        if not self._presence_is_full:
            self._presence.fill_(1)
        self._presence_is_full = not absent
        for slot in absent:
            self._presence[slot.index] = 0
        assert self._presence_request is not None
        self._presence_handle = self._presence_request.enqueue_inplace(self._presence.data_ptr())

    def _agree_on_presence(self) -> None:
        absent = []
        if not self._presence_handle:
            absent = [slot for slot in self.slots if slot.epoch != self.epoch]
            self.announce(absent)
        try:
            ops.wait(self._presence_handle)
        except MismatchError as error:
            raise MismatchError(
                f"{error} (one byte for each parameter that requires a gradient: do all ranks have the same model?)"
            ) from error
        if absent:
            self._contribute_nothing(absent)

    def _contribute_nothing(self, absent: Sequence[Slot]) -> None:
        """Take part in the reduction of the gradients that this rank lacks and another one has."""
        present = self._presence.tolist()
        for slot in absent:
            needed_by_group = slot.group is not None and any(present[member.index] for member in slot.group.slots)
            if not (present[slot.index] or needed_by_group):
                continue
            slot.param.grad = torch.full_like(slot.param, _NEUTRAL.get(self.options.op, 0.0), requires_grad=False)
            self.submit(slot)
            if not present[slot.index]:
                slot.param.grad = None

    def _wait(self) -> None:
        ops.wait_all(self.handles)
        if self._finishers:
            with torch.no_grad():
                for finisher in self._finishers:
                    finisher()

    def abandon(self) -> None:
        """Give up the epoch, after an error: nothing of it will be waited for."""
        handles = [*self.handles, self._presence_handle] if self._presence_handle else self.handles.copy()
        abandon(handles, [*self.borrowed, *self._finishers, self._presence])
        self._presence = torch.ones_like(self._presence)
        self._presence_is_full = True
        self._end_epoch()

    def _end_epoch(self) -> None:
        # Cleared, not replaced: the hooks hold the lists.
        self.handles.clear()
        self.borrowed.clear()
        self._finishers.clear()
        self._presence_handle = 0
        self.epoch += 1
