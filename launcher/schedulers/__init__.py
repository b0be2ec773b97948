"""The interface of a scheduler: it gives a job its hosts, starts the agents on other hosts, or does both.

Each scheduler has one module in this package and one row of :mod:`horovodlike.launcher.schedulers.registry`. MPI's
``mpirun`` is not a row: it starts ranks instead of agents, so its jobs have steps of their own
(:mod:`horovodlike.launcher.supervisor.mpirun_job`). Options that it cannot carry out are refused by ``make_command()``.
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
"""The command of an agent on another host. Python and this package must have the same paths there as here."""


@dataclass(frozen=True)
class JobAllocation:
    """The hosts that a scheduler has given to this job.

    Attributes:
        scheduler: The name of the scheduler.
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
        job_variable: The variable that it sets in every job; if it is not set, the scheduler is not asked for hosts.
        program: The program that starts agents on other hosts. If it is not in ``PATH``, or if a host is not in the
            allocation, ssh starts them.
        node_name: The variable that holds this machine's name among the hosts, or an empty string.
        prefixes: The prefixes of variables about the launcher's own process, which are of no use on other hosts.
    """

    name: ClassVar[str]
    job_variable: ClassVar[str] = ""
    program: ClassVar[str]
    node_name: ClassVar[str] = ""
    prefixes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """Return the allocation that the scheduler has given to this job, according to the environment.

        Returns:
            None if there is no allocation, and inside a step of tasks, where the scheduler itself starts ranks.

        Raises:
            ValueError: The variables of the scheduler, or its answers, make no sense.
            OSError: A file that the variables name cannot be read.
        """

    @abstractmethod
    def start_command(self, host: str, remote: RemoteStart, timeout: float) -> list[str]:
        """Return the command that starts the agent on another host; its standard streams are the agent's. Pure.

        Args:
            host: The host.
            remote: How its agent is started.
            timeout: How long the command may take to connect, in seconds.
        """
