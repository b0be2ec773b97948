"""Where a job runs: on the hosts that the user names, on those that a scheduler has given, or on this machine."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.addresses import find_this_machine
from horovodlike.launcher.planning.hosts import HostSlots, parse_hostfile, parse_hosts, place_ranks
from horovodlike.launcher.planning.job_spec import THIS_MACHINE
from horovodlike.launcher.planning.topology import local_names
from horovodlike.launcher.schedulers.allocation import find_allocation

__all__ = ["HostResolution", "find_hosts"]


@dataclass(frozen=True)
class HostResolution:
    """Where a job runs.

    Attributes:
        num_proc: The number of ranks, or None if nobody says.
        hosts: The hosts; none stands for this machine.
        here: The name of this machine among the hosts, or None.
        slurm: Slurm starts what runs on other hosts.
        cpus: How many processors of each host a scheduler has given.
        reason: Why it is so.
    """

    num_proc: int | None
    hosts: tuple[HostSlots, ...] = ()
    here: str | None = THIS_MACHINE
    slurm: bool = False
    cpus: Mapping[str, int] = field(default_factory=dict)
    reason: str = "no host is named: the ranks run on this machine"


def find_hosts(
    hosts: str | None, hostfile: str | None, num_proc: int | None, environ: Mapping[str, str]
) -> HostResolution:
    """Decides where a job runs.

    Args:
        hosts: What ``-H`` says, or None.
        hostfile: The name of a file with hosts, or None.
        num_proc: The number of ranks, or None for all slots.
        environ: The environment, which a scheduler may have made.

    Raises:
        UsageError: What is said about hosts makes no sense, or there are too few slots.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError("-H and --hostfile contradict each other; give one of them")
    allocation = find_allocation(environ)
    named: tuple[HostSlots, ...]
    if hosts is not None:
        named, reason = parse_hosts(hosts), "the hosts are those of -H"
    elif hostfile is not None:
        named, reason = parse_hostfile(_read(hostfile), hostfile), f"the hosts are those of {hostfile}"
    elif allocation is not None:
        named, reason = allocation.hosts, f"the hosts are those that {allocation.scheduler} has given"
    else:
        return HostResolution(num_proc)
    names = local_names() | {name for name in (environ.get("SLURMD_NODENAME"),) if name}
    found, here = find_this_machine(named, names)
    if hosts is None and hostfile is None and num_proc is not None and [entry.host for entry in found] == [here]:
        return HostResolution(num_proc, reason=f"{reason}, and this machine is the only one")
    size = place_ranks(found, num_proc)[0].size
    slurm = (
        allocation is not None
        and allocation.scheduler == "Slurm"
        and {entry.host for entry in found if entry.host != here} <= {entry.host for entry in allocation.hosts}
        and shutil.which("srun", path=environ.get("PATH")) is not None
    )
    return HostResolution(size, found, here, slurm, allocation.cpus if slurm and allocation is not None else {}, reason)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--hostfile {path} is no text: {error}") from None
