"""The launcher's end of the connection to an agent."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from horovodlike.launcher.frames import PIECE, Frame, FrameReader, Kind, encode

_START_AGENT = Path(__file__).with_name("start_agent.py")


class AgentLink:
    """A running agent. Not thread-safe."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        """Takes a process that speaks frames on its standard input and output, which are unbuffered pipes."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._reader = FrameReader()

    @property
    def pid(self) -> int:
        """The process id, of the ssh client if the agent is on another host."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when the agent has sent something or has ended."""
        return self._stdout.fileno()

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Sends one frame. An agent that has gone shows itself by the end of what it sends, not here."""
        data = memoryview(encode(kind, number, payload))
        with contextlib.suppress(BrokenPipeError, ValueError):
            while data:
                data = data[self._stdin.write(data) or 0 :]

    def send_task(self, task: bytes) -> None:
        """Sends the file that every rank can read."""
        for start in range(0, len(task), PIECE):
            self.send(Kind.TASK, 0, task[start : start + PIECE])

    def receive(self) -> list[Frame] | None:
        """What has arrived (waits for something), or None at the end: the host is clean then."""
        data = os.read(self._stdout.fileno(), PIECE)
        return self._reader.feed(data) if data else None

    def close(self) -> int:
        """Cuts the connection and waits for the agent's end, which ends everything it has started.

        Returns:
            The agent's exit code, or minus the signal that killed it.
        """
        if self._stdout.closed:
            return self._process.wait()
        with contextlib.suppress(OSError):
            self._stdin.close()
        # To the end of the output: then the guard has gone, but the agent proper as well.
        with contextlib.suppress(OSError):
            while os.read(self._stdout.fileno(), PIECE):
                pass
        self._stdout.close()
        return self._process.wait()


def start_local_agent() -> AgentLink:
    """Starts the agent of this host, in a session of its own: a Ctrl-C on the terminal does not reach it."""
    process = subprocess.Popen(
        # -X utf8 has no say in what ranks get: names and variables travel as bytes.
        [sys.executable, "-I", "-S", "-X", "utf8", str(_START_AGENT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    return AgentLink(process)
