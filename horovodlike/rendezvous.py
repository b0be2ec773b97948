"""How the ranks of a job find each other, trust each other and agree: what ``init()`` does before the engine starts.

:func:`establish` is the whole of it. Its parts:

* :mod:`horovodlike.place`: which rank this process is;
* :class:`RendezvousServer`: what ``hvdrun`` runs, or else rank 0 in its own process (:mod:`horovodlike._meeting_point`
  is how the others then find it);
* :class:`Rendezvous`: a rank's connection to it;
* :mod:`horovodlike._channel`: what travels between them, authenticated;
* :mod:`horovodlike.host_memory`: the shared memory of the ranks of a host.
"""

import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from horovodlike._channel import AuthenticationError, JobKey, VersionError
from horovodlike._meeting_point import MeetingPoint
from horovodlike._rendezvous_client import Rendezvous, UnreachableError
from horovodlike._rendezvous_server import RendezvousServer
from horovodlike._roll_call import name_ranks
from horovodlike.config import SETTINGS, Config
from horovodlike.errors import ConfigError, RendezvousError
from horovodlike.host_memory import open_segment
from horovodlike.place import Place, find_place

__all__ = ["Membership", "Rendezvous", "RendezvousServer", "establish"]

_SECRET = "HOROVODLIKE_SECRET_KEY"


@dataclass
class Membership:
    """What :func:`establish` found: everything the engine needs to start.

    Closed by :meth:`close`, or used as a context manager; an exception in the ``with`` block is told to the ranks that
    wait in :meth:`confirm`. Nothing here is needed any more once the engines of all ranks run.

    Attributes:
        place: Where this process stands in the job.
        pids: The process ids of this host's ranks, by local rank.
        processors: How many processors this host's ranks may use, all together.
        segment_fd: The shared memory of this host's ranks, zeroed, or -1 if this host has one rank.
        rendezvous: The connection to the other ranks, or None in a job of one.
    """

    place: Place
    pids: list[int]
    processors: int = 1
    segment_fd: int = -1
    rendezvous: Rendezvous | None = None
    _server: RendezvousServer | None = field(default=None, repr=False)

    def confirm(self) -> None:
        """Waits until all ranks have come here, each one with its engine running.

        Raises:
            RendezvousError: A rank failed before it came here; the message says which one and why.
        """
        if self.rendezvous is not None:
            self.rendezvous.barrier("confirm")

    def close_segment(self) -> None:
        """Closes the descriptor of the shared memory, when it has been mapped; the mapping stays."""
        if self.segment_fd >= 0:
            os.close(self.segment_fd)
            self.segment_fd = -1

    def close(self) -> None:
        """Leaves the job: closes every descriptor, and the server if it is this rank's. May be called again."""
        self.close_segment()
        if self.rendezvous is not None:
            self.rendezvous.close()
            self.rendezvous = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> "Membership":
        """It is open from the start."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Closes it, and tells the others if that is because something failed."""
        if error is not None and self.rendezvous is not None:
            self.rendezvous.abort(f"{type(error).__name__}: {error}")
        self.close()


_kept_key: JobKey | None = None


def establish(
    config: Config, segment_bytes: Callable[[Place], int], environ: MutableMapping[str, str] | None = None
) -> Membership:
    """Finds the other ranks of the job and sets up what this host's ranks share.

    Collective: every rank calls it, any number of times, closing the last membership before the next. A job of one
    touches neither the network nor a file. The job's key is removed from the environment, so that processes that this
    one starts do not inherit it, and kept for the next call.

    Args:
        config: The settings; those that must be equal on all ranks are compared.
        segment_bytes: How much shared memory this host's ranks need, given this process's place.
        environ: The environment; ``os.environ`` if None.

    Returns:
        The membership, with zeroed shared memory.

    Raises:
        RendezvousError: The ranks could not find, trust or agree with each other; the message names the ranks.
        ConfigError: The environment contradicts itself.
    """
    source = os.environ if environ is None else environ
    key = _take_key(source)
    place = find_place(source)
    if place.size == 1:
        return Membership(place, [os.getpid()], len(os.sched_getaffinity(0)))
    num_bytes = segment_bytes(place)
    membership = Membership(place, [])
    try:
        if source.get("HOROVODLIKE_RENDEZVOUS_PORT"):
            rendezvous = membership.rendezvous = _join_launcher(source, key, place, config)
            greetings = rendezvous.begin(_greeting(place, config))
        elif place.rank == 0:
            rendezvous, greetings = _host(membership, MeetingPoint(place.job, source), config)
        else:
            rendezvous = membership.rendezvous = _seek(MeetingPoint(place.job, source), place, config)
            greetings = rendezvous.begin(_greeting(place, config))
        membership.pids = _agree(greetings)
        membership.processors = len(set().union(*(greeting["processors"] for greeting in greetings)))
        membership.segment_fd = open_segment(rendezvous, place, num_bytes)
    except BaseException as error:
        membership.__exit__(type(error), error, None)
        raise
    return membership


