"""Running `hvdrun` in tests, and finding the processes that it may have left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
SLACK_S = 15.0  # the delay that a busy machine may add
GRACE_S = 5.0
SETTLE_S = 2.0
MARK = "HOROVODLIKE_TEST_MARK"


@dataclass
class Ended:
    """How a launcher has ended."""

    code: int
    out: bytes
    err: str
    seconds: float

    def lines_of(self, rank: int, stream: str = "stdout") -> list[bytes]:
        prefix = f"[{rank}]<{stream}>: ".encode()
        text = self.out if stream == "stdout" else self.err.encode()
        return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of the processes, except zombies, that have a mark in their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_gone(mark: str, seconds: float) -> None:
    """Wait until no process has the mark; fail if that takes too long."""
    deadline = time.monotonic() + seconds
    while left := marked(mark):
        assert time.monotonic() < deadline, f"left after {seconds} s: {left}"
        pid = next(iter(left))
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(pidfd)


class Launch:
    """A running launcher. All its descendants inherit a mark in their environment."""

    def __init__(self, words: Sequence[str | Path], *, program: Sequence[str] = (), **options: Any) -> None:
        self.mark = secrets.token_hex(8)
        self._err = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._out = b""
        self._started = time.monotonic()
        environ = {**os.environ, MARK: self.mark, **options.pop("env", {})}
        environ.setdefault("OMP_NUM_THREADS", "1")
        options = {"stdout": subprocess.PIPE, "stderr": self._err, "stdin": subprocess.DEVNULL, "bufsize": 0, **options}
        self.process = subprocess.Popen(
            [*(program or (sys.executable, "-m", "horovodlike.launcher")), *map(str, words)],
            env={name: value for name, value in environ.items() if value is not None},
            **options,
        )

    def expect(self, text: bytes, times: int = 1) -> bytes:
        """Read output until it contains the text `times` times; return all output so far."""
        self._read_until(lambda: self._out.count(text) >= times, f"{text!r} {times} times")
        return self._out

    def expect_match(self, pattern: bytes, accept: Callable[[re.Match[bytes]], bool]) -> re.Match[bytes]:
        """Read output until it has a match of the pattern that `accept` accepts; return the first such match."""
        found: list[re.Match[bytes]] = []

        def seen() -> bool:
            found[:] = filter(accept, re.finditer(pattern, self._out))
            return bool(found)

        self._read_until(seen, f"{pattern!r}")
        return found[0]

    def expect_error(self, pattern: str) -> str:
        """Wait for a line on standard error; return the first group of the pattern."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self._errors())) is None or "\n" not in self._errors()[found.end() :]:
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self._errors()}"
            assert self.process.poll() is None, self._errors()
            time.sleep(0.02)
        return found[1]

    def _read_until(self, seen: Callable[[], bool], what: str) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        while not seen():
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{what} did not come; output: {self._out!r}; {self._errors()}"
            data = self.process.stdout.read(65536)
            assert data, f"the output ended without {what}: {self._out!r}; {self._errors()}"
            self._out += data

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def finish(self, seconds: float = LIMIT_S) -> Ended:
        """Wait until the launcher has exited, and check that no process is left."""
        out, _ = self.process.communicate(timeout=seconds)
        took = time.monotonic() - self._started
        left = marked(self.mark)
        assert left == {}, left
        return Ended(self.process.returncode, self._out + (out or b""), self._errors(), took)

    def wait_gone(self, seconds: float) -> None:
        wait_gone(self.mark, seconds)

    def _errors(self) -> str:
        # The launcher shares the file's position, so this must not move it.
        descriptor = self._err.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._err.close()


def on_terminal(
    words: Sequence[str], environ: dict[str, str], cwd: Path, program: Sequence[str] = ("-m", "horovodlike.launcher")
) -> tuple[int, bytes]:
    """Run hvdrun, or another program of Python, on a terminal; return its exit code and its output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *program, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environ},
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the other side has closed it
        while select.select([ours], [], [], 60)[0]:
            data = os.read(ours, 65536)
            if not data:
                break
            seen += data
    os.close(ours)
    return process.wait(LIMIT_S), seen
