"""Shows lines and tracebacks that several ranks write within a short time once, with their ranks.

A :class:`Fold` is pure: bytes and the time go in, blocks and a deadline come out. A block waits for other ranks for at
most :data:`WINDOW_S`. It is not shown before what its ranks have written earlier, so that the lines of each rank stay
in their order. Progress bars, that is text with carriage returns, wait for nothing but the lines before them.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.supervisor.failure_attribution import TRACEBACK, tells_of_lost_peer
from horovodlike.launcher.supervisor.printer import LONGEST_PARTIAL

WINDOW_S = 0.5
"""How long a line waits for the same line of other ranks: longer than ranks that work in step are apart on a crowded
machine, and too short to be felt by somebody who watches."""
LEFT_OUT = b" (traceback left out)"
_MOST_BYTES = 1024 * 1024  # of blocks that wait
_OVERHEAD = 1024  # a block counts as that many bytes more


@dataclass(eq=False)
class Block:
    """A line, a whole traceback, or a piece of a progress bar.

    Attributes:
        stream: The stream to which it was written.
        text: The bytes.
        deadline: When it must be shown.
        order: Greater than that of each block that must be shown before.
        ranks: The ranks that have written it.
        traceback: Whether it is a whole traceback.
        for_all: Whether other ranks may join.
        before: Blocks that must be shown before.
        shown: Whether it is shown.
    """

    stream: FrameKind
    text: bytes
    deadline: float
    order: int
    ranks: set[int]
    traceback: bool = False
    for_all: bool = True
    before: "set[Block]" = field(default_factory=set)
    shown: bool = False


@dataclass
class _Source:
    """One stream of one rank: its unfinished line, or the fact that this was passed on since it is a progress bar."""

    partial: bytes = b""
    passed_on: bool = False


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
            window: How long a line waits, in seconds.
        """
        self._num_ranks = num_ranks
        self._finished: set[int] = set()
        self._window = window
        self._sources: dict[tuple[int, FrameKind], _Source] = {}
        self._tracebacks: dict[int, _Traceback] = {}  # by rank
        self._blocks: list[Block] = []  # sorted by `order`
        self._alike: dict[tuple[FrameKind, bytes], list[Block]] = {}
        self._last: dict[int, Block] = {}  # by rank: the last of its blocks that wait
        self._order = 0
        self._bytes = 0
        self._due = float("inf")  # the first deadline of the blocks
        self._is_ready = False  # a block may be shown before its deadline

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`due` at the latest; None while nothing waits."""
        first = min((self._due, *(each.deadline for each in self._tracebacks.values())))
        return None if first == float("inf") else first

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
        for owner, stream in [key for key in self._sources if key[0] == rank]:
            source = self._sources.pop((owner, stream))
            if source.partial:
                self._add_line(rank, stream, source.partial + b"\n", now)
            elif source.passed_on:
                self._cut(rank)
                self._pass_on(rank, stream, b"\n", now)
        self._cut(rank)
        self._finished.add(rank)
        self._is_ready = True
        return self.due(now)

    def due(self, now: float) -> list[Block]:
        """Return the blocks that wait no longer."""
        for rank in [rank for rank, each in self._tracebacks.items() if each.deadline <= now]:
            self._cut(rank)
        if self._bytes > _MOST_BYTES:
            return self._show({*self._blocks[: len(self._blocks) // 2 + 1]})
        if self._due <= now:
            return self._show({block for block in self._blocks if block.deadline <= now})
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
                is_whole = not tells_of_lost_peer(line)
                text = traceback.text if is_whole else line.rstrip(b"\r\n") + LEFT_OUT + b"\n"
                self._place(rank, Block(stream, text, traceback.deadline, 0, {rank}, traceback=is_whole))
        elif line.rstrip() == TRACEBACK:
            self._tracebacks[rank] = _Traceback(stream, line, now + self._window)
        else:
            self._place(rank, Block(stream, line, now + self._window, 0, {rank}))

    def _cut(self, rank: int) -> None:
        """Give up waiting for the end of a rank's traceback."""
        if (traceback := self._tracebacks.pop(rank, None)) is not None:
            self._place(rank, Block(traceback.stream, traceback.text, traceback.deadline, 0, {rank}))

    def _pass_on(self, rank: int, stream: FrameKind, text: bytes, now: float) -> None:
        self._place(rank, Block(stream, text, now + self._window, 0, {rank}, for_all=False))
        self._is_ready = True

    # The blocks of all ranks.

    def _place(self, rank: int, block: Block) -> None:
        """Merge a rank's next block with that of other ranks, or append it."""
        last = self._last.get(rank)
        alike = self._alike.setdefault((block.stream, block.text), []) if block.for_all else []
        other = next((each for each in alike if rank not in each.ranks), None)
        if other is not None and self._can_follow(other, last):
            other.ranks.add(rank)
            other.deadline = min(other.deadline, block.deadline)
            block = other
        else:
            block.order = self._next_order()
            alike.append(block)
            self._blocks.append(block)
            self._bytes += len(block.text) + _OVERHEAD
        self._due = min(self._due, block.deadline)
        if last is not None:
            block.before.add(last)
        self._last[rank] = block
        self._is_ready = self._is_ready or self._is_complete(block)

    def _can_follow(self, block: Block, last: Block | None) -> bool:
        """Return whether a block can be shown after another one; if so, put it there with all that must follow it."""
        if last is None or block.order > last.order:
            return True
        if last is block:
            return False
        first = bisect_left(self._blocks, block.order, key=lambda each: each.order)
        kept: list[Block] = []
        moved, followed = [block], {block}
        for each in self._blocks[first + 1 :]:
            if followed.isdisjoint(each.before):
                kept.append(each)
            elif each is last:
                return False
            else:
                moved.append(each)
                followed.add(each)
        for each in moved:
            each.order = self._next_order()
        self._blocks[first:] = [*kept, *moved]
        return True

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _is_complete(self, block: Block) -> bool:
        if not block.for_all or self._num_ranks is None:
            return not block.for_all
        return len(block.ranks | self._finished) >= self._num_ranks

    def _show(self, wanted: set[Block]) -> list[Block]:
        """Drop and return some blocks, those that must be shown before, and those that no rank can join any more."""
        for block in reversed(self._blocks):
            if block in wanted:
                wanted |= block.before
        shown = []
        for block in self._blocks:
            if block in wanted or (self._is_complete(block) and all(each.shown for each in block.before)):
                block.shown = True
                shown.append(block)
        for block in shown:
            self._forget(block)
        self._blocks = [block for block in self._blocks if not block.shown]
        self._due = min((block.deadline for block in self._blocks), default=float("inf"))
        self._is_ready = False
        return shown

    def _forget(self, block: Block) -> None:
        self._bytes -= len(block.text) + _OVERHEAD
        block.before.clear()
        if block.for_all:
            alike = self._alike[block.stream, block.text]
            alike.remove(block)
            if not alike:
                del self._alike[block.stream, block.text]
        for rank in block.ranks:
            if self._last.get(rank) is block:
                del self._last[rank]


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
