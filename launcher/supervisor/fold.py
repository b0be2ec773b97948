"""Shows lines and tracebacks that several ranks write within a short time once, with their ranks.

A :class:`Fold` is pure: bytes and the time go in, blocks and a deadline come out. A block waits for other ranks for at
most :data:`WINDOW_S`; an error because of a lost peer, of which one line is shown, waits longer for its cause. A block
is not shown before what its ranks have written earlier, so that the lines of each rank stay in their order. Progress
bars, that is text with carriage returns, wait for nothing but the lines before them.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.supervisor.failure_attribution import SETTLE_S, TRACEBACK, names_lost_peer
from horovodlike.launcher.supervisor.printer import LONGEST_PARTIAL

WINDOW_S = 0.5
"""How long a line waits for the same line of other ranks: longer than ranks that work in step are apart on a crowded
machine, and too short to be felt by somebody who watches."""
LEFT_OUT = b" (traceback left out)"
_MOST_BYTES = 4 * 1024 * 1024  # of blocks that wait
_OVERHEAD = 1024  # a block counts as that many bytes more
_ROOM = 1024  # so many blocks can usually be put between two before all get new numbers for their order
_BATCH = 0.2  # of the window: blocks whose deadlines are so close are shown together


@dataclass(eq=False)
class Block:
    """A line, a whole traceback, or a piece of a progress bar.

    Attributes:
        stream: The stream to which it was written.
        text: The bytes.
        deadline: When it must be shown.
        ranks: The ranks that have written it.
        traceback: Whether it is a whole traceback.
        extra: How many seconds it waits longer than other blocks.
        for_all: Whether other ranks may join.
        missing: How many of the ranks that still write may join, or write the cause.
        number: Greater than that of each block that was made before.
        order: Greater than that of each block that must be shown before.
        before: Blocks that must be shown before.
        shown: Whether it is shown.
    """

    stream: FrameKind
    text: bytes
    deadline: float
    ranks: set[int]
    traceback: bool = False
    extra: float = 0
    for_all: bool = True
    missing: float = 0
    number: int = 0
    order: float = 0
    before: "set[Block]" = field(default_factory=set)
    shown: bool = False


@dataclass
class _Source:
    """One stream of one rank: its unfinished line, or the fact that this was passed on since it is a progress bar."""

    partial: bytes = b""
    passed_on: bool = False


@dataclass
class _Alike:
    """The blocks with one text, in the order in which they were made."""

    blocks: list[Block] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)  # by rank: the number of the last block that it has written

    def next_of(self, rank: int) -> Block | None:
        """Return the first block that a rank may join; it can join none of those before, now or later."""
        index = bisect_right(self.blocks, self.reached.get(rank, 0), key=lambda each: each.number)
        return self.blocks[index] if index < len(self.blocks) else None


@dataclass
class _Traceback:
    """The traceback that a rank is writing."""

    stream: FrameKind
    text: bytes
    deadline: float


class Fold:
    """The lines of all ranks that wait to be shown.

    Times are those of one clock that never goes back, in seconds. What a method returns must be shown in that order.
    """

    def __init__(self, num_ranks: int | None = None, window: float = WINDOW_S) -> None:
        """Start with nothing that waits.

        Args:
            num_ranks: How many ranks write; what all of them have written is shown at once. None if it may change.
            window: How long a line waits at most, in seconds.
        """
        self._running = math.inf if num_ranks is None else num_ranks
        self._finished: set[int] = set()
        self.window = window
        """How long a line waits at most: the first of the ranks has written it that long before the deadline."""
        self._sources: dict[tuple[int, FrameKind], _Source] = {}
        self._tracebacks: dict[int, _Traceback] = {}  # by rank; the one with the first deadline comes first
        self._blocks: list[Block] = []  # sorted by `order`
        self._alike: dict[tuple[FrameKind, bytes], _Alike] = {}
        self._last: dict[int, Block] = {}  # by rank: the last of its blocks that wait
        self._number = 0
        self._bytes = 0
        self._due = math.inf  # the first deadline of the blocks
        self._is_ready = False  # a block may be shown before its deadline

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`due` at the latest; None while nothing waits."""
        first = min(self._due, self._due_of_tracebacks)
        return None if first == math.inf else first

    @property
    def _due_of_tracebacks(self) -> float:
        return next(iter(self._tracebacks.values())).deadline if self._tracebacks else math.inf

    def add(self, rank: int, stream: FrameKind, data: bytes, now: float) -> list[Block]:
        """Take the bytes that a rank has written; return the blocks that wait no longer."""
        source = self._sources.setdefault((rank, stream), _Source())
        for text, is_line in _split(source, data):
            if is_line:
                self._add_line(rank, stream, text, now)
            else:
                self._cut(rank)
                self._pass_on(rank, stream, text, now)
        return self.due(now)

    def finish(self, rank: int, now: float) -> list[Block]:
        """End the unfinished lines of a rank that writes no more; return the blocks that wait no longer."""
        for stream in (FrameKind.STDOUT, FrameKind.STDERR):
            source = self._sources.pop((rank, stream), _Source())
            if source.partial:
                self._add_line(rank, stream, source.partial + b"\n", now)
            elif source.passed_on:
                self._cut(rank)
                self._pass_on(rank, stream, b"\n", now)
        self._cut(rank)
        if rank not in self._finished:
            self._finished.add(rank)
            self._running -= 1
            for block in self._blocks:
                if block.for_all and (rank not in block.ranks or block.extra):
                    block.missing -= 1
                    self._is_ready = self._is_ready or _can_be_shown(block)
        return self.due(now)

    def due(self, now: float) -> list[Block]:
        """Return the blocks that wait no longer."""
        while self._tracebacks and self._due_of_tracebacks <= now:
            self._cut(next(iter(self._tracebacks)))
        if self._bytes > _MOST_BYTES:
            return self._show({*self._blocks})
        if self._due <= now:
            soon = now + self.window * _BATCH
            return self._show({block for block in self._blocks if block.deadline <= soon})
        return self._show(set()) if self._is_ready else []

    def flush(self) -> list[Block]:
        """Return all that waits, but for unfinished lines."""
        return self.due(float("inf"))

    # The lines of one rank.

    def _add_line(self, rank: int, stream: FrameKind, line: bytes, now: float) -> None:
        traceback = self._tracebacks.get(rank)
        if traceback is not None and (traceback.stream is not stream or len(traceback.text) > LONGEST_PARTIAL):
            self._cut(rank)
            traceback = None
        if traceback is not None:
            traceback.text += line
            if not line.startswith(b" "):  # the exception
                del self._tracebacks[rank]
                is_whole = not names_lost_peer(line)
                text = traceback.text if is_whole else line.rstrip(b"\r\n") + LEFT_OUT + b"\n"
                extra = 0 if is_whole else SETTLE_S  # the cause may still be written
                deadline = traceback.deadline + extra
                self._place(rank, Block(stream, text, deadline, {rank}, traceback=is_whole, extra=extra))
        elif line.rstrip() == TRACEBACK:
            self._tracebacks[rank] = _Traceback(stream, line, now + self.window)
        else:
            self._place(rank, Block(stream, line, now + self.window, {rank}))

    def _cut(self, rank: int) -> None:
        """Give up waiting for the end of a rank's traceback."""
        if (traceback := self._tracebacks.pop(rank, None)) is not None:
            self._place(rank, Block(traceback.stream, traceback.text, traceback.deadline, {rank}))

    def _pass_on(self, rank: int, stream: FrameKind, text: bytes, now: float) -> None:
        self._place(rank, Block(stream, text, now + self.window, {rank}, for_all=False))

    # The blocks of all ranks.

    def _place(self, rank: int, block: Block) -> None:
        """Merge a rank's next block with that of other ranks, or append it."""
        last = self._last.get(rank)
        alike = self._alike.setdefault((block.stream, block.text), _Alike()) if block.for_all else None
        other = None if alike is None else alike.next_of(rank)
        if other is not None and self._can_follow(other, last):
            other.ranks.add(rank)
            other.deadline = min(other.deadline, block.deadline)
            block = other
        else:
            self._append(block)
        if alike is not None:
            alike.reached[rank] = block.number
            block.missing -= rank not in self._finished and not block.extra
        self._due = min(self._due, block.deadline)
        if last is not None:
            block.before.add(last)
        self._last[rank] = block
        if block.traceback:  # the errors that it has led to come below
            for each in self._blocks:
                if each.extra > 0 and self._can_follow(each, block):
                    break
        self._is_ready = self._is_ready or _can_be_shown(block)

    def _append(self, block: Block) -> None:
        self._number += 1
        block.number = self._number
        block.order = self._blocks[-1].order + 1 if self._blocks else 0
        self._blocks.append(block)
        self._bytes += len(block.text) + _OVERHEAD
        if block.for_all:
            block.missing = self._running
            self._alike[block.stream, block.text].blocks.append(block)

    def _can_follow(self, block: Block, last: Block | None) -> bool:
        """Return whether a block can be shown after another one; if so, put that one, and what is before, above it."""
        if last is None or last.order < block.order:
            return True
        found, moved = [last], {last}
        while found:
            for each in found.pop().before:
                if each.order >= block.order and not each.shown and each not in moved:
                    found.append(each)
                    moved.add(each)
            if block in moved:
                return False
        self._put_above(block, sorted(moved, key=_order))
        return True

    def _put_above(self, block: Block, moved: list[Block]) -> None:
        for each in reversed(moved):
            del self._blocks[bisect_left(self._blocks, each.order, key=_order)]
        index = bisect_left(self._blocks, block.order, key=_order)
        above = self._blocks[index - 1].order if index else block.order - 1
        self._blocks[index:index] = moved
        step = (block.order - above) / max(len(moved) + 1, _ROOM)
        if step > 2 * math.ulp(block.order):
            for count, each in enumerate(moved, 1):
                each.order = above + count * step
        else:
            for count, each in enumerate(self._blocks):
                each.order = count

    def _show(self, wanted: set[Block]) -> list[Block]:
        """Drop and return some blocks, those that must be shown before, and those that no rank can join any more."""
        for block in reversed(self._blocks):
            if block in wanted:
                wanted |= block.before
        shown = []
        for block in self._blocks:
            if block in wanted or _can_be_shown(block):
                block.shown = True
                shown.append(block)
        for block in shown:
            self._forget(block)
        self._blocks = [block for block in self._blocks if not block.shown]
        self._due = min((block.deadline for block in self._blocks), default=math.inf)
        self._is_ready = False
        return shown

    def _forget(self, block: Block) -> None:
        self._bytes -= len(block.text) + _OVERHEAD
        block.before.clear()
        if block.for_all:
            alike = self._alike[block.stream, block.text].blocks
            alike.remove(block)
            if not alike:
                del self._alike[block.stream, block.text]
        for rank in block.ranks:
            if self._last.get(rank) is block:
                del self._last[rank]


def _can_be_shown(block: Block) -> bool:
    """Return whether no rank can join a block any more, and all that must be shown before is shown."""
    return block.missing <= 0 and all(each.shown for each in block.before)


def _order(block: Block) -> float:
    return block.order


def _split(source: _Source, data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield what a source has written in pieces, each with True if it is a line, False if it must be passed on."""
    *lines, rest = (source.partial + data).split(b"\n")
    source.partial = b""
    for line in lines:
        is_bar = source.passed_on or _moves_back(line.removesuffix(b"\r"))
        source.passed_on = False
        yield line + b"\n", not is_bar
    if rest and (source.passed_on or _moves_back(rest) or len(rest) > LONGEST_PARTIAL):
        source.passed_on = True
        yield rest, False
    else:
        source.partial = rest


def _moves_back(text: bytes) -> bool:
    return b"\r" in text or b"\b" in text
