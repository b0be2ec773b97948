"""The request of a user: a job, and how it is started."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodlike._net.secure_channel import JobKey
from horovodlike.launcher.planning.hosts import HostSlots, Placement, place_ranks

THIS_MACHINE = "localhost"
MOST_RANKS = 65536
"""As many as the engine takes."""


class Binding(enum.Enum):
    """The kind of processors that each rank is bound to."""

    NONE = "none"
    CORE = "core"
    NUMA = "numa"


@dataclass(frozen=True)
class RemoteStart:
    """How the agents of other hosts are started.

    Attributes:
        ssh_port: The port of ssh's servers; None leaves it to ssh's configuration.
        ssh_identity_file: The private key; None leaves it to ssh's configuration.
        ssh_options: Further words for ssh's command line.
        scheduler: The name of what starts the agents: ssh, or the scheduler whose allocation has all hosts.
        cpus: How many processors of each host belong to that allocation.
    """

    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_options: tuple[str, ...] = ()
    scheduler: str = "ssh"
    cpus: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job on each of which a launcher is started by hand or by a scheduler.

    Attributes:
        count: How many there are.
        number: The number of this one; node 0 leads.
        host: A name or address of node 0, which that node has itself.
        port: The port that the launcher of node 0 listens on.
        key: The key that all of them hold.
    """

    count: int
    number: int
    host: str
    port: int
    key: JobKey


@dataclass(frozen=True)
class ElasticSpec:
    """The part of a job that only elastic jobs have.

    Attributes:
        min_np: With fewer workers the job waits; None for as many as it starts with.
        max_np: It never has more; None for as many as there are slots.
        discovery_script: A program that prints the hosts, or None if they are fixed.
        slots: How many slots a host has that comes without a number.
        reset_limit: How often the set of workers may change; None for any number of times.
        cooldown_range: How long a host is left alone after failures, the first time and at most, in seconds; None for
            the default.
        elastic_timeout: How long the job waits for enough workers, in seconds.
        heartbeat_timeout: How long a worker may be stopped, or a host silent, in seconds.
        grace_period: How long workers may take to leave when the job must end, in seconds.
        discovery_timeout: How long the program that prints the hosts may take, in seconds.
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


@dataclass(frozen=True)
class JobSpec:
    """A job as it was asked for, checked as far as that is possible without looking at this machine.

    Attributes:
        num_proc: The number of ranks; of an elastic job, with how many it starts.
        command: The words that each rank executes, as they were typed.
        settings: ``HOROVODLIKE_*`` variables for the ranks: those that were asked for, and no others.
        hosts: The hosts of the ranks; if empty, this machine.
        here: The name that this machine has among the hosts, or None if it is not one of them.
        remote: How the agents of other hosts are started.
        nodes: This is one of several nodes that are started by themselves, or None.
        elastic: Workers may come and go, or None.
        start_timeout: How long the ranks wait for each other, and the launcher for its agents, in seconds.
        network_timeout: How long another host may be silent, in seconds.
        network_interface: The network over which hosts communicate, as in the setting of this name.
        bind_to: The kind of processors that each rank is bound to.
        gpus_per_rank: How many GPUs each rank sees, which are its own; 0 leaves that to the environment.
        output_directory: A folder for a copy of each rank's output, or None.
        timestamps: Each line of output begins with the time.
        verbose: Decisions are explained on standard error.
        compat: The command is a Python program that imports ``horovod``.
        mpi: MPI's mpirun starts the ranks.
        mpi_args: Further words for mpirun's command line.
        ignored: Horovod's options that were given and have no effect.
        names: By flag, what was given instead of it: an argument of ``run()``, a key or a variable.
        reasons: Why the job is as it is, for ``verbose``.
        files: The files that every host will write, or beside which it writes others.
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
    verbose: bool = False
    compat: bool = False
    mpi: bool = False
    mpi_args: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    reasons: tuple[str, ...] = field(default=(), compare=False)
    files: tuple[str, ...] = ()

    def called(self, flag: str) -> str:
        """Return the name of a flag in messages."""
        return self.names.get(flag, flag)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The ranks of each host.

        Raises:
            UsageError: The hosts have too few slots.
        """
        return place_ranks(self.hosts or (HostSlots(THIS_MACHINE, self.num_proc),), self.num_proc)
