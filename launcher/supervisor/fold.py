"""Shows lines and tracebacks that several ranks write within a short time once, with their ranks.

A :class:`Fold` is pure: bytes and the time go in, blocks and a deadline come out. The blocks of each rank wait in a
queue, for at most :data:`WINDOW_S`. A block is shown for all ranks that have it in their queues, below the blocks that
are before it there; so the lines of each rank stay in their order. An error because of a lost peer, of which one line
is shown, waits longer for its cause. Progress bars, that is text with carriage returns, wait for nothing but the lines
before them.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.supervisor.failure_attribution import SETTLE_S, TRACEBACK, names_lost_peer
from horovodlike.launcher.supervisor.printer import LONGEST_PARTIAL

WINDOW_S = 0.5
"""How long a line waits for the same line of other ranks: longer than ranks that work in step are apart on a crowded
machine, and too short to be noticed."""
LEFT_OUT = b" (traceback left out)"
_MOST_BYTES = 16 * 1024 * 1024  # the limit for all blocks that wait
_OVERHEAD = 512  # a block counts as its text and this
_BATCH_S = 0.1  # blocks that are due within this time are shown together

_Key = tuple[FrameKind, bytes]


@dataclass(eq=False)
class Block:
    """A line, a whole traceback, or a piece of a progress bar.

    Attributes:
        stream: The stream to which it was written.
        text: The bytes.
        written: The time at which a rank has written it; of several ranks, the first one.
        deadline: The latest time to show it.
        traceback: Whether it is a whole traceback.
        is_consequence: Whether it stands for a traceback whose cause is another rank.
        is_bar: Whether it is a piece of a progress bar, which is shown for each rank.
        ranks: The ranks for which it is shown, in ascending order; empty while it waits.
    """

    stream: FrameKind
    text: bytes
    written: float
    deadline: float
    traceback: bool = False
    is_consequence: bool = False
    is_bar: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> _Key:
        """Equal for blocks that are shown as one."""
        return self.stream, self.text


@dataclass
class _Source:
    """One stream of one rank: its unfinished line, or the fact that this was passed on since it is a progress bar."""

    partial: bytes = b""
    passed_on: bool = False


class Fold:
    """The blocks of all ranks that wait to be shown.

    Times are in seconds of one clock that never goes back. Blocks that a method returns must be shown in their order.
    """

    def __init__(self, num_ranks: int | None = None, window: float = WINDOW_S) -> None:
        """Start with nothing that waits.

        Args:
            num_ranks: How many ranks write; a block that all have written is shown at once. None if it may change.
            window: How long a line waits at most, in seconds.
        """
        self._running = math.inf if num_ranks is None else num_ranks
        self._finished: set[int] = set()
        self._window = window
        self._sources: dict[tuple[int, FrameKind], _Source] = {}
        self._tracebacks: dict[int, Block] = {}  # unfinished ones, by rank, in the order of their starts
        self._queues: dict[int, deque[Block]] = defaultdict(deque)  # by rank
        self._holders: dict[_Key, dict[int, int]] = defaultdict(dict)  # how many such blocks are in each rank's queue
        self._bytes = 0
        self._due = math.inf  # no block in the queues is due before
        self._shown: list[Block] = []  # to be returned next

    @property
    def deadline(self) -> float | None:
        """The latest time to call :meth:`due`; None while nothing waits."""
        first = min(self._due if self._holders else math.inf, self._traceback_due)
        return None if first == math.inf else first

    @property
    def _traceback_due(self) -> float:
        return next(iter(self._tracebacks.values())).deadline if self._tracebacks else math.inf

    def add(self, rank: int, stream: FrameKind, data: bytes, now: float) -> list[Block]:
        """Take the bytes that a rank has written; return the blocks that wait no longer."""
        source = self._sources.setdefault((rank, stream), _Source())
        for text, is_line in _split(source, data):
            if is_line:
                self._add_line(rank, stream, text, now)
            else:
                self._pass_on(rank, stream, text, now)
        return self.due(now)

    def finish(self, rank: int, now: float) -> list[Block]:
        """End the unfinished lines of a rank that writes no more; return the blocks that wait no longer."""
        for stream in (FrameKind.STDOUT, FrameKind.STDERR):
            source = self._sources.pop((rank, stream), _Source())
            if source.partial:
                self._add_line(rank, stream, source.partial + b"\n", now)
            elif source.passed_on:
                self._pass_on(rank, stream, b"\n", now)
        self._cut(rank)
        if rank not in self._finished:
            self._finished.add(rank)
            self._running -= 1
            for block in [block for queue in self._queues.values() for block in queue]:
                if not block.ranks and self._is_complete(block):
                    self._show(block.key)
        return self.due(now)

    def due(self, now: float) -> list[Block]:
        """Return the blocks that wait no longer."""
        while self._tracebacks and self._traceback_due <= now:
            self._cut(next(iter(self._tracebacks)))
        if self._bytes > _MOST_BYTES or self._running <= 0:
            self._show_due(math.inf)
        elif self._due <= now:
            self._show_due(now + _BATCH_S)
        shown, self._shown = self._shown, []
        return shown

    def flush(self) -> list[Block]:
        """Return all that waits, but for unfinished lines."""
        return self.due(math.inf)

    # The lines of one rank.

    def _add_line(self, rank: int, stream: FrameKind, line: bytes, now: float) -> None:
        traceback = self._tracebacks.get(rank)
        if traceback is not None and (traceback.stream is not stream or len(traceback.text) > LONGEST_PARTIAL):
            self._cut(rank)
            traceback = None
        if traceback is not None:
            traceback.text += line
            if not line.startswith(b" "):
                self._end_traceback(rank, line)
        elif line.rstrip() == TRACEBACK:
            self._tracebacks[rank] = Block(stream, line, now, now + self._window)
        else:
            self._enqueue(rank, Block(stream, line, now, now + self._window))

    def _end_traceback(self, rank: int, exception: bytes) -> None:
        block = self._tracebacks.pop(rank)
        if names_lost_peer(exception):
            block.is_consequence = True
            block.text = exception.rstrip(b"\r\n") + LEFT_OUT + b"\n"
            block.deadline += SETTLE_S  # its cause may still be written
        else:
            block.traceback = True
        self._enqueue(rank, block)

    def _cut(self, rank: int) -> None:
        """Give up waiting for the end of a rank's traceback."""
        if rank in self._tracebacks:
            self._enqueue(rank, self._tracebacks.pop(rank))

    def _pass_on(self, rank: int, stream: FrameKind, text: bytes, now: float) -> None:
        self._cut(rank)
        self._enqueue(rank, Block(stream, text, now, math.inf, is_bar=True))

    # The queues of all ranks.

    def _enqueue(self, rank: int, block: Block) -> None:
        self._queues[rank].append(block)
        self._bytes += len(block.text) + _OVERHEAD
        if block.is_bar:
            self._show_bars(rank)
            return
        holders = self._holders[block.key]
        holders[rank] = holders.get(rank, 0) + 1
        self._due = min(self._due, block.deadline)
        if self._is_complete(block):
            self._show(block.key)

    def _is_complete(self, block: Block) -> bool:
        """Return whether no rank can join a block any more."""
        if block.is_bar or block.is_consequence:
            return False
        holders = self._holders[block.key]
        return len(holders) >= self._running and sum(rank not in self._finished for rank in holders) >= self._running

    def _show_due(self, until: float) -> None:
        due = [block for queue in self._queues.values() for block in queue if block.deadline <= until]
        for block in sorted(due, key=lambda each: each.deadline):
            if not block.ranks:
                self._show(block.key)
        self._due = min((block.deadline for queue in self._queues.values() for block in queue), default=math.inf)

    def _show(self, key: _Key) -> None:
        """Show a block for all ranks that have written it, below the blocks that are before it in their queues."""
        ranks = sorted(self._holders[key])
        for rank in ranks:
            while (above := self._queues[rank][0].key) != key:
                self._take(above, sorted(each for each in self._holders[above] if self._queues[each][0].key == above))
        self._take(key, ranks)

    def _take(self, key: _Key, ranks: list[int]) -> None:
        """Show a block that is the first one in the queues of some ranks, and the progress bars behind it."""
        self._shown.append(min([self._pop(rank, ranks) for rank in ranks], key=lambda block: block.written))
        holders = self._holders[key]
        for rank in ranks:
            holders[rank] -= 1
            if not holders[rank]:
                del holders[rank]
            self._show_bars(rank)
        if not holders:
            del self._holders[key]

    def _show_bars(self, rank: int) -> None:
        while self._queues[rank] and self._queues[rank][0].is_bar:
            self._shown.append(self._pop(rank, [rank]))

    def _pop(self, rank: int, ranks: list[int]) -> Block:
        block = self._queues[rank].popleft()
        block.ranks = tuple(ranks)
        self._bytes -= len(block.text) + _OVERHEAD
        return block


def _split(source: _Source, data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield a source's bytes in pieces, each with True if it is a line, False if it must be passed on."""
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
