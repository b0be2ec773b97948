"""An elastic job for tests: a small driver in the test's process, and workers that it starts. Also their program.

The driver forms a generation when every live member of the last one is ready, as hvdrun's does, and decides nothing
else: tests add and kill workers themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

sys.path.append(str(Path(__file__).parent.parent))

from support.forkserver import Child, fork_server  # noqa: E402
from support.ranks import COMMON_MODULES, DUMP_STACKS, shm_entries  # noqa: E402

from horovodlike._bootstrap.bootstrap import RendezvousServer  # noqa: E402
from horovodlike._net import secure_channel  # noqa: E402
from horovodlike._net.secure_channel import Identity, JobKey, job_digest  # noqa: E402

PATIENCE = 60.0


@dataclass(eq=False)
class Worker:
    """One process, as the driver sees it."""

    number: int
    process: Child
    results: Connection
    log: Any
    socket: socket.socket | None = None
    sealer: Any = None
    is_ready: bool = False
    has_finished: bool = False
    is_leaving: bool = False
    is_gone: bool = False
    said: list[Any] = field(default_factory=list)  # with tell()
    whys: list[tuple[str, str]] = field(default_factory=list)  # with which it asked for a place
    value: Any = None
    error: str = ""

    def output(self) -> str:
        descriptor = self.log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


class ElasticJob:
    """Workers that all call one function, which may call `init()`.

    Args:
        size: How many there are at first.
        fn: The function; it gets the arguments.
        nodes: How many hosts they believe to be on, in turn.
        generations: How many are formed before `release()`.
        modules: What the workers have imported when they begin.
        before: More environment variables that they had when they imported it.
        settings: More environment variables for the workers.
    """

    def __init__(
        self,
        size: int,
        fn: Callable[..., Any],
        *args: Any,
        nodes: int = 1,
        generations: float = float("inf"),
        modules: Sequence[str] = (),
        before: Mapping[str, str] | None = None,
        **settings: str,
    ) -> None:
        from horovodlike._net.object_seal import dumps

        module = sys.modules[fn.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            self._message = dumps((fn, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        self.workers: list[Worker] = []
        self.generation = 0
        self.members: list[Worker] = []  # of the last generation, by rank
        self.sizes: list[int] = []  # of all generations
        self._most_generations = generations
        self._nodes = nodes
        self._first_size = size
        self._mother = fork_server((*COMMON_MODULES, *modules), tuple(sorted((before or {}).items())))
        self._settings = {**(before or {}), **settings}
        self._changes = 0
        self._key = JobKey.random()
        self._job = secrets.token_hex(8)
        self._shm_before = shm_entries()
        self._server: RendezvousServer | None = None
        self._happened = threading.Condition()  # guards everything here
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.add(size)

    # What tests call.

    def add(self, count: int = 1) -> None:
        """Start workers."""
        for _ in range(count):
            with self._happened:
                self.workers.append(self._spawn(len(self.workers)))
                reader = threading.Thread(target=self._collect, args=(self.workers[-1],))
                self._threads.append(reader)
            reader.start()

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until something is true of the job."""
        with self._happened:
            assert self._happened.wait_for(condition, PATIENCE), f"{what}\n{self.report()}"

    def wait_to_hear(self, number: int, text: object) -> None:
        """Wait until a worker has said something with `tell()`."""
        worker = self.workers[number]
        self.wait_for(lambda: text in worker.said, f"worker {number} never said {text!r}")

    def kill(self, number: int, signum: signal.Signals = signal.SIGKILL) -> None:
        self.workers[number].process.send_signal(signum)

    def stop(self, reason: str) -> None:
        """Tell all that the job ends."""
        with self._happened:
            for worker in self.workers:
                self._say(worker, {"stop": reason})

    def answer(self, number: int, message: dict[str, Any]) -> None:
        """Say something else to a worker that waits for a place."""
        with self._happened:
            self.workers[number].is_ready = False
            self._say(self.workers[number], message)

    def hang_up(self, number: int) -> None:
        """Lose the connection to a worker."""
        found = self.workers[number].socket
        assert found is not None
        found.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Form as many generations as are needed, from now on."""
        with self._happened:
            self._most_generations = float("inf")
            self._form()

    def finish(self) -> list[Worker]:
        """Wait until all processes have ended; check that nothing of them is left."""
        try:
            self.wait_for(lambda: all(worker.is_gone for worker in self.workers), "not all workers have ended")
            for worker in self.workers:
                worker.process.wait(PATIENCE)
        finally:
            self._clean_up()
        assert shm_entries() <= self._shm_before
        return self.workers

    def values(self, *lost: int) -> list[Any]:
        """As `finish()`; all workers but those that are lost must have returned. Their values, by number."""
        self.finish()
        for worker in self.workers:
            ended_well = worker.process.returncode == 0 and not worker.error
            assert ended_well or worker.number in lost, f"worker {worker.number}\n{self.report()}"
        return [worker.value for worker in self.workers if worker.number not in lost]

    def report(self) -> str:
        lines = [f"generation {self.generation}, sizes {self.sizes}"]
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(DUMP_STACKS)
        time.sleep(0.2)  # nothing says when the stacks have been written; the test has failed anyway
        for worker in self.workers:
            state = "ready" if worker.is_ready else "not ready"
            lines.append(f"--- worker {worker.number}: {state}, exit code {worker.process.poll()}, {worker.whys}")
            lines.append(f"said {worker.said[-10:]}\n{worker.error}\n{worker.output()[-6000:]}")
        return "\n".join(lines)

    def _clean_up(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for worker in self.workers:
            worker.results.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        if error is not None and any(worker.process.poll() is None for worker in self.workers):
            self._clean_up()
        for worker in self.workers:
            worker.log.close()

    # The driver.

    def _spawn(self, number: int) -> Worker:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115
        foreign = ("HOROVOD", "OMPI_", "PMI", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
            "HOROVODLIKE_ELASTIC": "1",
            "HOROVOD_ELASTIC": "1",
            "HOROVODLIKE_WORKER": str(number),
            "HOROVODLIKE_DRIVER_ADDR": "127.0.0.1",
            "HOROVODLIKE_DRIVER_PORT": str(self._listener.getsockname()[1]),
            "HOROVODLIKE_SECRET_KEY": self._key.hex(),
            "HOROVODLIKE_JOB_ID": self._job,
            "HOROVODLIKE_NODE_ID": f"{self._job}-node{number % self._nodes}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **self._settings,
        }
        with theirs:
            process = self._mother.start(__file__, theirs.fileno(), environment, log.fileno())
        connection = Connection(ours.detach())
        connection.send_bytes(self._message)
        return Worker(number, process, connection, log)

    def _collect(self, worker: Worker) -> None:
        """The lines and the result of a worker's function."""
        while True:
            try:
                kind, value = cloudpickle.loads(worker.results.recv_bytes())
            except (EOFError, ConnectionResetError):
                break
            with self._happened:
                if kind == "said":
                    worker.said.append(value)
                elif kind == "value":
                    worker.value = value
                else:
                    worker.error = value
                self._happened.notify_all()
        worker.process.wait()
        with self._happened:
            self._lose(worker)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=self._attend, args=(accepted,))
            self._threads.append(thread)
            thread.start()

    def _attend(self, accepted: socket.socket) -> None:
        with accepted:
            challenge = secure_channel.make_challenge()
            accepted.sendall(challenge)
            hello = accepted.recv(secure_channel.HELLO_BYTES, socket.MSG_WAITALL)
            if len(hello) < secure_channel.HELLO_BYTES:
                return
            identity, sealer, opener = secure_channel.accept_hello(self._key, challenge, hello)
            assert identity == Identity(identity.rank, 0, job_digest(f"elastic/{self._job}"))
            worker = self.workers[identity.rank]
            with self._happened:
                assert worker.socket is None, f"worker {worker.number} has connected twice"
                worker.socket, worker.sealer = accepted, sealer
            while data := _receive(accepted):
                for payload in opener.feed(data):
                    with self._happened:
                        self._obey(worker, json.loads(payload))
                        self._happened.notify_all()

    def _obey(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["do"] == "finished":
            worker.has_finished = True
        elif message["do"] == "training":
            worker.has_finished = False
        elif message["do"] == "leaving":
            worker.is_leaving = True
        elif message["do"] not in ("committed", "shutdown"):
            assert message["do"] == "ready"
            worker.whys.append((message["why"], message["reason"]))
            worker.is_ready = True
            if worker not in self.members and self.generation:
                self._announce(added=True)
            self._form()

    def _announce(self, added: bool) -> None:
        self._changes += 1
        for member in self.members:
            self._say(member, {"changed": {"number": self._changes, "added": added, "removed": not added}})

    def _lose(self, worker: Worker) -> None:
        worker.is_gone, worker.is_ready = True, False
        if worker in self.members and self._server is not None:
            self._server.close()  # ends a wait for it in init()
        self._form()
        self._happened.notify_all()

    def _form(self) -> None:
        """Begin a generation if all are there."""
        if self.generation >= self._most_generations:
            return
        old = [member for member in self.members if not member.is_gone]
        ready = [worker for worker in self.workers if worker.is_ready]
        if not all(member.is_ready for member in old) or not ready:
            return
        if self.generation == 0 and len(ready) < self._first_size:
            return
        new = [worker for worker in ready if worker not in old]
        if self._server is not None:
            self._server.close()
        self.generation += 1
        self.members = [*old, *new]
        self.sizes.append(len(self.members))
        key = self._key.derive(b"horovodlike generation", str(self.generation).encode())
        self._server = RendezvousServer(key, len(self.members), job=self._job)
        self._server.start()
        for rank, member in enumerate(self.members):
            member.is_ready = False
            self._say(member, {"place": {"generation": self.generation, "variables": self._variables(rank)}})

    def _variables(self, rank: int) -> dict[str, str]:
        nodes = [member.number % self._nodes for member in self.members]
        locals_ = [nodes[:each].count(nodes[each]) for each in range(len(nodes))]
        across = [nodes[each] for each in range(len(nodes)) if locals_[each] == locals_[rank]]
        place = {
            "RANK": rank,
            "SIZE": len(nodes),
            "LOCAL_RANK": locals_[rank],
            "LOCAL_SIZE": nodes.count(nodes[rank]),
            "CROSS_RANK": across.index(nodes[rank]),
            "CROSS_SIZE": len(across),
        }
        assert self._server is not None
        return {
            **{f"{prefix}_{name}": str(place[name]) for name in place for prefix in ("HOROVODLIKE", "HOROVOD")},
            "HOROVODLIKE_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVODLIKE_RENDEZVOUS_PORT": str(self._server.port),
            "HOROVODLIKE_GENERATION": str(self.generation),
        }

    def _say(self, worker: Worker, message: dict[str, Any]) -> None:
        if worker.socket is not None:
            with contextlib.suppress(OSError):  # it has gone
                worker.socket.sendall(worker.sealer.seal(json.dumps(message).encode()))


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


# The program of a worker.

_results: Connection | None = None


def tell(value: object) -> None:
    """In a worker: tell the test something."""
    connection = sys.modules["__main__"].__dict__["_results"]
    connection.send_bytes(cloudpickle.dumps(("said", value)))


def _main() -> None:
    global _results
    prctl_set_pdeathsig = 1  # a test run that is killed leaves no worker behind
    ctypes.CDLL(None).prctl(prctl_set_pdeathsig, signal.SIGKILL)
    faulthandler.register(DUMP_STACKS, file=sys.stderr, all_threads=True)
    connection = _results = Connection(int(sys.argv[1]))
    fn, args = cloudpickle.loads(connection.recv_bytes())
    try:
        answer = "value", fn(*args)
    except Exception:
        answer = "error", traceback.format_exc()
    connection.send_bytes(cloudpickle.dumps(answer))
    sys.exit(answer[0] == "error")


if __name__ == "__main__":
    _main()
