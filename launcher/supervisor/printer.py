"""Separates the output of many ranks on one screen or in one file. Pure: bytes in, bytes out.

No line ever mixes the bytes of two ranks. A carriage return ends a line as far as prefixes are concerned. On a
terminal, text before or after a carriage return (a progress bar) is *transient*: it stays on the lowest line, the next
transient text overwrites it, and when other lines are printed, it is drawn again below them.
"""

import re
from collections.abc import Callable, Hashable

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
        self.terminal = terminal
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
            if self.terminal:
                text, cut = text + b"\n", cut + 1
        if cut < len(text):
            self._held[key] = text[cut:]
        if self.terminal:
            return self._on_terminal(key, prefix, text[:cut])
        return self._in_file(key, prefix, text[:cut])

    def finish(self, key: Hashable, prefix: bytes) -> bytes:
        """End a source: its unfinished text becomes a line; return the bytes to write."""
        rest = self._held.pop(key, b"").rstrip(b"\r") or (self._overwritten.get(key, b"") if self.terminal else b"")
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
