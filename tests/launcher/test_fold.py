from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.supervisor.failure_attribution import SETTLE_S
from horovodlike.launcher.supervisor.fold import LEFT_OUT, Block, Fold

OUT, ERR = FrameKind.STDOUT, FrameKind.STDERR
WINDOW = 0.5
TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n'
VALUE_ERROR = TRACEBACK + b"ValueError: no such batch\n"
LOST_PEER = TRACEBACK + b"horovodlike.errors.JobBrokenError: rank 3 has gone\n"


def seen(blocks: Iterable[Block]) -> list[tuple[list[int], bytes]]:
    return [([*block.ranks], block.text) for block in blocks]


def test_a_line_of_all_ranks_is_shown_once_and_at_once() -> None:
    fold = Fold(3)
    assert fold.add(0, OUT, b"epoch 1\r\n", 0.0) == fold.add(2, OUT, b"epoch 1\r\n", 0.1) == []
    assert fold.deadline == WINDOW
    assert seen(fold.add(1, OUT, b"epoch 1\r\n", 0.2)) == [([0, 1, 2], b"epoch 1\r\n")]
    assert fold.deadline is None


def test_a_line_of_some_ranks_waits_for_the_window() -> None:
    fold = Fold(4)
    fold.add(0, OUT, b"a\n", 0.0)
    fold.add(2, OUT, b"a\n", 0.4)
    assert fold.due(0.49) == []
    assert seen(fold.due(WINDOW)) == [([0, 2], b"a\n")]
    fold.add(3, OUT, b"a\n", 0.6)
    assert seen(fold.due(1.1)) == [([3], b"a\n")]


def test_ranks_that_have_ended_are_not_waited_for_and_keep_their_part() -> None:
    fold = Fold(4)
    for rank in (0, 1):
        assert fold.add(rank, OUT, b"bye", 0.0) == fold.finish(rank, 0.0) == []
    assert fold.add(2, OUT, b"bye\n", 0.0) == []
    assert seen(fold.finish(3, 0.1)) == [([0, 1, 2], b"bye\n")]
    assert seen(fold.add(2, OUT, b"last\n", 0.2)) == [([2], b"last\n")]


def test_lines_of_one_rank_among_lines_of_all() -> None:
    fold, shown = Fold(3), []
    for rank in range(3):
        shown += fold.add(rank, OUT, b"start\nshard %d\nready\n" % rank, 0.0)
    assert seen(shown) == [
        ([0, 1, 2], b"start\n"),
        ([0], b"shard 0\n"),
        ([1], b"shard 1\n"),
        ([2], b"shard 2\n"),
        ([0, 1, 2], b"ready\n"),
    ]


def test_streams_are_not_mixed() -> None:
    fold = Fold()
    fold.add(0, OUT, b"a\n", 0.0)
    fold.add(0, ERR, b"a\n", 0.0)
    fold.add(1, ERR, b"a\n", 0.0)
    assert [(block.stream, block.ranks) for block in fold.flush()] == [(OUT, (0,)), (ERR, (0, 1))]


def test_a_progress_bar_passes_through() -> None:
    fold = Fold(2)
    assert seen(fold.add(0, ERR, b"\r 1%", 0.0)) == [([0], b"\r 1%")]
    assert seen(fold.add(0, ERR, b"\r 2%", 0.0)) == [([0], b"\r 2%")]
    assert seen(fold.add(1, ERR, b"\r 2%", 0.0)) == [([1], b"\r 2%")]
    assert seen(fold.add(0, ERR, b"\r100%\nnext\n", 0.0)) == [([0], b"\r100%\n")]
    assert seen(fold.add(0, ERR, b"3\b4", 0.0)) == []
    assert seen(fold.due(WINDOW)) == [([0], b"next\n"), ([0], b"3\b4")]
    assert seen(fold.finish(0, WINDOW)) == [([0], b"\n")]


def test_a_traceback_is_one_block() -> None:
    fold = Fold(3)
    for part in VALUE_ERROR.splitlines(keepends=True):
        fold.add(0, ERR, part, 0.0)
        fold.add(1, ERR, part.replace(b"line 3", b"line 4"), 0.0)
    assert fold.add(2, ERR, VALUE_ERROR, 0.1) == []
    shown = fold.due(WINDOW)
    assert seen(shown) == [([0, 2], VALUE_ERROR), ([1], VALUE_ERROR.replace(b"line 3", b"line 4"))]
    assert all(block.traceback for block in shown)


