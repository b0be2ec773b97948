"""`DistributedOptimizer`: any torch optimizer, with gradients reduced over the ranks before it steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from horovodlike import basics
from horovodlike.process_set import ProcessSet, check_registered, global_process_set
from horovodlike.torch._compile import leave_alone
from horovodlike.torch._compressed_reduction import CompressedReduction
from horovodlike.torch._delta_reduction import DeltaReduction
from horovodlike.torch._reduction import Reduction
from horovodlike.torch._slot import Slot
from horovodlike.torch._submission import ReductionOptions
from horovodlike.torch.compression import Compression, Compressor, GradientReducer
from horovodlike.torch.mpi_ops import allreduce

_CHANGED = (
    "gradients have been changed between backward() and step(), before they were reduced: all ranks get the same "
    "gradients, but in some of them what was done is lost, and in others it was done before the reduction. Call "
    "optimizer.synchronize() before you change them, as for clipping, and then "
    "`with optimizer.skip_synchronize(): optimizer.step()`"
)
Groups = Sequence[Sequence[torch.nn.Parameter]]


class _DistributedOptimizer(torch.optim.Optimizer):
    """What `DistributedOptimizer` puts in front of the class of the optimizer that it wraps."""

    _inner: torch.optim.Optimizer
    _reduction: Reduction  # without parameters if there is a delta
    _delta: DeltaReduction | None
    _names: dict[torch.nn.Parameter, str]
    _known_params: list[int]  # ids
    _explicit_groups: list[list[torch.nn.Parameter]] | None
    _should_synchronize: bool
    _synchronized: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until the gradients are reduced, and do the wrapped optimizer's step.

        Args:
            closure: Computes the loss and its gradients, and may be called several times. Each time the gradients are
                reduced, and so is the loss (like the gradients for Average and Sum), so that an optimizer that
                decides by it decides the same on all ranks.

        Returns:
            What the wrapped optimizer's step returns.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        self._inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before the wrapping
        if self._delta is not None:
            own_step = partial(super().step, *([] if closure is None else [closure]))
            return self._delta.step(own_step) if self._reduction.communicates else own_step()
        if closure is not None and self._should_synchronize:
            if self._reduction.is_in_progress():
                self.synchronize()
            self._synchronized = False
            return super().step(self._reducing(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "step() follows synchronize() and will reduce the gradients again; write "
                    "`with optimizer.skip_synchronize(): optimizer.step()` to use them as they are",
                    stacklevel=2,
                )
            self._finish()
        self._synchronized = False
        return super().step() if closure is None else super().step(closure)

    # The wrapped class's step runs the hooks of the optimizer. Without this mark torch would make this one run them
    # as well.
    step.hooked = True  # type: ignore[attr-defined]

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
        slots = self._reduction.slots
        if loss is None or op not in (basics.Average, basics.Sum) or not (slots and self._reduction.communicates):
            return loss
        name = f"loss.{min(slot.name for slot in slots)}"
        if isinstance(loss, torch.Tensor):
            return allreduce(loss.detach(), name=name, op=op, process_set=process_set)
        return allreduce(
            torch.tensor(loss, dtype=torch.float64, device="cpu"), name=name, op=op, process_set=process_set
        ).item()

    def synchronize(self) -> None:
        """Wait until the gradients of this step are reduced. All ranks have to call it, or `step`.

        Raises:
            HorovodInternalError: A reduction failed.
        """
        self._finish()

    def _finish(self) -> None:
        self._take_in_added()
        if self._reduction.finish():
            warnings.warn(_CHANGED, stacklevel=3)  # of who has called step() or synchronize()
        self._synchronized = True

    def _take_in_added(self) -> None:
        """Have parameters reduced that were added to the groups in another way than by `add_param_group`."""
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
        """Within this context `step` uses the gradients as they are: after `synchronize` and, say, clipping."""
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
        # Optimizers of before torch 1.7 have no argument.
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do the wrapped optimizer's `load_state_dict`. Gradients that are being reduced go on being reduced."""
        super().load_state_dict(state_dict)
        # Schedulers made before the wrapping hold the optimizer inside, and change its groups.
        self._inner.state, self._inner.param_groups = self.state, self.param_groups

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are of the optimizer inside: the class of this one cannot be imported."""
        return _new, (type(self._inner),), self.__getstate__()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many times `backward` adds to the gradients before they are reduced. Counting begins anew."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, got {passes}")
        self._reduction.forget_passes()
        self._reduction.passes = passes

    @property
    def backward_passes_per_step(self) -> int:
        """How many times `backward` adds to the gradients before they are reduced."""
        return self._reduction.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {slot.param: slot.name.removeprefix("allreduce.") for slot in self._reduction.slots}

    @property
    def _handles(self) -> dict[torch.nn.Parameter, tuple[int, object]]:
        return {param: (0, ctx) for param, ctx in self._reduction.complete().items()}

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        return {slot.param for slot in self._reduction.slots}

    @property
    def _allreduce_delay(self) -> dict[torch.nn.Parameter, int]:
        return self._reduction.passes_left()

    @property
    def _groups(self) -> list[list[torch.nn.Parameter]] | None:
        return self._explicit_groups


leave_alone(
    _DistributedOptimizer._finish, _DistributedOptimizer.synchronize, _DistributedOptimizer.zero_grad, Reduction.finish
)


def reducer_of(optimizer: torch.optim.Optimizer) -> GradientReducer | None:
    """Return what reduces all gradients of a `DistributedOptimizer` together, if anything does."""
    return optimizer._reduction.reducer if isinstance(optimizer, _DistributedOptimizer) else None


def _new(base: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return base.__new__(base)


def _named(
    params: Iterable[torch.nn.Parameter], group: int, names: dict[torch.nn.Parameter, str]
) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"allreduce.{names.get(param, f'noname.{group}.{index}')}", param) for index, param in enumerate(params)]


def _checked_names(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None, params: Sequence[torch.nn.Parameter]
) -> dict[torch.nn.Parameter, str]:
    if named_parameters is None:
        return {}
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError(
            "named_parameters must be a sequence of tuples (name, parameter), as model.named_parameters() returns"
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError(f"the names in named_parameters must be unique, found duplicates: {', '.join(duplicates)}")
    by_parameter = {param: name for name, param in named}
    unnamed = [id(param) for param in params if param not in by_parameter]
    if named and unnamed:
        raise ValueError(
            f"named_parameters does not name {len(unnamed)} of the optimizer's parameters; their Python object ids "
            f"are {', '.join(map(str, unnamed))}"
        )
    return by_parameter


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
    """Return the reducer, if it is one, and the class that compresses gradient by gradient."""
    if isinstance(compression, type) and issubclass(compression, GradientReducer):
        raise ValueError(f"compression must be an object of {compression.__name__}, not the class: add parentheses")
    if not isinstance(compression, GradientReducer):
        return None, compression
    if groups:
        raise ValueError(f"compression={type(compression).__name__} reduces all gradients together: leave out groups")
    return compression, Compression.none


def _make_groups(
    reduction: Reduction, slots: list[Slot], groups: int | list[list[torch.nn.Parameter]] | None
) -> list[list[torch.nn.Parameter]] | None:
    """Group the slots as asked; those in no explicit group stay alone."""
    if not groups:
        return None
    if isinstance(groups, int):
        count = min(groups, len(slots))
        bounds = [len(slots) * index // count for index in range(count + 1)] if count else [0]
        chosen = [slots[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
    else:
        by_parameter = {slot.param: slot for slot in slots}
        chosen = [[by_parameter[param] for param in group if param in by_parameter] for group in groups]
    for group in chosen:
        if group:
            reduction.group(group)
    return [[slot.param for slot in group] for group in chosen]


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
) -> _DistributedOptimizer:
    """Wrap an optimizer so that it steps with gradients reduced over all ranks.

    The result is of a subclass of the optimizer's class with the same name, shares its parameter groups, state and
    hooks, and replaces it. Gradients are handed to the engine while `backward` computes the next ones, or, if the
    engine has no processor to itself (`HOROVODLIKE_OVERLAP`), when it has computed all. `step` waits for the results.
    With one rank nothing is sent, but the rules are the same.

    Parameters that begin to require a gradient later are taken in at the end of the step in which they do, on all
    ranks.

    Gradients of parameters whose channels are last in memory (`model.to(memory_format=torch.channels_last)`) are
    reduced where they lie, like contiguous ones. The parameters have to be so on all ranks. A gradient in another order
    than its parameter is copied.

    A parameter that has no gradient when `step` is called takes part with a gradient of zeros if any rank has one;
    if no rank has, it stays without.

    Args:
        optimizer: Any torch optimizer, over the same parameters on all ranks.
        named_parameters: `model.named_parameters()`. Ranks match gradients by these names; without them, by the
            parameters' positions. Optimizers in one process need different names if they are used at the same time.
        compression: What to send instead of a gradient: `Compression.none`, `.fp16`, `.bf16` or a class of your own;
            or an object that reduces all gradients of a step together, when `step` or `synchronize` is called:
            `Compression.powersgd(rank=4)`, `Compression.topk(ratio=0.01)` or a `GradientReducer` of your own. That
            works with Average and Sum, without groups and without `gradient_predivide_factor`.
        backward_passes_per_step: How many times `backward` adds to the gradients before they are reduced. The
            gradients are summed, not averaged, over the passes.
        op: Average, Sum, Min, Max or Product. Or Adasum: then each rank steps with its own gradients, and what the
            steps have changed is added up adaptively (see `allreduce`), which needs no smaller learning rate with more
            ranks. `synchronize` does nothing then, and clipping concerns the own gradients.
        gradient_predivide_factor: With Average, divides by this before the sum and by size / this afterwards.
        num_groups: Deprecated; use `groups`.
        groups: Number of groups of consecutive parameters, or lists of parameters. Gradients of a group are reduced
            as one operation, when all of them are there.
        sparse_as_dense: Reduce sparse gradients as dense ones. Without it they are gathered (`op` Average or Sum
            only), which is quicker where few rows have a gradient.
        process_set: The ranks whose gradients are reduced together. On others the optimizer is a plain one.

    Raises:
        ValueError: An argument cannot be used, or `init()` has not been called.
    """
    basics.size()  # raises before init()
    check_registered(process_set)
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if gradient_predivide_factor != 1.0 and op != basics.Average:
        raise ValueError("gradient_predivide_factor works with op=Average only")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, got {backward_passes_per_step}")
    chosen_groups = _checked_groups(groups, num_groups)
    names = _checked_names(named_parameters, [p for group in optimizer.param_groups for p in group["params"]])
    factor = gradient_predivide_factor
    reducer, compressor = _checked_compression(compression, chosen_groups)
    options = ReductionOptions(op, compressor, 1.0 / factor, factor, sparse_as_dense, process_set)
    if reducer is None:
        reduction = Reduction(options, backward_passes_per_step)
    else:
        reduction = CompressedReduction(options, backward_passes_per_step, reducer)
    named = [
        entry for index, group in enumerate(optimizer.param_groups) for entry in _named(group["params"], index, names)
    ]
    wrapped = _subclass_instance(optimizer)
    wrapped._delta = None
    if op == basics.Adasum:
        if reducer is not None or chosen_groups:
            raise ValueError("op=Adasum knows no groups, and of compressions those that are classes")
        name = f"delta.{min((name for name, _ in named), default='')}"
        wrapped._delta, named = DeltaReduction(wrapped, name, options), []
    slots = reduction.add(named)
    wrapped._inner = optimizer
    wrapped._reduction = reduction
    wrapped._names = names
    wrapped._known_params = []
    wrapped._explicit_groups = _make_groups(reduction, slots, chosen_groups)
    wrapped._should_synchronize = True
    wrapped._synchronized = False
    weakref.finalize(wrapped, reduction.remove_hooks).atexit = False
    _share_what_is_loaded(optimizer, wrapped)
    return wrapped


def _share_what_is_loaded(inner: torch.optim.Optimizer, wrapped: _DistributedOptimizer) -> None:
    """Have both go on with the same groups and state when a state is loaded into the one inside."""
    found = weakref.ref(wrapped)

    def share(loaded: torch.optim.Optimizer) -> None:
        wrapped = found()
        if loaded is inner and wrapped is not None:
            wrapped.state, wrapped.param_groups = inner.state, inner.param_groups

    if hasattr(inner, "_optimizer_load_state_dict_post_hooks"):  # not before torch 2.2
        inner.register_load_state_dict_post_hook(share)


def _subclass_instance(optimizer: torch.optim.Optimizer) -> _DistributedOptimizer:
    """Return an object of a subclass of the optimizer's class that shares everything the optimizer holds."""
    base = type(optimizer)
    derived = type(base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__})
    wrapped: _DistributedOptimizer = object.__new__(derived)
    wrapped.__dict__.update(optimizer.__dict__)
    # A scheduler made before the wrapping has put its own `step` on the object, which is bound to the base class.
    wrapped.__dict__.pop("step", None)
    return wrapped
