"""Elastic jobs: the driver, which starts workers, replaces those that fail, and decides which are members.

===================== ==================================================================================================
``elastic_job``       the steps of an elastic job
``membership``        pure: all decisions; ``events`` are its input and output, ``state`` its data, and ``host_health``
                      decides when a host may have workers again
``driver``            carries the decisions out, and reports events to the membership
``agents``            the agents of the hosts, and how workers are started through them
``called_hosts``      the hosts that call in, and the driver's end of their connections
``call_in``           the end of a host that calls in
``worker_server``     the driver's end of the connections to its workers
``cluster_discovery`` hosts that Kubernetes or DNS names
``rank_assignment``   pure: the environment variables that give a generation's members their ranks
===================== ==================================================================================================

This module finds the hosts. For another way to find them, derive a class from :class:`HostDiscovery` and pass an
instance of it to ``horovodlike.run``.
"""

import os
import shutil
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.addresses import find_this_machine
from horovodlike.launcher.planning.command import NO_INTERPRETER, interpreter_trouble
from horovodlike.launcher.planning.hosts import HostSlots, merge_hosts, parse_host_line
from horovodlike.launcher.schedulers.registry import names_of_this_machine

__all__ = ["DiscoveryError", "HostDiscovery"]

_EVERY_S = 1.0
_FAREWELL_S = 2.0


class DiscoveryError(RuntimeError):
    """The hosts could not be discovered this time; the message says why.

    Attributes:
        may_pass: Whether it may help to wait; then a job that starts waits until its start timeout.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        """Keep the attributes."""
        super().__init__(message)
        self.may_pass = may_pass


class HostDiscovery(ABC):
    """Finds the hosts of an elastic job. Derive from it to ask a scheduler of your own."""

    @abstractmethod
    def find(self) -> dict[str, int]:
        """Return the hosts that can be used now, each with its number of slots, in the order in which they are filled.

        It is called once when the job starts, and then about once a second by another thread. If the first call raises
        an Exception, the job ends with it; if a later call raises one, the hosts stay as they were.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """End the discovery; may be called while another thread is in :meth:`find`, which must then return soon."""


class FixedHosts(HostDiscovery):
    """A discovery that always finds the same hosts."""

    def __init__(self, hosts: Mapping[str, int]) -> None:
        """Take the hosts and their slots."""
        self._hosts = dict(hosts)

    def find(self) -> dict[str, int]:
        """See :meth:`HostDiscovery.find`."""
        return dict(self._hosts)


class HostDiscoveryScript(HostDiscovery):
    """A program that prints one host per line: ``host``, or ``host:slots``. Without a ``#!`` line, a shell runs it."""

    def __init__(self, script: str, slots: int | None = None, seconds: float = 30.0) -> None:
        """Look for the program.

        Args:
            script: Its path, or its name on PATH.
            slots: The number of slots of a host that is printed without one; 1 if None.
            seconds: How long the program may take; then it is ended.

        Raises:
            UsageError: There is no such program, or it cannot be executed.
        """
        self._script = script
        self._slots = slots
        self._seconds = seconds
        self._lock = threading.Lock()
        self._pid: int | None = None  # guarded by _lock, as are writes of _closed
        self._closed = False
        self._answered = False
        path = os.path.abspath(script) if os.sep in script or os.path.exists(script) else shutil.which(script)
        if path is None or not os.path.isfile(path):
            raise UsageError(f"--host-discovery-script {script}: there is no such program; check the path")
        if not os.access(path, os.X_OK):
            raise UsageError(f"--host-discovery-script {script}: it is not executable; chmod +x {script}")
        trouble = interpreter_trouble(path)
        if trouble not in ("", NO_INTERPRETER):
            raise UsageError(f"--host-discovery-script {script}: {trouble}; begin it with a line such as #!/bin/sh")
        self._words = ["/bin/sh", path] if trouble else [path]

    def find(self) -> dict[str, int]:
        """Run the program.

        Raises:
            DiscoveryError: The program failed, took too long, or printed an invalid line.
        """
        from horovodlike.launcher.agent.external import ask  # not at the top: parsing the options does not need it
        from horovodlike.launcher.supervisor.waiting import Waiting

        waiting = Waiting()

        def cancelled() -> bool:
            if not self._answered:
                waiting.note(f"waiting: --host-discovery-script {self._script} has not answered yet")
            return self._closed

        if self._closed:
            raise DiscoveryError("the job is over")
        try:
            answer = ask(self._words, self._seconds, cancelled=cancelled, on_start=self._note)
            self._answered = True
        except OSError as error:
            raise DiscoveryError(f"{self._script} cannot be executed: {error.strerror}") from None
        finally:
            with self._lock:
                self._pid = None
        said = answer.err.decode(errors="replace").strip().splitlines()[-5:]
        words = f"{': ' if said else ''}{'; '.join(said)}"
        if answer.trouble:
            how = "; if it needs longer, raise --discovery-timeout (HOROVODLIKE_DISCOVERY_TIMEOUT) or --elastic-timeout"
            remedy = how if answer.took_too_long else ""
            raise DiscoveryError(f"{self._script} was ended: {answer.trouble}{remedy}{words}")
        if answer.status != 0:
            raise DiscoveryError(f"{self._script} ended with {answer.status}{words}")
        hosts: list[HostSlots] = []
        for line in answer.out.decode(errors="replace").splitlines():
            if not line.strip():
                continue
            try:
                hosts.append(parse_host_line(line, 1 if self._slots is None else self._slots))
            except ValueError:
                raise DiscoveryError(f"{self._script} printed {line!r}; a line must be like: worker-0:2") from None
        return {entry.host: entry.slots for entry in merge_hosts(hosts)}

    def _note(self, pid: int) -> None:
        with self._lock:
            self._pid = pid

    def close(self) -> None:
        """See :meth:`HostDiscovery.close`."""
        from horovodlike.launcher.agent.process import send_signal  # see above

        with self._lock:
            self._closed = True
            if self._pid is not None:  # if it does not end, ask() in find() ends it, because of _closed
                send_signal(-self._pid, signal.SIGTERM)


