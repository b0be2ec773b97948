"""The names of `horovodlike.torch`, and that it costs no more to import than it must."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys

import pytest

import horovodlike.torch as hvd
from horovodlike import basics

COLLECTIVES = {
    "allreduce": "tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set",
    "allreduce_async": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "allreduce_": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "allreduce_async_": "tensor, average, name, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce": "tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce_async": "tensors, average, name, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce_": "tensors, average, name, op, prescale_factor, postscale_factor, process_set",
    "grouped_allreduce_async_": "tensors, average, name, op, prescale_factor, postscale_factor, process_set",
    "allgather": "tensor, name, process_set",
    "allgather_async": "tensor, name, process_set",
    "grouped_allgather": "tensors, name, process_set",
    "grouped_allgather_async": "tensors, name, process_set",
    "broadcast": "tensor, root_rank, name, process_set",
    "broadcast_async": "tensor, root_rank, name, process_set",
    "broadcast_": "tensor, root_rank, name, process_set",
    "broadcast_async_": "tensor, root_rank, name, process_set",
    "grouped_broadcast": "tensors, root_rank, name, process_set",
    "grouped_broadcast_async": "tensors, root_rank, name, process_set",
    "grouped_broadcast_": "tensors, root_rank, name, process_set",
    "grouped_broadcast_async_": "tensors, root_rank, name, process_set",
    "reducescatter": "tensor, name, compression, op, process_set, prescale_factor, postscale_factor",
    "reducescatter_async": "tensor, name, op, process_set, prescale_factor, postscale_factor",
    "grouped_reducescatter": "tensors, name, compression, op, process_set, prescale_factor, postscale_factor",
    "grouped_reducescatter_async": "tensors, name, op, process_set, prescale_factor, postscale_factor",
    "sparse_allreduce_async": "tensor, name, op, process_set",
    "alltoall": "tensor, splits, name, process_set",
    "alltoall_async": "tensor, splits, name, process_set",
    "grouped_alltoall": "tensors, splits, name, process_set",
    "grouped_alltoall_async": "tensors, splits, name, process_set",
    "join": "device, process_set",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "barrier": "process_set, name",
    "broadcast_parameters": "params, root_rank, process_set",
    "broadcast_optimizer_state": "optimizer, root_rank, model, process_set",
    "broadcast_object": "obj, root_rank, name, process_set",
    "allgather_object": "obj, name, process_set",
    "check_consistency": "model, process_set",
    "DataParallel": "module, device_ids, output_device, dim",
    "SyncBatchNorm": "num_features, eps, momentum, affine, track_running_stats, process_set",
    "DistributedOptimizer": (
        "optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, "
        "num_groups, groups, sparse_as_dense, process_set, weight"
    ),
    "DownpourOptimizer": (
        "optimizer, named_parameters, update_frequency, init_delay, prefetch, send_frequency, local_update, staleness, "
        "payload, servers, process_set, data_parallel_set"
    ),
    "EASGDOptimizer": (
        "optimizer, named_parameters, update_frequency, init_delay, prefetch, beta, staleness, payload, servers, "
        "process_set, data_parallel_set"
    ),
    "set_batch_weight": "weight",
    "batch_weight": "",
}
BUILT = ("ccl", "cuda", "ddl", "gloo", "mpi", "nccl", "rocm")
OTHERS = [
    *(f"{what}_built" for what in BUILT),
    "gloo_enabled",
    "mpi_enabled",
    "mpi_threads_supported",
    "init",
    "shutdown",
    "is_initialized",
    "flight_recorder",
    "metrics",
    "start_timeline",
    "stop_timeline",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "collective_availability",
    "cross_rank",
    "cross_size",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Compression",
    "elastic",
    "nn",
    "Engine",
    "GradientReducer",
    "PowerSGD",
    "TopK",
    "HorovodInternalError",
    "ProcessSet",
    "global_process_set",
]


def test_the_names_are_the_ones_of_this_release():
    assert sorted(hvd.__all__) == sorted([*COLLECTIVES, *OTHERS])
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def test_what_is_built_in():
    built = {what for what in BUILT if getattr(hvd, f"{what}_built")()}
    # Gloo is what scripts take for "without MPI".
    assert built - {"cuda", "nccl"} == {"gloo"} | ({"mpi"} if importlib.util.find_spec("mpi4py") else set())
    assert hvd.gloo_enabled() and not hvd.mpi_enabled()
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()


def test_signatures_are_horovods():
    for name, parameters in COLLECTIVES.items():
        assert ", ".join(inspect.signature(getattr(hvd, name)).parameters) == parameters, name


def test_modules_that_scripts_import():
    from horovodlike.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm

    assert mpi_ops.allreduce is hvd.allreduce
    for name in basics.__all__:
        assert getattr(mpi_ops, name) is getattr(basics, name), name
        assert name in mpi_ops.__all__
    assert {*basics.__all__} - {*hvd.__all__} == {"is_homogeneous"}
    assert elastic is hvd.elastic
    assert elastic.state.TorchState is elastic.TorchState and elastic.sampler.ElasticSampler is elastic.ElasticSampler
    assert compression.Compression is hvd.Compression
    assert functions.broadcast_object is hvd.broadcast_object
    assert optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm


def test_import_does_not_load_the_compiler():
    script = "import sys, horovodlike.torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd="/", timeout=60).returncode == 0
