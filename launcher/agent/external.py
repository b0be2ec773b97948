"""Questions to other programs: each has a time limit, and none of its processes is left afterwards."""

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
"""From SIGTERM to SIGKILL."""
_GIVE_UP_S = 1.0
"""A process that is left so long after SIGKILL sleeps in the kernel and cannot be ended."""
_MOST_BYTES = 4 * 1024 * 1024
_PIECE = 64 * 1024
_TOO_LONG = "it has not ended within"
_NOT_WANTED = "its answer is not wanted any more"


@dataclass(frozen=True)
class Answer:
    """The answer of a program.

    Attributes:
        status: Its exit code, or minus the signal that killed it.
        out: The bytes that it has written to standard output.
        err: The bytes that it has written to standard error.
        trouble: Why it was ended before its time, or an empty string.
    """

    status: int
    out: bytes
    err: bytes
    trouble: str = ""

    @property
    def took_too_long(self) -> bool:
        """Whether it was ended at its time limit."""
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
        cancelled: Called now and then; True if the answer is no longer wanted.
        on_start: Called with its process id.

    Raises:
        OSError: It cannot be executed.
        BaseException: Whatever interrupted it (KeyboardInterrupt); the program has been ended.
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
    """Read what a program writes until it has exited; return the reason if the wait ends before."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for pipe in filter(None, (process.stdout, process.stderr)):
            said[pipe.fileno()] = bytearray()
            selector.register(pipe.fileno(), selectors.EVENT_READ)
        trailing = None
        while selector.get_map():
            now = time.monotonic()
            if trailing is not None and now >= trailing:
                return ""  # its output is complete; its children are ended as well
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
    while process.poll() is None:  # it has closed its pipes and continues
        now = time.monotonic()
        if now >= deadline:
            return f"{_TOO_LONG} {seconds:g} s"
        if cancelled():
            return _NOT_WANTED
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_S, deadline - now))
    return ""


def _end(process: "subprocess.Popen[bytes]", gently: bool) -> None:
    """End what is left of a program: all below it, and all of its session."""
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
        left = tree_of(process.pid)  # a shell that is killed last may have started another program


def _lives(pid: int) -> bool:
    """Whether a process has not exited; whether its parent has noticed does not matter."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
