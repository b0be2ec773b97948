"""`DownpourOptimizer` and `EASGDOptimizer`: ranks train without waiting for each other, over a parameter server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from horovodlike import basics
from horovodlike._engine import steps
from horovodlike._engine.arguments import factor, integer
from horovodlike.process_set import ProcessSet, check_registered, global_process_set
from horovodlike.torch._optimizer.exchange import (
    DownpourExchange,
    ElasticExchange,
    ExchangeOptions,
    LocalUpdate,
    ServerExchange,
)
from horovodlike.torch._optimizer.wrapping import Wrapper, checked_names, share_what_is_loaded, subclass_instance
from horovodlike.torch.optimizer import DistributedOptimizer, _DistributedOptimizer

if TYPE_CHECKING:
    from horovodlike.torch.parameter_server import ParameterServer

__all__ = ["DownpourOptimizer", "EASGDOptimizer"]

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]] | None
Payload = Literal["bfloat16", "int8"] | None
Servers = Literal["ranks", "dedicated"] | None


class _AsynchronousOptimizer(Wrapper):
    """The methods with which `DownpourOptimizer` and `EASGDOptimizer` override the wrapped optimizer's methods.

    Used as a context manager, it closes itself at the end.
    """

    _reducing: torch.optim.Optimizer | None  # the `DistributedOptimizer` of the data-parallel set
    _exchange: ServerExchange
    # In a data-parallel set, the methods of `DistributedOptimizer`.
    synchronize: Callable[[], None]
    skip_synchronize: Callable[[], AbstractContextManager[None]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the wrapped optimizer's step, and then exchange parameters with the servers if this is due.

        Args:
            closure: Computes the loss and its gradients. Unless `local_update="step"`, Downpour calls it once, before
                the step of the wrapped optimizer, which receives none.

        Returns:
            The return value of the wrapped optimizer's step, or of the closure.

        Raises:
            HorovodInternalError: A server is lost, or a reduction in the data-parallel set failed.
            RuntimeError: The optimizer is closed.
            ValueError: A parameter has changed its shape.
        """
        self._check_open("step")
        if self._reducing is None:  # else the optimizer that reduces marks the step
            steps.mark()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers made before the wrapping
        returned: Any = None
        unreduced: AbstractContextManager[None] = nullcontext()
        if self._exchange.needs_gradients:
            returned = self._gradients_of(closure)
            closure = None
            unreduced = self.skip_synchronize() if self._reducing is not None else unreduced
        self._exchange.before_step()
        with unreduced:
            of_step = super().step() if closure is None else super().step(closure)
        self._exchange.after_step(self.param_groups)
        return of_step if returned is None else returned

    # The `step` of the wrapped class runs the optimizer's hooks. Without this mark, torch would make this `step` run
    # them a second time.
    step.hooked = True  # type: ignore[attr-defined]  # a mark

    def _gradients_of(self, closure: Callable[[], Any] | None) -> Any:
        """Have the gradients ready, reduced in the data-parallel set; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reducing is not None:
            self.synchronize()
        return loss

    def pull(self) -> None:
        """Copy the servers' values to the parameters now, on this rank and the others of its data-parallel set.

        Raises:
            HorovodInternalError: A server is lost.
            RuntimeError: The servers have no values yet, in the warm-up, or the optimizer is closed.
        """
        self._check_open("pull")
        if not self._exchange.has_begun:
            raise RuntimeError("pull() in the warm-up: the servers have no values before step init_delay")
        self._exchange.pull()

    def flush(self) -> None:
        """Wait until the servers have carried out this rank's updates.

        Raises:
            HorovodInternalError: A server is lost.
        """
        self._exchange.flush()

    def close(self) -> None:
        """Send the updates that are not sent yet, and leave the servers; the parameters stay as they are.

        A collective call of all ranks of the process set: each waits for the others. A second call does nothing.

        Raises:
            HorovodInternalError: A server is lost.
        """
        self._exchange.close()

    def __enter__(self) -> _AsynchronousOptimizer:
        """Return the optimizer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the optimizer; after an exception without the other ranks, and without sending remaining updates."""
        if kind is None:
            self._exchange.close()
        else:
            self._exchange.end()

    @property
    def parameter_server(self) -> ParameterServer | None:
        """The client of the servers, for the values and the rules of one's own; None in the warm-up."""
        return self._exchange.server

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add parameters, of which the servers know nothing.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{type(self).__name__}: the servers do not hold parameters that are added later: add the group before "
            "the optimizer is wrapped"
        )

    def _check_open(self, operation: str) -> None:
        if self._exchange.is_closed:
            raise RuntimeError(f"{operation}() of a {type(self).__name__} that has left its servers by close()")


def DownpourOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters = None,
    *,
    update_frequency: int = 10,
    init_delay: int = 100,
    prefetch: int = 0,
    send_frequency: int = 1,
    local_update: LocalUpdate = "gradient",
    staleness: int | None = None,
    payload: Payload = None,
    servers: Servers = None,
    process_set: ProcessSet = global_process_set,
    data_parallel_set: ProcessSet | None = None,
) -> _AsynchronousOptimizer:
    """Wrap an optimizer so that each rank trains by itself and adds its updates to parameters at the servers.

    Each step ends with the wrapped optimizer's own step. Every `send_frequency` steps the updates accumulated since the
    last time are sent, and the servers add them to their values. Every `update_frequency` steps, after the sending, the
    servers' values replace the parameters; with `prefetch` they are values from that many steps before. No step waits
    for another rank, unless `staleness` says so.

    The result is an object of a subclass, with the same name, of the optimizer's class, and shares the optimizer's
    groups, state and hooks. `close` it at the end, or use it as a context manager. `pull()` copies the servers' values
    to the parameters at any time, as before a checkpoint; `flush()` waits until all sent updates have been added;
    `parameter_server` is the client itself, whose `receive(out=other.parameters())` leaves the parameters alone.
    Buffers of the model, as of batch normalization, stay each rank's own.

    Args:
        optimizer: Any torch optimizer, over the same parameters on all ranks. Its state is not sent.
        named_parameters: `model.named_parameters()`, for names in errors and, in a data-parallel set, as in
            `DistributedOptimizer`.
        update_frequency: The number of steps from one copy of the servers' values to the next.
        init_delay: The number of steps before the servers receive the parameters of the process set's first rank, and
            all other ranks copy these. Until then each rank trains alone, and nothing is accumulated. With 0 the
            servers receive the parameters at once. All ranks wait for each other at this point.
        prefetch: How many steps before they are copied the values are asked for, from 0 to `update_frequency`. They
            arrive while the rank trains; updates that it makes meanwhile are in the next ones.
        send_frequency: The number of steps from one sending of updates to the next.
        local_update: The update that is sent. "gradient": the sum of the gradients times -lr, the learning rate that
            the parameter's group has when it is sent. "step": the changes that the wrapped optimizer's steps have made,
            momentum included. Or a function that takes the sum of the gradients of a parameter, which it may change,
            and the parameter's group, and returns a tensor of the same shape and dtype.
        staleness: Stale synchronous parallel: a rank that is more steps than this ahead of the slowest one waits for
            it, at the end of its step. None: no rank waits.
        payload: As in `ParameterServer`: "bfloat16" or "int8" for fewer bytes to send.
        servers: As in `ParameterServer`: "ranks" or "dedicated". None: the servers that `hvdrun --servers` has started,
            if any, or else the ranks of the process set.
        process_set: The ranks that share the servers, which TorchMPI calls the sharding communicator.
        data_parallel_set: Ranks with this one that train as one client: their gradients are averaged in each step, as
            by `DistributedOptimizer`, only the first of them sends and receives, and it broadcasts the received values.
            It must be in `process_set`, others may be. None: each rank is a client.

    Raises:
        HorovodInternalError: A server is lost.
        TypeError: An argument has a wrong type.
        ValueError: An argument cannot be used, or `init()` has not been called.
    """
    name = "DownpourOptimizer"
    sending = _count(send_frequency, "send_frequency", name, 1)
    if not callable(local_update) and local_update not in ("gradient", "step"):
        raise ValueError(f'{name}: local_update must be "gradient", "step" or a function, got {local_update!r}')
    if local_update != "step" and _calls_closure_often(optimizer):
        raise ValueError(
            f"{name}: {type(optimizer).__name__} calls its closure several times in a step, which has no gradient to "
            'send: pass local_update="step"'
        )
    frequencies = _frequencies(update_frequency, init_delay, prefetch, staleness, name)
    options = ExchangeOptions(*frequencies, payload, servers, process_set, data_parallel_set)
    return _wrapped(
        optimizer,
        named_parameters,
        options,
        name,
        lambda named: DownpourExchange(named, options, sending, local_update),
    )


def EASGDOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters = None,
    *,
    update_frequency: int = 10,
    init_delay: int = 100,
    prefetch: int = 0,
    beta: float = 0.9,
    staleness: int | None = None,
    payload: Payload = None,
    servers: Servers = None,
    process_set: ProcessSet = global_process_set,
    data_parallel_set: ProcessSet | None = None,
) -> _AsynchronousOptimizer:
    """Wrap an optimizer so that each rank trains by itself, and draws a centre at the servers and itself together.

    Elastic averaging SGD: every `update_frequency` steps, the tau of the paper, a rank with the parameters x receives
    the centre c, subtracts alpha * (x - c) from its parameters, and has the servers add the same to the centre. Between
    these the ranks explore by themselves. The centre is the model that is trained: `pull()` copies it to the
    parameters, for evaluation or at the end.

    See `DownpourOptimizer` for the result and how it is used.

    Args:
        optimizer: As in `DownpourOptimizer`, and so are all arguments that are not named here.
        named_parameters: `model.named_parameters()`.
        update_frequency: The number of steps from one exchange with the centre to the next.
        init_delay: The number of steps of the warm-up, after which the first rank's parameters become the centre.
        prefetch: How many steps before an exchange the centre is asked for.
        beta: alpha times the number of clients: more than 0, at most 1.
        staleness: The number of steps by which a rank may be ahead of the slowest one.
        payload: "bfloat16" or "int8" for fewer bytes to send.
        servers: "ranks" or "dedicated": the processes that hold the centre.
        process_set: The ranks that share the servers.
        data_parallel_set: Ranks with this one that train as one client.

    Raises:
        HorovodInternalError: A server is lost.
        TypeError: An argument has a wrong type.
        ValueError: An argument cannot be used, or `init()` has not been called.
    """
    name = "EASGDOptimizer"
    rate = factor(beta, "beta", name)
    if not 0 < rate <= 1:
        raise ValueError(f"{name}: beta must be > 0 and <= 1, got {beta!r}")
    frequencies = _frequencies(update_frequency, init_delay, prefetch, staleness, name)
    options = ExchangeOptions(*frequencies, payload, servers, process_set, data_parallel_set)
    return _wrapped(optimizer, named_parameters, options, name, lambda named: ElasticExchange(named, options, rate))


def _frequencies(
    update_frequency: int, init_delay: int, prefetch: int, staleness: int | None, operation: str
) -> tuple[int, int, int, int | None]:
    """Return the numbers of steps, checked."""
    updates = _count(update_frequency, "update_frequency", operation, 1)
    delay = _count(init_delay, "init_delay", operation, 0)
    ahead = _count(prefetch, "prefetch", operation, 0)
    if ahead > updates:
        raise ValueError(f"{operation}: prefetch must be from 0 to update_frequency ({updates}), got {ahead}")
    return updates, delay, ahead, None if staleness is None else _count(staleness, "staleness", operation, 0)


def _count(value: int, argument: str, operation: str, least: int) -> int:
    count = integer(value, argument, operation)
    if count < least:
        raise ValueError(f"{operation}: {argument} must be >= {least}, got {count}")
    return count


def _calls_closure_often(optimizer: torch.optim.Optimizer) -> bool:
    step = getattr(type(optimizer), "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _wrapped(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    options: ExchangeOptions,
    operation: str,
    make_exchange: Callable[[Sequence[tuple[str, torch.nn.Parameter]]], ServerExchange],
) -> _AsynchronousOptimizer:
    basics.size()  # raises before init()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{operation}: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if isinstance(optimizer, (_DistributedOptimizer, _AsynchronousOptimizer)):
        raise ValueError(
            f"{operation}: the optimizer is wrapped already. Wrap the torch optimizer itself; for synchronous training "
            "in a part of the ranks pass data_parallel_set"
        )
    _check_sets(options, operation)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = checked_names(named_parameters, params)
    named = [(names.get(param, f"number {index}"), param) for index, param in enumerate(params)]
    for name, param in named:
        if not param.is_floating_point():
            raise ValueError(
                f"{operation}: parameter {name!r} is of {param.dtype}, and only floating-point ones can be averaged: "
                "leave it out of the optimizer"
            )
    inner, reducing = optimizer, None
    if options.data_parallel_set is not None:
        reducing = optimizer = DistributedOptimizer(
            optimizer,
            [(name, param) for param, name in names.items()] if names else None,
            process_set=options.data_parallel_set,
        )
        reducing._reduction.compares_first = False  # the servers make the parameters equal, which differ until then
    wrapper: _AsynchronousOptimizer = subclass_instance(_AsynchronousOptimizer, optimizer)
    wrapper._inner, wrapper._reducing = inner, reducing
    wrapper._exchange = make_exchange(named)
    share_what_is_loaded(inner, wrapper)
    return wrapper


def _check_sets(options: ExchangeOptions, operation: str) -> None:
    """Make sure that this rank has a part, and that the rank that sends is in the process set."""
    check_registered(options.process_set)
    group, rank = options.data_parallel_set, basics.rank()
    if group is not None:
        check_registered(group)
        if not group.included():
            raise ValueError(f"{operation}: rank {rank} is not in its data_parallel_set, {group}")
    first = rank if group is None else (group.ranks or [rank])[0]
    if first not in (options.process_set.ranks or []):
        raise ValueError(
            f"{operation}: rank {first}, which sends and receives for rank {rank}, is not in process_set, "
            f"{options.process_set}"
        )
