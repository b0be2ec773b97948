"""The output of the ranks: to the screen with a prefix, to files unchanged; and the last lines of each rank."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, TextIO

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.errors import UsageError, given, ranges
from horovodlike.launcher.supervisor.failure_attribution import TRACEBACK
from horovodlike.launcher.supervisor.fold import Block, Fold
from horovodlike.launcher.supervisor.printer import Printer
from horovodlike.launcher.supervisor.writer import Write, Writer, byte_writer

LAST_LINES = 20
_TAIL_BYTES = 32 * 1024
_LED_TO = (b"another exception occurred:", b"the direct cause of the following exception:")
_NAMES = {FrameKind.STDOUT: "stdout", FrameKind.STDERR: "stderr"}
# Six hues twice; neither black nor white, which a terminal may have as its background.
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)


def last_lines(tail: bytes, count: int = LAST_LINES) -> tuple[bytes, ...]:
    """Return the last lines of a stream, without text that a carriage return has made invisible.

    They are more than ``count`` if a traceback among the last lines, or one that led to it, begins before.
    """
    lines = [re.split(rb"\r+", line.rstrip(b"\r"))[-1] for line in tail.rstrip(b"\r\n").split(b"\n")]
    if not any(lines):
        return ()
    first = max(0, len(lines) - count)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index] == TRACEBACK:
            first = min(first, index)
            if not any(line.endswith(_LED_TO) for line in lines[max(0, index - 2) : index]):
                break
    return tuple(lines[first:])


def server_of(number: int, num_ranks: int | None) -> int | None:
    """Return which server of parameters a process is; None for a rank. Servers are numbered after the ranks.

    Args:
        number: The number of the process.
        num_ranks: How many ranks the job has; None if it has no servers.
    """
    return None if num_ranks is None or number < num_ranks else number - num_ranks


@dataclass
class Screen:
    """The target of one of the launcher's own streams.

    Attributes:
        write: The function that writes bytes to it.
        printer: Its state; shared by standard output and error if they lead to the same place.
        coloured: Prefixes have colours.
        is_terminal: It is a terminal; neither a file nor a pipe.
    """

    write: Write
    printer: Printer
    coloured: bool
    is_terminal: bool = False

    @classmethod
    def pair(
        cls, stdout: TextIO | None, stderr: TextIO | None, environ: Mapping[str, str]
    ) -> "dict[FrameKind, Screen]":
        """Return the screens for standard output and error of ranks."""
        screens = {FrameKind.STDOUT: cls.of(stdout, environ), FrameKind.STDERR: cls.of(stderr, environ)}
        if _same_place(stdout, stderr):
            screens[FrameKind.STDERR].printer = screens[FrameKind.STDOUT].printer
        return screens

    @classmethod
    def of(cls, stream: TextIO | None, environ: Mapping[str, str]) -> "Screen":
        """Return the screen of a stream; None stands for one that was closed when this process was started."""
        if stream is None:
            return cls(_discard, Printer(terminal=False), coloured=False)
        terminal = stream.isatty() and environ.get("TERM", "dumb") != "dumb"
        printer = Printer(terminal=terminal, columns=lambda: _columns(stream))
        return cls(byte_writer(stream), printer, terminal and not environ.get("NO_COLOR"), stream.isatty())


def _discard(data: bytes) -> None:
    pass


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _same_place(first: TextIO | None, second: TextIO | None) -> bool:
    if first is None or second is None:
        return False
    try:
        return os.path.sameopenfile(first.fileno(), second.fileno())
    except (OSError, ValueError):
        return False


class OutputFiles:
    """The files ``DIRECTORY/rank.<rank>/stdout`` and ``stderr``, the rank padded with zeros so that names sort."""

    def __init__(
        self,
        directory: str,
        size: int,
        ranks: Iterable[int] | None = None,
        *,
        servers: int = 0,
        called: str = "--output-filename",
    ) -> None:
        """Create the files, or empty them if they exist.

        Args:
            directory: The folder.
            size: How many ranks the job has.
            ranks: The ranks that have files on this host; all if None.
            servers: How many servers of parameters the job has; their folders are ``server.N``.
            called: The name of the option in messages to the user.

        Raises:
            UsageError: A file cannot be created.
        """
        self._files: dict[tuple[int, FrameKind], BinaryIO | None] = {}  # None: the job continues without it
        self._directory = Path(directory)
        self._called = called
        self._num_ranks = size if servers else None
        self._digits = len(str(size - 1))
        self._stack = ExitStack()
        if not directory:
            raise UsageError(f"{called} is empty; it must be the name of a folder")
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            for rank in range(size + servers) if ranks is None else ranks:
                self.add(rank)
            undo.pop_all()

    def add(self, rank: int) -> None:
        """Make the files of one more rank.

        Raises:
            UsageError: A file cannot be created. The rank can continue without the missing files.
        """
        self._files.update({(rank, stream): None for stream in _NAMES})
        server = server_of(rank, self._num_ranks)
        folder = self._directory / (f"rank.{rank:0{self._digits}d}" if server is None else f"server.{server}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stream, name in _NAMES.items():
                file = open(folder / name, "wb", buffering=0)  # noqa: SIM115 - closed by close()
                self._files[rank, stream] = self._stack.enter_context(file)
        except OSError as error:
            raise UsageError(f"{given(self._called, self._directory)}: {error.filename}: {error.strerror}") from None

    def write(self, rank: int, stream: FrameKind, data: bytes) -> str | None:
        """Append bytes to a file of a rank, unchanged.

        Returns:
            The problem if the file cannot be written, after which nothing more is written to it; else None.
        """
        file = self._files[rank, stream]
        if file is None:
            return None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) or 0 :]
        except OSError as error:  # the disk is full
            self._files[rank, stream] = None
            return f"{given(self._called, self._directory)}: {file.name} cannot be written: {error.strerror}"
        return None

    def close(self) -> None:
        """Close all files."""
        self._stack.close()


class RankOutput:
    """Passes all output of a job on to screens and files. Belongs to one thread."""

    def __init__(
        self,
        screens: "dict[FrameKind, Screen]",
        writer: Writer,
        files: OutputFiles | None = None,
        timestamps: bool = False,
        num_ranks: int | None = None,
        clock: Callable[[], float] = time.time,
        fold: Fold | None = None,
        shown: frozenset[int] | None = None,
    ) -> None:
        """Take the targets of the output.

        Args:
            screens: The screens for standard output and error.
            writer: Writes to the screens, in its own thread.
            files: The files that receive a copy, or None.
            timestamps: Each line begins with the time.
            num_ranks: See :func:`server_of`.
            clock: Returns the time of the output that is being added, in seconds since 1970. A line that has waited
                for the same line of other ranks has the time at which the first of them has written it.
            fold: Shows output of several ranks on a terminal once; None shows all output of each rank.
            shown: The ranks whose output is shown; None for all. Servers are always shown.
        """
        self._screens = screens
        self._shown = shown
        self._writer = writer
        self._files = files
        self._timestamps = timestamps
        self._num_ranks = num_ranks
        self._clock = clock
        self._fold = Fold() if fold is None else fold
        self._folded = set() if fold is None else {stream for stream, screen in screens.items() if screen.is_terminal}
        self._lowest: Block | None = None  # the ranks' last block on a terminal, if all is shown
        self._tails: dict[int, bytes] = {}

    @property
    def full(self) -> bool:
        """Back-pressure: whether too much output waits for the screen to read more from the ranks."""
        return self._writer.full

    @property
    def broken(self) -> bool:
        """True if the reader of standard output has closed it."""
        return isinstance(self._error, BrokenPipeError)

    @property
    def trouble(self) -> str | None:
        """The error, such as a full disk, if standard output cannot be written, unless its reader has closed it."""
        error = self._error
        if error is None or self.broken:
            return None
        return f"standard output cannot be written: {getattr(error, 'strerror', None) or error}"

    @property
    def _error(self) -> Exception | None:
        return self._writer.error_of(self._screens[FrameKind.STDOUT].write)

    def drain(self, give_up: Callable[[], bool]) -> None:
        """Wait until all output so far is on the screen; see :meth:`Writer.drain`."""
        self.flush()
        self._writer.drain(give_up)

    def expect(self, rank: int) -> None:
        """Prepare for one more rank than there were at the start.

        Raises:
            UsageError: The rank's files cannot be created; the rank can continue without them.
        """
        if self._files is not None:
            self._files.add(rank)

    def add(self, rank: int, stream: FrameKind, data: bytes) -> None:
        """Take bytes that a rank has written."""
        if self._files is not None and (trouble := self._files.write(rank, stream, data)) is not None:
            self.say(f"hvdrun: {trouble}; the job goes on without that file")
        if stream is FrameKind.STDERR:
            self._tails[rank] = (self._tails.get(rank, b"") + data)[-_TAIL_BYTES:]
        if self._shown is not None and rank not in self._shown and server_of(rank, self._num_ranks) is None:
            return
        if self._is_folded(rank, stream):
            self._show(self._fold.add(rank, stream, data, time.monotonic()))
        else:
            self._put((rank,), stream, data, self._time())

    def finish(self, rank: int) -> None:
        """Write out the unfinished lines of a rank that has ended."""
        if server_of(rank, self._num_ranks) is None:
            self._show(self._fold.finish(rank, time.monotonic()))
        for stream, screen in self._screens.items():
            if not self._is_folded(rank, stream):
                prefix = self._prefix((rank,), stream, self._time())
                self._writer.put(screen.write, screen.printer.finish((rank, stream), prefix))

    @property
    def deadline(self) -> float | None:
        """The latest time to call :meth:`show_due`, as a value of ``time.monotonic()``; None while no line waits."""
        return self._fold.deadline

    def show_due(self) -> None:
        """Show the lines that have waited long enough for the same lines of other ranks."""
        self._show(self._fold.due(time.monotonic()))

    def flush(self) -> None:
        """Show all lines that wait for the same lines of other ranks."""
        self._show(self._fold.flush())

    def end(self) -> None:
        """Flush; no more output will arrive."""
        self.flush()

    def ends_with_traceback_of(self, rank: int) -> bool:
        """Return whether the last lines on the screen are a traceback that a rank has written to standard error."""
        self.flush()
        lowest = self._lowest
        return lowest is not None and lowest.traceback and lowest.stream is FrameKind.STDERR and rank in lowest.ranks

    def keep_last_lines(self, rank: int, data: bytes) -> None:
        """Store the end of standard error of a rank whose output goes to the screen of another node."""
        self._tails[rank] = data[-_TAIL_BYTES:]

    def tail(self, rank: int) -> bytes:
        """Return the end of a rank's standard error."""
        return self._tails.get(rank, b"")

    def last_lines(self, rank: int) -> tuple[bytes, ...]:
        """Return the last lines of a rank's standard error."""
        return last_lines(self.tail(rank))

    def say(self, *lines: str | bytes) -> None:
        """Write lines of the launcher itself to standard error."""
        self.flush()
        self._lowest = None
        data = b"".join((line.encode(errors="replace") if isinstance(line, str) else line) + b"\n" for line in lines)
        screen = self._screens[FrameKind.STDERR]
        self._writer.put(screen.write, screen.printer.add("hvdrun", b"", data))

    def _is_folded(self, rank: int, stream: FrameKind) -> bool:
        return stream in self._folded and server_of(rank, self._num_ranks) is None

    def _show(self, blocks: Sequence[Block]) -> None:
        now = time.monotonic()

        def key(block: Block) -> tuple[tuple[int, ...], FrameKind, str]:
            return block.ranks, block.stream, self._time(now - block.written)

        for (ranks, stream, at), alike in groupby(blocks, key):
            self._put(ranks, stream, b"".join(block.text for block in alike), at)
        self._lowest = blocks[-1] if blocks else self._lowest

    def _put(self, ranks: tuple[int, ...], stream: FrameKind, data: bytes, at: str) -> None:
        self._lowest = None
        screen = self._screens[stream]
        key = (ranks[0] if len(ranks) == 1 else ranks, stream)
        self._writer.put(screen.write, screen.printer.add(key, self._prefix(ranks, stream, at), data))

    def _time(self, age: float = 0.0) -> str:
        return time.ctime(self._clock() - max(0.0, age)) if self._timestamps else ""

    def _prefix(self, ranks: tuple[int, ...], stream: FrameKind, at: str) -> bytes:
        server = server_of(ranks[0], self._num_ranks)
        text = f"{at}[{ranges(ranks) if server is None else f'server {server}'}]<{_NAMES[stream]}>: "
        if self._screens[stream].coloured:
            text = f"\x1b[{_COLOURS[ranks[0] % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()
