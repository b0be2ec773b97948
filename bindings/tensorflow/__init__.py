"""horovodlike for TensorFlow 2: ``import horovodlike.tensorflow as hvd``.

Example::

    hvd.init()
    hvd.broadcast_variables(model.weights, root_rank=0)
    tape = hvd.DistributedGradientTape(tape)

`tape.gradient` then returns gradients that are reduced over the ranks.
"""

from typing import Any

from horovodlike._engine.metrics import flight_recorder, metrics
from horovodlike.arrays.consistency import check_consistency
from horovodlike.availability import collective_availability
from horovodlike.basics import *  # the names that all bindings share
from horovodlike.errors import HorovodInternalError
from horovodlike.process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovodlike.tensorflow import elastic
from horovodlike.tensorflow._weights import set_batch_weight
from horovodlike.tensorflow.compression import Compression
from horovodlike.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovodlike.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovodlike.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from horovodlike.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    check_num_rank_power_of_2,
    grouped_allgather,
    grouped_allreduce,
    grouped_broadcast,
    grouped_reducescatter,
    handle_average_backwards_compatibility,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from horovodlike.tensorflow.optimizer import DistributedOptimizer
from horovodlike.timeline import start_timeline, stop_timeline
from horovodlike.weighting import batch_weight

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "batch_weight",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_consistency",
    "check_num_rank_power_of_2",
    "collective_availability",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "flight_recorder",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "set_batch_weight",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horovodlike.tensorflow.sync_batch_norm import SyncBatchNormalization  # imports Keras

    globals()[name] = SyncBatchNormalization
    return SyncBatchNormalization
