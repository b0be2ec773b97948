"""Many collectives of all kinds, in an order of its own on each rank, against NumPy."""

import pytest

STEPS = 20
PER_STEP = 50


def _mixed(seed: int) -> int:
    """Runs STEPS * PER_STEP collectives; in each step a rank enqueues them in its own order, then waits for all."""
    import numpy as np
    from support.collectives import enqueue, gathered

    from horovodlike import basics
    from horovodlike._engine import ops
    from horovodlike._engine.ops import Kind, ReduceOp

    rank, size = basics.rank(), basics.size()
    checked = 0
    for step in range(STEPS):
        plan = np.random.default_rng([seed, step])
        kinds = plan.integers(0, 4, PER_STEP)
        lengths = plan.choice([0, 1, 7, 1009, 20_011], PER_STEP)
        roots = plan.integers(0, size, PER_STEP)
        inputs = [[np.arange(n, dtype=np.int64) % 1000 * (other + 1) for other in range(size)] for n in lengths]
        mine = [per_rank[rank].copy() for per_rank in inputs]
        handles = {}
        for i in np.random.default_rng([seed, step, rank]).permutation(PER_STEP):
            name = f"mixed.{i}"
            if kinds[i] == 0:
                handles[i] = enqueue(Kind.ALLREDUCE, name, [mine[i]], op=ReduceOp.SUM)
            elif kinds[i] == 1:
                handles[i] = enqueue(Kind.BROADCAST, name, [mine[i]], root_rank=int(roots[i]))
            elif kinds[i] == 2:
                handles[i] = enqueue(Kind.ALLGATHER, name, [mine[i][: rank * 3]])
            else:
                handles[i] = enqueue(Kind.BARRIER, name, [])
        for i in np.random.default_rng([seed, step, rank, 2]).permutation(PER_STEP):
            if kinds[i] == 2:
                (got,) = gathered(handles[i], np.int64)
                expected = np.concatenate([inputs[i][other][: other * 3] for other in range(size)])
            else:
                ops.wait(handles[i])
                expected = sum(inputs[i]) if kinds[i] == 0 else inputs[i][roots[i]]
                expected = inputs[i][rank] if kinds[i] == 3 else expected
                got = mine[i]
            np.testing.assert_array_equal(got, expected)
            checked += 1
    return checked


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mixed_collectives(ranks, size):
    assert ranks(size).run(_mixed, 5) == [STEPS * PER_STEP] * size


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sixteen_ranks_run_a_thousand_mixed_collectives(fresh_ranks):
    assert fresh_ranks(16).run(_mixed, 6, timeout=200) == [STEPS * PER_STEP] * 16
