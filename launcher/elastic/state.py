"""The driver's state of an elastic job: workers, slots, and the current generation. Pure."""

import enum
from dataclasses import dataclass, field

from horovodlike.launcher.elastic.host_health import Backoff


@dataclass(frozen=True)
class Policy:
    """The limits and timeouts that the user has asked for.

    Attributes:
        num_proc: How many workers the job starts with.
        min_np: The fewest workers; the job waits while it has fewer.
        max_np: The most workers of the job; None for as many as there are slots.
        reset_limit: How many generations there may be after the first one; None for any number. When they are used up,
            workers are neither added nor removed, and a loss ends the job.
        resets_like_horovod: Whether only generations after a loss or a change of the hosts' slots count, not one that a
            replaced worker joins; and when they are used up, such a change ends the job as well.
        backoff: The rule for when a host that has failed is used again.
        elastic_timeout: How long the job waits for enough workers, in seconds.
        heartbeat_timeout: How long a worker may be stopped, or without its connection to the driver, in seconds.
    """

    num_proc: int
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    resets_like_horovod: bool = False
    backoff: Backoff = Backoff()
    elastic_timeout: float = 600.0
    heartbeat_timeout: float = 5.0


class Status(enum.Enum):
    """The state of a worker."""

    STARTING = "starting"
    READY = "waiting for a place"
    MEMBER = "member"
    LEAVING = "leaving"
    FINISHED = "finished"
    REMOVED = "removed"


_ACTIVE = (Status.STARTING, Status.READY, Status.MEMBER)


@dataclass
class WorkerState:
    """One worker. It is removed from the roster when its process has exited."""

    number: int
    host: str
    slot: int
    since: float  # when its status changed
    status: Status = Status.STARTING
    was_ready: bool = False
    has_shut_down: bool = False  # its script has called shutdown() since it was ready
    commits: int = 0  # the number that it has reported last
    stopped_at: float | None = None
    adrift_at: float | None = None
    killed: bool = False

    @property
    def active(self) -> bool:
        """True if the worker takes part in the job, or still may."""
        return self.status in _ACTIVE and not self.killed


@dataclass
class Generation:
    """The current generation; before the first one, number 0 without members."""

    number: int = 0
    members: tuple[int, ...] = ()  # in the order of ranks, also those that have gone
    formed_at: float = 0.0
    commits: int = 0  # the most commits of any worker when it was formed
    slots: dict[str, int] = field(default_factory=dict)  # the hosts' slots when it was formed
    broken: str = ""  # why it cannot work any more
    failed: str = ""  # why init() failed, if it did
    failed_before: int = 0  # how many generations just before it, of the same members, failed in init()
    abandoned: bool = False
    returning: bool = False  # a member leaves, so the others ask for ranks again without an announcement
    told: frozenset[int] = frozenset()  # the joining and going workers of the latest announcement
    failures: list[tuple[int, int, bytes]] = field(default_factory=list)  # members': number, status and last words


class Roster:
    """The workers that live, and the role of each.

    Attributes:
        policy: The limits and timeouts that the user has asked for.
        workers: The workers by number.
        slots: The number of workers that each host may have; hosts that have been offered for longer come first.
        generation: The current generation.
    """

    def __init__(self, policy: Policy) -> None:
        """Start without hosts and workers."""
        self.policy = policy
        self.workers: dict[int, WorkerState] = {}
        self.slots: dict[str, int] = {}
        self.generation = Generation()

    def is_member(self, worker: WorkerState) -> bool:
        """Return True if the worker has, or had, a rank in the current generation."""
        return worker.number in self.generation.members

    def members(self) -> list[WorkerState]:
        """List the members that live, in the order of their ranks; not those that have left or finished."""
        living = (self.workers[number] for number in self.generation.members if number in self.workers)
        return [worker for worker in living if worker.active]

    def unwanted(self) -> set[int]:
        """Return the workers without a slot or beyond ``max_np``; members have the first claim, then older workers."""
        found: set[int] = set()
        room = dict(self.slots)
        left = len(self.workers) if self.policy.max_np is None else self.policy.max_np
        for worker in sorted(self.workers.values(), key=lambda each: (not self.is_member(each), each.number)):
            if worker.active and left > 0 and room.get(worker.host, 0) > 0:
                room[worker.host] -= 1
                left -= 1
            elif worker.active:
                found.add(worker.number)
        return found

    def staying(self) -> list[WorkerState]:
        """List the members that will have a rank in the next generation.

        If no member has a slot any more, some stay until newcomers have received the training state from them.
        """
        members, unwanted = self.members(), self.unwanted()
        wanted = [worker for worker in members if worker.number not in unwanted]
        if wanted or not members:
            return wanted
        room = len(members) if self.policy.max_np is None else self.policy.max_np
        return members[: max(1, room - len(self.newcomers()))]

    def newcomers(self) -> list[WorkerState]:
        """List the workers that are ready and have not been members of this generation."""
        unwanted = self.unwanted()
        found = [worker for worker in self.workers.values() if worker.active and worker.status is Status.READY]
        return [each for each in found if not self.is_member(each) and each.number not in unwanted]

    def starting(self) -> list[WorkerState]:
        """List the workers that have not asked for a rank yet."""
        unwanted = self.unwanted()
        found = [worker for worker in self.workers.values() if worker.active and worker.status is Status.STARTING]
        return [worker for worker in found if worker.number not in unwanted]
