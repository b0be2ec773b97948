"""A reduction has the same bits on every rank, from run to run, and for any batch limit, slot size and timing."""

import hashlib

import pytest


def _digest(seed: int) -> str:
    import numpy as np
    from support.collectives import enqueue

    from horovodlike import basics
    from horovodlike._engine import ops
    from horovodlike._engine.ops import Kind, ReduceOp

    generator = np.random.default_rng([seed, basics.rank()])
    sizes = [1, 17, 1009, 70_001, 300_007, *(3 * n + 1 for n in range(60))]
    arrays = [generator.standard_normal(size).astype(kind) for size in sizes for kind in ("float32", "float16")]
    order = np.random.default_rng([seed, basics.rank(), 1]).permutation(len(arrays))
    handles = [enqueue(Kind.ALLREDUCE, f"bits.{i}", [arrays[i]], op=ReduceOp.AVERAGE) for i in order]
    ops.wait_all(handles)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


@pytest.mark.parametrize("size", [2, 3])
def test_same_bits_for_any_run_batch_limit_and_slot_size(fresh_ranks, size):
    configurations = [
        {"HOROVODLIKE_FUSION_THRESHOLD": limit, "HOROVODLIKE_SLOT_BYTES": slot, "HOROVODLIKE_SLOT_DEPTH": depth}
        for limit, slot, depth in [
            ("134217728", "262144", "4"),
            ("0", "4096", "2"),
            ("100000", "65536", "3"),
            ("134217728", "1048576", "4"),
            ("100000", "4096", "4"),
        ]
    ]
    digests = set()
    for configuration in configurations:
        pool = fresh_ranks(size, configuration)
        digests.update(pool.run(_digest, 11))
    assert len(digests) == 1


def test_same_bits_in_five_runs(ranks):
    digests = set()
    for _ in range(5):
        digests.update(ranks(4).run(_digest, 12))
    assert len(digests) == 1


def _sum_of_denormals(count: int) -> list[float]:
    import torch

    import horovodlike.torch as hvd

    tensor = torch.full((count,), 1e-40)
    torch.set_flush_denormal(hvd.rank() == 0)  # this thread alone, from now on
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"denormals.{count}")
    torch.set_flush_denormal(False)
    return tensor.unique().tolist()


@pytest.mark.parametrize("count", [5, 100_003])
def test_denormals_are_kept_whatever_the_framework_has_set(ranks, count):
    first, second = ranks(2).run(_sum_of_denormals, count)
    assert first == second == [pytest.approx(2e-40, rel=1e-3)]
