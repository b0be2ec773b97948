"""Slurm: nodes and tasks from its environment, agents by ``srun``."""

from collections.abc import Mapping

from horovodlike._bootstrap.hostlist import expand_counts, expand_hosts
from horovodlike.launcher.errors import counted
from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.planning.hosts import HostSlots
from horovodlike.launcher.schedulers import AGENT, JobAllocation, Scheduler

_FIRST_PSEUDO_STEP = 0xFFFFFFF0
"""The first of the step ids that Slurm uses for other things than tasks: the batch script, an interactive shell."""


class Slurm(Scheduler):
    """The scheduler Slurm; see the module's docstring."""

    name = "Slurm"
    job_variable = "SLURM_JOB_ID"
    program = "srun"
    node_name = "SLURMD_NODENAME"
    prefixes = ("SLURM_",)

    def hosts(self, environ: Mapping[str, str]) -> JobAllocation | None:
        """See :meth:`Scheduler.hosts`."""
        nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
        if not nodes:
            return None
        step = environ.get("SLURM_STEP_ID", "")
        if step.isdigit() and int(step) < _FIRST_PSEUDO_STEP:
            return None
        names = expand_hosts(nodes)
        cpus = _per_node(environ, "SLURM_JOB_CPUS_PER_NODE", names)
        slots = _per_node(environ, "SLURM_TASKS_PER_NODE", names) or dict.fromkeys(names, 1)
        return JobAllocation(self.name, tuple(HostSlots(name, slots[name]) for name in names), cpus)

    def start_command(self, host: str, remote: RemoteStart, timeout: float) -> list[str]:
        """See :meth:`Scheduler.start_command`."""
        cpus = remote.cpus.get(host)
        share = [f"--cpus-per-task={cpus}"] if cpus else []  # otherwise the step would have one processor
        step = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
        step += ["--overlap", "--mem=0", "--cpu-bind=none"]
        return ["srun", *step, *share, "--mpi=none", "--unbuffered", "--quiet", *AGENT]


def _per_node(environ: Mapping[str, str], variable: str, names: list[str]) -> dict[str, int]:
    text = environ.get(variable)
    if not text:
        return {}
    numbers = expand_counts(text)
    if len(numbers) != len(names):
        raise ValueError(f"{variable}={text!r} is for {counted(len(numbers), 'node')}, but there are {len(names)}")
    return dict(zip(names, numbers, strict=True))
