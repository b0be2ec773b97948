"""Tensors on a GPU behave as those on the CPU: the tests of the other modules, with a double of CUDA."""

from __future__ import annotations

import pytest
import test_torch_adasum
import test_torch_alltoall
import test_torch_autograd
import test_torch_compile
import test_torch_elastic
import test_torch_functions
import test_torch_gradient_compression
import test_torch_gradient_reducers
import test_torch_ops
import test_torch_optimizer
import test_torch_optimizer_gradients
import test_torch_optimizer_rules
import test_torch_reducescatter
import test_torch_sparse
import test_torch_sync_batch_norm
from support.gpus import on_gpu

import horovodlike.torch as hvd

pytestmark = pytest.mark.slow

CASES = {
    "ops": test_torch_ops.CASES,
    "alltoall": [
        *(test_torch_alltoall._grid, test_torch_alltoall._even, test_torch_alltoall._gradient),
        *(test_torch_alltoall._grouped, test_torch_alltoall._gradient_of_group),
    ],
    "autograd": test_torch_autograd.CASES,
    "functions": test_torch_functions.CASES,
    "compression": test_torch_gradient_compression.CASES,
    "reducers": test_torch_gradient_reducers.CASES,
    "optimizer": test_torch_optimizer.CASES,
    "gradients": test_torch_optimizer_gradients.CASES,
    "rules": test_torch_optimizer_rules.CASES,
    "reducescatter": [
        *(test_torch_reducescatter._grid, test_torch_reducescatter._large),
        *(test_torch_reducescatter._grouped_and_strided, test_torch_reducescatter._gradients),
    ],
    "batch norm": test_torch_sync_batch_norm.CASES,
    "adasum": [test_torch_adasum._definition],
    "sparse": [test_torch_sparse._allreduce],
}


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("what", CASES)
def test_as_on_the_cpu(gpu_ranks, what, size):
    for case in CASES[what]:
        gpu_ranks(size).run(on_gpu(case))


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_the_optimizer_equals_one_rank_with_the_whole_batch(gpu_ranks, size):
    for report in gpu_ranks(size).run(on_gpu(test_torch_optimizer._equals_one_rank)):
        for variant, difference, same_on_all_ranks in report:
            assert difference < 1e-6, variant
            assert same_on_all_ranks, variant


OTHERS = [
    pytest.param(
        (test_torch_compile._is_as_without, test_torch_compile._everything, "aot_eager"),
        marks=test_torch_compile.pytestmark,
    ),
    (test_torch_elastic._synchronizes, 1),
    (test_torch_sparse._training, hvd.Average, {}),
    (test_torch_sparse._training, hvd.Average, {"sparse_as_dense": True}),
    (test_torch_sparse._some_ranks_lack_it,),
    (test_torch_sparse._mixed,),
    (test_torch_sparse._unfrozen, None),
    (test_torch_sparse._unfrozen, 2),
]


@pytest.mark.thorough
@pytest.mark.parametrize("call", OTHERS, ids=lambda call: "-".join(map(str, (call[0].__name__.strip("_"), *call[2:]))))
def test_two_ranks_as_on_the_cpu(gpu_ranks, call):
    case, *arguments = call
    gpu_ranks(2).run(on_gpu(case), *arguments)
