"""Runs other programs for their output: with a time limit, and so that none of their processes is left."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovodlike.launcher.agent.process import send_signal, tree_of

_LOOK_S = 0.2
_TRAILING_S = 1.0
"""How long a program's children may hold its output open once it has exited."""
_GRACE_S = 0.5
"""The time from SIGTERM to SIGKILL."""
_GIVE_UP_S = 1.0
"""A process that still exists this long after SIGKILL sleeps in the kernel: it cannot be ended."""
_MOST_BYTES = 4 * 1024 * 1024
_PIECE = 64 * 1024
_TOO_LONG = "it has not ended within"
_NOT_WANTED = "its answer is not wanted any more"


@dataclass(frozen=True)
class Answer:
    """The exit status and output of a program.

    Attributes:
        status: Its exit code, or minus the signal that killed it.
        out: The bytes that it has written to standard output.
        err: The bytes that it has written to standard error.
        trouble: The reason why :func:`ask` has ended it, or an empty string if it has exited by itself.
    """

    status: int
    out: bytes
    err: bytes
    trouble: str = ""

    @property
    def took_too_long(self) -> bool:
        """True if the program was ended because of its time limit."""
        return self.trouble.startswith(_TOO_LONG)


def ask(
    words: Sequence[str],
    seconds: float,
    environ: Mapping[str, str] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    on_start: Callable[[int], object] = lambda pid: None,
) -> Answer:
    """Run a program, in a session of its own and without input, and end it with all its children.

    Args:
        words: The program and its arguments.
        seconds: How long it may take.
        environ: Its environment; this process's if None.
        cancelled: Called now and then; if it returns True, the answer is not wanted, and the program is ended.
        on_start: Called with the program's process id.

    Raises:
        OSError: The program cannot be executed.
        BaseException: An exception interrupted the wait (KeyboardInterrupt); the program has been ended.
    """
    process = subprocess.Popen(
        words,
        env=None if environ is None else dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    said: dict[int, bytearray] = {}
    trouble = "it was interrupted"
    try:
        on_start(process.pid)
        trouble = _listen(process, said, seconds, cancelled)
    finally:
        _end(process, gently=bool(trouble))
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
    out, err = (bytes(text) for text in said.values())
    return Answer(-signal.SIGKILL if process.returncode is None else process.returncode, out, err, trouble)


def _listen(
    process: "subprocess.Popen[bytes]", said: dict[int, bytearray], seconds: float, cancelled: Callable[[], bool]
) -> str:
    """Read a program's output until it has exited; return the reason if the wait ends earlier, else an empty string."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for pipe in filter(None, (process.stdout, process.stderr)):
            said[pipe.fileno()] = bytearray()
            selector.register(pipe.fileno(), selectors.EVENT_READ)
        trailing = None
        while selector.get_map():
            now = time.monotonic()
            if trailing is not None and now >= trailing:
                return ""  # it has exited; _end() kills the children that hold its output open
            if now >= deadline:
                return f"{_TOO_LONG} {seconds:g} s"
            if cancelled():
                return _NOT_WANTED
            for key, _ in selector.select(min(_LOOK_S, deadline - now)):
                piece = os.read(key.fd, _PIECE)
                said[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
                if len(said[key.fd]) > _MOST_BYTES:
                    return f"it has written more than {_MOST_BYTES >> 20} MiB"
            if trailing is None and process.poll() is not None:
                trailing = time.monotonic() + _TRAILING_S
    while process.poll() is None:  # the program has closed its output and still runs
        now = time.monotonic()
        if now >= deadline:
            return f"{_TOO_LONG} {seconds:g} s"
        if cancelled():
            return _NOT_WANTED
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_S, deadline - now))
    return ""


def _end(process: "subprocess.Popen[bytes]", gently: bool) -> None:
    """Kill a program's process group; or end ``gently``, by SIGTERM first, its session and all descendants."""
    if not gently:
        send_signal(-process.pid, signal.SIGKILL)
        return
    left = tree_of(process.pid)
    for pid in left:
        send_signal(pid, signal.SIGTERM)
        send_signal(pid, signal.SIGCONT)
    deadline = time.monotonic() + _GRACE_S
    while (process.poll() is None or any(map(_lives, left))) and time.monotonic() < deadline:
        time.sleep(0.01)
    deadline = time.monotonic() + _GIVE_UP_S
    left = [*left, *tree_of(process.pid)]
    while (process.poll() is None or any(map(_lives, left))) and time.monotonic() < deadline:
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = tree_of(process.pid)  # a shell may have started another one before it was killed


def _lives(pid: int) -> bool:
    """Return False if a process has exited, even if its parent has not reaped it yet; else True."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
