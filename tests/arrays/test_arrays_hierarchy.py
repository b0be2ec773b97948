"""Hierarchies: their layout for any number of ranks, their process sets, and allreduces by levels."""

from __future__ import annotations

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike import process_set
from horovodlike.arrays.hierarchy import layouts

REDUCTIONS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


@pytest.mark.parametrize("size", range(1, 38))
def test_layout_by_the_rank_modulo_three(size):
    (layout,) = layouts([[str(rank % 3)] for rank in range(size)])
    for rank in range(size):
        (group,) = (each for each in layout.groups if rank in each)
        assert group.index(rank) == rank // 3
        assert len(group) == size // 3 + (rank % 3 < size % 3)
    assert layout.is_cartesian == (size < 3 or size % 3 == 0)
    if layout.is_cartesian:
        assert sorted(rank for ranks in layout.across for rank in ranks) == list(range(size))
        assert all(len({rank // 3 for rank in ranks}) == 1 for ranks in layout.across)
    else:
        assert layout.across == ((0, 1, 2),)


def test_a_second_key_divides_each_group():
    keys = [["a", "x"], ["b", "x"], ["a", "x"], ["b", "y"], ["a", "y"], ["b", "y"], ["a", "y"]]
    outer, inner = layouts(keys)
    assert outer == (((0, 2, 4, 6), (1, 3, 5)), ((0, 1),), False)
    assert inner == (((0, 2), (4, 6), (1,), (3, 5)), ((0, 4), (1, 3)), False)


def test_groups_below_different_groups_may_differ_in_size():
    keys = [["a", "x"], ["a", "x"], ["a", "y"], ["a", "y"], ["b", "x"], ["b", "y"]]
    assert [layout.is_cartesian for layout in layouts(keys)] == [False, True]


def _by_modulo():
    rank, size = hvd.rank(), hvd.size()
    with hvd.Hierarchy(rank % 3) as hierarchy:
        assert hierarchy.intra.ranks == list(range(rank % 3, size, 3))
        assert hierarchy.is_cartesian == (size < 3 or size % 3 == 0)
        if hierarchy.is_cartesian:
            assert hierarchy.inter.ranks == [each for each in range(size) if each // 3 == rank // 3]
        else:
            assert (hierarchy.inter and hierarchy.inter.ranks) == ([0, 1, 2] if rank < 3 else None)
        (level,) = hierarchy.levels
        assert (level.name, level.intra, level.inter) == (str(rank % 3), hierarchy.intra, hierarchy.inter)
        _check_reductions(hierarchy)
    assert process_set.ids_and_ranks() == {0: list(range(size))}


def _check_reductions(hierarchy):
    for dtype in (np.float64, np.int32):
        mine = (np.arange(10) + 3 * hvd.rank() + 1).astype(dtype)
        for op in REDUCTIONS:
            for name in (None, "reduced"):
                expected = hvd.allreduce(mine, op=op)
                reduced = hierarchy.allreduce(mine, name, op)
                assert reduced.dtype == dtype
                np.testing.assert_allclose(reduced, expected, rtol=1e-12)
    assert hierarchy.allreduce(hvd.rank(), op=hvd.Max) == hvd.size() - 1


def _nested():
    """Racks of two nodes, and nodes of one rank or two."""
    rank = hvd.rank()
    node = {4: "0011", 3: "001"}[hvd.size()][rank]
    hierarchy = hvd.Hierarchy("rack", int(node))
    outer, inner = hierarchy.levels
    assert outer.name == "rack"
    assert inner.name == f"rack/{node}"
    assert outer.intra is hvd.global_process_set
    assert outer.inter.ranks == [rank]
    assert hierarchy.is_cartesian == (hvd.size() == 4)
    _check_reductions(hierarchy)
    hierarchy.remove()
    hierarchy.remove()
    with pytest.raises(ValueError, match="not registered"):
        hierarchy.allreduce(np.ones(2))


def _sets_of_others_stay():
    own = hvd.add_process_set([0, 2])
    with hvd.Hierarchy(hvd.rank() % 2) as hierarchy:
        if hvd.rank() % 2 == 0:
            assert hierarchy.intra is own
    assert own.process_set_id is not None
    hvd.remove_process_set(own)


def _refusals():
    rank, last = hvd.rank(), hvd.size() - 1
    for keys, text in (
        ((), "rank 1 has given no key"),
        (("a", "b"), "rank 1 has given 2 keys, and rank 0 1"),
        ((1.5,), "rank 1 has given the key 1.5; keys are strings or integers"),
        ((None,), "rank 1 has given the key None"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.Hierarchy(*(keys if rank == last else ("a",)))
    with hvd.Hierarchy(rank) as hierarchy:
        with pytest.raises(hvd.UnsupportedReductionError, match="Adasum"):
            hierarchy.allreduce(np.ones(2), op=hvd.Adasum)
        with pytest.raises(ValueError, match="op"):
            hierarchy.allreduce(np.ones(2), op=99)
    assert process_set.ids_and_ranks() == {0: [0, 1]}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sets_by_the_rank_modulo_three(ranks, size):
    ranks(size).run(_by_modulo)


@pytest.mark.parametrize("size", [3, 4])
def test_nested(ranks, size):
    ranks(size).run(_nested)


def test_sets_that_are_registered_already_are_used_and_stay(ranks):
    ranks(3).run(_sets_of_others_stay)


def test_refusals(ranks):
    ranks(2).run(_refusals)
