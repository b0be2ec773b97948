"""The monitor of a job in its launcher, which adds output and events to the reports of the ranks."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from horovodlike._bootstrap.job_key import monitor_key, read_key_file
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import SETTINGS
from horovodlike.errors import ConfigError
from horovodlike.launcher.agent.host_probe import installed_version, why_unwritable
from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import JobSpec, MonitorSpec
from horovodlike.launcher.planning.plan import JobIdentity
from horovodlike.launcher.supervisor import Wakeup
from horovodlike.launcher.supervisor.output import RankOutput
from horovodlike.launcher.supervisor.waiting import print_message
from horovodlike.monitor.board import Board
from horovodlike.monitor.server import Monitor


def open_monitor(
    spec: JobSpec, asked: MonitorSpec, identity: JobIdentity, addresses: Sequence[str], size: int | None
) -> Monitor:
    """Start the monitor of a job, and print the address of its page.

    Args:
        spec: The job.
        asked: The monitor that the user has asked for.
        identity: The job's key and name.
        addresses: The addresses of this host at which ranks reach it.
        size: The number of ranks, if it is known.

    Raises:
        UsageError: The file of the token or of the metrics cannot be used.
        RendezvousError: The port is in use.
    """
    token = None
    if asked.token_file:
        try:
            token = read_key_file(asked.token_file, SETTINGS["monitor_token_file"].variable).hex()
        except ConfigError as error:
            raise UsageError(str(error)) from None
    if asked.metrics_file is not None and (trouble := why_unwritable(asked.metrics_file)):
        raise UsageError(
            f"--metrics-file {asked.metrics_file} cannot be written: {trouble}; name a file in a folder that exists"
        )
    board = Board(identity.job_id, installed_version(), output_directory=spec.output_directory)
    monitor = Monitor(
        board,
        monitor_key(JobKey(bytes.fromhex(identity.key))),
        size=size,
        host=asked.host,
        port=asked.port,
        names=asked.names,
        token=token,
        metrics_file=asked.metrics_file,
        is_attachable=True,
    )
    monitor.start(addresses)
    if monitor.url is not None:
        print_message(f"the job can be watched at {monitor.url}")
    return monitor


class WatchedOutput(RankOutput):
    """Output that the monitor sees, too."""

    def __init__(self, board: Board, wakeup: Wakeup, *given: Any, **named: Any) -> None:
        """Take the monitor's board, the waker of this thread's loop, and the arguments of :class:`RankOutput`."""
        super().__init__(*given, **named)
        self._board = board
        self._wakeup = wakeup
        self._verdicts: deque[str] = deque()  # the monitor's thread adds verdicts on slow ranks
        board.announce = self._take_verdict

    def _take_verdict(self, text: str) -> None:
        self._verdicts.append(text)
        self._wakeup.set()

    def show_due(self) -> None:
        """See :meth:`RankOutput.show_due`; print the verdicts that the monitor has come to."""
        super().show_due()
        while self._verdicts:
            super().say(f"hvdrun: {self._verdicts.popleft()}")

    def add(self, rank: int, stream: FrameKind, data: bytes) -> None:
        """See :meth:`RankOutput.add`."""
        super().add(rank, stream, data)
        self._board.take_output(rank, data, stream is FrameKind.STDERR)

    def say(self, *lines: str | bytes) -> None:
        """See :meth:`RankOutput.say`."""
        super().say(*lines)
        text = "\n".join(line.decode(errors="replace") if isinstance(line, bytes) else line for line in lines)
        if text:
            self._board.add_event("launcher", text)
