"""Reduction of one optimizer's gradients: from the hooks that note them to the wait that ends the step.

On the CPU, the hook of most parameters only notes that the gradient is complete: it is `list.append`. Some hooks also
hand the noted gradients, except small ones, to the engine if it has a processor to work on while the framework
computes. These are hooks of parameters about a mebibyte of gradients apart, and the hook of the first parameter, whose
gradient is usually the last. On a GPU, hooks also note the stream, and the same hooks hand over small gradients too.
Other gradients are handed over when any thread waits for a result, usually in `step()`. Gradients that the engine has
while the caller's code runs are lent (`loan`): later writes do not reach the engine. If a model is moved to a GPU after
it was wrapped, the gradients of the first step are handed over at its end, and then the hooks are registered again.

A parameter may lack a gradient on some ranks. Each step therefore reduces, with Max, one byte for each parameter: the
`GradientMask`. It costs one small request. If no gradient is missing, this is sent with the last gradient; it waits for
no rank longer than the gradients do. If another rank has a gradient that this rank lacks, this rank contributes values
that do not change the result (zeros; for Min, Max and Product their neutral value). A gradient that no rank has stays
None, so that weight decay and momentum do not move its parameter.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from horovodlike import basics
from horovodlike._engine import ops
from horovodlike._engine.ops import GpuStream
from horovodlike.arrays.consistency import compare
from horovodlike.process_set import check_registered, global_process_set
from horovodlike.torch._ops import disable_compile, gpu
from horovodlike.torch._ops.sparse import empty_sparse_like
from horovodlike.torch._optimizer.gradient_mask import GradientMask
from horovodlike.torch._optimizer.gradient_reducer import GradientReducer
from horovodlike.torch._optimizer.gradient_state import GradientState, Group
from horovodlike.torch._optimizer.submission import CURRENT, ReductionOptions, Submission
from horovodlike.torch._optimizer.weight_exchange import WeightExchange
from horovodlike.torch.consistency import records_of

# About this many bytes of gradients are handed over at once; each time, the computing thread loses cache contents.
_WORTH_SENDING = 1 << 20
_NEUTRAL = {basics.Min: float("inf"), basics.Max: float("-inf"), basics.Product: 1.0}

# The reductions that have parameters. The tuple is replaced and never changed: another thread may be iterating over it.
_reductions: tuple[Reduction, ...] = ()


def _hand_over() -> None:
    for reduction in _reductions:
        if reduction.has_noted():
            reduction.hand_over_for_another()


def _abandon_all(_: object) -> None:
    for reduction in _reductions:
        reduction.abandon()


ops.before_waiting(_hand_over)
basics.on_init(_abandon_all)  # drops the gradients of the previous job


class Reduction:
    """The gradients of one optimizer and their reduction."""

    reducer: GradientReducer | None = None  # set in the subclass, whose reducer takes all gradients together

    def __init__(self, options: ReductionOptions, passes: int) -> None:
        """Start without parameters."""
        self.options = options
        self.passes = passes  # backward passes in a step; may be set while none have been counted
        self._set_id = check_registered(options.process_set)  # id of the process set when the requests were made
        self.states: list[GradientState] = []
        self._groups: list[Group] = []
        self._later: list[tuple[str, torch.nn.Parameter]] = []  # parameters that are new or require no gradient
        self._by_id: dict[int, GradientState] = {}  # by the parameter's id, which hashes quicker than the parameter
        # A gradient is first noted, then complete (all passes have been made), then borrowed by the engine.
        self._noted: list[torch.Tensor] = []  # parameters
        self._complete: list[GradientState] = []
        self._streams: dict[GradientState, GpuStream] = {}  # on which the noted gradients on a GPU were made
        self._submission = Submission(options, self._set_id)
        self._mask = GradientMask()
        self.weights = WeightExchange(options)
        self._first_seen: tuple[torch.Tensor | None, int] = (None, 0)  # the first complete gradient, and its version
        self._failure: Exception | None = None  # an error that `hand_over_for_another` has caught
        self.compares_first = True  # whether the ranks compare their parameters in the first step of each job
        self._comparison: list[Callable[[], None]] = []  # the comparison that is under way
        self._compared_in = 0  # the last generation in which the ranks have compared them
        # Each thread that waits hands gradients over, so several may do so at once: the lock guards a gradient's way
        # from noted to handed over. It is not held while waiting. Hooks append to `_noted` without it.
        self._lock = threading.RLock()

    def add(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[GradientState]:
        """Add parameters; return the states of those that require a gradient now, which will be reduced."""
        global _reductions
        named = list(named)
        added = [GradientState(param, name) for name, param in named if param.requires_grad]
        self._later += [(name, param) for name, param in named if not param.requires_grad]
        if not self.states and added:
            _reductions += (self,)
        self.states += added
        self._by_id.update((id(state.param), state) for state in added)
        for index, state in enumerate(sorted(self.states, key=lambda state: state.name)):
            state.index = index
        self._describe_mask()
        waiting = 0
        for state in reversed(added):  # about the order of a backward pass
            waiting += state.param.numel() * state.param.element_size()
            state.is_last = state is added[0]
            state.hands_over = waiting >= _WORTH_SENDING or state.is_last
            waiting = 0 if state.hands_over else waiting
            self._hook(state)
        return added

    def add_later(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Note those parameters that are new, so that they are added at the end of this step."""
        present = [*((state.name, state.param) for state in self.states), *self._later]
        names, known = {name for name, _ in present}, {id(param) for _, param in present}
        for name, param in named:
            if id(param) not in known:
                while name in names:  # the name of a parameter that this one replaces
                    name += ".new"
                names.add(name)
                self._later.append((name, param))

    def _hook(self, state: GradientState) -> None:
        """Register the hook of a parameter's gradient for the device on which the parameter is now."""
        if state.registration is not None:
            state.registration.remove()
        state.notes_stream = gpu.is_on_gpu(state.param)
        if state.notes_stream:
            hook = self._hook_on_gpu(state)
        else:
            hook = self._handing_over_hook(state.is_last) if state.hands_over else self._noted.append
        register = state.param.register_post_accumulate_grad_hook
        state.registration = register(hook)  # type: ignore[no-untyped-call]  # torch has no annotations here

    def group(self, states: list[GradientState]) -> None:
        """Reduce the gradients of these parameters by one request."""
        self._groups.append(Group(states))
        self._submission.plain = False

    def remove_hooks(self) -> None:
        """Remove the parameters' hooks: their gradients are not reduced any more."""
        global _reductions
        _reductions = tuple(reduction for reduction in _reductions if reduction is not self)
        if self.has_noted():
            self.hand_over_for_another()  # other ranks may wait for these gradients
        self.abandon()
        for state in self.states:
            if state.registration is not None:
                state.registration.remove()

    @property
    def communicates(self) -> bool:
        """True if this rank reduces gradients together with at least one other rank."""
        process_set = self.options.process_set
        if process_set is global_process_set:
            return basics.size() > 1
        set_id = check_registered(process_set)
        if set_id != self._set_id:  # the process set has been registered again
            self._forget_requests(set_id)
        return bool(process_set.included()) and (process_set.size() or 0) > 1

    def _forget_requests(self, set_id: int) -> None:
        self._set_id = set_id
        self._submission.forget_requests(set_id)
        for state in self.states:
            state.request, state.alike = None, False
        for group in self._groups:
            group.request = None
        self._describe_mask()

    def _describe_mask(self) -> None:
        if self.states:
            name = f"presence.{min(state.name for state in self.states)}"
            self._mask.describe(len(self.states), name, self._set_id)
            self.weights.describe(name, self._set_id)

    def _handing_over_hook(self, is_last: bool) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            self._noted.append(param)
            if basics.overlaps():
                self.hand_over(but_small=True)
            elif is_last:
                self.count()

        disable_compile(hook)  # `backward` may be called by a function that is compiled
        return hook

    def _hook_on_gpu(self, state: GradientState) -> Callable[[torch.Tensor], None]:
        # Autograd runs the hook on the stream on which the gradient was made, which depends on the forward pass. The
        # thread that hands the gradient over later may have another current stream. Gradients on a GPU are reduced
        # during the backward pass, however busy the processors are.
        def hook(param: torch.Tensor) -> None:
            if gpu.is_on_gpu(param):
                self._streams[state] = gpu.current_stream(gpu.device_of(param))
            self._noted.append(param)
            if state.hands_over:
                self.hand_over()

        disable_compile(hook)
        return hook

    def hand_over_for_another(self) -> None:
        """Hand gradients over because a thread waits for another operation. `finish` raises the errors."""
        try:
            self.hand_over()
        except Exception as error:
            self._failure = self._failure or error

    def _were_replaced(self) -> bool:
        """Return whether a parameter's gradient is another tensor than at the end of its backward pass."""
        seen, grads = [state.seen for state in self.states], [state.param.grad for state in self.states]
        if all(map(operator.is_, seen, grads)):  # the usual case, in a third of the time
            return False
        pairs = zip(seen, grads, strict=True)
        return any(last is not None and grad is not None and grad is not last for last, grad in pairs)

    def count(self) -> None:
        """Count the backward passes noted so far.

        Raises:
            AssertionError: There were more passes than announced; the surplus ones are not counted.
        """
        too_many = None
        with self._lock:
            noted = self._noted.copy()
            del self._noted[: len(noted)]
            passes, complete = self.passes, self._complete
            for state in map(self._by_id.__getitem__, map(id, noted)):
                if state.passes >= passes or state.grad is not None:
                    too_many = state
                    continue
                state.passes += 1
                if state.passes == passes:
                    state.seen = state.param.grad
                    complete.append(state)
            if complete and self._first_seen[0] is None:
                self._first_seen = (complete[0].seen, _version(complete[0].seen))
        if too_many is not None:
            raise AssertionError(
                f"{too_many.name}: more backward passes than backward_passes_per_step={passes} before step(); "
                "raise backward_passes_per_step to accumulate gradients, or call step() or synchronize() in between. "
                "If several activation checkpoints use the parameter, give these use_reentrant=False"
            )

    def is_in_progress(self) -> bool:
        """Return whether there are complete gradients that `finish` has not waited for."""
        with self._lock:
            self.count()
            return bool(self._complete or self._submission.borrowed)

    def forget_passes(self) -> None:
        """Forget the backward passes of gradients that have not been handed over: count from 0 again."""
        with self._lock:
            self._noted.clear()
            self._complete.clear()
            self._first_seen = (None, 0)
            for state in self.states:
                state.passes = 0
                state.seen = None

    def passes_left(self) -> dict[torch.nn.Parameter, int]:
        """Return, for each parameter, the number of backward passes until its gradient is complete."""
        self.count()
        return {state.param: 0 if state.grad is not None else self.passes - state.passes for state in self.states}

    def complete(self) -> dict[torch.nn.Parameter, object]:
        """Return the parameters whose gradients are complete, and the context of their compression."""
        self.count()
        return {each.param: each.ctx for each in self.states if each.grad is not None or each.passes == self.passes}

    def has_noted(self) -> bool:
        """Return whether there may be gradients to hand over."""
        return bool(self._noted or self._complete)

    def hand_over(self, but_small: bool = False) -> None:
        """Hand the complete gradients to the engine, except small ones if `but_small`. Callable from any thread.

        `but_small` is for a caller whose code continues. Then gradients that share a storage are left for `finish` as
        well: a write to one of them would move the storage of all of them to a copy.
        """
        with self._lock:
            try:
                self.count()
                communicates = self.communicates
            except ValueError:  # there is no job, or the process set is not registered any more
                self.abandon()
                raise
            # The weight of a step with several passes is the sum over them: it is read when the last one has begun.
            if communicates and self._complete and self.weights.allows_hand_over():
                complete, left = self._complete.copy(), []
                if but_small and not self._streams:
                    left = [state for state in complete if state.is_small or state.is_part_of_a_storage()]
                    deferred = {*left}
                    complete = [state for state in complete if state not in deferred]
                self._complete[:] = left
                self._submit(complete, self._streams)
                if self._submission.moved:
                    self._complete += [state for state in complete if state.grad is None]

    def _announce_if_complete(self) -> None:
        if self.compares_first and self._compared_in != basics.generation():
            self._compared_in = basics.generation()
            named = sorted((state.name.removeprefix("allreduce."), state.param) for state in self.states)
            self._comparison = [compare(partial(records_of, named), self.options.process_set, named[0][0])]
        if len(self._submission.borrowed) == len(self.states) and not self._mask.handle:
            self._mask.announce((), self._submission.sparse_dims, bool(self.weights.is_used))

    def _submit(
        self, states: list[GradientState], streams: Mapping[GradientState, GpuStream] = CURRENT, waits: bool = False
    ) -> None:
        try:
            self._scale(states, streams)
            self._submission.submit(states, streams, waits)
            self._announce_if_complete()
        except BaseException:
            self.abandon()
            raise

    def _scale(self, states: list[GradientState], streams: Mapping[GradientState, GpuStream]) -> None:
        """Multiply gradients that are about to be handed over by the factor that the ranks' weights make."""
        if self.weights.factors is not None:
            self.weights.scale(states, streams)
            self._first_seen = (self._first_seen[0], _version(self._first_seen[0]))

    def finish(self) -> bool:
        """Wait until the gradients of all parameters are reduced, and begin the next step.

        Gradients that exist after fewer backward passes than announced, or after none, are reduced as well.

        Returns:
            True if gradients were changed after their backward pass, before this call.

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
            if self.states and self.communicates:
                grad, version = self._first_seen
                changed = self._submission.has_been_changed() or _version(grad) != version or self._were_replaced()
                self._wait_for_weights()
                with self._lock:
                    self._complete.clear()
                    everything = not self._submission.borrowed
                    rest = self.states if everything else [state for state in self.states if state.grad is None]
                    self._submit(rest, waits=True)
                self._agree_on_mask()
                self._wait()
                while self._comparison:
                    self._comparison.pop()()
            else:
                self.weights.alone(bool(self.options.process_set.included()))
        except BaseException:
            self.abandon()
            raise
        self._end_step()
        if self._submission.moved:
            self._submission.moved = False
            for state in self.states:
                self._hook(state)
        if self._later:
            self._take_in_later()
        return changed

    def _wait_for_weights(self) -> None:
        with self._lock:
            weighted = self.weights.begin(waits=True)
        if weighted:
            self.weights.wait()
            self.weights.drop_what_does_not_count(self.states)

    def _take_in_later(self) -> None:
        """Reduce gradients of parameters that are new or now require one: separately once, then with all others."""
        ready = [(name, param) for name, param in self._later if param.requires_grad]
        if not ready:
            return
        apart = self._without_parameters()
        apart.compares_first = self.compares_first
        apart.add(ready)
        apart.weights.take_over(self.weights)
        try:
            apart.finish()
        finally:
            apart.remove_hooks()
        self._later = [(name, param) for name, param in self._later if not param.requires_grad]
        self.add(ready)

    def _without_parameters(self) -> Reduction:
        return Reduction(self.options, self.passes)

    def _agree_on_mask(self) -> None:
        absent = [state for state in self.states if state.grad is None] if not self._mask.handle else []
        if absent:
            indices = [state.index for state in absent]
            self._mask.announce(indices, self._submission.sparse_dims, bool(self.weights.is_used))
        # The mask is handed over last, so the gradients are usually reduced when the mask is.
        self._mask.wait()
        if absent:
            self._contribute_nothing(absent)

    def _contribute_nothing(self, absent: Sequence[GradientState]) -> None:
        """Take part in the reduction of the gradients that this rank lacks and another one has."""
        present = self._mask.bytes.tolist()
        for state in absent:
            needed_by_group = state.group is not None and any(present[member.index] for member in state.group.states)
            if not (present[state.index] or needed_by_group):
                continue
            state.param.grad = self._nothing_for(state, sparse_dim=present[state.index] - 1)
            self._submit([state], waits=True)
            if not present[state.index]:
                state.param.grad = state.grad = None

    def _nothing_for(self, state: GradientState, sparse_dim: int) -> torch.Tensor:
        if sparse_dim > 0 and not self.options.sparse_as_dense:
            return empty_sparse_like(state.param, sparse_dim)
        return torch.full_like(state.param, _NEUTRAL.get(self.options.op, 0.0), requires_grad=False)

    def _wait(self) -> None:
        self._submission.wait(self.states)

    def abandon(self) -> None:
        """Abandon the step after an error: no thread will wait for its operations."""
        self._failure = None
        self._comparison.clear()
        self._submission.abandon(self._mask.handle, self._mask.bytes)
        self._mask.abandon()
        self._end_step()

    def _end_step(self) -> None:
        self._first_seen = (None, 0)
        for state in self.states:
            state.passes = 0
            state.seen = state.grad = None
        if not self._submission.plain:
            for state in self.states:
                state.dense = state.work = state.ctx = None
        for group in self._groups:
            group.ready = 0
            group.streams.clear()
        self._noted.clear()  # not replaced by a new list: the hooks append to this one
        self._complete.clear()
        self._streams.clear()
        self._submission.clear()
        self.weights.end()
        self._mask.handle = 0


def _version(grad: torch.Tensor | None) -> int:
    """Return how often the gradient was changed in place, except by the engine; clipping changes all gradients."""
    return 0 if grad is None or grad.is_inference() else grad._version
