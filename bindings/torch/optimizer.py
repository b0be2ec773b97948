"""`DistributedOptimizer`: any torch optimizer, with gradients reduced over the ranks before it steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from horovodlike import basics, weighting
from horovodlike._engine import steps
from horovodlike._engine.arguments import check_compression, passes_per_step, predivide_factor, reduce_op
from horovodlike.process_set import ProcessSet, check_registered, global_process_set
from horovodlike.torch._ops import disable_compile
from horovodlike.torch._optimizer.adasum_delta import AdasumDeltaReduction
from horovodlike.torch._optimizer.compressed_reduction import CompressedReduction
from horovodlike.torch._optimizer.gradient_state import GradientState
from horovodlike.torch._optimizer.reduction import Reduction
from horovodlike.torch._optimizer.submission import ReductionOptions
from horovodlike.torch._optimizer.wrapping import Wrapper, checked_names, share_what_is_loaded, subclass_instance
from horovodlike.torch.compression import Compression, Compressor, GradientReducer
from horovodlike.torch.mpi_ops import allreduce
from horovodlike.weighting import Weight

_CHANGED = (
    "gradients have been changed between backward() and step(), before they were reduced: all ranks get the same "
    "gradients, but in some of them what was done is lost, and in others it was done before the reduction. Call "
    "optimizer.synchronize() before you change them, as for clipping, and then "
    "`with optimizer.skip_synchronize(): optimizer.step()`"
)
# Begins like Horovod's warning, because scripts filter warnings by that text.
_REDUCED_AGAIN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown: the gradients are reduced again. To use them as they are, write "
    "`with optimizer.skip_synchronize(): optimizer.step()`"
)
Groups = Sequence[Sequence[torch.nn.Parameter]]


class _DistributedOptimizer(Wrapper):
    """The methods with which `DistributedOptimizer` overrides methods of the wrapped optimizer's class."""

    _reduction: Reduction  # has no parameters if `_delta` reduces instead
    _delta: AdasumDeltaReduction | None
    _names: dict[torch.nn.Parameter, str]
    _known_params: list[int]  # ids of the groups' parameters when they were last checked
    _explicit_groups: list[list[torch.nn.Parameter]] | None
    _should_synchronize: bool
    _synchronized: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until the gradients are reduced, and do the wrapped optimizer's step.

        Args:
            closure: Computes the loss and its gradients, and may be called several times. Each call reduces the
                gradients and, for Average and Sum, the loss with the same operation and weight, so that an optimizer
                that makes decisions by the loss makes the same ones on all ranks.

        Returns:
            The return value of the wrapped optimizer's step.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        steps.mark()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before the wrapping
        if self._delta is not None:
            weighting.of_step(None, basics.Adasum, type(self).__name__)  # raises if a weight is set
            own_step = partial(super().step, *([] if closure is None else [closure]))
            return self._delta.step(own_step) if self._reduction.communicates else own_step()
        if closure is not None and self._should_synchronize:
            if self._reduction.is_in_progress():
                self.synchronize()
            self._synchronized = False
            return super().step(self._reducing(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_REDUCED_AGAIN, stacklevel=2)
            self._finish()
        self._synchronized = False
        return super().step() if closure is None else super().step(closure)

    # The `step` of the wrapped class runs the optimizer's hooks. Without this mark, torch would make this `step` run
    # them a second time.
    step.hooked = True  # type: ignore[attr-defined]  # a mark

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reducing_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            return self._reduced_loss(loss)

        return reducing_closure

    def _reduced_loss(self, loss: Any) -> Any:
        op, process_set = self._reduction.options.op, self._reduction.options.process_set
        states = self._reduction.states
        if loss is None or op not in (basics.Average, basics.Sum) or not (states and self._reduction.communicates):
            return loss
        name = f"loss.{min(state.name for state in states)}"
        own = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
        reduced = allreduce(self._reduction.weights.weighted(own), name=name, op=op, process_set=process_set)
        return reduced if isinstance(loss, torch.Tensor) else reduced.item()

    def synchronize(self) -> None:
        """Wait until the gradients of this step are reduced. All ranks have to call this, or `step`.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        self._finish()

    def _finish(self) -> None:
        self._take_in_added()
        if self._reduction.finish():
            warnings.warn(_CHANGED, stacklevel=3)  # names the line that called step() or synchronize()
        self._synchronized = True

    def _take_in_added(self) -> None:
        """Start to reduce the gradients of parameters that were added to the groups without `add_param_group`."""
        if self._delta is not None:
            return
        params = [id(param) for group in self.param_groups for param in group["params"]]
        if params == self._known_params:
            return
        self._known_params = params
        for index, group in enumerate(self.param_groups):
            self._reduction.add_later(_named(group["params"], index, self._names))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` uses the gradients as they are, as after `synchronize` and clipping."""
        if self._delta is not None:
            raise AssertionError("with op=Adasum nothing is reduced before the step: there is nothing to skip")
        if not self._should_synchronize:
            raise AssertionError("skip_synchronize() is active already")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do the wrapped optimizer's `zero_grad`.

        Raises:
            AssertionError: Gradients are being reduced: after `backward` and before `step` or `synchronize`.
        """
        if self._reduction.is_in_progress():
            raise AssertionError(
                "zero_grad() between backward() and step() or synchronize() would change gradients while they are "
                "being reduced; to drop them, call synchronize() first, on all ranks"
            )
        self._reduction.forget_passes()
        # `zero_grad` of optimizers written before torch 1.7 has no argument.
        if set_to_none:
            super().zero_grad()
        else:
            super().zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and reduce the gradients of its parameters as well. All ranks have to do the same.

        Raises:
            AssertionError: Gradients are being reduced: after `backward` and before `step` or `synchronize`.
        """
        if self._reduction.is_in_progress():
            raise AssertionError("add_param_group() between backward() and step() or synchronize()")
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        added = self.param_groups[index]["params"]
        if self._delta is None:
            self._reduction.add(_named(added, index, self._names))

    def _begin(
        self,
        options: ReductionOptions,
        passes: int,
        reducer: GradientReducer | None,
        names: dict[torch.nn.Parameter, str],
        groups: int | list[list[torch.nn.Parameter]] | None,
    ) -> None:
        """Start reducing the gradients of the parameters."""
        reduction = Reduction(options, passes) if reducer is None else CompressedReduction(options, passes, reducer)
        named = [
            entry for index, group in enumerate(self.param_groups) for entry in _named(group["params"], index, names)
        ]
        self._delta = None
        if options.op == basics.Adasum:
            name = f"delta.{min((name for name, _ in named), default='')}"
            self._delta, named = AdasumDeltaReduction(self, name, options), []
        states = reduction.add(named)
        self._reduction = reduction
        self._names = names
        self._known_params = []
        self._explicit_groups = _make_groups(reduction, states, groups)
        self._should_synchronize = True
        self._synchronized = False
        weakref.finalize(self, reduction.remove_hooks).atexit = False
        share_what_is_loaded(self._inner, self)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many times `backward` adds to the gradients before they are reduced. Counting begins with 0 again."""
        passes = passes_per_step(passes, "set_backward_passes_per_step")
        self._reduction.forget_passes()
        self._reduction.passes = passes

    @property
    def backward_passes_per_step(self) -> int:
        """The number of times that `backward` adds to the gradients before they are reduced."""
        return self._reduction.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {state.param: state.name.removeprefix("allreduce.") for state in self._reduction.states}

    @property
    def _handles(self) -> dict[torch.nn.Parameter, tuple[int, object]]:
        return {param: (0, ctx) for param, ctx in self._reduction.complete().items()}

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        return {state.param for state in self._reduction.states}

    @property
    def _allreduce_delay(self) -> dict[torch.nn.Parameter, int]:
        return self._reduction.passes_left()

    @property
    def _groups(self) -> list[list[torch.nn.Parameter]] | None:
        return self._explicit_groups


disable_compile(
    *(_DistributedOptimizer._finish, _DistributedOptimizer.synchronize, _DistributedOptimizer.zero_grad),
    *(Reduction.finish, steps.mark),
)


def reducer_of(optimizer: torch.optim.Optimizer) -> GradientReducer | None:
    """Return the `GradientReducer` of a `DistributedOptimizer`; None if there is none."""
    return optimizer._reduction.reducer if isinstance(optimizer, _DistributedOptimizer) else None


def _named(
    params: Iterable[torch.nn.Parameter], group: int, names: dict[torch.nn.Parameter, str]
) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"allreduce.{names.get(param, f'noname.{group}.{index}')}", param) for index, param in enumerate(params)]


def _checked_groups(groups: int | Groups | None, num_groups: int) -> int | list[list[torch.nn.Parameter]] | None:
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
        if groups is None:
            groups = num_groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups must be a non-negative integer or a list of lists of torch.Tensor, got {groups}")
        return groups
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ValueError(f"groups must be a non-negative integer or a list of lists of torch.Tensor, got {groups!r}")
    members = [member for group in groups for member in group]
    if not all(isinstance(member, torch.Tensor) for member in members):
        raise ValueError("groups must be made of torch.Tensor")
    if len({id(member) for member in members}) < len(members):
        raise ValueError("a parameter can be in one group only")
    return groups


def _checked_compression(
    compression: type[Compressor] | GradientReducer, groups: object
) -> tuple[GradientReducer | None, type[Compressor]]:
    """Return the reducer (None if `compression` is a class), and the class that compresses single gradients."""
    if isinstance(compression, type) and issubclass(compression, GradientReducer):
        raise ValueError(f"compression must be an object of {compression.__name__}, not the class: add parentheses")
    if not isinstance(compression, GradientReducer):
        check_compression(compression, "DistributedOptimizer")
        return None, compression
    if groups:
        raise ValueError(f"compression={type(compression).__name__} reduces all gradients together: leave out groups")
    return compression, Compression.none


def _make_groups(
    reduction: Reduction, states: list[GradientState], groups: int | list[list[torch.nn.Parameter]] | None
) -> list[list[torch.nn.Parameter]] | None:
    """Put the states into groups, and return their parameters. Other gradients are reduced singly."""
    if not groups:
        return None
    if isinstance(groups, int):
        count = min(groups, len(states))
        bounds = [len(states) * index // count for index in range(count + 1)] if count else [0]
        chosen = [states[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
    else:
        by_parameter = {state.param: state for state in states}
        chosen = [[by_parameter[param] for param in group if param in by_parameter] for group in groups]
    for group in chosen:
        if group:
            reduction.group(group)
    return [[state.param for state in group] for group in chosen]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] | GradientReducer = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = basics.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    weight: Weight = None,
) -> _DistributedOptimizer:
    """Wrap an optimizer so that it steps with gradients reduced over all ranks.

    The result is an object of a subclass, with the same name, of the optimizer's class. It shares the optimizer's
    parameter groups, state and hooks, and is used in its place. Gradients are handed to the engine while `backward`
    computes the next ones or, if the engine has no processor to itself (`HOROVODLIKE_OVERLAP`), after `backward`.
    `step` waits for the results. With one rank nothing is sent, but the same errors are raised.

    The result cannot be copied or pickled: copy the model and the optimizer before the wrapping, in one call, or keep
    `state_dict()`.

    A parameter that begins to require a gradient later is included at the end of that step, which must be the same
    step on all ranks.

    Gradients of parameters whose channels are last in memory (`model.to(memory_format=torch.channels_last)`) are
    reduced in place, like contiguous ones. The parameters must have this memory format on all ranks. A gradient in
    another memory format than its parameter is copied.

    A parameter that has no gradient when `step` is called takes part with a gradient of zeros (the neutral value for
    Min, Max and Product) if any other rank has a gradient for it. If no rank has one, the gradient stays None.

    Args:
        optimizer: Any torch optimizer, over the same parameters on all ranks.
        named_parameters: `model.named_parameters()`. Ranks match gradients by these names; without them, by the
            parameters' positions. Optimizers in one process need different names if they are used at the same time.
        compression: The class that compresses each gradient: `Compression.none`, `.fp16`, `.bf16` or one of your own;
            or an object that reduces all gradients of a step together, when `step` or `synchronize` is called:
            `Compression.powersgd(rank=4)`, `Compression.topk(ratio=0.01)` or a `GradientReducer` of your own. Such an
            object works with Average and Sum, without groups and without `gradient_predivide_factor`.
        backward_passes_per_step: How many times `backward` adds to the gradients before they are reduced. The
            gradients are summed, not averaged, over the passes.
        op: Average, Sum, Min, Max or Product. Or Adasum: then each rank steps with its own gradients, and the resulting
            changes of the parameters are summed adaptively (see `allreduce`), which needs no smaller learning rate with
            more ranks. `synchronize` then does nothing, and clipping applies to this rank's own gradients.
        gradient_predivide_factor: With Average, gradients are divided by this factor before the sum and by
            size / factor after it.
        num_groups: Deprecated; use `groups`.
        groups: Number of groups of consecutive parameters, or lists of parameters. Gradients of a group are reduced
            as one operation, when all of them are complete.
        sparse_as_dense: Reduce sparse gradients as dense ones. Without it they are gathered (`op` Average or Sum
            only), which is quicker where few rows have a gradient.
        process_set: The ranks whose gradients are reduced together. On other ranks the optimizer reduces nothing.
        weight: The number of samples behind this rank's gradients in each step, or a function without arguments that
            returns it and is called once in each step, after the backward pass has begun: gradients are then reduced to
            the mean over the samples of all ranks. With several backward passes it is the number of samples of all of
            them. `hvd.batch_weight`: the weight that `set_batch_weight` has set. None: the same, or the average over
            ranks if none is set. Needs Average.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument cannot be used, or `init()` has not been called.
    """
    basics.size()  # raises before init()
    check_registered(process_set)
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    op = reduce_op(op, "DistributedOptimizer")
    divisor = predivide_factor(gradient_predivide_factor, op, "DistributedOptimizer")
    passes = passes_per_step(backward_passes_per_step, "DistributedOptimizer")
    chosen_groups = _checked_groups(groups, num_groups)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = checked_names(named_parameters, params)
    names = {param: names[param] for param in params if param in names}
    reducer, compressor = _checked_compression(compression, chosen_groups)
    if op == basics.Adasum and (reducer is not None or chosen_groups):
        raise ValueError("op=Adasum knows no groups, and of compressions those that are classes")
    weighting.check_argument(weight, op, "DistributedOptimizer")
    options = ReductionOptions(op, compressor, 1.0 / divisor, divisor, sparse_as_dense, process_set, weight)
    wrapped: _DistributedOptimizer = subclass_instance(_DistributedOptimizer, optimizer)
    wrapped._inner = optimizer
    wrapped._begin(options, passes, reducer, names, chosen_groups)
    return wrapped
