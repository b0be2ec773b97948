"""From a job and its hosts to one plan per rank. Pure: each decision comes with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodlike.launcher.errors import UsageError, counted
from horovodlike.launcher.planning.gpus import gpu_variables
from horovodlike.launcher.planning.hosts import Placement
from horovodlike.launcher.planning.job_spec import Binding, JobSpec
from horovodlike.launcher.planning.topology import Host

__all__ = [
    "MALLOC_TUNABLES",
    "JobIdentity",
    "RankPlan",
    "bind",
    "choose_omp_threads",
    "common_variables",
    "place_variables",
    "plan_ranks",
    "tuning_variables",
]

_Cpus = tuple[int, ...]

# Where TensorFlow's kernels and its graph executor look for what OpenMP's programs find in OMP_NUM_THREADS.
_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# glibc's malloc gives the memory of gradients back to the kernel when they are freed, and the next step gets it again
# page by page, each filled with zeros: a quarter of the time of a training step. So it is to keep up to 4 GiB of what
# is free, to have no mappings of their own for what is less than 32 MiB, its maximum, and to ask for huge pages.
MALLOC_TUNABLES = "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=33554432:glibc.malloc.hugetlb=1"
# Who has one of these, even if it is empty, has decided on his own.
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@dataclass(frozen=True)
class JobIdentity:
    """What the ranks of one job have in common.

    Attributes:
        job_id: Names the job in logs.
        key: The job's secret, 64 hexadecimal digits; it goes nowhere but into the environment of ranks.
        address: Where the rendezvous listens: one address, or several that are separated by commas.
        port: Where the rendezvous listens.
    """

    job_id: str
    key: str = field(repr=False)
    address: str
    port: int


@dataclass(frozen=True)
class RankPlan:
    """How one rank is started.

    Attributes:
        rank: The rank.
        local_rank: Its number on its host.
        environ: What it has besides the environment that all ranks have.
        command: What it executes.
        cpus: The logical processors that it is bound to, or None.
    """

    rank: int
    local_rank: int
    environ: Mapping[str, str] = field(repr=False)
    command: tuple[str, ...]
    cpus: _Cpus | None = None


def choose_omp_threads(environ: Mapping[str, str], cpus: int, ranks: int) -> tuple[int | None, str]:
    """Decides ``OMP_NUM_THREADS``: without it every rank would start as many threads as there are processors.

    Returns:
        The number, or None to leave it alone; and what to say about it.
    """
    given = environ.get("OMP_NUM_THREADS")
    if given:
        return None, f"OMP_NUM_THREADS={given} was set already"
    threads = max(1, cpus // ranks)
    each = f"each of {ranks} ranks" if ranks != 1 else "1 rank"
    return threads, f"OMP_NUM_THREADS={threads} for {each} ({counted(cpus, 'core')}); set it yourself to change that"


def bind(how: Binding, host: Host, ranks: int) -> tuple[list[_Cpus | None], str]:
    """Decides which logical processors each local rank is bound to.

    ``core`` deals out the physical cores, an equal share to each rank and none to two; ``numa`` spreads the ranks over
    the NUMA nodes in blocks.

    Returns:
        For each rank its processors, or None; and the reason.

    Raises:
        UsageError: There are fewer cores than ranks.
    """
    if how is Binding.NONE:
        return [None] * ranks, "ranks are not bound"
    if how is Binding.NUMA:
        nodes = host.numa_nodes
        reason = f"{counted(ranks, 'rank')} on {counted(len(nodes), 'NUMA node')}"
        return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)], reason
    cores = host.cores
    share = len(cores) // ranks
    if share == 0:
        raise UsageError(
            f"--bind-to core: {ranks} ranks, but this process may use only {counted(len(cores), 'core')}; "
            f"use at most -np {len(cores)}, or --bind-to none"
        )
    shares = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    reason = f"{share} of {counted(len(cores), 'core')} per rank"
    return [tuple(cpu for core in mine for cpu in core) for mine in shares], reason


def plan_ranks(
    spec: JobSpec,
    command: tuple[str, ...],
    placement: Placement,
    host: Host,
    identity: JobIdentity,
    environ: Mapping[str, str],
) -> tuple[list[RankPlan], list[str]]:
    """Plans every rank of a job on one host.

    Args:
        spec: The job.
        command: What each rank executes.
        placement: Which ranks the host has.
        host: The host.
        identity: The job's identity.
        environ: The environment that all ranks have.

    Returns:
        The plans, and what the user has to be told.

    Raises:
        UsageError: The job does not fit.
    """
    ranks = placement.local_size
    cpus, _ = bind(spec.bind_to, host, ranks)
    gpus = gpu_variables(spec.gpus_per_rank, host.gpus, ranks, spec.called("--gpus-per-rank"))
    tuning, said = tuning_variables(environ, host.usable_cpus, ranks)
    common = common_variables(spec, placement.name, identity) | tuning
    if host.gpus is not None and spec.verbose:
        seen = f"{spec.gpus_per_rank} of {counted(len(host.gpus.names), 'GPU')}"
        said.append(f"each rank sees {seen} ({host.gpus.source})")
    plans = [
        RankPlan(
            rank=placement.first_rank + local_rank,
            local_rank=local_rank,
            environ={**common, **_place(placement, local_rank), **gpus[local_rank]},
            command=command,
            cpus=cpus[local_rank],
        )
        for local_rank in range(ranks)
    ]
    return plans, said


def common_variables(spec: JobSpec, node: str, identity: JobIdentity) -> dict[str, str]:
    """What the ranks of a host have in common, but for where they meet if they are told that later."""
    address = {
        "HOROVODLIKE_RENDEZVOUS_ADDR": identity.address,
        "HOROVODLIKE_RENDEZVOUS_PORT": str(identity.port),
    }
    return {
        **spec.settings,
        "HOROVODLIKE_START_TIMEOUT": f"{spec.start_timeout:.12g}",
        "HOROVODLIKE_NODE_ID": node,
        **(address if identity.port else {}),
        "HOROVODLIKE_SECRET_KEY": identity.key,
        "HOROVODLIKE_JOB_ID": identity.job_id,
        "PYTHONUNBUFFERED": "1",
    }


def tuning_variables(environ: Mapping[str, str], cpus: int, ranks: int) -> tuple[dict[str, str], list[str]]:
    """How many threads each rank of a host is to use, and how its memory is allocated.

    Returns:
        The variables that say so, but for those that are set, and what the user has to be told.
    """
    threads, reason = choose_omp_threads(environ, cpus, ranks)
    number = environ["OMP_NUM_THREADS"] if threads is None else str(threads)
    variables = {}
    if number.isdigit():  # OpenMP has lists as well
        variables = {name: number for name in ("OMP_NUM_THREADS", *_TENSORFLOW_THREADS) if not environ.get(name)}
    if environ.keys().isdisjoint(_MALLOC_VARIABLES):
        variables["GLIBC_TUNABLES"] = MALLOC_TUNABLES
    return variables, [] if threads is None else [reason]


def place_variables(**place: int) -> dict[str, str]:
    """A rank's place in the job, also under the names that scripts written for Horovod read."""
    return {
        f"{owner}_{name.upper()}": str(value) for owner in ("HOROVODLIKE", "HOROVOD") for name, value in place.items()
    }


def _place(placement: Placement, local_rank: int) -> dict[str, str]:
    cross_rank, cross_size = placement.cross(local_rank)
    variables = place_variables(
        rank=placement.first_rank + local_rank,
        size=placement.size,
        local_rank=local_rank,
        local_size=placement.local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
    )
    return variables | {"HOROVOD_HOSTNAME": placement.name}