class DiscoveryThread:
    """Calls a discovery again and again, in a thread, and knows which of the hosts is this machine."""

    def __init__(
        self, discovery: HostDiscovery, environ: Mapping[str, str], here: str | None = None, *, resolves: bool = True
    ) -> None:
        """Prepare the thread.

        Args:
            discovery: Finds the hosts.
            environ: The environment; a scheduler may have named this machine there.
            here: The name of this machine among the hosts, if it is known.
            resolves: Whether to find this machine among the hosts; else their names stay as they are.
        """
        self.here = here
        self._discovery = discovery
        self._resolves = resolves
        self._names = names_of_this_machine(environ)
        self._renamed: dict[str, str] = {}  # name of a host as discovered -> its name in this job
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> dict[str, int]:
        """Return the hosts as they are now; the names of this machine are merged into one, :attr:`here`.

        Raises:
            Exception: An exception of the discovery.
        """
        found = [HostSlots(host, slots) for host, slots in self._discovery.find().items() if slots > 0]
        if not self._resolves:
            return {entry.host: entry.slots for entry in found}
        new = [entry for entry in found if entry.host not in self._renamed]
        if new:
            names = self._names if self.here is None else self._names | {self.here}
            for entry in new:
                (resolved,), here = find_this_machine([entry], names)
                if here is not None:
                    self.here = self.here or here
                self._renamed[entry.host] = self.here or here if here is not None else resolved.host
        return {each.host: each.slots for each in merge_hosts(HostSlots(self._renamed[e.host], e.slots) for e in found)}

    def start(self, last: Mapping[str, int], tell: Callable[[dict[str, int] | str], None]) -> None:
        """Call :meth:`look` every second, in a thread.

        Args:
            last: The last result of :meth:`look`.
            tell: Called in the thread with the hosts when they have changed, or with the reason why they could not be
                found; a reason is not repeated while it stays the same.
        """
        self._thread = threading.Thread(target=self._run, args=(dict(last), tell), name="hvdrun-discovery", daemon=True)
        self._thread.start()

    def _run(self, last: dict[str, int], tell: Callable[[dict[str, int] | str], None]) -> None:
        said = ""
        while not self._stop.wait(_EVERY_S):
            try:
                found = self.look()
            except Exception as error:  # any exception of a plug-in: the job continues with the hosts that it has
                problem = str(error) or type(error).__name__
                if problem != said and not self._stop.is_set():
                    tell(f"the hosts cannot be found out, and stay as they are: {problem}")
                said = problem
                continue
            said = ""
            if found != last and not self._stop.is_set():
                last = found
                tell(dict(found))

    def close(self) -> None:
        """End the thread; if it is in a plug-in that does not return, leave it behind."""
        self._stop.set()
        self._discovery.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_FAREWELL_S)
