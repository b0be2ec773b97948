"""Properties of what profiles are made with: intervals, rows in which slices nest, clocks, and the last ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovodlike.timeline._batches import Event, RankBatch, TensorRequest, matched
from horovodlike.timeline._clocks import corrections
from horovodlike.timeline._intervals import common, total, union
from horovodlike.timeline._profile_trace import nested

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)
ROUNDING_NS = 1000


def _points(intervals: list[tuple[int, int]]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}


@settings(deadline=None)
@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_points(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    first, second = union(some), union(others)
    assert _points(first) == _points(some) and total(first) == len(_points(some))
    assert all(before[1] < behind[0] for before, behind in zip(first, first[1:], strict=False))
    assert _points(common(first, second)) == _points(first) & _points(second)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 50_000)), max_size=40), st.integers(-9, 9))
def test_slices_of_a_row_nest(times: list[tuple[int, int]], shift: int) -> None:
    slices: list[Event] = [{"ph": "X", "ts": begin / 1000, "dur": duration / 1000} for begin, duration in times]
    rows: dict[int, list[tuple[int, int]]] = {}
    seen = []
    for row, event, (begin, end) in nested(slices, shift):
        seen.append(id(event))
        assert begin == round(event["ts"] * 1000) + shift
        assert 0 <= round(event["dur"] * 1000) - (end - begin) <= (ROUNDING_NS if row < 31 else 50_000)
        assert row <= len(rows)
        rows.setdefault(row, []).append((begin, end))
    assert sorted(seen) == sorted(map(id, slices))
    for of_row in rows.values():
        for number, (begin, end) in enumerate(of_row):
            for other_begin, other_end in of_row[:number]:
                assert begin >= other_end or (other_begin <= begin and end <= other_end)


def _job(seed: int, offsets: list[int], num_batches: int) -> tuple[dict[int, list[RankBatch]], dict[int, int]]:
    """Return the batches of ranks whose clocks are off, and the rank that came last for each batch, by its number."""
    chance = random.Random(seed)
    batches: dict[int, list[RankBatch]] = {rank: [] for rank in range(len(offsets))}
    last = {}
    now = 10**12
    for number in range(1, num_batches + 1):
        requested = [now + chance.randrange(2_000_000) for _ in offsets]
        last[number] = max(range(len(offsets)), key=requested.__getitem__)
        begun = [max(requested) + 10_000 + chance.randrange(50_000) for _ in offsets]
        ended = [max(begun) + 100_000 + chance.randrange(50_000) for _ in offsets]
        for rank, offset in enumerate(offsets):
            batch = RankBatch(number, "ALLREDUCE", begun[rank] + offset, ended[rank] + offset, len(offsets))
            batch.requests.append(TensorRequest("a", requested[rank] + offset, 4, None, {}))
            batches[rank].append(batch)
        now = max(ended) + chance.randrange(1_000_000)
    return batches, last


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(-(10**10), 10**10), min_size=2, max_size=6), st.integers(5, 30))
def test_clocks_are_aligned_as_far_as_the_batches_bound_them(seed: int, offsets: list[int], num_batches: int) -> None:
    batches, last = _job(seed, offsets, num_batches)
    found = corrections((str(rank), of_rank) for rank, of_rank in batches.items())
    # All that the bounds leave open is the time of a wait or of a reduction.
    for rank, offset in enumerate(offsets):
        correction = found[str(rank)]
        assert correction is not None and abs(correction + offset - offsets[0]) < 1_000_000
        for batch in batches[rank]:
            batch.shift(correction)
    matches = matched(batches)
    assert len(matches) == num_batches
    for members in (match.members.values() for match in matches):
        assert max(batch.ready for batch in members) <= min(batch.begun for batch in members) + 300_000


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=2, max_size=5))
def test_ranks_of_one_clock_are_never_corrected_and_the_last_one_is_right(seed: int, skipped: list[int]) -> None:
    batches, last = _job(seed, [0] * len(skipped), 12)
    absent = random.Random(seed).randrange(6, 13)
    for batch in (each for of_rank in batches.values() for each in of_rank if each.number == absent):
        batch.num_ranks -= 1
    cut = {rank: of_rank[skipped[rank] :] for rank, of_rank in batches.items()}
    cut[0] = [batch for batch in cut[0] if batch.number != absent]  # rank 0 is not in its process set
    assert corrections(("host", of_rank) for of_rank in cut.values()) == {"host": 0}
    assert {*corrections((str(rank), of_rank) for rank, of_rank in cut.items()).values()} == {0}
    found = {next(iter(match.members.values())).number: match for match in matched(cut)}
    assert {*found} == {*range(1 + max(skipped), 13)} | {absent}
    for number, match in found.items():
        if number != absent:
            assert len(match.members) == len(skipped) and match.last == last[number]
            ready = [batch.ready for batch in match.members.values()]
            assert match.is_late is (max(ready) - min(ready) >= 1_000_000)


def test_clocks_of_batches_that_contradict_each_other_are_not_known() -> None:
    batches, _ = _job(1, [0, 0], 10)
    for batch in batches[1][::2]:
        batch.shift(20_000_000)
    assert corrections([("a", batches[0]), ("b", batches[1])]) == {"a": 0, "b": None}
    assert len(matched(batches)) == 5


def test_a_request_that_is_older_than_the_timeline_proves_nothing() -> None:
    batches, _ = _job(1, [0, 50_000_000], 10)
    for batch in batches[1]:
        batch.clipped = True
    assert corrections([("a", batches[0]), ("b", batches[1])]) == {"a": 0, "b": 0}
    assert matched(batches) == []


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_end_of_a_batch_on_a_gpu_bounds_no_clock(on_gpu: bool) -> None:
    batches, _ = _job(2, [0, 50_000_000], 10)
    for rank in batches:
        for batch in batches[rank]:
            batch.on_gpu = on_gpu
            if on_gpu:  # only given to the device
                batch.ended = batch.begun + 1
    assert corrections([("a", batches[0]), ("b", batches[1])])["b"] == pytest.approx(-50_000_000, abs=1_000_000)
