"""The rank info of this process, read from the environment variables that its launcher has set.

The constants are the names of horovodlike's internal variables, which ``hvdrun`` sets for the processes that it starts;
users set some of them in jobs without ``hvdrun``. (:mod:`horovodlike.config` has the settings.)

Each launcher is a row of :data:`_LAUNCHERS` with the names of its variables. :func:`find_rank_info` is a pure function
of the environment, except that it searches the process's ancestors if the launcher gives its jobs no name.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from horovodlike._bootstrap.hostlist import expand_counts
from horovodlike.config import SETTINGS, did_you_mean
from horovodlike.errors import ConfigError, RendezvousError

__all__ = [
    *("RankInfo", "file_of_generation", "find_ancestor", "find_rank_info", "generation", "misspelt", "path_of_rank"),
]

DRIVER_ADDRESS = "HOROVODLIKE_DRIVER_ADDR"
DRIVER_PORT = "HOROVODLIKE_DRIVER_PORT"
ELASTIC = "HOROVODLIKE_ELASTIC"
FAULT_PLAN = "HOROVODLIKE_FAULT_PLAN"
GENERATION = "HOROVODLIKE_GENERATION"
HOST_ID = "HOROVODLIKE_HOSTID"
JOB_ID = "HOROVODLIKE_JOB_ID"
MONITOR_PORT = "HOROVODLIKE_MONITOR_PORT"
NODE_ID = "HOROVODLIKE_NODE_ID"
RENDEZVOUS_ADDRESS = "HOROVODLIKE_RENDEZVOUS_ADDR"
RENDEZVOUS_OWNER = "HOROVODLIKE_RENDEZVOUS_OWNER"
RENDEZVOUS_PORT = "HOROVODLIKE_RENDEZVOUS_PORT"
RESULT_FD = "HOROVODLIKE_RESULT_FD"
SECRET_KEY = "HOROVODLIKE_SECRET_KEY"
SECRET_KEY_FILE = "HOROVODLIKE_SECRET_KEY_FILE"
SERVER = "HOROVODLIKE_SERVER"
SERVERS = "HOROVODLIKE_SERVERS"
TASK_FD = "HOROVODLIKE_TASK_FD"
WORKER = "HOROVODLIKE_WORKER"

Names = tuple[str, ...]
Ancestor = Callable[[Names], str | None]


@dataclass(frozen=True)
class RankInfo:
    """The place of this process in its job.

    Attributes:
        rank: 0 to ``size - 1``.
        size: The number of processes of the job.
        local_rank: 0 to ``local_size - 1`` among the processes of this host.
        local_size: The number of processes of the job on this host.
        cross_rank: The host's number among the hosts that have a process of this local rank.
        cross_size: The number of hosts that have a process of this local rank.
        launcher: The name of the job's launcher; ``none`` without a launcher.
        job: A text that is the same on all ranks of the job and differs between jobs; empty in a job of one rank.
        node_id: The launcher's name for this host, or None. Ranks with different names are on different hosts.
        is_homogeneous: Whether every host has the same number of processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = "none"
    job: str = ""
    node_id: str | None = None
    is_homogeneous: bool = True


@dataclass(frozen=True)
class _Launcher:
    """The names of one launcher's variables. Where a field has several names, the first one that is set counts."""

    name: str
    present: tuple[Names, ...]  # this launcher started the process if one name of each tuple is set
    rank: Names
    size: Names
    local_rank: Names
    local_size: Names = ()
    cross_rank: Names = ()
    cross_size: Names = ()
    tasks_per_node: Names = ()  # "4(x2),3": replaces local_size
    job: Names = ()  # their values, joined, name the job if one of job_required is set
    job_required: Names = ()
    job_ancestor: Names = ()  # else: command names of the process that started all ranks of this host
    node_id: Names = ()
    no_place: tuple[str, Names] = ("", ())  # a variable, and the values of it with which the process is not a rank


def _both(name: str) -> Names:
    return (f"HOROVODLIKE_{name}", f"HOROVOD_{name}")


# Slurm's reserved step numbers: interactive, batch, extern, pending. Their task count is the allocation's.
_SLURM_NO_STEP = ("4294967290", "4294967291", "4294967292", "4294967293")

