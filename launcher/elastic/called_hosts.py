"""The hosts of an elastic job that call in: each runs its own ``hvdrun``, or a :class:`~.call_in.CallIn`.

Two that claim to be the same are told apart by a heartbeat: if the older one answers it, the newer one is refused.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.agent.protocol import FrameKind, InvalidFrameError, encode_seconds, encode_text
from horovodlike.launcher.elastic import HostDiscovery
from horovodlike.launcher.errors import HostsError, counted
from horovodlike.launcher.supervisor.connection import FrameConnection
from horovodlike.launcher.supervisor.failure_attribution import exit_code
from horovodlike.launcher.supervisor.node_connection import Joined, NodeConnection, NodeListener
from horovodlike.launcher.supervisor.node_job import read_join

__all__ = ["CalledHosts"]

_ASK_AFTER_S = 0.5
_LOOK_S = 0.1
_PROBE_S = 60.0
LEFT = exit_code(-15)
"""The exit code of a launcher whose node leaves while the job continues: as if SIGTERM had ended it."""
_LONGEST_NAME = 253


@dataclass(eq=False)
class Caller:
    """A host that has called in.

    Attributes:
        connection: The connection to the launcher there; after JOIN it carries the frames of an agent.
        identity: The node's number or name, which no other host has.
        name: The host's name in the job.
        addresses: The address of this host and of the other one in the connection.
        prints: Whether the output of its workers stays there.
        leaving: It has said that it leaves, and no new workers are started there.
        offered: It has been offered to the job.
    """

    connection: NodeConnection
    identity: int | str
    name: str
    addresses: tuple[str, str]
    prints: bool
    leaving: bool = False
    offered: bool = False


@dataclass(eq=False)
class _Contender:
    """A host that claims to be another one, which has called in before. The older one is asked whether it lives."""

    caller: Caller
    older: Caller
    ask_at: float
    arrivals: int | None = None  # the older one's when it was asked

    def has_gone(self) -> bool:
        """Return whether it has hung up."""
        try:
            return self.caller.connection.receive() is None
        except (OSError, InvalidFrameError):
            return True


class CalledHosts(HostDiscovery):
    """Listens for hosts that call in, and offers those that are there to an elastic job.

    To ``horovodlike.run(..., host_discovery=...)`` it is the discovery of hosts; the agents come from it, too. It
    serves one job, whose end closes it. After the constructor it belongs to the thread that runs the job.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int = 0,
        *,
        key: JobKey | None = None,
        nodes: int = 0,
        own: Mapping[str, int] | None = None,
    ) -> None:
        """Listen. Hosts may call in from now on; the job begins with them.

        Args:
            addresses: The addresses of this host to listen on.
            port: The port; 0 for any free one.
            key: The key that the hosts have to prove; None for a new one.
            nodes: The most hosts, if they are numbered, this one included; 0 if they have names only.
            own: The name and the slots of this host, if it has workers, too.

        Raises:
            HostsError: It cannot listen.
        """
        self._key = JobKey.random() if key is None else key
        self._nodes = nodes
        self._own = dict(own or {})
        self._listener = NodeListener(self._key, nodes, addresses, port, named=True)
        self._callers: dict[int | str, Caller] = {}
        self._contenders: list[_Contender] = []
        self._allowed: Collection[str] | None = None
        self._say: Callable[[str], None] = lambda _: None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, so that hosts which leave now have done so because of that. From any thread."""
        return self._is_over

    @property
    def key(self) -> JobKey:
        """The key that hosts need to call in."""
        return self._key

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.port

    def find(self) -> dict[str, int]:
        """See :meth:`HostDiscovery.find`: the hosts that are there, do not leave, and are allowed."""
        found = dict(self._own)
        for caller in self._offered():
            caller.offered = True
            found[caller.name] = caller.connection.num_proc
        return found

    def close(self) -> None:
        """Stop listening, and break off all connections that the job has not ended."""
        self._listener.close()
        for caller in [*self._callers.values(), *(each.caller for each in self._contenders)]:
            self._dismiss(caller.connection, 1, "hvdrun: the job was given up")
        self._callers.clear()
        self._contenders.clear()

    # For the driver.

    def on_log(self, data: bytes) -> None:
        """Take a pickled value that a worker has logged; here it is dropped."""

    def note_end(self) -> None:
        """Note that the job has ended; its hosts notice it as their workers end."""
        self._is_over = True

    def set_say(self, say: Callable[[str], None]) -> None:
        """Print messages by this function from now on."""
        self._say = say

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`attend` has something to do."""
        return self._listener.fileno()

    def next_deadline(self) -> float | None:
        """Return when :meth:`attend` will have something to do even if nothing arrives."""
        look = time.monotonic() + _LOOK_S if self._contenders else None
        return min(filter(None, (look, self._listener.next_deadline())), default=None)

    def attend(self) -> list[Caller]:
        """Handle arrived connections and frames, without waiting; return the hosts that are new."""
        before = self._listener.denials
        joined = filter(None, map(self._join, self._listener.attend()))
        if (denials := self._listener.denials) != before:
            self._say(denials.removeprefix("; "))
        return [*joined, *self._decide_contenders()]

    def allow(self, names: Collection[str]) -> None:
        """Offer only hosts with these names or addresses from now on; this host is always offered."""
        before = {each.name for each in self._offered()}
        self._allowed = frozenset(names)
        after = {each.name for each in self._offered()}
        for name in sorted(before - after):
            self._say(f"{name} is not among the hosts that are discovered any more: its workers leave")

    def is_waiting(self, host: str) -> bool:
        """Return whether a host has called in and was never offered."""
        return any(each.name == host and not each.offered and not each.leaving for each in self._callers.values())

    def prints(self, host: str) -> bool:
        """Return whether the output of the workers of a host stays there."""
        return any(each.name == host and each.prints for each in self._callers.values())

    def leave(self, connection: FrameConnection) -> None:
        """Note that a host leaves."""
        for caller in self._callers.values():
            if caller.connection is connection and not caller.leaving:
                caller.leaving = True
                self._say(f"{caller.name} leaves: its workers commit, and then the job goes on without them")

    def drop(self, host: str, verdict: tuple[int, str] | None = None) -> None:
        """Forget a host whose workers have ended, and tell its launcher; do nothing if it is unknown.

        Args:
            host: Its name.
            verdict: The exit code for its launcher, and the text that it prints; None if the host only leaves.
        """
        for caller in [each for each in self._callers.values() if each.name == host]:
            del self._callers[caller.identity]
            why = "" if caller.leaving else "hvdrun: this node has left the job, which goes on without it"
            self._dismiss(caller.connection, *((LEFT, why) if verdict is None else verdict))

    def dismiss(self, exit_code: int, why: str) -> None:
        """Tell the launchers of all hosts how the job has ended."""
        for contender in self._contenders:
            self._dismiss(contender.caller.connection, exit_code, why)
        self._contenders.clear()
        for caller in [*self._callers.values()]:
            self.drop(caller.name, (exit_code, why))

    # Inside.

    def _offered(self) -> Iterator[Caller]:
        return (each for each in self._callers.values() if not each.leaving and self._is_allowed(each))

    def _is_allowed(self, caller: Caller) -> bool:
        names = {caller.name, str(caller.connection.host), caller.addresses[1]}
        return self._allowed is None or not names.isdisjoint(self._allowed)

    def _join(self, joined: Joined) -> Caller | None:
        connection, count, join = joined
        try:
            if count != (self._nodes if connection.node else 0):
                raise HostsError(
                    f"--nnodes ends with {count} on node {connection.node} but {self._nodes} on node 0; give the same "
                    "everywhere"
                )
            caller = self._read(connection, read_join(connection, join))
        except HostsError as error:
            self._refuse(connection, str(error))
            return None
        older = self._callers.get(caller.identity)
        if older is None and not any(each.caller.identity == caller.identity for each in self._contenders):
            return self._admit(caller)
        if older is None:
            self._refuse(connection, self._explain_double(caller))
            return None
        self._contenders.append(_Contender(caller, older, time.monotonic() + _ASK_AFTER_S))
        return None

    def _read(self, connection: NodeConnection, said: dict[str, object]) -> Caller:
        name = str(said.get("name") or connection.host)
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise HostsError(f"{name[:_LONGEST_NAME]!r} cannot be the name of a host")
        addresses = connection.addresses
        if addresses is None:
            raise HostsError(f"{name} has gone before it was answered")
        return Caller(connection, connection.node or name, name, addresses, bool(said.get("prints", True)))

    def _admit(self, caller: Caller) -> Caller | None:
        connection = caller.connection
        if 0 < self._nodes <= len(self._callers) + len(self._own):
            self._refuse(connection, f"--nnodes ends with {self._nodes}, all there; for spares, raise it with --max-np")
            return None
        taken = {*self._own, *(each.name for each in self._callers.values())}
        if caller.name in taken:
            if isinstance(caller.identity, str):
                self._refuse(connection, f"a host with the name {caller.name} is there already; give each its own")
                return None
            caller.name = f"{caller.name}#{caller.identity}"
        connection.host = caller.name
        self._callers[caller.identity] = caller
        connection.send(FrameKind.PLACE, 0, encode_text({"host": caller.name}))
        which = f"node {connection.node}, " if connection.node else ""
        self._say(
            f"{which}{caller.name} at {caller.addresses[1]} has called in with {counted(connection.num_proc, 'slot')}"
        )
        return caller

    def _decide_contenders(self) -> Iterator[Caller]:
        """Admit those whose older ones have gone; refuse those whose older ones live."""
        now = time.monotonic()
        for contender in list(self._contenders):
            caller, older = contender.caller, contender.older
            if contender.has_gone():
                self._contenders.remove(contender)
                caller.connection.hang_up()
            elif self._callers.get(caller.identity) is not older:
                self._contenders.remove(contender)
                if caller.identity in self._callers:
                    self._refuse(caller.connection, self._explain_double(caller))
                elif (admitted := self._admit(caller)) is not None:
                    yield admitted
            elif older.leaving:  # such as a pod that Kubernetes replaces before it has ended
                continue
            elif contender.arrivals is None and now >= contender.ask_at:
                contender.arrivals = older.connection.arrivals
                older.connection.send(FrameKind.ALIVE, 0, encode_seconds(_PROBE_S))
            elif contender.arrivals is not None and older.connection.arrivals > contender.arrivals:
                self._contenders.remove(contender)
                self._refuse(caller.connection, self._explain_double(caller))

    def _explain_double(self, caller: Caller) -> str:
        if isinstance(caller.identity, int):
            return f"two nodes claim to be --node-rank {caller.identity}; give each its own"
        return f"two hosts claim to be {caller.identity}; give each a name of its own"

    def _refuse(self, connection: NodeConnection, why: str) -> None:
        where = connection.addresses
        self._say(f"{where[1] if where else connection.host} is refused: {why}")
        self._dismiss(connection, 1, why)

    def _dismiss(self, connection: NodeConnection, exit_code: int, why: str) -> None:
        connection.dismiss(exit_code, why.encode(errors="replace"))
