"""Plan how each rank of a job starts on its host. Pure functions, which return their decisions with the reasons."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodlike.launcher.agent.host_probe import VISIBLE, Gpus, Host
from horovodlike.launcher.errors import UsageError, counted, given
from horovodlike.launcher.planning import Binding, JobSpec
from horovodlike.launcher.planning.hosts import Placement

_Cpus = tuple[int, ...]

# TensorFlow's variables for the threads of its kernels and of its graph executor: its counterparts of OMP_NUM_THREADS.
_TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# glibc's malloc returns the memory of freed gradients to the kernel, which gives it back in the next step page by page,
# each filled with zeros: this takes a quarter of the time of a training step. So these tunables make malloc keep up to
# 4 GiB of free memory, map no block of less than 32 MiB (the maximum) by itself, and ask for huge pages.
MALLOC_TUNABLES = "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=33554432:glibc.malloc.hugetlb=1"
# If the user has set one of these, even to an empty value, the launcher does not tune malloc.
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@dataclass(frozen=True)
class JobIdentity:
    """The data of a job that all its ranks share.

    Attributes:
        job_id: The name of the job in logs.
        key: The job's secret, 64 hexadecimal digits; it is passed on only in the environment of ranks.
        address: The address of the rendezvous server, or several that are separated by commas.
        port: The port of the rendezvous server.
        master: An address and a free port of rank 0's host, for torch.distributed; None until they are known.
        monitor_port: The port of the job's monitor, at the addresses of the rendezvous server or of the driver; 0 if
            there is none.
    """

    job_id: str
    key: str = field(repr=False)
    address: str
    port: int
    master: tuple[str, int] | None = None
    monitor_port: int = 0


@dataclass(frozen=True)
class RankPlan:
    """The plan for starting one rank.

    Attributes:
        rank: The rank.
        local_rank: Its number on its host; -1 for a server of parameters.
        environ: Its variables besides the environment that all ranks have.
        command: The words that it executes.
        cpus: The logical processors that it is bound to, or None.
    """

    rank: int
    local_rank: int
    environ: Mapping[str, str] = field(repr=False)
    command: tuple[str, ...]
    cpus: _Cpus | None = None


def choose_omp_threads(environ: Mapping[str, str], cpus: int, ranks: int) -> tuple[int | None, str]:
    """Decide ``OMP_NUM_THREADS``: without it every rank would start as many threads as there are processors.

    Returns:
        The number, or None to keep the user's value; and the reason, for a message.
    """
    given = environ.get("OMP_NUM_THREADS")
    if given:
        return None, f"OMP_NUM_THREADS={given} was set already"
    threads = max(1, cpus // ranks)
    each = f"each of {ranks} ranks" if ranks != 1 else "1 rank"
    return threads, f"OMP_NUM_THREADS={threads} for {each} ({counted(cpus, 'core')}); set it yourself to change that"


def bind(how: Binding, host: Host, ranks: int) -> tuple[list[_Cpus | None], str]:
    """Decide which logical processors each local rank is bound to.

    ``core`` gives each rank an equal share of the physical cores for itself; ``numa`` binds blocks of consecutive ranks
    to the NUMA nodes in turn.

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
    """Plan every rank of a job on one host.

    Args:
        spec: The job.
        command: The words that each rank executes.
        placement: The ranks of the host.
        host: The host.
        identity: The job's identity.
        environ: The environment that all ranks have.

    Returns:
        The plans, and messages for the user.

    Raises:
        UsageError: The job does not fit the host.
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
            environ={
                **common,
                **_place(placement, local_rank),
                **torch_variables(placement, local_rank, identity, environ),
                **gpus[local_rank],
            },
            command=command,
            cpus=cpus[local_rank],
        )
        for local_rank in range(ranks)
    ]
    return plans, said


def plan_servers(spec: JobSpec, placement: Placement, identity: JobIdentity) -> list[RankPlan]:
    """Plan the processes of one host that serve parameters; they are numbered after the ranks."""
    modules = [word for name in spec.server_modules for word in ("--import", name)]
    command = (sys.executable, "-m", "horovodlike.parameter_server", *modules)
    common = common_variables(spec, placement.name, identity) | {"HOROVODLIKE_SIZE": str(spec.num_proc), VISIBLE: ""}
    return [
        RankPlan(number, -1, {**common, "HOROVODLIKE_SERVER": str(number - spec.num_proc)}, command)
        for number in server_numbers(spec, placement)
    ]


def server_numbers(spec: JobSpec, placement: Placement) -> range:
    """Return the numbers of the servers of one host: they are assigned to the hosts in turn."""
    return range(spec.num_proc + placement.number, spec.num_proc + spec.servers, len(placement.names))


def common_variables(spec: JobSpec, node: str, identity: JobIdentity) -> dict[str, str]:
    """Return the variables that all ranks of a host share; without the rendezvous server's if it is not known yet."""
    address = {
        "HOROVODLIKE_RENDEZVOUS_ADDR": identity.address,
        "HOROVODLIKE_RENDEZVOUS_PORT": str(identity.port),
    }
    return {
        **spec.settings,
        "HOROVODLIKE_START_TIMEOUT": f"{spec.start_timeout:.12g}",
        "HOROVODLIKE_NODE_ID": node,
        **(address if identity.port else {}),
        **({"HOROVODLIKE_SERVERS": str(spec.servers)} if spec.servers else {}),
        **({"HOROVODLIKE_MONITOR_PORT": str(identity.monitor_port)} if identity.monitor_port else {}),
        "HOROVODLIKE_SECRET_KEY": identity.key,
        "HOROVODLIKE_JOB_ID": identity.job_id,
        "PYTHONUNBUFFERED": "1",
    }


