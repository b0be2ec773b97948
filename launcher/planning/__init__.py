"""The specification of a job: the user's requests, and how the job is started."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodlike._net.listen import LOOPBACK
from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.planning.hosts import HostSlots, Placement, place_ranks

THIS_MACHINE = "localhost"
MOST_RANKS = 65536
"""The most ranks that the engine accepts."""


class Binding(enum.Enum):
    """The processors that each rank is bound to: any, cores of its own, or a NUMA node."""

    NONE = "none"
    CORE = "core"
    NUMA = "numa"


@dataclass(frozen=True)
class RemoteStart:
    """The way in which the agents on other hosts are started.

    Attributes:
        ssh_port: The port of ssh's servers; None leaves it to ssh's configuration.
        ssh_identity_file: The private key; None leaves it to ssh's configuration.
        ssh_options: Further words for ssh's command line.
        scheduler: The name of the scheduler that starts the agents, since its allocation has all hosts; else ``ssh``.
        cpus: How many processors of each host belong to that allocation.
    """

    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_options: tuple[str, ...] = ()
    scheduler: str = "ssh"
    cpus: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job with ``--nnodes``; a launcher is started on each of them, by hand or by a scheduler.

    Attributes:
        count: The number of nodes; of an elastic job, the most; 0 if none has a number.
        number: The number of this node; node 0 leads the job. None for a node of an elastic job that has a name.
        host: A name of node 0 that resolves to an address of its own, or such an address.
        port: The port that the launcher of node 0 listens on.
        key: The key that the launchers of all nodes hold.
        least: The fewest nodes with which an elastic job begins; None for a job whose nodes stay the same.
        name: The name of this node; the name of its host if it is empty.
        prints: Whether the output of this node's ranks stays on it; only a node of an elastic job can pass it on.
    """

    count: int
    number: int | None
    host: str
    port: int
    key: JobKey
    least: int | None = None
    name: str = ""
    prints: bool = True


@dataclass(frozen=True)
class ElasticSpec:
    """The part of a job that only elastic jobs have.

    Attributes:
        min_np: The fewest workers, below which the job waits for more; None for as many as it starts with.
        max_np: The most workers; None for as many as there are slots.
        discovery_script: A program that prints the hosts, or None.
        slots: The number of slots of a host that is listed without a number.
        reset_limit: How often the set of workers may change; None for any number of times.
        cooldown_range: The first and the longest back-off of a host after failures, in seconds; None for the default.
        elastic_timeout: How long the job waits for enough workers, in seconds.
        heartbeat_timeout: How long a worker may be stopped, or a host silent, before it counts as lost, in seconds.
        grace_period: How long workers may take to leave when the job must end, in seconds.
        discovery_timeout: How long the program that prints the hosts may take, in seconds.
        discover: The place where the hosts are found, as in ``--discover``, or None.
    """

    min_np: int | None = None
    max_np: int | None = None
    discovery_script: str | None = None
    slots: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    elastic_timeout: float = 600.0
    heartbeat_timeout: float = 5.0
    grace_period: float = 5.0
    discovery_timeout: float = 30.0
    discover: str | None = None


@dataclass(frozen=True)
class MonitorSpec:
    """The monitor of a job, in the launcher.

    Attributes:
        port: The port for readers; 0: a free one; None: there are no readers.
        metrics_file: A file to which the metrics are written each second, or None.
        host: The address at which readers are answered.
        names: The names by which they may call it.
        token_file: The file with the token, or an empty text for a random one.
    """

    port: int | None = None
    metrics_file: str | None = None
    host: str = LOOPBACK
    names: tuple[str, ...] = ()
    token_file: str = ""


@dataclass(frozen=True)
class JobSpec:
    """A job as it was asked for, checked as far as that is possible without looking at this machine.

    Attributes:
        num_proc: The number of ranks; for an elastic job, the number of workers that it starts with.
        command: The words that each rank executes, as they were typed.
        settings: The ``HOROVODLIKE_*`` variables for the ranks, besides those in the environment.
        hosts: The hosts of the ranks; if empty, this machine.
        here: The name that this machine has among the hosts, or None if it is not one of them.
        remote: How the agents on other hosts are started.
        nodes: The nodes of a job with ``--nnodes``, or None.
        elastic: The part that only elastic jobs have, or None.
        start_timeout: How long the ranks wait for each other, and the launcher for its agents, in seconds.
        network_timeout: How long another host may be silent before it counts as lost, in seconds.
        network_interface: The network over which hosts communicate, as in the setting of this name.
        bind_to: The processors that each rank is bound to.
        gpus_per_rank: How many GPUs each rank has for itself; 0 leaves that to the environment.
        output_directory: A folder for a copy of each rank's output, or None.
        timestamps: Whether each line of output begins with the time.
        shown_ranks: The ranks whose output is shown; None for all.
        fold: Whether lines that several ranks write to a terminal within a short time are shown once.
        verbose: Whether decisions are explained on standard error.
        compat: Whether the command is a Python program that imports ``horovod``.
        mpi: Whether MPI's mpirun starts the ranks.
        mpi_args: Further words for mpirun's command line.
        ignored: Horovod's options that were given and have no effect.
        names: The name that the user gave in place of a flag, by flag: an argument of ``run()``, a key or a variable.
        reasons: The reasons for decisions about the job, for ``verbose``.
        servers: How many processes serve parameters beside the ranks.
        server_modules: The modules that they import, for the user's own update rules.
        files: The paths at which each host writes files: the path itself, or the path with a rank in its name.
        place: The platform's description of this node, or None.
        grace_period: How long ranks may take to end after a signal to the launcher, in seconds.
        monitor: The monitor of the job, or None.
        live: Whether the launcher shows the state of the job, which its monitor has, among the output.
    """

    num_proc: int
    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[HostSlots, ...] = ()
    here: str | None = THIS_MACHINE
    remote: RemoteStart = RemoteStart()
    nodes: Nodes | None = None
    elastic: ElasticSpec | None = None
    start_timeout: float = 30.0
    network_timeout: float = 30.0
    network_interface: str = ""
    bind_to: Binding = Binding.NONE
    gpus_per_rank: int = 0
    output_directory: str | None = None
    timestamps: bool = False
    shown_ranks: frozenset[int] | None = None
    fold: bool = True
    verbose: bool = False
    compat: bool = False
    mpi: bool = False
    mpi_args: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    reasons: tuple[str, ...] = field(default=(), compare=False)
    servers: int = 0
    server_modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    place: str | None = field(default=None, compare=False)
    grace_period: float = 5.0
    monitor: MonitorSpec | None = None
    live: bool = False

    def called(self, flag: str) -> str:
        """Return the name by which messages mention a flag."""
        return self.names.get(flag, flag)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The ranks of each host.

        Raises:
            UsageError: The hosts have too few slots.
        """
        return place_ranks(self.hosts or (HostSlots(THIS_MACHINE, self.num_proc),), self.num_proc)