_LAUNCHERS = (
    _Launcher(
        name="hvdrun",
        present=((*_both("RANK"), *_both("SIZE")),),
        rank=_both("RANK"),
        size=_both("SIZE"),
        local_rank=_both("LOCAL_RANK"),
        local_size=_both("LOCAL_SIZE"),
        cross_rank=_both("CROSS_RANK"),
        cross_size=_both("CROSS_SIZE"),
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        job_required=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
        node_id=(NODE_ID, "HOROVOD_HOSTNAME"),
    ),
    _Launcher(
        name="torchrun",
        present=(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",)),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        cross_rank=("GROUP_RANK",),
        cross_size=("GROUP_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        job_required=("MASTER_PORT",),
        node_id=("GROUP_RANK",),
    ),
    _Launcher(
        name="Open MPI",
        present=(("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        job_required=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        job_ancestor=("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"),
        node_id=("PMIX_HOSTNAME",),
    ),
    _Launcher(
        name="MPICH",
        present=(("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",)),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        # Hydra gives its jobs no name, but one proxy is the ancestor of all ranks of a host.
        job_ancestor=("hydra_pmi_proxy", "hydra_bstrap_pr"),
        node_id=("PMI_HOSTNAME",),
    ),
    _Launcher(
        name="Slurm",
        present=(("SLURM_PROCID",), ("SLURM_STEP_ID",)),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        cross_rank=("SLURM_NODEID",),
        cross_size=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        job_required=("SLURM_JOB_ID",),
        node_id=("SLURMD_NODENAME", "SLURM_NODEID"),
        no_place=("SLURM_STEP_ID", _SLURM_NO_STEP),
    ),
)


def find_ancestor(command_names: Names) -> str | None:
    """Find the nearest ancestor of this process by its command name.

    Args:
        command_names: The names, cut to 15 characters as the kernel does.

    Returns:
        A text that identifies the ancestor until the machine restarts; None if there is no such ancestor.
    """
    pid = "self"
    try:
        while pid != "0":
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
            number, _, rest = text.partition(" (")
            command, _, rest = rest.rpartition(") ")
            fields = rest.split()
            if command in command_names and pid != "self":
                return f"{command}-{number}-{fields[19]}"  # field 22 of proc(5): the start time
            pid = fields[1]
    except (OSError, IndexError):
        pass
    return None


def find_rank_info(environ: Mapping[str, str], ancestor: Ancestor = find_ancestor) -> RankInfo:
    """Read the rank info of this process.

    The launchers are tried in this order: ``HOROVODLIKE_*`` and ``HOROVOD_*``, torchrun, Open MPI, MPICH (Hydra),
    Slurm inside a step. Without any of them this is a job of one rank. An empty variable counts as not set.

    Args:
        environ: The environment variables.
        ancestor: Identifies the nearest ancestor process that has one of the given command names.

    Returns:
        The rank info as the launcher gives it. :func:`horovodlike._bootstrap.bootstrap.establish` finds out which
        ranks really share a host.

    Raises:
        ConfigError: A variable is missing, is not an integer or contradicts another one.
        RendezvousError: Nothing distinguishes this job from another one.
    """
    environ = {name: value.strip() for name, value in environ.items() if value.strip()}
    launcher = next((row for row in _LAUNCHERS if _started_by(row, environ)), None)
    if launcher is None:
        _check_that_it_is_alone(environ)
        return RankInfo()
    place = _read(launcher, environ)
    return replace(place, job=_job(launcher, place, environ, ancestor)) if place.size > 1 else place


def _check_that_it_is_alone(environ: Mapping[str, str]) -> None:
    """Raise an error if a launcher has started several processes for torch.distributed without local ranks."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if all(name in environ for name in names) and environ["WORLD_SIZE"] != "1":
        shown = ", ".join(f"{name}={environ[name]}" for name in names)
        raise ConfigError(
            f"{shown} say that this process is one of several, but LOCAL_RANK and LOCAL_WORLD_SIZE, its number and "
            "their count on this host, are not set: set both, or start the processes with hvdrun or torchrun, or unset "
            "RANK to run alone"
        )


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> RankInfo:
    rank, size = _integer(launcher, environ, launcher.rank), _integer(launcher, environ, launcher.size)
    cross_rank = _integer(launcher, environ, launcher.cross_rank, 0)
    cross_size = _integer(launcher, environ, launcher.cross_size, 1)
    local_rank = _integer(launcher, environ, launcher.local_rank)
    if launcher.tasks_per_node:
        local_size = _tasks_of_node(launcher, environ, cross_rank)
    else:
        local_size = _integer(launcher, environ, launcher.local_size)
    for (index, index_names), (count, count_names) in (
        ((rank, launcher.rank), (size, launcher.size)),
        ((local_rank, launcher.local_rank), (local_size, launcher.local_size or launcher.tasks_per_node)),
        ((cross_rank, launcher.cross_rank), (cross_size, launcher.cross_size)),
        ((local_size - 1, launcher.local_size or launcher.tasks_per_node), (size, launcher.size)),
    ):
        if not 0 <= index < count:
            shown, against = _shown(environ, index_names), _shown(environ, count_names)
            raise ConfigError(
                f"{shown} contradicts {against}: start the ranks with {launcher.name}, or unset its variables"
            )
    node_name = _variable(environ, (HOST_ID, *launcher.node_id))
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        launcher=launcher.name,
        node_id=environ[node_name] if node_name else None,
    )


def _variable(environ: Mapping[str, str], names: Names) -> str | None:
    return next((name for name in names if name in environ), None)


def _started_by(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    name, values = launcher.no_place
    return all(_variable(environ, names) for names in launcher.present) and environ.get(name) not in values


def _shown(environ: Mapping[str, str], names: Names) -> str:
    name = _variable(environ, names)
    return f"{name}={environ[name]!r}" if name else f"the missing {' or '.join(names)}"


def _integer(launcher: _Launcher, environ: Mapping[str, str], names: Names, default: int | None = None) -> int:
    variable = _variable(environ, names)
    if variable is None:
        if default is not None:
            return default
        given = " and ".join(filter(None, (_variable(environ, choice) for choice in launcher.present)))
        raise ConfigError(
            f"{names[0]} is not set although {given} is: set all of {launcher.name}'s variables or none of them"
        )
    text = environ[variable]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(
            f"{variable}={text!r} is not an integer of at least 0; {launcher.name} sets it, so start the ranks with "
            f"{launcher.name}, or unset it"
        )
    return int(text)


def _tasks_of_node(launcher: _Launcher, environ: Mapping[str, str], node: int) -> int:
    variable = _variable(environ, launcher.tasks_per_node)
    if variable is None:
        return _integer(launcher, environ, launcher.tasks_per_node)  # raises an error that names the variable
    try:
        return expand_counts(environ[variable])[node]
    except (ValueError, IndexError):
        raise ConfigError(
            f"{variable}={environ[variable]!r} does not tell how many tasks node {node} has; "
            "something like 4(x2),3 is expected"
        ) from None


def _job(launcher: _Launcher, place: RankInfo, environ: Mapping[str, str], ancestor: Ancestor) -> str:
    given = environ.get(JOB_ID)
    if given:
        return given
    if _variable(environ, launcher.job_required):
        return "/".join([launcher.name, *(environ.get(name, "") for name in launcher.job)])
    if launcher.job_ancestor and place.local_size < place.size:
        return launcher.name  # no process is the ancestor of all ranks; the key distinguishes the jobs
    found = ancestor(launcher.job_ancestor) if launcher.job_ancestor else None
    if found:
        return f"{launcher.name}/{found}"
    raise RendezvousError(
        f"nothing in the environment that {launcher.name} made tells this job from another one: set {JOB_ID} "
        "to the same new text on all of its ranks, or start them with hvdrun"
    )


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable whose name is close to the name of a setting or of a variable above."""
    prefix, own = "HOROVODLIKE_", _LAUNCHERS[0]
    known = {each.variable for each in SETTINGS.values()} | {each for each in globals().values() if type(each) is str}
    known |= {*own.rank, *own.size, *own.local_rank, *own.local_size, *own.cross_rank, *own.cross_size}
    wrong = [name for name, value in environ.items() if name.startswith(prefix) and value and name not in known]
    near = {name: did_you_mean(name, sorted(known), prefix) for name in sorted(wrong)}
    return [f"{name} has no effect: there is no such setting{question}" for name, question in near.items() if question]


def generation() -> int:
    """Return the number of this process's generation of an elastic job: each change of the members begins a new one.

    A job begins with generation 1; a job that is not elastic has this one only.
    """
    return int(os.environ.get(GENERATION) or 1)


def file_of_generation(file_path: str) -> str:
    """Return the output file of this process's generation, so that no generation overwrites the file of another.

    Generation 1 has ``file_path``, generation 3 has ``.generation3`` before the suffix. An empty path stays empty.
    """
    path = Path(file_path)
    if not file_path or generation() == 1:
        return file_path
    return str(path.with_name(f"{path.stem}.generation{generation()}{path.suffix}"))


def path_of_rank(file_path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file that a rank writes: ``file_path`` on rank 0; rank 1, say, has ``.rank1`` before the suffix."""
    path = Path(file_path)
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
