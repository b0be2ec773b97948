"""The hosts of a job: those that the user names, those that a batch scheduler has allocated, or this machine.

:data:`SCHEDULERS` is the registry; no code outside it and a scheduler's own module depends on a particular scheduler.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import THIS_MACHINE, ElasticSpec, RemoteStart
from horovodlike.launcher.planning.addresses import find_this_machine, local_names
from horovodlike.launcher.planning.hosts import HostSlots, parse_hostfile, parse_hosts, place_ranks
from horovodlike.launcher.schedulers import JobAllocation, Scheduler
from horovodlike.launcher.schedulers.flux import Flux
from horovodlike.launcher.schedulers.host_files import Lsf, Pbs
from horovodlike.launcher.schedulers.slurm import Slurm
from horovodlike.launcher.schedulers.ssh import Ssh

SCHEDULERS: tuple[Scheduler, ...] = (Flux(), Slurm(), Lsf(), Pbs())
"""The schedulers, in the order in which they are asked for hosts: Flux may run within another one's allocation."""
_BY_NAME = {each.name: each for each in (*SCHEDULERS, Ssh())}


def scheduler_of(remote: RemoteStart) -> Scheduler:
    """Return the scheduler, or ssh, that starts the agents on other hosts."""
    return _BY_NAME[remote.scheduler]


def names_of_this_machine(environ: Mapping[str, str]) -> set[str]:
    """Return the names that certainly are this machine's: its own names, and its name in a scheduler's variable."""
    return {*local_names(), *filter(None, (environ.get(each.node_name) for each in SCHEDULERS))}


def find_allocation(environ: Mapping[str, str]) -> JobAllocation | None:
    """Ask each scheduler for the hosts of this job.

    Returns:
        The allocation; None without one, and inside a step of tasks, where the scheduler itself starts ranks.

    Raises:
        UsageError: The variables of the scheduler, or its answers, make no sense.
    """
    for scheduler in SCHEDULERS:
        if not environ.get(scheduler.job_variable):
            continue
        try:
            found = scheduler.hosts(environ)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"the hosts of this {scheduler.name} job cannot be found: {error}; name them with -H"
            ) from None
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class HostResolution:
    """The hosts on which a job runs.

    Attributes:
        num_proc: The number of ranks, or None if it was not given.
        hosts: The hosts; empty for this machine.
        here: The name of this machine among the hosts, or None.
        scheduler: The name of the scheduler that starts the agents on other hosts; else ``ssh``.
        cpus: How many processors of each host that scheduler has given.
        reason: The reason for this choice, for a message.
    """

    num_proc: int | None
    hosts: tuple[HostSlots, ...] = ()
    here: str | None = THIS_MACHINE
    scheduler: str = Ssh.name
    cpus: Mapping[str, int] = field(default_factory=dict)
    reason: str = "no host is named: the ranks run on this machine"


def find_hosts(
    hosts: str | None,
    hostfile: str | None,
    num_proc: int | None,
    environ: Mapping[str, str],
    elastic: ElasticSpec | None = None,
    discovery: object = None,
) -> HostResolution:
    """Decide on which hosts a job runs, and with how many workers it starts if it is elastic.

    Args:
        hosts: The value of ``-H``, or None.
        hostfile: The name of a file with hosts, or None.
        num_proc: The number of ranks, or None for all slots.
        environ: The environment, which may have variables of a scheduler.
        elastic: The elastic part of the job, if it is elastic.
        discovery: An object that finds the hosts of an elastic job, in place of the other arguments; or None.

    Raises:
        UsageError: The hosts cannot be used, or there are too few slots.
    """
    if elastic is not None:
        num_proc = elastic.min_np if num_proc is None else num_proc
        ways = [each for each in (elastic.discovery_script, elastic.discover, discovery) if each is not None]
        if ways:
            if hosts or hostfile or len(ways) > 1:
                raise UsageError(
                    "the hosts are given in two ways; give a discovery of hosts, a list or a file, and no other"
                )
            return HostResolution(num_proc, reason="the hosts are found out again and again")
    if hosts is not None and hostfile is not None:
        raise UsageError("-H and --hostfile contradict each other; give one of them")
    try:
        allocation = find_allocation(environ)
    except UsageError:
        if hosts is None and hostfile is None:
            raise
        allocation = None  # the user has named the hosts
    named: tuple[HostSlots, ...]
    if hosts is not None:
        named, reason = parse_hosts(hosts), "the hosts are those of -H"
    elif hostfile is not None:
        named, reason = parse_hostfile(_read(hostfile), hostfile), f"the hosts are those of {hostfile}"
    elif allocation is not None:
        named, reason = allocation.hosts, f"the hosts are those that {allocation.scheduler} has given"
    else:
        return HostResolution(num_proc)
    found, here = find_this_machine(named, names_of_this_machine(environ))
    if hosts is None and hostfile is None and num_proc is not None and [entry.host for entry in found] == [here]:
        return HostResolution(num_proc, reason=f"{reason}, and this machine is the only one")
    size = place_ranks(found, num_proc)[0].size
    if num_proc is None and elastic is not None and elastic.max_np is not None:
        size = min(size, elastic.max_np)
    others = {entry.host for entry in found if entry.host != here}
    if (
        allocation is not None
        and others <= {entry.host for entry in allocation.hosts}
        and shutil.which(_BY_NAME[allocation.scheduler].program, path=environ.get("PATH")) is not None
    ):
        return HostResolution(size, found, here, allocation.scheduler, allocation.cpus, reason)
    return HostResolution(size, found, here, reason=reason)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--hostfile {path} is no text: {error}") from None
