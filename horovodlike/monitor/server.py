"""The monitor of a job: one thread that takes the reports of ranks and answers readers.

Nothing that goes wrong in it ends the job: it becomes an event that the page shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path

from horovodlike._net.listen import LOOPBACK, is_everywhere, listen
from horovodlike._net.secure_channel import JobKey, close_in_child
from horovodlike._net.socket_options import ensure_descriptors
from horovodlike.monitor import attach, web
from horovodlike.monitor.board import Board
from horovodlike.monitor.collector import Collector
from horovodlike.monitor.metrics_file import MetricsFile

_TICK_S = 1.0
_SNAPSHOT_S = 0.5
_PATIENCE_S = 5.0  # the wait for the end of the thread
_UNKNOWN_SIZE = 256


class Monitor:
    """The servers of one job. Its methods may be called from any thread, but for :meth:`start` and :meth:`close`."""

    def __init__(
        self,
        board: Board,
        key: JobKey,
        *,
        size: int | None = None,
        host: str = LOOPBACK,
        port: int | None = None,
        names: Collection[str] = (),
        token: str | None = None,
        metrics_file: str | None = None,
        is_attachable: bool = False,
    ) -> None:
        """Prepare the monitor.

        Args:
            board: The state of the job.
            key: The key with which ranks send reports.
            size: The number of ranks, if that is known.
            host: The address at which readers are answered.
            port: The port for readers; 0: a free one; None: there are no readers.
            names: The names that a Host header may have, besides addresses, ``localhost``, and this host's name if it
                answers at all addresses.
            token: The text that readers must know; None: a random one.
            metrics_file: A file to which the metrics are written each second, or None.
            is_attachable: Whether ``hvdrun --attach`` can find it by the id of this process.
        """
        self.board = board
        self._size = size or _UNKNOWN_SIZE
        self._host, self._wanted = host, port
        self._access = web.Access(token or secrets.token_urlsafe(24), frozenset([*names, *_own_names(host)]))
        self._metrics_file = None if metrics_file is None else MetricsFile(board, Path(metrics_file).absolute())
        self._collector = Collector(key, board, self._size)
        self._addresses: set[str] = set()
        self._readers_socket: socket.socket | None = None
        self._is_attachable = is_attachable
        self._attach_socket: socket.socket | None = None
        self._cached: dict[bool, tuple[float, web.Snapshot]] = {}
        self._trouble = ""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self.port = 0
        """The port at which ranks send reports; known after :meth:`start`."""
        self.url: str | None = None
        """The address of the page; None without readers."""

    def start(self, addresses: Collection[str]) -> None:
        """Listen, and start the threads.

        Args:
            addresses: The addresses of this host at which ranks send reports; :meth:`listen_on` adds others.

        Raises:
            RendezvousError: A port is in use, or this host lacks an address.
        """
        try:
            ensure_descriptors(self._size + web.MOST_CONNECTIONS, "connections of ranks and readers of the monitor")
            if self._wanted is not None:
                [self._readers_socket] = listen("the monitor", [self._host], [self._wanted])
                close_in_child(self._readers_socket)
                shown = socket.gethostname() if is_everywhere(self._host) else self._host
                shown = f"[{shown}]" if ":" in shown else shown
                reader_port = self._readers_socket.getsockname()[1]
                self.url = f"http://{shown}:{reader_port}/?token={self._access.token}"
            listeners = listen("the monitor", list(addresses), [0] * 8)
            self.port = listeners[0].getsockname()[1]
            self._addresses.update(addresses)
            self._collector.server.listen(listeners)
            if self._is_attachable:
                self._listen_for_attachments()
            thread = threading.Thread(target=self._run, name="horovodlike-monitor", daemon=True)
            thread.start()
        except BaseException:
            self._close_sockets()
            raise
        self._thread = thread
        if self._metrics_file is not None:
            self._metrics_file.start()

    def _listen_for_attachments(self) -> None:
        try:
            self._attach_socket = attach.listen()
        except OSError as error:  # a second job of this process, or another process has taken the name
            self.board.add_event("warning", f"hvdrun --attach cannot be used for this job: {error.strerror}")

    def listen_on(self, addresses: Collection[str]) -> None:
        """Take reports at further addresses of this host, at the same port.

        Raises:
            RendezvousError: The port is in use there.
        """
        new = [address for address in addresses if address not in self._addresses]
        if new:
            listeners = listen("the monitor", new, [self.port])
            self._addresses.update(new)
            try:
                self._loop.call_soon_threadsafe(self._collector.server.listen, listeners)
            except RuntimeError:  # the thread has failed
                for each in listeners:
                    each.close()

    def close(self) -> None:
        """Close all connections, write the last metrics, and end the threads. May be called again."""
        if self._thread is not None:
            self.board.end("the job has ended")
            with contextlib.suppress(RuntimeError):  # the thread has failed
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_PATIENCE_S)
            self._thread = None
            if self._metrics_file is not None:
                self._metrics_file.close()

    def _snapshot(self, with_history: bool) -> web.Snapshot:
        """Return the state of the job, at most half a second old, however many readers there are."""
        now = time.monotonic()
        found = self._cached.get(with_history)
        if found is None or now - found[0] > _SNAPSHOT_S:
            found = self._cached[with_history] = now, web.Snapshot(self.board.snapshot(with_history))
        return found[1]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        for each in (self._readers_socket, self._attach_socket):
            if each is not None:
                each.close()
        self._collector.server.close()
        self._loop.close()

    async def _serve(self) -> None:
        server = self._collector.server
        self._loop.add_reader(server.fileno(), self._attend)
        readers = web.Readers(self._access, self._snapshot, self.board.output)
        web_server = None
        if self._readers_socket is not None:
            web_server = await asyncio.start_server(
                readers.serve, sock=self._readers_socket, limit=web.MOST_HEADER_BYTES, backlog=1024
            )
        attachments = attach.Attachments(self._collector, self.board)
        attach_server = None
        if self._attach_socket is not None:
            attach_server = await asyncio.start_unix_server(
                attachments.serve, sock=self._attach_socket, limit=attach.LINE_BYTES
            )
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _TICK_S)
                self._attend(ticks=True)  # also drops connections that have not authenticated themselves in time
        finally:
            self._loop.remove_reader(server.fileno())
            for each in (web_server, attach_server):
                if each is not None:
                    each.close()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                readers.close()  # a task may miss that it is cancelled if its reader has sent something just now
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)

    def _attend(self, ticks: bool = False) -> None:
        try:
            self._collector.server.attend()
            if ticks:
                self.board.tick()
        except Exception as error:
            if repr(error) != self._trouble:
                self._trouble = repr(error)
                self.board.add_event("warning", f"the monitor has failed for a moment: {error!r}")


def _own_names(host: str) -> list[str]:
    """Return the names that readers elsewhere have for this host, if the monitor answers them."""
    return [socket.gethostname(), socket.getfqdn()] if is_everywhere(host) else []
