"""Ranks for tests: processes that run the functions that a test sends them.

A `RankPool` of each size is started once, on demand, and used by all tests of the run; a test that breaks its job uses
a pool of its own. This file is also the program that the ranks run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from support.forkserver import Child, fork_server

COMMON_MODULES = ("numpy", "cloudpickle", "horovodlike.basics")
IN_HASTE = b"in haste"
DUMP_STACKS = signal.SIGUSR1
# After one rank has failed, the others may wait for it forever: they have this time, in seconds, to answer as well.
GRACE_SECONDS = 5.0
SHM = Path("/dev/shm")


class RankFailure(AssertionError):
    """A rank raised, died, or did not answer in time; the message has the error and output of every rank."""


@dataclass
class Outcome:
    """The outcome of a function on one rank."""

    value: Any = None
    error: str = ""  # the traceback, or how the process ended
    exit_code: int | None = None  # if the process ended
    seconds: float = 0.0  # from the start of the function on all ranks to this rank's answer

    @property
    def ok(self) -> bool:
        return not self.error


class RankPool:
    """Processes that form one job.

    Args:
        size: How many processes.
        settings: More environment variables for the ranks.
        modules: The modules that the ranks have imported when they start.
        before: More environment variables, which are set while the modules are imported.
    """

    def __init__(
        self,
        size: int,
        settings: Mapping[str, str] | None = None,
        *,
        modules: Sequence[str] = (),
        before: Mapping[str, str] | None = None,
    ) -> None:
        from horovodlike._bootstrap.bootstrap import RendezvousServer

        self.size = size
        self.broken = False
        self._logs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115  # closed with the object
        key = secrets.token_bytes(32)
        self._server = RendezvousServer(key, size)
        self._server.start()
        self._shm_before = shm_entries()
        self._connections: list[Connection] = []
        self.processes: list[Child] = []
        self._sent_at = 0.0
        server = fork_server((*COMMON_MODULES, *modules), tuple(sorted((before or {}).items())))
        for rank in range(size):
            environment = {**environment_of(rank, size, key, self._server.port), **(before or {}), **(settings or {})}
            ours, theirs = socket.socketpair()
            with theirs:
                self.processes.append(server.start(__file__, theirs.fileno(), environment, self._logs[rank].fileno()))
            self._connections.append(Connection(ours.detach()))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results by rank.

        Raises:
            RankFailure: A rank raised, died, or took longer than `timeout` seconds.
        """
        return self.run_each(fn, [args] * self.size, timeout=timeout)

    def run_each(
        self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout: float = 60.0
    ) -> list[Any]:
        """Call `fn` on every rank as `run` does, each with its own arguments."""
        self.start(fn, arguments)
        outcomes = self.collect(timeout, grace=GRACE_SECONDS)
        if not all(outcome.ok for outcome in outcomes):
            self.broken = True
            self.terminate()
            raise RankFailure(self._report(outcomes))
        return [outcome.value for outcome in outcomes]

    def start(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]] | None = None) -> None:
        """Have all ranks call a function, and return at once."""
        from horovodlike._net.object_seal import dumps

        module = sys.modules[fn.__module__]
        cloudpickle.register_pickle_by_value(module)  # test modules cannot be imported by the ranks
        try:
            messages = [dumps((fn, args)) for args in arguments or [()] * self.size]
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        self._sent_at = time.monotonic()
        for connection, message in zip(self._connections, messages, strict=True):
            with contextlib.suppress(OSError):  # `collect` reports a rank that has exited
                connection.send_bytes(message)

    def collect(self, timeout: float = 60.0, grace: float | None = None) -> list[Outcome]:
        """Return the outcome of the function on each rank; never takes much longer than `timeout` seconds.

        With `grace`, the other ranks get only that many seconds after a rank has failed.
        """
        deadline = time.monotonic() + timeout
        outcomes: dict[Connection, Outcome] = {}
        while len(outcomes) < self.size:
            pending = [connection for connection in self._connections if connection not in outcomes]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                outcomes[connection] = outcome = self._receive(connection)
                outcome.seconds = time.monotonic() - self._sent_at
                if grace is not None and not outcome.ok:
                    deadline = min(deadline, time.monotonic() + grace)
        late = [rank for rank, connection in enumerate(self._connections) if connection not in outcomes]
        for rank in late:
            outcomes[self._connections[rank]] = Outcome(error=f"no answer\n{self._stacks(rank)}")
        return [outcomes[connection] for connection in self._connections]

    def _receive(self, connection: Connection) -> Outcome:
        try:
            ok, value = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self.processes[self._connections.index(connection)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            exit_code = process.returncode
            return Outcome(error=f"ended with {exit_code}", exit_code=exit_code)
        return Outcome(value=value) if ok else Outcome(error=value)

    def _stacks(self, rank: int) -> str:
        """Return the Python stacks of a rank that hangs."""
        log = self._logs[rank]
        before = os.fstat(log.fileno()).st_size
        self.kill(rank, DUMP_STACKS)
        deadline = time.monotonic() + 2.0
        text = b""
        while time.monotonic() < deadline and b"<module>" not in text:
            text = os.pread(log.fileno(), 1 << 16, before)
            time.sleep(0.01)  # nothing signals the end of the dump, whose last line is the outermost frame
        return text.decode(errors="replace")

    def _report(self, outcomes: Sequence[Outcome]) -> str:
        lines = []
        for rank, outcome in enumerate(outcomes):
            lines.append(f"--- rank {rank} of {self.size}: {outcome.error or 'returned'}")
            if outcome.error:
                size = os.fstat(self._logs[rank].fileno()).st_size
                tail = os.pread(self._logs[rank].fileno(), 4096, max(0, size - 4096)).decode(errors="replace").strip()
                lines.append(f"output: {tail}" if tail else "")
        return "\n".join(["", *lines])

    def output(self, rank: int) -> str:
        """Return the output of a rank so far."""
        descriptor = self._logs[rank].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        if self.processes[rank].poll() is None:
            self.processes[rank].send_signal(number)

    def terminate(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait(timeout=10)

    def stop(self, in_haste: bool = False) -> None:
        """Tell the ranks to shut down and exit when they are idle, and return at once.

        In haste they skip the end of the interpreter, which takes a second with many modules imported.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(IN_HASTE if in_haste else b"")

    def close(self, timeout: float = 20.0) -> None:
        """Let the ranks shut down and exit; check that no process and no file of them is left.

        Raises:
            RankFailure: A rank did not exit by itself, or something is left in /dev/shm.
        """
        self.stop()
        deadline = time.monotonic() + timeout
        late = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(f"rank {rank} did not exit\n{self._stacks(rank)}")
        self.terminate()
        for connection in self._connections:
            connection.close()
        self._server.close()
        for log in self._logs:
            log.close()
        left = shm_entries() - self._shm_before
        if late or left:
            raise RankFailure("\n".join([*late, *(f"left in {SHM}: {entry}" for entry in left)]))


def shm_entries() -> set[str]:
    """Return the names in /dev/shm that belong to the package."""
    return {entry.name for entry in SHM.iterdir() if "horovodlike" in entry.name or "hvl" in entry.name}


def environment_of(rank: int, size: int, key: bytes, port: int) -> dict[str, str]:
    """Return the environment of a rank of a job on this host, whose rendezvous server listens at `port`."""
    foreign = ("HOROVOD", "OMPI_", "PMI", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {
        **inherited,
        "HOROVODLIKE_RANK": str(rank),
        "HOROVODLIKE_SIZE": str(size),
        "HOROVODLIKE_LOCAL_RANK": str(rank),
        "HOROVODLIKE_LOCAL_SIZE": str(size),
        "HOROVODLIKE_CROSS_RANK": "0",
        "HOROVODLIKE_CROSS_SIZE": "1",
        "HOROVODLIKE_NODE_ID": f"{key.hex()[:8]}-node",
        "HOROVODLIKE_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVODLIKE_RENDEZVOUS_PORT": str(port),
        "HOROVODLIKE_SECRET_KEY": key.hex(),
        "HOROVODLIKE_JOB_ID": key.hex()[-16:],
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _serve(connection: Connection) -> None:
    """Call the functions that the test sends and answer, until it closes the connection or sends an end."""
    from horovodlike import basics

    basics.init()
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if message in (b"", IN_HASTE):
            break
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # Keras itself uses deprecated functions.
                warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"keras\.")
                fn, args = cloudpickle.loads(message)
                answer = cloudpickle.dumps((True, fn(*args)))
        except Exception:
            answer = cloudpickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
    basics.shutdown()
    if message == IN_HASTE:
        os._exit(0)


def _main() -> None:
    prctl_set_pdeathsig = 1  # the kernel kills the rank when the test run is killed
    ctypes.CDLL(None).prctl(prctl_set_pdeathsig, signal.SIGKILL)
    faulthandler.register(DUMP_STACKS, file=sys.stderr, all_threads=True)
    _serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    _main()
