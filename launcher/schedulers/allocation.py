"""The hosts that a batch scheduler has given to this job, from the environment that it makes.

A scheduler is a row of :data:`SCHEDULERS`: a name, and a function from the environment to hosts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from horovodlike._bootstrap.hostlist import expand_counts, expand_hosts
from horovodlike.launcher.errors import UsageError, counted
from horovodlike.launcher.planning.hosts import HostSlots, merge_hosts, parse_hostfile

__all__ = ["Allocation", "find_allocation"]

_FIRST_PSEUDO_STEP = 0xFFFFFFF0
"""From here on Slurm numbers what is no step of tasks: the batch script, an interactive shell."""


@dataclass(frozen=True)
class Allocation:
    """What a scheduler has given to this job.

    Attributes:
        scheduler: Its name.
        hosts: The hosts, with a slot for each task.
        cpus: How many processors of each host belong to the job, as far as the scheduler says.
    """

    scheduler: str
    hosts: tuple[HostSlots, ...]
    cpus: Mapping[str, int]


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Reads the environment of a batch job.

    Returns:
        The allocation, or None outside of any and inside a step of tasks, where the scheduler itself starts ranks.

    Raises:
        UsageError: What the scheduler has set makes no sense.
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
