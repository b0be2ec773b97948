"""The output of the ranks: to the screen with a prefix, to files unchanged; and the last lines of each rank.

A :class:`Printer` separates the output of many ranks on one screen. It is pure: bytes in, bytes out. No line ever mixes
the bytes of two ranks. A carriage return ends a line as far as prefixes are concerned. On a terminal, text before or
after a carriage return (a progress bar) is *transient*: it stays on the lowest line, the next transient text overwrites
it, and when other lines are printed, it is drawn again below them.
"""

import os
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.errors import UsageError, given
from horovodlike.launcher.supervisor.writer import Write, Writer, byte_writer

LONGEST_PARTIAL = 64 * 1024
"""The most bytes without an end of line that are buffered; more are written without waiting for the end."""
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE = b"\r\x1b[K"


class Printer:
    """The state of one screen or file: unfinished lines, and how the last output ended.

    A *key* names a source, that is one stream of one rank.
    """

    def __init__(self, *, terminal: bool = False, columns: Callable[[], int] = lambda: 80) -> None:
        """Make a printer for a fresh line.

        Args:
            terminal: The output understands cursor movements.
            columns: Returns the width of the terminal; called for each transient line.
        """
        self._terminal = terminal
        self._columns = columns
        self._held: dict[Hashable, bytes] = {}
        self._open: Hashable = None  # the source of the last output, if that did not end with a newline
        self._open_is_long = False  # ... since the line is too long to be buffered
        self._overwritten: dict[Hashable, bytes] = {}  # the last text before a carriage return, until the next newline
        self._shown: tuple[Hashable, bytes] | None = None  # the transient line on the terminal

    def add(self, key: Hashable, prefix: bytes, data: bytes) -> bytes:
        """Take the bytes that a source has written; return the bytes to write to the screen or file."""
        text = self._held.pop(key, b"") + data
        # A carriage return at the very end may be the first half of a line end.
        cut = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
        if len(text) - cut > LONGEST_PARTIAL:
            cut = len(text)
            if self._terminal:
                text, cut = text + b"\n", cut + 1
        if cut < len(text):
            self._held[key] = text[cut:]
        if self._terminal:
            return self._on_terminal(key, prefix, text[:cut])
        return self._in_file(key, prefix, text[:cut])

    def finish(self, key: Hashable, prefix: bytes) -> bytes:
        """End a source: its unfinished text becomes a line; return the bytes to write."""
        rest = self._held.pop(key, b"").rstrip(b"\r") or (self._overwritten.get(key, b"") if self._terminal else b"")
        if rest:
            return self.add(key, prefix, rest + b"\n")
        if self._open == key and self._open is not None:
            self._open = None
            return b"\n"
        return b""

    def _in_file(self, key: Hashable, prefix: bytes, whole: bytes) -> bytes:
        if b"\r" in whole:
            body = b"".join(prefix + line for line in _LINE.findall(whole) if line != b"\r")
        elif whole:
            body = prefix + whole[:-1].replace(b"\n", b"\n" + prefix) + whole[-1:]
        else:
            body = b""
        if not body:
            return b""
        if self._open is not None and self._open != key:
            body = b"\n" + body
        elif self._open is not None and self._open_is_long:
            body = body[len(prefix) :]
        self._open = None if body.endswith(b"\n") else key
        self._open_is_long = not body.endswith((b"\n", b"\r"))
        return body

    def _on_terminal(self, key: Hashable, prefix: bytes, whole: bytes) -> bytes:
        kept = []
        if b"\r" in whole:
            for line in _LINE.findall(whole):
                text = line.rstrip(b"\r\n")
                if line.endswith(b"\n"):
                    kept.append(prefix + (text or self._overwritten.pop(key, b"")) + b"\n")
                    self._overwritten.pop(key, None)
                else:
                    self._overwritten[key] = text or self._overwritten.get(key, b"")
        elif whole:
            kept.append(prefix + whole[:-1].replace(b"\n", b"\n" + prefix) + b"\n")
            self._overwritten.pop(key, None)
        return self._show(key, prefix, b"".join(kept))

    def _show(self, key: Hashable, prefix: bytes, lines: bytes) -> bytes:
        """Return the bytes that print lines above the transient one and redraw that one."""
        before = self._shown
        held = self._held.get(key, b"")
        if key in self._overwritten or held.endswith(b"\r"):
            text = held.rstrip(b"\r") or self._overwritten.get(key, b"")
            self._shown = (key, prefix + self._fit(text, prefix)) if text else self._shown
        elif before is not None and before[0] == key:
            self._shown = None
        if not lines and self._shown == before:
            return b""
        after = self._shown[1] if self._shown is not None else b""
        return (_ERASE if before is not None else b"") + lines + after

    def _fit(self, text: bytes, prefix: bytes) -> bytes:
        """Cut a transient line so that it can be erased; one with escape sequences is left as it is."""
        if b"\x1b" in text:
            return text
        room = self._columns() - len(_ESCAPE.sub(b"", prefix)) - 1
        if len(text) <= room:
            return text
        return text.decode(errors="replace")[: max(0, room)].encode()


