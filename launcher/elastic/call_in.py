"""A host that calls in: it offers its slots to an elastic job elsewhere, whose driver listens (``called_hosts``).

The connection carries the frames of an agent. The workers have the environment, the folder and the command of the
process that calls in; the driver decides their ranks, processors, GPUs and keys.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.host_probe import describe, detect_host, encode_needs, installed_version
from horovodlike.launcher.agent.protocol import (
    Frame,
    FrameKind,
    InvalidFrameError,
    decode_text,
    encode_exit,
    encode_seconds,
    encode_text,
    to_native,
)
from horovodlike.launcher.agent.run_task import SEARCH_PATH
from horovodlike.launcher.elastic.called_hosts import LEFT
from horovodlike.launcher.elastic.rank_assignment import OF_A_PLACE
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.planning import ElasticSpec, JobSpec, Nodes
from horovodlike.launcher.planning.plan import RankPlan, inherited, tuning_variables
from horovodlike.launcher.supervisor.agent_startup import start_message
from horovodlike.launcher.supervisor.connection import start_local_agent
from horovodlike.launcher.supervisor.job import GRACE_S, Outcome
from horovodlike.launcher.supervisor.node_connection import NodeConnection, connect_node
from horovodlike.launcher.supervisor.node_job import key_of_ranks
from horovodlike.launcher.supervisor.node_relay import Relay
from horovodlike.launcher.supervisor.static_job import Launch

__all__ = ["CallIn", "call_in"]

_RUN_TASK = Path(__file__).parents[1] / "agent" / "run_task.py"


class _WorkerRelay(Relay):
    """The relay between the agent of a host that has called in and the driver."""

    def __init__(self, *given: Any, job: "CallInLaunch") -> None:
        """Take the arguments of :class:`Relay`, and the steps that this relay is one of."""
        super().__init__(*given)
        self._job = job
        self._leaving = False

    def _on_agent(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ALIVE:  # this relay has answered already
            return
        if self._job.prints:
            super()._on_agent(frame)
        else:
            self._uplink.send(*frame)

    def _on_uplink(self, frame: Frame) -> None:
        if frame.kind is FrameKind.START:
            self._start(frame)
        elif frame.kind is FrameKind.DESCRIBE:
            self._uplink.send(FrameKind.DESCRIPTION, 0, encode_text(self._job.describe(decode_text(frame.payload))))
        elif frame.kind in (FrameKind.TASK, FrameKind.SIGNAL_RANK):
            self._agent.send(*frame)
        else:
            super()._on_uplink(frame)
            if frame.kind is FrameKind.ALIVE:  # so that the agent does not outlive a relay that is stopped
                self._agent.send(*frame)

    def _start(self, frame: Frame) -> None:
        workers, message = self._job.rewrite(frame.payload)
        for worker in workers:
            if self._leaving:  # it was sent before the driver knew
                self._uplink.send(FrameKind.EXITED, worker, encode_exit(0, -signal.SIGTERM))
            elif self._job.prints:
                try:
                    self._output.expect(worker)
                except UsageError as error:
                    self._output.say(f"hvdrun: {error}; worker {worker} goes on without")
        if not self._leaving:
            self._agent.send(FrameKind.START, 0, message)

    def _handle_signals(self) -> None:
        while self._signals:
            name, grace = signal.Signals(self._signals.popleft()).name, self._job.grace_period
            self._signalled += 1
            if self._uplink not in self._open or self._signalled > 1:
                self._agent.send(FrameKind.KILL)
                continue
            self._leaving = True
            self._output.say(
                f"hvdrun: {name}: this node leaves the job; its workers may take {grace:g} s to commit and exit. A "
                "second signal kills at once"
            )
            self._uplink.send(FrameKind.LEAVING)
            self._agent.send(FrameKind.SIGNAL, signal.SIGTERM, encode_seconds(grace))


class CallInLaunch(Launch):
    """The steps of a host that calls in. Its workers are planned by the driver."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take the arguments of :class:`Launch`."""
        super().__init__(*given, **named)
        self._lock = threading.Lock()  # guards the next four attributes, for leave()
        self._uplink: NodeConnection | None = None
        self._relay: _WorkerRelay | None = None
        self._given_grace: float | None = None
        self.left = False

    @property
    def prints(self) -> bool:
        """Whether the output of the workers stays here."""
        assert self._spec.nodes is not None
        return self._spec.nodes.prints

    @property
    def grace_period(self) -> float:
        """How long the workers may take to exit when this host leaves, in seconds."""
        assert self._spec.elastic is not None
        return self._spec.elastic.grace_period if self._given_grace is None else self._given_grace

    def resolve(self) -> None:
        """Offer this host to the job; wait until it is accepted."""
        spec, nodes = self._spec, self._spec.nodes
        assert nodes is not None
        deadline = time.monotonic() + spec.start_timeout
        place = (0, 0) if nodes.number is None else (nodes.number, nodes.count)
        uplink = connect_node(nodes.key, *place, nodes.host, nodes.port, deadline, lambda: self.left)
        self._stack.callback(uplink.hang_up)
        with self._lock:
            self._uplink = uplink
            self._check_left()
        join = {"version": installed_version(), "host": socket.gethostname(), "num_proc": spec.num_proc}
        uplink.send(FrameKind.JOIN, 0, encode_text({**join, "name": nodes.name, "prints": nodes.prints}))
        deadline = time.monotonic() + spec.start_timeout
        try:
            frame, *self._early = uplink.await_frame(deadline, FrameKind.PLACE, FrameKind.OUTCOME)
        except (OSError, InvalidFrameError) as error:
            raise HostsError(f"node 0 has gone, or is stuck ({error}); see what it prints") from None
        if frame.kind is FrameKind.OUTCOME:
            raise HostsError(f"node 0 says: {frame.payload.decode(errors='replace').removeprefix('hvdrun: ')}")

    def probe(self) -> None:
        """Describe this host."""
        self._environ = {name: value for name, value in inherited(self._environ).items() if name not in OF_A_PLACE}
        self._tuning, _ = tuning_variables(self._environ, detect_host().usable_cpus, self._spec.num_proc)
        self._open_files(1, ())

    def start(self) -> None:
        """Start this host's agent, which starts workers as the driver asks for them."""
        self._open_output()
        agent = start_local_agent()
        self._stack.callback(agent.close)
        self._say()
        patience = self._spec.start_timeout
        relay = _WorkerRelay(agent, self._uplink, self._output, self._wakeup, patience, job=self)
        with self._lock:
            self._check_left()
            self._relay = relay
        self._attach(relay)

    def supervise(self) -> None:
        """Run until the driver has ended the job, or this host has left it."""
        assert self._relay is not None
        self._exit_code = self._relay.run(self._early)

    def attribute(self) -> Outcome:
        """Return the exit code that the driver has decided, and the reason if it has named one."""
        assert self._relay is not None
        return Outcome(exit_code=self._exit_code, trouble=self._relay.why)

    def leave(self, grace_period: float | None) -> None:
        """Have this host leave the job, as SIGTERM does; a second call kills the workers. From any thread."""
        with self._lock:
            self.left = True
            self._given_grace = grace_period
            if self._relay is not None:
                self._relay.interrupt(signal.SIGTERM)
            elif self._uplink is not None:
                self._uplink.kill()

    def _check_left(self) -> None:
        if self.left:
            raise HostsError("this host was told to leave before the job had workers for it")

    # For the relay.

    def describe(self, needs: Mapping[str, Any]) -> dict[str, Any]:
        """Describe this host to the driver, which names the job's needs; folder and program are this host's own."""
        own = encode_needs(self._folder, self._command[0])
        return describe({**needs, "cwd": own["cwd"], "program": own["program"]})

    def rewrite(self, payload: bytes) -> tuple[list[int], bytes]:
        """Return the workers that a START of the driver has, and the START for this host's agent.

        Raises:
            InvalidFrameError: It makes no sense.
        """
        try:
            plans = [self._plan(entry) for entry in decode_text(payload)["ranks"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidFrameError(f"a worker cannot be started ({error!r})") from None
        message = start_message(plans, self._environ, self._folder, elastic=True, grace_period=self.grace_period)
        return [plan.rank for plan in plans], message

    def _plan(self, entry: Mapping[str, Any]) -> RankPlan:
        assert self._spec.nodes is not None
        given = {_text(name): _text(value) for name, value in entry["environ"].items()}
        key = key_of_ranks(self._spec.nodes.key, given["HOROVODLIKE_JOB_ID"])
        environ = {**self._tuning, **given, "HOROVODLIKE_SECRET_KEY": key.hex()}
        cpus = entry["cpus"]
        return RankPlan(int(entry["rank"]), 0, environ, self._command, None if cpus is None else tuple(map(int, cpus)))


def _text(value: str) -> str:
    return os.fsdecode(to_native(value))


class CallIn:
    """Offers this host to an elastic job elsewhere, from Python; :func:`call_in` does it in one call."""

    def __init__(
        self,
        key: str,
        name: str,
        host: str,
        port: int,
        slots: int,
        *,
        environ: Mapping[str, str] | None = None,
        command: tuple[str, ...] | None = None,
        prints: bool = False,
        start_timeout: float = 30.0,
        grace_period: float = GRACE_S,
    ) -> None:
        """Prepare it; :meth:`run` connects.

        Args:
            key: The key of the job's :class:`CalledHosts`, in hexadecimal digits.
            name: The name of this host in the job, which no other live one has. Workers with one name share memory.
            host: The addresses of the job's :class:`CalledHosts`, separated by commas.
            port: Its port.
            slots: How many workers this host takes.
            environ: The environment of the workers; None for this process's environment.
            command: The words that each worker executes; None for the function of ``horovodlike.run``, in this
                interpreter, with this process's search path before the driver's.
            prints: Whether the output of the workers appears here, in place of where the job was started.
            start_timeout: How long to wait for the job, in seconds.
            grace_period: How long the workers may take to commit and exit after :meth:`leave`, in seconds.
        """
        nodes = Nodes(0, None, host, port, JobKey(bytes.fromhex(key)), name=name, prints=prints)
        spec = JobSpec(
            slots,
            (sys.executable, str(_RUN_TASK)) if command is None else command,
            nodes=nodes,
            elastic=ElasticSpec(grace_period=grace_period),
            start_timeout=start_timeout,
            fold=False,
        )
        self._stack = ExitStack()
        self._reason = ""
        environ = dict(os.environ if environ is None else environ)
        if command is None:
            environ[SEARCH_PATH] = json.dumps([os.path.abspath(entry) for entry in sys.path])
        self._launch = CallInLaunch(spec, spec.command, environ, self._stack)

    def run(self) -> int:
        """Call in, and serve the job until it is over, or this host has left it; return the exit code of ``hvdrun``.

        When it returns or raises, no process of the workers is left. Callable once, from any thread.

        Raises:
            HostsError: The job cannot be reached, does not accept the key, or refuses this host; the message says why.
        """
        try:
            with self._stack:
                self._launch.resolve()
                self._launch.probe()
                self._launch.start()
                self._launch.supervise()
        except HostsError:
            if self._launch.left:  # before it had workers
                return LEFT
            raise
        outcome = self._launch.attribute()
        self._reason = outcome.trouble or ""
        return outcome.exit_code

    @property
    def reason(self) -> str:
        """How the job has ended, in the words of its driver; empty if it has ended well, or not yet."""
        return self._reason

    def leave(self, grace_period: float | None = None) -> None:
        """Leave the job: the workers commit and exit, and it continues without them. Callable from any thread.

        Args:
            grace_period: How long they may take, in seconds; None for the constructor's value.
        """
        self._launch.leave(grace_period)


def call_in(key: str, name: str, host: str, port: int, slots: int, **options: Any) -> int:
    """Offer this host to an elastic job elsewhere until that is over; see :class:`CallIn` for everything."""
    return CallIn(key, name, host, port, slots, **options).run()
