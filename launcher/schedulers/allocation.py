"""The hosts of a job: those that the user names, those that a batch scheduler has allocated, or this machine.

A scheduler is a row of :data:`SCHEDULERS`: a name, and a function from the environment to hosts.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horovodlike._bootstrap.hostlist import expand_counts, expand_hosts
from horovodlike.launcher.errors import UsageError, counted
from horovodlike.launcher.planning.addresses import find_this_machine, local_names
from horovodlike.launcher.planning.hosts import HostSlots, merge_hosts, parse_hostfile, parse_hosts, place_ranks
from horovodlike.launcher.planning.job_spec import THIS_MACHINE

__all__ = ["HostResolution", "find_hosts", "Allocation", "find_allocation"]

_FIRST_PSEUDO_STEP = 0xFFFFFFF0
"""From here on Slurm numbers what is no step of tasks: the batch script, an interactive shell."""


@dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler has given to this job.

    Attributes:
        scheduler: Its name.
        hosts: The hosts, with a slot for each task.
        cpus: How many processors of each host belong to the job, as far as the scheduler says.
    """

    scheduler: str
    hosts: tuple[HostSlots, ...]
    cpus: Mapping[str, int]


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Read the environment of a batch job.

    Returns:
        The allocation, or None outside of any and inside a step of tasks, where the scheduler itself starts ranks.

    Raises:
        UsageError: The variables of the scheduler make no sense.
    """
    for scheduler, read in SCHEDULERS:
        try:
            found = read(environ)
        except (ValueError, OSError) as error:
            raise UsageError(f"the hosts of this {scheduler} job cannot be found: {error}; name them with -H") from None
        if found is not None:
            return Allocation(scheduler, *found)
    return None


_Found = tuple[tuple[HostSlots, ...], Mapping[str, int]]


def _slurm(environ: Mapping[str, str]) -> _Found | None:
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if "SLURM_JOB_ID" not in environ or not nodes:
        return None
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < _FIRST_PSEUDO_STEP:
        return None
    names = expand_hosts(nodes)
    cpus = _per_node(environ, "SLURM_JOB_CPUS_PER_NODE", names)
    slots = _per_node(environ, "SLURM_TASKS_PER_NODE", names) or dict.fromkeys(names, 1)
    return tuple(HostSlots(name, slots[name]) for name in names), cpus


def _per_node(environ: Mapping[str, str], variable: str, names: list[str]) -> dict[str, int]:
    text = environ.get(variable)
    if not text:
        return {}
    numbers = expand_counts(text)
    if len(numbers) != len(names):
        raise ValueError(f"{variable}={text!r} is for {counted(len(numbers), 'node')}, but there are {len(names)}")
    return dict(zip(names, numbers, strict=True))


def _lsf(environ: Mapping[str, str]) -> _Found | None:
    if "LSB_JOBID" not in environ:
        return None
    path = environ.get("LSB_DJOB_HOSTFILE")
    if path:
        return parse_hostfile(Path(path).read_text(), path), {}
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return None
    if len(words) % 2 or not all(number.isdigit() for number in words[1::2]):
        raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)!r} is no list of hosts and numbers")
    return merge_hosts(HostSlots(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True)), {}


def _pbs(environ: Mapping[str, str]) -> _Found | None:
    path = environ.get("PBS_NODEFILE")
    if "PBS_JOBID" not in environ or not path:
        return None
    return parse_hostfile(Path(path).read_text(), path), {}


SCHEDULERS: tuple[tuple[str, Callable[[Mapping[str, str]], _Found | None]], ...] = (
    ("Slurm", _slurm),
    ("LSF", _lsf),
    ("PBS", _pbs),
)


@dataclass(frozen=True)
class HostResolution:
    """The hosts on which a job runs.

    Attributes:
        num_proc: The number of ranks, or None if it was not given.
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
    """Decide where a job runs.

    Args:
        hosts: The value of ``-H``, or None.
        hostfile: The name of a file with hosts, or None.
        num_proc: The number of ranks, or None for all slots.
        environ: The environment, which a scheduler may have made.

    Raises:
        UsageError: The hosts cannot be used, or there are too few slots.
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