LAST_LINES = 20
_TAIL_BYTES = 32 * 1024
_NAMES = {FrameKind.STDOUT: "stdout", FrameKind.STDERR: "stderr"}
# Six hues twice; neither black nor white, which a terminal may have as its background.
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)


def last_lines(tail: bytes, count: int = LAST_LINES) -> tuple[bytes, ...]:
    """Return the last lines of a stream, without text that a carriage return has made invisible."""
    lines = [re.split(rb"\r+", line.rstrip(b"\r"))[-1] for line in tail.rstrip(b"\r\n").split(b"\n")]
    return tuple(lines[-count:]) if any(lines) else ()


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
    """

    write: Write
    printer: Printer
    coloured: bool

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
        return cls(byte_writer(stream), printer, terminal and not environ.get("NO_COLOR"))


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
            The problem if the file cannot be written, after which it gets nothing more; else None.
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
    ) -> None:
        """Take the targets of the output.

        Args:
            screens: The screens for standard output and error.
            writer: Writes to the screens, in its own thread.
            files: The files that get a copy, or None.
            timestamps: Each line begins with the time.
            num_ranks: As for :func:`server_of`.
            clock: Returns the time of the output that is being added, in seconds since 1970.
        """
        self._screens = screens
        self._writer = writer
        self._files = files
        self._timestamps = timestamps
        self._num_ranks = num_ranks
        self._clock = clock
        self._tails: dict[int, bytes] = {}

    @property
    def full(self) -> bool:
        """True if so much output waits for the screen that nothing more should be read from the ranks."""
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
        screen = self._screens[stream]
        self._writer.put(screen.write, screen.printer.add((rank, stream), self._prefix(rank, stream), data))

    def finish(self, rank: int) -> None:
        """Write out the unfinished lines of a rank that has ended."""
        for stream, screen in self._screens.items():
            self._writer.put(screen.write, screen.printer.finish((rank, stream), self._prefix(rank, stream)))

    def keep_last_lines(self, rank: int, data: bytes) -> None:
        """Store the last lines of standard error of a rank whose output goes to the screen of another node."""
        self._tails[rank] = data[-_TAIL_BYTES:]

    def last_lines(self, rank: int) -> tuple[bytes, ...]:
        """Return the last lines of a rank's standard error."""
        return last_lines(self._tails.get(rank, b""))

    def say(self, *lines: str | bytes) -> None:
        """Write lines of the launcher itself to standard error."""
        data = b"".join((line.encode(errors="replace") if isinstance(line, str) else line) + b"\n" for line in lines)
        screen = self._screens[FrameKind.STDERR]
        self._writer.put(screen.write, screen.printer.add("hvdrun", b"", data))

    def _prefix(self, rank: int, stream: FrameKind) -> bytes:
        server = server_of(rank, self._num_ranks)
        text = f"[{rank if server is None else f'server {server}'}]<{_NAMES[stream]}>: "
        if self._timestamps:
            text = time.ctime(self._clock()) + text
        if self._screens[stream].coloured:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()