def tuning_variables(environ: Mapping[str, str], cpus: int, ranks: int) -> tuple[dict[str, str], list[str]]:
    """Decide how many threads each rank of a host uses, and how its memory is allocated.

    Returns:
        The variables for this, except those that are set already, and messages for the user.
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
    """Return a rank's rank info as variables, also under the names that scripts written for Horovod read."""
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


_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def torch_variables(
    placement: Placement, local_rank: int, identity: JobIdentity, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables from which torch.distributed reads a rank's number and the job's size and master.

    A master that the user has chosen is kept. The other variables replace inherited ones, as from an enclosing job.
    """
    if identity.master is None:
        return {}
    address, port = identity.master
    variables = {
        "RANK": placement.first_rank + local_rank,
        "WORLD_SIZE": placement.size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": placement.local_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in variables.items() if not (name in _MASTER and environ.get(name))}


def gpu_variables(
    per_rank: int, gpus: Gpus | None, ranks: int, called: str = "--gpus-per-rank"
) -> list[dict[str, str]]:
    """Assign the host's GPUs to its local ranks, in order. Pure.

    Args:
        per_rank: How many GPUs each rank has; with 0, no variable is set.
        gpus: The GPUs of the host.
        ranks: How many ranks the host has.
        called: The name with which the user gave ``per_rank``, for messages.

    Returns:
        For each local rank, the variables that select its GPUs.

    Raises:
        UsageError: The host has too few GPUs.
    """
    if per_rank == 0:
        return [{} for _ in range(ranks)]
    assert gpus is not None
    have = len(gpus.names)
    if per_rank * ranks > have:
        few = have // per_rank
        fewer = f"use at most {counted(few, 'rank')} on this host, or " if few else ""
        raise UsageError(
            f"{given(called, per_rank)}: {counted(ranks, 'rank')} need{'s' * (ranks == 1)} "
            f"{counted(per_rank * ranks, 'GPU')}, but this host has {have or 'none'} ({gpus.source}); {fewer}leave "
            f"{called} out: then all ranks see all GPUs"
        )
    shares = (gpus.names[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks))
    return [{VISIBLE: ",".join(share)} for share in shares]


OWN_NAMES = (
    *("HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "SHELL", "USER"),
    *("TEMP", "TMP", "TMPDIR"),
    *("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "XAUTHORITY"),
    "CUDA_VISIBLE_DEVICES",
)
"""Variables that each host has for itself: ranks have their own host's values, not the launcher's."""
OWN_PREFIXES = ("SSH_", "XDG_")
_OF_A_WORKER = frozenset(
    {
        *("HOROVODLIKE_ELASTIC", "HOROVOD_ELASTIC", "HOROVODLIKE_WORKER", "HOROVODLIKE_GENERATION"),
        *("HOROVODLIKE_DRIVER_ADDR", "HOROVODLIKE_DRIVER_PORT"),
        *("HOROVODLIKE_SERVER", "HOROVODLIKE_SERVERS", "HOROVODLIKE_MONITOR_PORT"),
    }
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return all variables except the rank variables of another job, whose process may have started the launcher."""
    return {name: value for name, value in environ.items() if name not in _OF_A_WORKER}


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are sent to other hosts: all except those that each host has for itself."""
    return {
        name: value for name, value in environ.items() if name not in OWN_NAMES and not name.startswith(OWN_PREFIXES)
    }
