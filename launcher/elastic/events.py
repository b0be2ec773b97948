"""The events of an elastic job, and the decisions of the membership. Workers are identified by their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """A worker asks for a rank.

    Attributes:
        worker: The worker.
        why: ``start``, ``broken``, ``changed`` or ``failed``.
        text: The reason in words.
        commits: The number of its commits.
    """

    worker: int
    why: str = "start"
    text: str = ""
    commits: int = 0


@dataclass(frozen=True)
class Exited:
    """A worker's process has ended, with an exit code or minus a signal; or it could not be started."""

    worker: int
    status: int
    started: bool = True
    said: bytes = b""  # its last words, by which failures are compared


@dataclass(frozen=True)
class Finished:
    """A worker's training function has returned."""

    worker: int


@dataclass(frozen=True)
class Noted:
    """A worker has made its first commit (``committed``), or its script has called ``shutdown()`` (``shutdown``)."""

    worker: int
    what: str


@dataclass(frozen=True)
class Training:
    """A worker that has finished trains again, with the same members."""

    worker: int


@dataclass(frozen=True)
class Leaving:
    """A worker was told to leave, and the other members know."""

    worker: int


@dataclass(frozen=True)
class Stopped:
    """A worker's process has been stopped by a signal."""

    worker: int


@dataclass(frozen=True)
class Continued:
    """A worker's process continues after it was stopped."""

    worker: int


@dataclass(frozen=True)
class Adrift:
    """A worker's connection to the driver has ended, most often because its process has."""

    worker: int


@dataclass(frozen=True)
class HostsFound:
    """Discovery offers these hosts, each with its slots."""

    slots: Mapping[str, int]


@dataclass(frozen=True)
class HostLost:
    """The agent of a host could not be started, or has gone; the host's workers have gone, too."""

    host: str
    reason: str


Event = Ready | Exited | Finished | Noted | Training | Leaving | Stopped | Continued | Adrift | HostsFound | HostLost


@dataclass(frozen=True)
class Spawn:
    """Start a worker on a slot of a host."""

    worker: int
    host: str
    slot: int
    reason: str


@dataclass(frozen=True)
class Form:
    """Form a generation of these members, which are in the order of their ranks."""

    generation: int
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Abandon:
    """Give up a broken generation: an error is raised in a member that still waits for others at its rendezvous."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Announce:
    """Tell the members that workers join or go, so that they ask for ranks again at their next commit."""

    number: int
    added: bool
    removed: bool
    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Remove:
    """Tell a worker that waits for a rank that there is none for it, and that it must exit."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Kill:
    """Kill a worker."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Report:
    """Tell the user how a worker has failed."""

    worker: int
    status: int
    reason: str


@dataclass(frozen=True)
class End:
    """End the job. ``failure`` is the worker that caused the end, or None."""

    exit_code: int
    reason: str
    failure: int | None = None


Decision = Spawn | Form | Abandon | Announce | Remove | Kill | Report | End
