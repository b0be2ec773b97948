"""The strategy `"horovodlike"` for Lightning's `Trainer`: importing this module registers it.

Example::

    import lightning.pytorch as pl
    import horovodlike.torch.lightning

    trainer = pl.Trainer(strategy="horovodlike")

Start the script with `hvdrun`, or with any other launcher that horovodlike knows. Works with `lightning` and with
`pytorch_lightning`: with the one that the script has imported before, or else with the one that is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch

from horovodlike import basics
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch import mpi_ops
from horovodlike.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovodlike.torch.optimizer import DistributedOptimizer
from horovodlike.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["HorovodlikeEnvironment", "HorovodlikeStrategy"]


def _installed() -> str:
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            return name
    raise ModuleNotFoundError("horovodlike.torch.lightning needs Lightning: pip install 'horovodlike[lightning]'")


_PACKAGE = _installed()
_strategies: Any = import_module(f"{_PACKAGE}.strategies")
_environments: Any = import_module(f"{_PACKAGE}.plugins.environments")
_layer_plugins: Any = import_module(f"{_PACKAGE}.plugins.layer_sync")
_rank_zero_only = import_module(f"{_PACKAGE}.utilities.rank_zero").rank_zero_only
_Metric = import_module("torchmetrics").Metric  # Lightning needs torchmetrics

_OPS = {
    "mean": basics.Average,
    "avg": basics.Average,
    "sum": basics.Sum,
    "min": basics.Min,
    "max": basics.Max,
    "product": basics.Product,
}
_NEVER = 1 << 30  # more backward passes than a step can have, so that no hook hands a gradient over


class HorovodlikeEnvironment(_environments.ClusterEnvironment):
    """Lightning's interface to the ranks of a horovodlike job. `init()` has to be called before.

    Args:
        process_set: The ranks that train together.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        """Describe the ranks of a registered process set."""
        super().__init__()
        self._process_set = process_set

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has started all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """The variable MASTER_ADDR, which `hvdrun` sets; for strategies of torch.distributed."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """The variable MASTER_PORT, which `hvdrun` sets; for strategies of torch.distributed."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Return whether this process is in a job."""
        return basics.is_initialized()

    def world_size(self) -> int:
        """Return the number of ranks that train together."""
        return len(_ranks(self._process_set))

    def global_rank(self) -> int:
        """Return this process's index among the ranks that train together."""
        return self._process_set.rank() or 0

    def local_rank(self) -> int:
        """Return this process's local rank on its host."""
        return basics.local_rank()

    def node_rank(self) -> int:
        """Return the number of this process's host."""
        return basics.cross_rank()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has decided."""


class HorovodlikeStrategy(_strategies.ParallelStrategy):
    """Trains one model on all ranks of a job, with a `DistributedOptimizer` around each optimizer.

    Starts the job (`init()`) if the script has not. All ranks begin with the parameters, buffers and optimizer states
    of the first rank. After each backward pass, except passes that only accumulate, gradients are averages over the
    ranks: `on_after_backward`, clipping and the optimizer see them as in one process with the whole batch. The learning
    rate is not scaled. Each rank keeps its own buffers, such as the statistics of batch normalization.

    Args:
        process_set: The registered set of the ranks that train together; this rank has to be a member.
        accelerator: As in Lightning's strategies, like the next three arguments.
        parallel_devices: The devices of this host: one for each of its ranks, or a single one for every rank.
        checkpoint_io: How checkpoints are written.
        precision_plugin: How precision is handled.
        **options: Arguments of each `DistributedOptimizer`: `compression`, `op`, `groups` and so on.

    Raises:
        TypeError: An option is no argument of `DistributedOptimizer`, or the strategy sets it.
        ValueError: The set is not registered, or this rank is no member of it; or `op` is Adasum.
    """

    strategy_name = "horovodlike"
    optimizers: list[Any]

    def __init__(
        self,
        process_set: ProcessSet = global_process_set,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        """Join the job."""
        for name in ("named_parameters", "backward_passes_per_step"):
            if name in options:
                raise TypeError(f"HorovodlikeStrategy: {name} is set by the strategy: leave it out")
        if options.get("op") == basics.Adasum:
            raise ValueError(
                "HorovodlikeStrategy: op=Adasum reduces after the step, so there are no gradients that Lightning could "
                "clip or show: use Average or Sum, or DistributedOptimizer in a script of your own"
            )
        basics.init()
        registered_id(process_set)  # raises unless this rank is a member
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=HorovodlikeEnvironment(process_set),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._process_set = process_set
        self._options = options
        self._accumulates = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy under its name."""
        strategy_registry.register(cls.strategy_name, cls, description="DistributedOptimizer of horovodlike")

    @property
    def is_distributed(self) -> bool:
        """True: Lightning gives each rank its share of the data."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of shares of the data, and the number of this rank's share."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices: list[torch.device] = self.parallel_devices
        return devices[self.local_rank if len(devices) > 1 else 0]

    def set_world_ranks(self) -> None:
        """Tell Lightning the global rank. Lightning calls this when it has chosen the devices.

        Raises:
            ValueError: The number of devices does not match the number of ranks on this host.
        """
        devices, ranks = self.parallel_devices, basics.local_size()
        if len(devices) != 1 and (len(devices) < ranks or (devices[0].type == "cpu" and len(devices) != ranks)):
            raise ValueError(
                f'strategy="horovodlike" runs one process for each device, and this host has {len(devices)} devices '
                f"(Trainer(devices=...)) and {ranks} processes: start as many with hvdrun -np, or leave devices out"
            )
        _rank_zero_only.rank = self.global_rank

    def model_to_device(self) -> None:
        """Move the model to the device of this rank."""
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert batch normalization if that is asked for, and broadcast the first rank's parameters and buffers."""
        if isinstance(self._layer_sync, _layer_plugins.TorchSyncBatchNorm):  # torch's own layer needs torch.distributed
            model = SyncBatchNorm.convert_sync_batchnorm(model, self._process_set)
        elif self._layer_sync is not None:
            model = self._layer_sync.apply(model)
        for module in model.modules():
            if isinstance(module, _Metric) and module.dist_sync_fn is None:
                module.dist_sync_fn = partial(_gather_of_all, process_set=self._process_set)
                module.distributed_available_fn = basics.is_initialized
        values = [*model.named_parameters(), *model.named_buffers()]
        broadcast_parameters([(f"lightning.{name}", value) for name, value in values], self._root, self._process_set)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Wrap the optimizers that `configure_optimizers` returns."""
        super().setup_optimizers(trainer)
        plain, self.optimizers = self.optimizers, []
        for optimizer in plain:
            broadcast_optimizer_state(optimizer, self._root, process_set=self._process_set)
            named = self.lightning_module.named_parameters()
            wrapped = DistributedOptimizer(optimizer, named, process_set=self._process_set, **self._options)
            self.optimizers = [*self.optimizers, wrapped]

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, and reduce the gradients before any hook or callback sees them."""
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        if not self._accumulates:
            self._synchronize()
        reduced: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(reduced)
        return reduced

    def _synchronize(self) -> None:
        chosen = self.optimizers
        if len(chosen) > 1:  # only the optimizers with new gradients on any rank
            has_new = torch.tensor([optimizer._reduction.is_in_progress() for optimizer in chosen], device="cpu")
            has_new = mpi_ops.allreduce(has_new, op=basics.Max, process_set=self._process_set)
            chosen = [optimizer for optimizer, new in zip(chosen, has_new.tolist(), strict=True) if new]
        for optimizer in chosen:
            optimizer.synchronize()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate gradients, without reducing them."""
        self._accumulate(True)
        try:
            yield
        finally:
            self._accumulate(False)

    def _accumulate(self, accumulates: bool) -> None:
        self._accumulates = accumulates
        for optimizer in self.optimizers:
            optimizer.set_backward_passes_per_step(_NEVER if accumulates else 1)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Do the optimizer's step, with gradients that `backward` has reduced.

        Raises:
            RuntimeError: Manual optimization has called `loss.backward()`, so the gradients have not been reduced.
        """
        if optimizer._reduction.is_in_progress():
            raise RuntimeError(
                "there are gradients of a backward pass that Lightning does not know of: in manual optimization write "
                "self.manual_backward(loss) instead of loss.backward()"
            )
        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction of a tensor over the ranks; return any other object unchanged.

        Args:
            tensor: A tensor of the same shape on all ranks. The mean of integers has torch's default dtype.
            group: A process set, or None for the ranks that train together.
            reduce_op: "mean", "sum", "min", "max", "product", or a `ReduceOp` of torch.distributed; None is "sum".

        Raises:
            ValueError: There is no such operation.
            TypeError: The group is no process set.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "sum" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in _OPS:
            raise ValueError(f"reduce_op={reduce_op!r} is none of {', '.join(_OPS)}")
        op, process_set = _OPS[name], self._set_of(group)
        if op == basics.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            return mpi_ops.allreduce(tensor.double(), op=op, process_set=process_set).to(torch.get_default_dtype())
        return mpi_ops.allreduce(tensor, op=op, process_set=process_set)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked: [...] -> [ranks, ...].

        Args:
            tensor: A tensor of the same shape on all ranks.
            group: A process set, or None for the ranks that train together.
            sync_grads: True for a differentiable result: the gradient of a tensor is then the sum over all ranks.
        """
        process_set = self._set_of(group)
        row = tensor.unsqueeze(0)
        if not sync_grads:
            return mpi_ops.allgather(row.detach(), process_set=process_set)
        if row.requires_grad:  # the gradient of allgather is the average
            row.register_hook(lambda grad: grad * len(_ranks(process_set)))  # type: ignore[no-untyped-call]
        return mpi_ops.allgather(row, process_set=process_set)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of the rank with index `src` among the ranks that train together."""
        return broadcast_object(obj, _ranks(self._process_set)[src], process_set=self._process_set)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks that train together have called this."""
        mpi_ops.barrier(self._process_set)

    def teardown(self) -> None:
        """Remove the hooks from the parameters, so that another run can wrap them again."""
        for optimizer in self.optimizers:
            optimizer._reduction.remove_hooks()
        super().teardown()

    @property
    def _root(self) -> int:
        return _ranks(self._process_set)[0]

    def _set_of(self, group: Any) -> ProcessSet:
        if group is None or group is torch.distributed.group.WORLD:  # Lightning passes WORLD if it exists
            return self._process_set
        if not isinstance(group, ProcessSet):
            raise TypeError(f"group must be a process set of horovodlike, got {group!r}")
        return group


def _ranks(process_set: ProcessSet) -> list[int]:
    ranks = process_set.ranks
    assert ranks is not None  # after `init()`
    return ranks


def _gather_of_all(tensor: torch.Tensor, group: Any = None, *, process_set: ProcessSet) -> list[torch.Tensor]:
    """Return the tensors of all ranks, whose sizes may differ in all dimensions; for the metrics of torchmetrics."""
    shape = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu").unsqueeze(0)
    shapes = mpi_ops.allgather(shape, process_set=process_set)
    values = mpi_ops.allgather(tensor.reshape(-1), process_set=process_set)
    parts = torch.split(values, shapes.prod(dim=1).tolist())
    return [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]


HorovodlikeStrategy.register_strategies(_strategies.StrategyRegistry)
