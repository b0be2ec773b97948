"""Arranges what many ranks write on one screen or into one file. Pure: bytes in, bytes out.

No line is ever made of the bytes of two ranks. A carriage return ends a line as far as prefixes are concerned. On a
terminal, what follows or precedes it (a progress bar) is *transient*: it stays on the lowest line, is overwritten by
its successor, makes room for other lines, and is drawn again below them.
"""

import re
from collections.abc import Callable, Hashable

__all__ = ["LONGEST_PARTIAL", "Printer"]

LONGEST_PARTIAL = 64 * 1024
"""More bytes than this without an end of line are not held back any longer."""

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ERASE = b"\r\x1b[K"


class Printer:
    """The state of one screen or file: unfinished lines, and how the last thing written ended.

    A *key* names a source, that is one stream of one rank.
    """

    def __init__(self, *, terminal: bool = False, columns: Callable[[], int] = lambda: 80) -> None:
        """Makes a printer for a fresh line.

        Args:
            terminal: The output understands cursor movements.
            columns: The width of the terminal; asked for each transient line.
        """
        self._terminal = terminal
        self._columns = columns
        self._held: dict[Hashable, bytes] = {}
        self._open: Hashable = None  # whose bytes came last, if they did not end with a newline
        self._open_is_long = False  # ... since the line is too long to be held
        self._overwritten: dict[Hashable, bytes] = {}  # the last text before a carriage return, until the next newline
        self._shown: tuple[Hashable, bytes] | None = None  # the transient line on the terminal

    def add(self, key: Hashable, prefix: bytes, data: bytes) -> bytes:
        """Takes what a source has written and returns what is to be written out."""
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
        """Ends a source: what it left unfinished becomes a line."""
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
        """Writes lines above the transient one, which is brought up to date."""
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
        """Cuts a transient line so that it can be erased; one with escape sequences is left as it is."""
        if b"\x1b" in text:
            return text
        room = self._columns() - len(_ESCAPE.sub(b"", prefix)) - 1
        if len(text) <= room:
            return text
        return text.decode(errors="replace")[: max(0, room)].encode()
