"""The monitor of a job: one thread that takes the reports of ranks, answers readers, and writes a file of metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import JobKey, close_in_child
from horovodlike._net.socket_options import ensure_descriptors
from horovodlike.monitor import prometheus, web
from horovodlike.monitor.board import Board
from horovodlike.monitor.collector import Collector

LOOPBACK = "127.0.0.1"
_TICK_S = 1.0
_SNAPSHOT_S = 0.5
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
    ) -> None:
        """Prepare the monitor.

        Args:
            board: The state of the job.
            key: The key with which ranks send reports.
            size: How many ranks the job has, if that is known.
            host: The address at which readers are answered.
            port: The port for readers; 0: a free one; None: there are no readers.
            names: The names that a Host header may have, besides addresses and ``localhost``.
            token: The text that readers must know; None: a random one.
            metrics_file: A file that gets the metrics each second, or None.
        """
        self.board = board
        self._size = size or _UNKNOWN_SIZE
        self._host, self._wanted = host, port
        self._access = web.Access(token or secrets.token_urlsafe(24), frozenset(names))
        self._metrics_file = None if metrics_file is None else Path(metrics_file).absolute()
        self._collector = Collector(key, board, self._size)
        self._addresses: set[str] = set()
        self._readers_socket: socket.socket | None = None
        self._cached: dict[bool, tuple[float, dict[str, Any]]] = {}
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self.port = 0
        """The port at which ranks send reports; known after :meth:`start`."""
        self.url: str | None = None
        """The address of the page; None without readers."""

    def start(self, addresses: Collection[str]) -> None:
        """Listen, and start the thread.

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
                shown = f"[{self._host}]" if ":" in self._host else self._host
                reader_port = self._readers_socket.getsockname()[1]
                self.url = f"http://{shown}:{reader_port}/?token={self._access.token}"
            listeners = listen("the monitor", list(addresses), [0] * 8)
        except BaseException:
            if self._readers_socket is not None:
                self._readers_socket.close()
            self._collector.server.close()
            self._loop.close()
            raise
        self.port = listeners[0].getsockname()[1]
        self._addresses.update(addresses)
        self._collector.server.listen(listeners)
        self._thread = threading.Thread(target=self._run, name="horovodlike-monitor", daemon=True)
        self._thread.start()

    def listen_on(self, addresses: Collection[str]) -> None:
        """Take reports at further addresses of this host, at the same port.

        Raises:
            RendezvousError: The port is in use there.
        """
        new = [address for address in addresses if address not in self._addresses]
        if new:
            listeners = listen("the monitor", new, [self.port])
            self._addresses.update(new)
            self._loop.call_soon_threadsafe(self._collector.server.listen, listeners)

    def close(self) -> None:
        """Write the last metrics, close all connections, and end the thread. May be called again."""
        if self._thread is not None:
            self.board.end("the job has ended")
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            self._thread = None

    def snapshot(self, with_history: bool = False) -> dict[str, Any]:
        """Return the state of the job, at most half a second old, however many readers there are."""
        now = time.monotonic()
        taken, state = self._cached.get(with_history, (0.0, {}))
        if not state or now - taken > _SNAPSHOT_S:
            state = self.board.snapshot(with_history)
            self._cached[with_history] = now, state
        return state

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._collector.server.close()
            self._loop.close()

    async def _serve(self) -> None:
        server = self._collector.server
        self._loop.add_reader(server.fileno(), server.attend)
        readers = web.Readers(self._access, self.snapshot)
        web_server = None
        if self._readers_socket is not None:
            web_server = await asyncio.start_server(
                readers.serve, sock=self._readers_socket, limit=web.MOST_HEADER_BYTES, backlog=1024
            )
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _TICK_S)
                server.attend()  # also drops connections that have not authenticated themselves in time
                self.board.tick()
                self._write_metrics()
        finally:
            self._loop.remove_reader(server.fileno())
            if web_server is not None:
                web_server.close()
                await readers.close()

    def _write_metrics(self) -> None:
        """Replace the file of metrics, so that its reader never sees a part of it."""
        if self._metrics_file is None:
            return
        text = prometheus.render(self.board.snapshot())
        try:
            descriptor, name = tempfile.mkstemp(dir=self._metrics_file.parent, prefix=f".{self._metrics_file.name}.")
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    os.fchmod(file.fileno(), 0o644)
                os.replace(name, self._metrics_file)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self.board.add_event("warning", f"{self._metrics_file} cannot be written: {error.strerror}")
            self._metrics_file = None
