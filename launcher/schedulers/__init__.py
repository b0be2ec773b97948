"""The interface of a scheduler: it gives a job its hosts, starts the agents of other hosts, or does both.

Each scheduler is one module of this package and one row of :mod:`horovodlike.launcher.schedulers.registry`. MPI's
``mpirun`` is no row: it starts ranks instead of agents, so that a job of it has steps of its own
(:mod:`horovodlike.launcher.supervisor.mpirun_job`), and what it refuses is checked where its command is made.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from horovodlike.launcher.agent import START_AGENT
from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.planning.hosts import HostSlots

AGENT = (sys.executable, "-I", "-S", "-X", "utf8", START_AGENT)
"""The words that are executed on another host, where everything has the same paths as here."""


@dataclass(frozen=True)
class JobAllocation:
    """The hosts that a scheduler has given to this job.

    Attributes:
        scheduler: Its name.
        hosts: The hosts, with a slot for each task.
        cpus: How many processors of each host belong to the job, as far as the scheduler says.
    """

    scheduler: str
    hosts: tuple[HostSlots, ...]
    cpus: Mapping[str, int] = field(default_factory=dict)


class Scheduler(ABC):
    """A row of the registry; it has no state.

    Attributes:
        name: Its name in messages.
        job_variable: The variable that every job of it has: without that it is not asked for hosts.
        program: The program that starts agents on other hosts. If it is not in ``PATH``, or if a host is not in the
            allocation, ssh starts them.
        node_name: The variable that holds this machine's name among the hosts, or an empty string.
        prefixes: Variables that begin so describe the launcher's own process, and are of no use to ranks elsewhere.
    """

    name: ClassVar[str]
    job_variable: ClassVar[str] = ""
    program: ClassVar[str]
    node_name: ClassVar[str] = ""
    prefixes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """Return what the scheduler has given to this job, as the environment says.

        Returns:
            None if it has given none, and inside a step of tasks, where the scheduler itself starts ranks.

        Raises:
            ValueError: The variables of the scheduler make no sense.
            OSError: A file that they name cannot be read.
        """

    @abstractmethod
    def start_command(self, host: str, remote: RemoteStart, timeout: float) -> list[str]:
        """Return the command that starts the agent of another host, whose standard input and output are its own. Pure.

        Args:
            host: The host.
            remote: How its agent is started.
            timeout: How long it may take to connect, in seconds.
        """