def test_a_traceback_without_an_end_is_shown_in_time() -> None:
    fold = Fold(2)
    fold.add(0, ERR, TRACEBACK, 0.0)
    assert fold.deadline == WINDOW
    assert seen(fold.due(WINDOW)) == [([0], TRACEBACK)]
    fold.add(0, ERR, TRACEBACK, 1.0)
    fold.add(0, OUT, b"other\n", 1.1)
    assert seen(fold.due(2.0)) == [([0], TRACEBACK), ([0], b"other\n")]


@pytest.mark.parametrize("size", [2, 3, None])
def test_the_first_failure_comes_first_and_those_because_of_it_follow_in_a_line(size: int | None) -> None:
    fold, others = Fold(size), range((size or 4) - 1)
    for rank in others:
        fold.add(rank, ERR, LOST_PEER.replace(b"line 3", b"line %d" % rank), 0.0)
    assert seen(fold.due(WINDOW)) == []
    shown = fold.add(others.stop, ERR, VALUE_ERROR, SETTLE_S - WINDOW)
    for rank in (*others, others.stop):
        shown += fold.finish(rank, SETTLE_S)
    while fold.deadline is not None:
        shown += fold.due(fold.deadline)
    line = b"horovodlike.errors.JobBrokenError: rank 3 has gone" + LEFT_OUT + b"\n"
    assert seen(shown) == [([others.stop], VALUE_ERROR), ([*others], line)]
    assert [block.traceback for block in shown] == [True, False]


def test_a_flood_does_not_wait() -> None:
    fold, line = Fold(2), b"1" * 60_000 + b"\n"
    early = [block for _ in range(500) for block in fold.add(0, OUT, line, 0.0)]
    assert len(early) > 200
    assert len([*early, *fold.flush()]) == 500


PIECES = [b"a\n", b"b\n", b"c\n", b"par", b"tial\n", b"\r 5%", b"x\r", b"\n", *VALUE_ERROR.splitlines(keepends=True)]
WRITES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from([OUT, ERR]),
        st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join),
        st.sampled_from([0.0, 0.01, 0.3]),
    ),
    max_size=30,
)


@pytest.mark.parametrize("size", [None, 4])
@given(writes=WRITES)
def test_nothing_is_lost_repeated_late_or_out_of_order(
    size: int | None, writes: list[tuple[int, FrameKind, bytes, float]]
) -> None:
    fold, now = Fold(size, WINDOW), 0.0
    came: dict[tuple[int, FrameKind], list[tuple[float, int]]] = {}  # when how many bytes were there
    written: dict[tuple[int, FrameKind], bytes] = {}
    shown: dict[tuple[int, FrameKind], bytes] = {}

    def show(blocks: Iterable[Block]) -> None:
        for block in blocks:
            for rank in block.ranks:
                key = rank, block.stream
                shown[key] = shown.get(key, b"") + block.text

    for rank, stream, data, wait in writes:
        while fold.deadline is not None and fold.deadline <= now + wait:
            show(fold.due(fold.deadline))
        now += wait
        key = rank, stream
        written[key] = written.get(key, b"") + data
        came.setdefault(key, []).append((now, len(written[key])))
        show(fold.add(rank, stream, data, now))
        for key, text in written.items():  # what came before the window is shown, but for unfinished lines
            ready = max((end for at, end in came[key] if at <= now - WINDOW), default=0)
            whole = text.rfind(b"\n", 0, ready) + 1
            assert len(shown.get(key, b"")) >= whole
    for rank in range(4):
        show(fold.finish(rank, now))
    show(fold.flush())
    for key, text in written.items():
        assert shown[key].rstrip(b"\n") == text.rstrip(b"\n")
        assert shown[key].startswith(text)
    assert fold.deadline is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_both_streams_of_a_rank_stay_in_order(turns: list[int]) -> None:
    fold, counts = Fold(), [0] * 4
    for rank in turns:
        fold.add(rank, (OUT, ERR)[counts[rank] % 2], b"%d\n" % counts[rank], 0.0)
        counts[rank] += 1
    blocks = fold.flush()
    for rank in range(4):
        assert [int(block.text) for block in blocks if rank in block.ranks] == list(range(counts[rank]))
    assert len(blocks) == max(counts)  # all ranks write the same numbers