def _take_key(environ: MutableMapping[str, str]) -> JobKey | None:
    global _kept_key
    text = environ.pop(_SECRET, "").strip()
    if text:
        try:
            _kept_key = JobKey(bytes.fromhex(text))
        except ValueError:
            raise ConfigError(f"{_SECRET} must be 64 hexadecimal digits (its value is not shown here)") from None
    return _kept_key


def _join_launcher(environ: Mapping[str, str], key: JobKey | None, place: Place, config: Config) -> Rendezvous:
    host = environ.get("HOROVODLIKE_RENDEZVOUS_ADDR") or "127.0.0.1"
    text = environ["HOROVODLIKE_RENDEZVOUS_PORT"]
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ConfigError(f"HOROVODLIKE_RENDEZVOUS_PORT={text!r} is not a port; hvdrun sets it")
    if key is None:
        raise RendezvousError(
            f"{_SECRET} is not set although HOROVODLIKE_RENDEZVOUS_PORT is: only the processes that hvdrun starts "
            "itself can be ranks, and this one seems to have been started by a rank. Unset HOROVODLIKE_RANK, "
            "HOROVODLIKE_SIZE, HOROVOD_RANK and HOROVOD_SIZE in its environment to make it a job of its own"
        )
    return Rendezvous(host, int(text), key, place, config.start_timeout, owner="hvdrun")


def _host(membership: Membership, meeting_point: MeetingPoint, config: Config) -> tuple[Rendezvous, list[Any]]:
    """Rank 0 runs the server, publishes where, and takes the file away again when everybody has come."""
    place = membership.place
    key = JobKey.random()
    membership._server = RendezvousServer(key, place.size, job=place.job)
    membership._server.start()
    port = membership._server.port
    try:
        meeting_point.publish(port, key)
        membership.rendezvous = Rendezvous("127.0.0.1", port, key, place, config.start_timeout, owner="rank 0")
        return membership.rendezvous, membership.rendezvous.begin(_greeting(place, config))
    finally:
        meeting_point.withdraw()


def _seek(meeting_point: MeetingPoint, place: Place, config: Config) -> Rendezvous:
    """Waits for rank 0's file. What it finds may be a crashed job's, so only the time limit is final."""
    deadline = time.monotonic() + config.start_timeout
    pause = 0.002
    found = "there was no such file"
    while True:
        try:
            appointment = meeting_point.read()
            if appointment is not None:
                port, key = appointment.port, appointment.key
                return Rendezvous("127.0.0.1", port, key, place, config.start_timeout, owner="rank 0", attempts=1)
        except (UnreachableError, AuthenticationError, VersionError) as error:
            found = f"what it names is no longer there: {error}"
        if time.monotonic() + pause > deadline:
            raise RendezvousError(
                f"after {config.start_timeout:g} s rank 0 of {place.size} had not told rank {place.rank} where it "
                f"listens, in {meeting_point.path} ({found}); see whether rank 0 runs and what it prints. If it only "
                "needs longer, raise --start-timeout (HOROVODLIKE_START_TIMEOUT)"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _greeting(place: Place, config: Config) -> dict[str, Any]:
    settings = {name: getattr(config, name) for name, row in SETTINGS.items() if row.same_on_all_ranks}
    processors = sorted(os.sched_getaffinity(0))
    return {"pid": os.getpid(), "local_rank": place.local_rank, "settings": settings, "processors": processors}


def _agree(greetings: list[dict[str, Any]]) -> list[int]:
    """Compares what the ranks say; every rank comes to the same verdict. Returns the process ids by local rank."""
    for name in greetings[0]["settings"]:
        ranks_of: dict[str, list[int]] = {}
        for rank, greeting in enumerate(greetings):
            ranks_of.setdefault(str(greeting["settings"].get(name)), []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items())
            raise RendezvousError(
                f"{SETTINGS[name].variable} differs between the ranks: {values}. Give it the same value on all of them"
            )
    pids = {greeting["local_rank"]: greeting["pid"] for greeting in greetings}
    if sorted(pids) != list(range(len(greetings))):
        local_ranks = ", ".join(str(greeting["local_rank"]) for greeting in greetings)
        raise RendezvousError(
            f"the local ranks of ranks 0 to {len(greetings) - 1} are {local_ranks}, but on one host every one must be "
            "there once; see what set them in the environment"
        )
    return [pids[local_rank] for local_rank in range(len(greetings))]
