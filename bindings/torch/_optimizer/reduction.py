"""Reducing the gradients of one optimizer: from the hooks that note them to the wait that ends the step.

The hook of a parameter notes that its gradient is complete, and does nothing else: it is `list.append`. If the engine
has a processor to work on while the framework computes, or a GPU, the hooks of some parameters also hand what has been
noted to the engine, but for small gradients: so many hooks that there is about a mebibyte of gradients between them,
and that of the first parameter, whose gradient is most often the last. What has not been handed over by then is when
any thread waits for a result: `step()`, most often. Gradients that the engine has while the caller's code runs are
lent (`loan`): what is done to them meanwhile does not reach the engine. On a GPU hooks note the stream, too. If a
model is moved there after it was wrapped, the gradients of the first step are handed over at its end, and the hooks are
made anew.

A parameter may lack a gradient on some ranks. Each step therefore reduces, with Max, one byte for each parameter:
whether this rank has its gradient. It costs one small request, sent with the last gradient if none is missing, and
waits for nothing that the gradients would not wait for. A rank that lacks a gradient that another one has contributes
what does not change the sum (zeros; for Min, Max and Product their neutral value). A gradient that no rank has stays
None, so that weight decay and momentum do not move its parameter.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.ops import GpuStream
from horovodlike.process_set import check_registered, global_process_set
from horovodlike.torch._ops import disable_compile, gpu
from horovodlike.torch._ops.sparse import empty_sparse_like
from horovodlike.torch._optimizer.gradient_mask import GradientMask
from horovodlike.torch._optimizer.gradient_reducer import GradientReducer
from horovodlike.torch._optimizer.gradient_state import GradientState, Group
from horovodlike.torch._optimizer.submission import CURRENT, ReductionOptions, Submission

# Gradients are handed over when there are about so many bytes; each time costs the computing thread its caches.
_WORTH_SENDING = 1 << 20
_NEUTRAL = {basics.Min: float("inf"), basics.Max: float("-inf"), basics.Product: 1.0}

# Those that have parameters. Replaced, not changed: another thread may be going through them.
_reductions: tuple[Reduction, ...] = ()


def _hand_over() -> None:
    for reduction in _reductions:
        if reduction.has_noted():
            reduction.hand_over_for_another()


def _abandon_all(_: object) -> None:
    for reduction in _reductions:
        reduction.abandon()


ops.before_waiting(_hand_over)
basics.on_init(_abandon_all)  # what was to be reduced in the job before


class Reduction:
    """The gradients of one optimizer and their reduction."""

    reducer: GradientReducer | None = None  # that reduces them, all together

    def __init__(self, options: ReductionOptions, passes: int) -> None:
        """Start without parameters."""
        self.options = options
        self.passes = passes  # to be set when none have been counted
        self._set_id = check_registered(options.process_set)  # that the requests were made for
        self.slots: list[GradientState] = []
        self._groups: list[Group] = []
        self._later: list[tuple[str, torch.nn.Parameter]] = []  # that are new, or do not require a gradient
        self._by_id: dict[int, GradientState] = {}  # by the parameter's id, which hashes quicker than the parameter
        # The states of a gradient: noted, complete (all passes have been made), borrowed by the engine.
        self._noted: list[torch.Tensor] = []  # parameters
        self._complete: list[GradientState] = []
        self._streams: dict[GradientState, GpuStream] = {}  # of those noted that are on a GPU, on which they were made
        self._submission = Submission(options, self._set_id)
        self._presence = GradientMask()
        self._first_seen: tuple[torch.Tensor | None, int] = (None, 0)  # gradient, and its version then
        self._failure: Exception | None = None  # of handing over on behalf of another one's wait
        # Each thread that waits hands over, so several may do it at once: guards what leads from noted to handed over.
        # Not held while waiting. Hooks append to `_noted` without it.
        self._lock = threading.RLock()

    def add(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[GradientState]:
        """Take in parameters, of which those that require a gradient now will be reduced; return their slots."""
        global _reductions
        named = list(named)
        added = [GradientState(param, name) for name, param in named if param.requires_grad]
        self._later += [(name, param) for name, param in named if not param.requires_grad]
        if not self.slots and added:
            _reductions += (self,)
        self.slots += added
        self._by_id.update((id(slot.param), slot) for slot in added)
        for index, slot in enumerate(sorted(self.slots, key=lambda slot: slot.name)):
            slot.index = index
        self._describe_presence()
        waiting = 0
        for slot in reversed(added):  # about the order of a backward pass
            waiting += slot.param.numel() * slot.param.element_size()
            slot.is_last = slot is added[0]
            slot.hands_over = waiting >= _WORTH_SENDING or slot.is_last
            waiting = 0 if slot.hands_over else waiting
            self._hook(slot)
        return added

    def add_later(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Take in those of these parameters that are new, at the end of this step."""
        present = [*((slot.name, slot.param) for slot in self.slots), *self._later]
        names, known = {name for name, _ in present}, {id(param) for _, param in present}
        for name, param in named:
            if id(param) not in known:
                while name in names:  # of one whose place this one has taken
                    name += ".new"
                names.add(name)
                self._later.append((name, param))

    def _hook(self, slot: GradientState) -> None:
        """Register the hook of a parameter's gradient for the device on which the parameter is now."""
        if slot.registration is not None:
            slot.registration.remove()
        slot.notes_stream = gpu.is_on_gpu(slot.param)
        if slot.notes_stream:
            hook = self._hook_on_gpu(slot)
        else:
            hook = self._handing_over_hook(slot.is_last) if slot.hands_over else self._noted.append
        register = slot.param.register_post_accumulate_grad_hook
        slot.registration = register(hook)  # type: ignore[no-untyped-call]  # torch has no annotations here

    def group(self, slots: list[GradientState]) -> None:
        """Reduce the gradients of these parameters by one request."""
        self._groups.append(Group(slots))
        self._submission.plain = False

    def remove_hooks(self) -> None:
        """Release the parameters: their gradients are not reduced any more."""
        global _reductions
        _reductions = tuple(reduction for reduction in _reductions if reduction is not self)
        if self.has_noted():
            self.hand_over_for_another()  # which may wait for it
        self.abandon()
        for slot in self.slots:
            if slot.registration is not None:
                slot.registration.remove()

    @property
    def communicates(self) -> bool:
        """Whether this rank is one of several that reduce gradients together."""
        process_set = self.options.process_set
        if process_set is global_process_set:
            return basics.size() > 1
        set_id = check_registered(process_set)
        if set_id != self._set_id:  # it has been registered again
            self._forget_requests(set_id)
        return bool(process_set.included()) and (process_set.size() or 0) > 1

    def _forget_requests(self, set_id: int) -> None:
        self._set_id = set_id
        self._submission.forget_requests(set_id)
        for slot in self.slots:
            slot.request, slot.alike = None, False
        for group in self._groups:
            group.request = None
        self._describe_presence()

    def _describe_presence(self) -> None:
        if self.slots:
            name = f"presence.{min(slot.name for slot in self.slots)}"
            self._presence.describe(len(self.slots), name, self._set_id)

    def _handing_over_hook(self, is_last: bool) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            self._noted.append(param)
            if basics.overlaps():
                self.hand_over(but_small=True)
            elif is_last:
                self.count()

        disable_compile(hook)  # `backward` may be called by a function that is compiled
        return hook

    def _hook_on_gpu(self, slot: GradientState) -> Callable[[torch.Tensor], None]:
        # Autograd runs it with the stream on which the gradient has been made, which depends on the forward pass. The
        # thread that hands over later may have another one. A GPU reduces beside the backward pass, whatever the
        # processors do.
        def hook(param: torch.Tensor) -> None:
            if gpu.is_on_gpu(param):
                self._streams[slot] = gpu.current_stream(gpu.device_of(param))
            self._noted.append(param)
            if slot.hands_over:
                self.hand_over()

        disable_compile(hook)
        return hook

    def hand_over_for_another(self) -> None:
        """Hand over because another operation is waited for. Errors are kept for `finish`."""
        try:
            self.hand_over()
        except Exception as error:
            self._failure = self._failure or error

    def _were_replaced(self) -> bool:
        """Return whether a parameter has another gradient than the one that its backward pass ended with."""
        seen, grads = [slot.seen for slot in self.slots], [slot.param.grad for slot in self.slots]
        if all(map(operator.is_, seen, grads)):  # the usual case, in a third of the time
            return False
        pairs = zip(seen, grads, strict=True)
        return any(last is not None and grad is not None and grad is not last for last, grad in pairs)

    def count(self) -> None:
        """Count the backward passes noted so far.

        Raises:
            AssertionError: There were more than announced; those too many are forgotten.
        """
        too_many = None
        with self._lock:
            noted = self._noted.copy()
            del self._noted[: len(noted)]
            passes, complete = self.passes, self._complete
            for slot in map(self._by_id.__getitem__, map(id, noted)):
                if slot.passes >= passes or slot.grad is not None:
                    too_many = slot
                    continue
                slot.passes += 1
                if slot.passes == passes:
                    slot.seen = slot.param.grad
                    complete.append(slot)
            if complete and self._first_seen[0] is None:
                self._first_seen = (complete[0].seen, _version(complete[0].seen))
        if too_many is not None:
            raise AssertionError(
                f"{too_many.name}: more backward passes than backward_passes_per_step={passes} before step(); "
                "raise backward_passes_per_step to accumulate gradients, or call step() or synchronize() in between"
            )

    def is_in_progress(self) -> bool:
        """Return whether gradients are complete that have not been waited for."""
        with self._lock:
            self.count()
            return bool(self._complete or self._submission.borrowed)

    def forget_passes(self) -> None:
        """Begin to count the backward passes of gradients that have not been handed over anew."""
        with self._lock:
            self._noted.clear()
            self._complete.clear()
            self._first_seen = (None, 0)
            for slot in self.slots:
                slot.passes = 0
                slot.seen = None

    def passes_left(self) -> dict[torch.nn.Parameter, int]:
        """Return how many more backward passes complete the gradient of each parameter."""
        self.count()
        return {slot.param: 0 if slot.grad is not None else self.passes - slot.passes for slot in self.slots}

    def complete(self) -> dict[torch.nn.Parameter, object]:
        """Return the parameters whose gradients are complete, and the context of their compression."""
        self.count()
        return {slot.param: slot.ctx for slot in self.slots if slot.grad is not None or slot.passes == self.passes}

    def has_noted(self) -> bool:
        """Return whether there may be something to hand over."""
        return bool(self._noted or self._complete)

    def hand_over(self, but_small: bool = False) -> None:
        """Hand the gradients that are complete to the engine, but for small ones if so asked. Any thread.

        Where the caller's code continues, small gradients are left for `finish`, and so are those that share a storage:
        a write to one of them would move all that are lent.
        """
        with self._lock:
            try:
                self.count()
                communicates = self.communicates
            except ValueError:  # there is no job, or its process set is gone
                self.abandon()
                raise
            if communicates:
                complete, left = self._complete.copy(), []
                if but_small and not self._streams:
                    left = [slot for slot in complete if slot.is_small or slot.is_part_of_a_storage()]
                    held_back = {*left}
                    complete = [slot for slot in complete if slot not in held_back]
                self._complete[:] = left
                self._submit(complete, self._streams)
                if self._submission.moved:
                    self._complete += [slot for slot in complete if slot.grad is None]

    def _announce_if_complete(self) -> None:
        if len(self._submission.borrowed) == len(self.slots) and not self._presence.handle:
            self._presence.announce((), self._submission.sparse_dims)

    def _submit(
        self, slots: list[GradientState], streams: Mapping[GradientState, GpuStream] = CURRENT, waits: bool = False
    ) -> None:
        try:
            self._submission.submit(slots, streams, waits)
            self._announce_if_complete()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> bool:
        """Wait until the gradients of all parameters are reduced, and begin the next step.

        Gradients that are there without as many backward passes as announced, or without any, are reduced as well.

        Returns:
            Whether gradients were changed while they were being reduced.

        Raises:
            HorovodInternalError: A reduction failed. The optimizer can be used again after the next `init()`.
            AssertionError: There were more backward passes than announced.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.count()
        changed = False
        try:
            if self.slots and self.communicates:
                grad, version = self._first_seen
                changed = self._submission.has_been_changed() or _version(grad) != version or self._were_replaced()
                with self._lock:
                    self._complete.clear()
                    everything = not self._submission.borrowed
                    rest = self.slots if everything else [slot for slot in self.slots if slot.grad is None]
                    self._submit(rest, waits=True)
                self._agree_on_presence()
                self._wait()
        except BaseException:
            self.abandon()
            raise
        self._end_step()
        if self._submission.moved:
            self._submission.moved = False
            for slot in self.slots:
                self._hook(slot)
        if self._later:
            self._take_in_later()
        return changed

    def _take_in_later(self) -> None:
        """Reduce the gradients of parameters that are new or have begun to require one: now apart, then with others."""
        ready = [(name, param) for name, param in self._later if param.requires_grad]
        if not ready:
            return
        apart = self._without_parameters()
        apart.add(ready)
        try:
            apart.finish()
        finally:
            apart.remove_hooks()
        self._later = [(name, param) for name, param in self._later if not param.requires_grad]
        self.add(ready)

    def _without_parameters(self) -> Reduction:
        return Reduction(self.options, self.passes)

    def _agree_on_presence(self) -> None:
        absent = [slot for slot in self.slots if slot.grad is None] if not self._presence.handle else []
        if absent:
            self._presence.announce([slot.index for slot in absent], self._submission.sparse_dims)
        # The last to be handed over, so most often the others are complete when this is.
        self._presence.wait()
        if absent:
            self._contribute_nothing(absent)

    def _contribute_nothing(self, absent: Sequence[GradientState]) -> None:
        """Take part in the reduction of the gradients that this rank lacks and another one has."""
        present = self._presence.bytes.tolist()
        for slot in absent:
            needed_by_group = slot.group is not None and any(present[member.index] for member in slot.group.slots)
            if not (present[slot.index] or needed_by_group):
                continue
            slot.param.grad = self._nothing_for(slot, sparse_dim=present[slot.index] - 1)
            self._submit([slot], waits=True)
            if not present[slot.index]:
                slot.param.grad = slot.grad = None

    def _nothing_for(self, slot: GradientState, sparse_dim: int) -> torch.Tensor:
        if sparse_dim > 0 and not self.options.sparse_as_dense:
            return empty_sparse_like(slot.param, sparse_dim)
        return torch.full_like(slot.param, _NEUTRAL.get(self.options.op, 0.0), requires_grad=False)

    def _wait(self) -> None:
        self._submission.wait(self.slots)

    def abandon(self) -> None:
        """Give up the step, after an error: nothing of it will be waited for."""
        self._failure = None
        self._submission.abandon(self._presence.handle, self._presence.bytes)
        self._presence.abandon()
        self._end_step()

    def _end_step(self) -> None:
        self._first_seen = (None, 0)
        for slot in self.slots:
            slot.passes = 0
            slot.seen = slot.grad = None
        if not self._submission.plain:
            for slot in self.slots:
                slot.dense = slot.work = slot.ctx = None
        for group in self._groups:
            group.ready = 0
            group.streams.clear()
        self._noted.clear()  # not replaced: the hooks hold it
        self._complete.clear()
        self._streams.clear()
        self._submission.clear()
        self._presence.handle = 0


def _version(grad: torch.Tensor | None) -> int:
    """Return how often the gradient has been changed in place, not by the engine; clipping changes all gradients."""
    return 0 if grad is None or grad.is_inference() else grad._version
