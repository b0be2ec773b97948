"""Ranks that no launcher of ours has started: processes that run one function and exit. Also the program of a rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from support.forkserver import Child, fork_server
from support.ranks import Outcome

MODULES = ("numpy", "cloudpickle", "torch")
FOREIGN = ("HOROVOD", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


class PlainRanks:
    """Processes, each of which runs a function with its own arguments and environment.

    Args:
        fn: The function; its result can be pickled.
        arguments: The arguments of each rank.
        environments: The variables of each rank in addition to this process's.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        server = fork_server(MODULES)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.children: list[Child] = []
        self.outputs: list[str] = []  # by rank, its output, once it was collected
        self._connections: list[Connection] = []
        self._logs = [tempfile.TemporaryFile() for _ in arguments]  # noqa: SIM115  # closed with the object
        cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
        try:
            messages = [cloudpickle.dumps((fn, each)) for each in arguments]
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[fn.__module__])
        for rank, message in enumerate(messages):
            ours, theirs = socket.socketpair()
            environ = {**inherited, "OMP_NUM_THREADS": "1", **(environments[rank] if environments else {})}
            with theirs:
                self.children.append(server.start(__file__, theirs.fileno(), environ, self._logs[rank].fileno()))
            self._connections.append(Connection(ours.detach()))
            self._connections[-1].send_bytes(message)

    def collect(self, timeout: float = 60.0) -> list[Outcome]:
        """Wait for all ranks, and return the outcome of each; kill those that have not answered in time."""
        start = time.monotonic()
        outcomes = []
        for child, connection in zip(self.children, self._connections, strict=True):
            outcome = Outcome(error="no answer in time")
            if connection.poll(max(0.0, start + timeout - time.monotonic())):
                try:
                    ok, value = cloudpickle.loads(connection.recv_bytes())
                    outcome = Outcome(value=value) if ok else Outcome(error=value)
                except (EOFError, ConnectionResetError):
                    outcome = Outcome(error=f"ended with {child.wait(10)}", exit_code=child.wait(10))
            outcome.seconds = time.monotonic() - start
            outcomes.append(outcome)
        for rank, child in enumerate(self.children):
            if outcomes[rank].error == "no answer in time":
                child.send_signal(signal.SIGKILL)
            child.wait(20)
            self._connections[rank].close()
            self.outputs.append(os.pread(self._logs[rank].fileno(), 1 << 20, 0).decode(errors="replace"))
            self._logs[rank].close()
        return outcomes

    def values(self, timeout: float = 60.0) -> list[Any]:
        """Return the function's result on each rank; an error of a rank is this test's."""
        outcomes = self.collect(timeout)
        assert all(outcome.ok for outcome in outcomes), "\n".join(
            f"--- rank {rank}: {outcome.error}\n{self.outputs[rank]}" for rank, outcome in enumerate(outcomes)
        )
        return [outcome.value for outcome in outcomes]


def _main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn, arguments = cloudpickle.loads(connection.recv_bytes())
            answer = cloudpickle.dumps((True, fn(*arguments)))
    except Exception:
        answer = cloudpickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    connection.close()


if __name__ == "__main__":
    _main()
