"""horovodlike for PyTorch: ``import horovodlike.torch as hvd``.

Example::

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The modules behind this façade:

* :mod:`horovodlike.torch.mpi_ops`: the collectives; :mod:`horovodlike.torch.compression`: compression of gradients
* :mod:`horovodlike.torch.optimizer`: `DistributedOptimizer`
* :mod:`horovodlike.torch.asynchronous`: `DownpourOptimizer`, `EASGDOptimizer`
* :mod:`horovodlike.weighting`: averages over samples instead of ranks
* :mod:`horovodlike.torch.data_parallel`: several devices in one process
* :mod:`horovodlike.torch.sync_batch_norm`: batch normalization over the batches of all ranks
* :mod:`horovodlike.torch.functions`: broadcasts of parameters, optimizer state and objects, and allgather of objects
* :mod:`horovodlike.torch.elastic`: training that continues when ranks come and go
* :mod:`horovodlike.torch.consistency`: a check that all ranks hold the same model
* :mod:`horovodlike.torch.nn`: layers that are split among ranks
* :mod:`horovodlike.torch.training_loop`: `Engine`, a training loop
"""

from horovodlike._engine.metrics import flight_recorder, metrics
from horovodlike.availability import collective_availability
from horovodlike.basics import *  # the names that all bindings share
from horovodlike.errors import HorovodInternalError
from horovodlike.process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodlike.timeline import start_timeline, stop_timeline
from horovodlike.torch import _compiled_ops, elastic, nn  # noqa: F401  # the first lets torch.compile trace collectives
from horovodlike.torch.asynchronous import DownpourOptimizer, EASGDOptimizer
from horovodlike.torch.compression import Compression, GradientReducer, PowerSGD, TopK
from horovodlike.torch.consistency import check_consistency
from horovodlike.torch.data_parallel import DataParallel
from horovodlike.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovodlike.torch.mpi_ops import *  # the collectives
from horovodlike.torch.optimizer import DistributedOptimizer
from horovodlike.torch.sync_batch_norm import SyncBatchNorm
from horovodlike.torch.training_loop import Engine
from horovodlike.weighting import batch_weight, set_batch_weight

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DataParallel",
    "DistributedOptimizer",
    "DownpourOptimizer",
    "EASGDOptimizer",
    "Engine",
    "GradientReducer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PowerSGD",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "TopK",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "batch_weight",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_consistency",
    "collective_availability",
    "cross_rank",
    "cross_size",
    "flight_recorder",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_alltoall",
    "grouped_alltoall_async",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "nn",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "set_batch_weight",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
