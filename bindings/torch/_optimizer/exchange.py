"""The exchange between the parameters of a rank and those at the servers: when to send, to receive, and to combine.

Downpour: J. Dean et al., Large Scale Distributed Deep Networks, 2012. EASGD: S. Zhang, A. Choromanska, Y. LeCun, Deep
learning with Elastic Averaging SGD, 2015, https://arxiv.org/abs/1412.6651. The options are TorchMPI's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from horovodlike import basics
from horovodlike.process_set import ProcessSet
from horovodlike.torch.mpi_ops import allreduce, barrier, grouped_broadcast_

if TYPE_CHECKING:
    from horovodlike.torch.parameter_server import ParameterServer

LocalUpdate = Literal["gradient", "step"] | Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ExchangeOptions:
    """The options that Downpour and EASGD share, checked."""

    update_frequency: int
    init_delay: int
    prefetch: int
    staleness: int | None
    payload: Any
    servers: Any
    process_set: ProcessSet
    data_parallel_set: ProcessSet | None


class ServerExchange(ABC):
    """Counts the steps of a rank, and after each one sends and receives if this is due. For one thread.

    Attributes:
        server: The client of the servers; None during the warm-up, and where the rank is not in the process set.
        num_clients: The number of ranks that send and receive, after the warm-up.
        is_closed: True after `close`.
        needs_gradients: True if `before_step` reads the gradients.
    """

    server: ParameterServer | None = None
    num_clients = 0
    is_closed = False
    needs_gradients = False

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], options: ExchangeOptions) -> None:
        """Prepare the exchange of these parameters; `begin` starts it, after the warm-up."""
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._shapes = [param.shape for param in self._params]
        self._options = options
        group = options.data_parallel_set
        self._is_client = group is None or group.rank() == 0
        self._steps = -options.init_delay  # from the end of the warm-up on
        self._values: list[torch.Tensor] = []  # into which this rank receives
        self._sending: Any = None  # the handle of the last send that has not been waited for
        self._receiving: Any = None  # likewise
        self._is_received = False  # the values are those that the next integration uses, or will be
        if options.init_delay == 0:
            self.begin()

    @property
    def has_begun(self) -> bool:
        """True if the warm-up is over."""
        return self._steps >= 0

    def begin(self) -> None:
        """Give the servers the parameters of the set's first rank, and all clients these as well."""
        from horovodlike.torch.parameter_server import ParameterServer  # which nothing else needs

        process_set = self._options.process_set
        if process_set.included():
            self.server = ParameterServer(
                self._params,
                process_set=process_set,
                servers=self._options.servers,
                init="root",
                root=(process_set.ranks or [0])[0],
                staleness=self._options.staleness,
                payload=self._options.payload,
            )
            clients = allreduce(torch.tensor(int(self._is_client)), op=basics.Sum, process_set=process_set)
            self.num_clients = int(clients.item())
        if self._is_client:
            self._values = [torch.empty_like(param, memory_format=torch.contiguous_format) for param in self._params]
        self.pull()
        if process_set.included():
            barrier(process_set=process_set)  # no rank sends before all have received
        if self._is_client and self._options.prefetch == self._options.update_frequency:
            self._receive()

    def before_step(self) -> None:  # noqa: B027  # nothing to do
        """Take the values that the exchange needs from before the rank's own step."""

    def after_step(self, groups: Groups) -> None:
        """Count a step, and send and receive if this is due. `groups`: the optimizer's parameter groups."""
        self._steps += 1
        if self._steps < 0:
            return
        if self._steps == 0:
            self.begin()
            return
        self._check_shapes()
        is_due = self._steps % self._options.update_frequency == 0
        if self._is_client:
            with torch.no_grad():
                self._exchange(groups, is_due)
            if (self._steps + self._options.prefetch) % self._options.update_frequency == 0 and self._options.prefetch:
                self._receive()
        elif self.server is not None and self._options.staleness is not None:
            self._tick()
        if is_due:
            self._broadcast()

    @abstractmethod
    def _exchange(self, groups: Groups, is_due: bool) -> None:
        """Send, and combine the parameters with the servers' values if this is due."""

    def pull(self) -> None:
        """Copy the servers' values to the parameters, on all ranks of the data-parallel set."""
        self._check_shapes()
        if self._is_client:
            self._receive()
            self._copy(self._received())
        self._broadcast()

    def flush(self) -> None:
        """Wait until the servers have carried out this rank's updates, and have sent the values that it requested."""
        self._finish_send()
        self._finish_receive()

    def _finish_send(self) -> None:
        handle, self._sending = self._sending, None
        if handle is not None:
            handle.wait()

    def _finish_receive(self) -> None:
        handle, self._receiving = self._receiving, None
        if handle is not None:
            handle.wait()

    def close(self) -> None:
        """Send the remaining updates, and close the servers' client, together with all ranks of the process set."""
        server = self.server
        if server is not None and not self.is_closed:
            try:
                self._send_rest()
                self._finish_send()
            finally:  # the other ranks wait for this one in it
                self.is_closed, self.server = True, None
                server.close()
        self.is_closed, self.server = True, None

    def end(self) -> None:
        """Close the client of the servers without the other ranks, after an error."""
        if self.server is not None:
            self.server.end()
        self.is_closed, self.server = True, None

    def _send_rest(self) -> None:  # noqa: B027  # nothing is left
        """Send the updates that are not sent yet."""

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Have the servers add tensors, which must stay as they are until `flush`."""
        self._finish_send()
        self._sending = self._client().send(tensors, "add")

    def _client(self) -> ParameterServer:
        assert self.server is not None
        return self.server

    def _receive(self) -> None:
        self.flush()  # so that the values include this rank's updates, and their memory is free
        self._receiving = self._client().receive(out=self._values)
        self._is_received = True

    def _received(self) -> list[torch.Tensor]:
        """Return the servers' values, as they were when `_receive` was called; now, if it was not."""
        if not self._is_received:
            self._receive()
        self._finish_receive()
        self._is_received = False
        return self._values

    def _tick(self) -> None:
        """End a clock; wait while this rank is more than the staleness ahead of another one."""
        if self._options.staleness is not None:
            self._finish_send()  # the updates of this clock
            self._client().tick().wait()

    def _copy(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(self._params, values, strict=True):
                param.copy_(value)

    def _broadcast(self) -> None:
        """Give the parameters of the data-parallel set's first rank to its other ranks."""
        group = self._options.data_parallel_set
        if group is not None and group.ranks is not None and len(group.ranks) > 1:
            with torch.no_grad():
                grouped_broadcast_([param.detach() for param in self._params], group.ranks[0], process_set=group)

    def _check_shapes(self) -> None:
        for name, param, shape in zip(self._names, self._params, self._shapes, strict=True):
            if param.shape != shape:
                raise ValueError(
                    f"parameter {name!r} has changed its shape from {list(shape)} to {list(param.shape)}, and the "
                    "servers hold the old one: close() this optimizer and wrap a new one"
                )


class DownpourExchange(ServerExchange):
    """Adds the updates of each rank to the servers' values, and copies these from time to time."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: ExchangeOptions,
        send_frequency: int,
        local_update: LocalUpdate,
    ) -> None:
        """Prepare the exchange; `send_frequency` and `local_update` are as for `DownpourOptimizer`."""
        self._send_frequency = send_frequency
        self._local_update = local_update
        self.needs_gradients = local_update != "step"
        self._before: list[torch.Tensor] = []  # the parameters before the step
        self._groups: Groups = ()
        super().__init__(named, options)

    def begin(self) -> None:
        """Begin to accumulate as well."""
        super().begin()
        if self._is_client:
            self._accumulated = [torch.zeros_like(value) for value in self._values]
            self._spare = [torch.zeros_like(value) for value in self._values]  # sent, while the others accumulate

    def before_step(self) -> None:
        """Add the gradients to the accumulated ones; or keep the parameters, to compute the step's changes after it."""
        if not (self.has_begun and self._is_client):
            return
        self._check_shapes()
        if self.needs_gradients:
            for sum_, param in zip(self._accumulated, self._params, strict=True):
                if param.grad is not None:
                    sum_.add_(param.grad)
        else:
            self._before = [param.detach().clone() for param in self._params]

    def _exchange(self, groups: Groups, is_due: bool) -> None:
        self._groups = groups
        for sum_, param, before in zip(self._accumulated, self._params, self._before, strict=False):
            sum_.add_(param - before)
        if self._steps % self._send_frequency == 0:
            self._send_accumulated()
        self._tick()
        if is_due:
            self._copy(self._received())

    def _send_rest(self) -> None:
        if self._is_client and self._steps % self._send_frequency:
            with torch.no_grad():
                self._send_accumulated()

    def _send_accumulated(self) -> None:
        group_of = {param: group for group in self._groups for param in group["params"]}
        pairs = zip(self._accumulated, self._params, strict=True)
        self._send([self._update(sum_, group_of[param]) for sum_, param in pairs])
        self._accumulated, self._spare = self._spare, self._accumulated
        for sum_ in self._accumulated:
            sum_.zero_()

    def _update(self, accumulated: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if callable(self._local_update):
            return self._local_update(accumulated, group)
        return accumulated.mul_(-group["lr"]) if self.needs_gradients else accumulated


class ElasticExchange(ServerExchange):
    """Draws the parameters of each rank and the servers' values towards each other."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], options: ExchangeOptions, beta: float) -> None:
        """Prepare the exchange with a moving rate of `beta` divided by the number of clients."""
        self._beta = beta
        super().__init__(named, options)

    def _exchange(self, groups: Groups, is_due: bool) -> None:
        if is_due:
            differences = self._received()
            for param, value in zip(self._params, differences, strict=True):
                torch.sub(param, value, out=value).mul_(self._beta / self.num_clients)
                param.sub_(value)
            self._send(differences)
        self._tick()
