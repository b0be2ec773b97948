"""The platforms that start the same command once on each node of a job: one table, each row with its source.

:data:`PLATFORMS` says how to recognise each platform, and how a process's place is read there.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from horovodlike._bootstrap.place import (
    OWN_NAMES,
    PORT,
    Facts,
    Place,
    check_number,
    read_json,
    read_mapping,
    read_master,
    read_names,
    read_number,
    read_port,
    split_address,
)
from horovodlike.errors import ConfigError

SAGEMAKER_FOLDER = "SAGEMAKER_BASE_DIR"
_SAGEMAKER_PORT = 7777  # which SageMaker's own launchers use
_MPI_FOLDER = "/etc/mpi/"
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
_SSH_WORDS = ("OMPI_MCA_plm_rsh_args", "HYDRA_LAUNCH_EXTRA_ARGS")

_SECRET = (
    "kubectl create secret generic horovodlike --from-literal=HOROVODLIKE_SECRET_KEY=$(openssl rand -hex 32), and in "
    "the container: env: [{name: HOROVODLIKE_SECRET_KEY, valueFrom: {secretKeyRef: {name: horovodlike, key: "
    "HOROVODLIKE_SECRET_KEY}}}]"
)
# Nodes are placed one by one and fetch their images. Kubernetes kills 30 s after SIGTERM, SageMaker after 120 s.
_POD = {"start_timeout": "600", "grace_period": "25"}
_MACHINE = {"start_timeout": "600", "grace_period": "110"}


class Platform(NamedTuple):
    """A row of the table.

    Attributes:
        name: Its name.
        read: Returns the place, or None if the process does not run there.
        source: Where the platform's variables are described.
        signs: The variables or files by which it is found, for the documentation.
    """

    name: str
    read: Callable[[Facts], Place | None]
    source: str
    signs: str


# The rows.


def _trainer(facts: Facts) -> Place | None:
    if not (facts.has("PET_NNODES") or facts.has("PET_NODE_RANK")):
        return None
    evidence = facts.shown(
        "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"
    )
    low, _, high = (facts.get("PET_NNODES") or "1").partition(":")
    nnodes = read_number(low, "PET_NNODES", 1)
    most = read_number(high, "PET_NNODES", nnodes) if high else nnodes
    number = facts.number("PET_NODE_RANK")
    if number is None and most == 1:
        number = 0
    if number is not None:
        check_number("Kubeflow Trainer", most, number, evidence)
    host, port = read_master(facts, "PET_")
    endpoint = facts.get("PET_RDZV_ENDPOINT")
    if host is None and endpoint:
        host, port = split_address(endpoint, "PET_RDZV_ENDPOINT")
    ranks: int | str = facts.get("PET_NPROC_PER_NODE") or "gpu or 1"
    if ranks not in ("gpu", "cpu", "auto", "gpu or 1"):
        ranks = read_number(str(ranks), "PET_NPROC_PER_NODE", 1)
    return Place(
        "Kubeflow Trainer", evidence, nnodes if nnodes == most else None, number, host, port, ranks, settings=_POD,
        key_advice=f"for a TrainJob: {_SECRET} (trainer.env)",
    )  # fmt: skip


def _jax_trainer(facts: Facts) -> Place | None:
    if not facts.has("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        return None
    evidence = facts.shown("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
    nnodes = read_number(facts.get("JAX_NUM_PROCESSES"), "JAX_NUM_PROCESSES", 1)
    number = read_number(facts.get("JAX_PROCESS_ID"), "JAX_PROCESS_ID")
    check_number("Kubeflow Trainer for JAX", nnodes, number, evidence)
    host, port = None, None
    if address := facts.get("JAX_COORDINATOR_ADDRESS"):
        host, port = split_address(address, "JAX_COORDINATOR_ADDRESS")
    return Place(
        "Kubeflow Trainer for JAX", evidence, nnodes, number, host, port, "gpu or 1", settings=_POD,
        key_advice=f"for a TrainJob: {_SECRET} (trainer.env)",
    )  # fmt: skip


def _mpi_job(facts: Facts) -> Place | None:
    if facts.has("OMPI_COMM_WORLD_RANK") or facts.has("PMI_RANK"):
        return None
    named = next((name for name in _HOSTFILES if facts.has(name)), None)
    path = facts.get(named) if named else f"{_MPI_FOLDER}hostfile"
    is_launcher = facts.get("K_MPI_JOB_ROLE") == "launcher"
    if not (is_launcher or path.startswith(_MPI_FOLDER)) or (hosts := facts.read(path)) is None:
        return None
    script = f"{path.rpartition('/')[0]}/discover_hosts.sh"  # both are files of one ConfigMap
    slots = set(re.findall(r"(?:slots\s*=\s*|:)([0-9]{1,6})\s*$", hosts, re.MULTILINE))
    return Place(
        "MPIJob",
        facts.shown("K_MPI_JOB_ROLE", *([named] if named else [])) or path,
        hostfile=path,
        discovery=script if facts.read(script) is not None else None,
        slots=int(slots.pop()) if len(slots) == 1 else None,
        ssh_options=next(filter(None, map(facts.get, _SSH_WORDS)), None),
        settings=_POD,
    )


def sagemaker_folder(facts: Facts) -> str:
    """Return the folder in which SageMaker exchanges files with a container."""
    return facts.get(SAGEMAKER_FOLDER) or "/opt/ml"


def _sagemaker(facts: Facts) -> Place | None:
    path = f"{sagemaker_folder(facts)}/input/config/resourceconfig.json"
    text = facts.read(path)
    config = {} if text is None else read_mapping(read_json(text, path), path)
    if facts.has("SM_HOSTS", "SM_CURRENT_HOST"):
        evidence = facts.shown("SM_HOSTS", "SM_CURRENT_HOST")
        hosts = read_names(read_json(facts.get("SM_HOSTS"), "SM_HOSTS"), "SM_HOSTS")
        here = facts.get("SM_CURRENT_HOST")
    elif text is not None:
        evidence = path
        hosts, here = read_names(config.get("hosts"), f"{path}: hosts"), str(config.get("current_host"))
    else:
        return None
    groups = [group for group in config.get("instance_groups") or [] if isinstance(group, dict)]
    if len(groups) > 1:
        hosts = next((read_names(group["hosts"], path) for group in groups if here in group.get("hosts", ())), hosts)
    hosts = sorted(set(hosts), key=_by_number)
    if here not in hosts:
        raise ConfigError(f"SageMaker: this host, {here}, is not among {', '.join(hosts)} ({evidence})")
    gpus = facts.number("SM_NUM_GPUS")
    interface = facts.get("SM_NETWORK_INTERFACE_NAME") or str(config.get("network_interface_name") or "")
    settings = _MACHINE | ({"network_interface": interface} if interface and len(hosts) > 1 else {})
    port = facts.get("SM_MASTER_PORT")
    return Place(
        "SageMaker", evidence, len(hosts), hosts.index(here), hosts[0],
        read_port(port, "SM_MASTER_PORT") if port else _SAGEMAKER_PORT, "gpu or 1" if gpus is None else max(gpus, 1),
        settings=settings,
        key_advice='give the estimator or ModelTrainer environment={"HOROVODLIKE_SECRET_KEY": secrets.token_hex(32)}',
    )  # fmt: skip


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts algo-2 before algo-10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name))


def _vertex(facts: Facts) -> Place | None:
    if not facts.has("CLUSTER_SPEC"):
        return None
    spec = read_mapping(read_json(facts.get("CLUSTER_SPEC"), "CLUSTER_SPEC"), "CLUSTER_SPEC")
    pools = ("workerpool0", "workerpool1")
    nodes, kind, number = _task("Vertex AI", "CLUSTER_SPEC", spec, pools)
    if number is None:
        raise ConfigError(
            f"Vertex AI: this replica is of {kind}, which Vertex AI keeps for reduction servers or evaluators "
            "(CLUSTER_SPEC); put workers into the first and second worker pool, or give --no-detect and --nnodes"
        )
    evidence = f"CLUSTER_SPEC: {kind}, {len(nodes)} replicas in {' and '.join(pools)}"
    host, port = split_address(nodes[0], "CLUSTER_SPEC")
    return Place(
        "Vertex AI", evidence, len(nodes), number, host, port, "gpu or 1", settings=_POD,
        key_advice="containerSpec.env: [{name: HOROVODLIKE_SECRET_KEY, value: ...}] in each worker pool",
    )  # fmt: skip


def _tf_config(facts: Facts) -> Place | None:
    if not facts.has("TF_CONFIG"):
        return None
    config = read_mapping(read_json(facts.get("TF_CONFIG"), "TF_CONFIG"), "TF_CONFIG")
    if not config.get("cluster") or not config.get("task"):
        return None  # a single process; the variable may have other content
    nodes, kind, number = _task("TF_CONFIG", "TF_CONFIG", config, ("chief", "master", "worker"))
    if kind == "evaluator":
        return None  # it is no part of the training
    if number is None:
        raise ConfigError(
            f"TF_CONFIG: this task is of type {kind}, but only chief and worker can have ranks; start hvdrun on those, "
            "or give --no-detect"
        )
    host, port = split_address(nodes[0], "TF_CONFIG")
    return Place(
        "TF_CONFIG", f"task of type {kind}, {len(nodes)} workers", len(nodes), number, host, port, "gpu or 1",
        settings=_POD, key_advice="set HOROVODLIKE_SECRET_KEY in the environment of each task",
    )  # fmt: skip


def _task(
    platform: str, source: str, config: Mapping[str, Any], kinds: tuple[str, ...]
) -> tuple[list[str], str, int | None]:
    """Read a cluster and a task of it.

    Returns:
        The addresses of all tasks that can have ranks, the type of this one, and its number, or None if it is another.
    """
    cluster, task = config.get("cluster"), config.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise ConfigError(f"{source} does not have a cluster and a task with a type; --no-detect ignores it")
    lists = {kind: read_names(cluster[kind], f"{source}: {kind}") for kind in kinds if kind in cluster}
    nodes = [address for kind in lists for address in lists[kind]]
    kind, index = task["type"], task.get("index", 0)
    if kind not in kinds:
        return nodes, kind, None
    index = read_number(str(index), f"{source}: task.index")
    check_number(platform, len(lists.get(kind, ())), index, f"{source}: {kind}")
    return nodes, kind, sum(len(lists[each]) for each in list(lists)[: list(lists).index(kind)]) + index


def _azure_mpi(facts: Facts) -> Place | None:
    address = next((name for name in ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE") if facts.has(name)), None)
    if address is None or not facts.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    evidence = facts.shown("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", address)
    if (local := facts.number("OMPI_COMM_WORLD_LOCAL_SIZE") or 1) > 1:
        raise ConfigError(
            f"Azure ML starts hvdrun {local} times on this node (OMPI_COMM_WORLD_LOCAL_SIZE), but it starts the ranks "
            "itself: set process_count_per_instance to 1, or run the script without hvdrun"
        )
    nnodes = read_number(facts.get("OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE", 1)
    number = read_number(facts.get("OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK")
    check_number("Azure ML", nnodes, number, evidence)
    host, _ = split_address(facts.get(address), address)  # the port belongs to Azure Batch itself
    return Place("Azure ML", evidence, nnodes, number, host, PORT, "gpu or 1", settings=_POD, key_advice=_AZURE)


_AZURE = 'environment_variables={"HOROVODLIKE_SECRET_KEY": secrets.token_hex(32)} of the command job'


def _azure_torch(facts: Facts) -> Place | None:
    if not facts.has("NODE_RANK", "MASTER_ADDR") or not any(name.startswith("AZUREML_") for name in facts.environ):
        return None  # scripts for Slurm, and Lightning, set variables of these names too
    evidence = facts.shown("NODE_RANK", "AZUREML_NODE_COUNT", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    number = read_number(facts.get("NODE_RANK"), "NODE_RANK")
    nnodes = facts.number("AZUREML_NODE_COUNT")  # WORLD_SIZE counts processes
    processes = facts.number("WORLD_SIZE") or 1
    if facts.number("LOCAL_RANK") or (facts.has("LOCAL_RANK") and nnodes is not None and processes > nnodes):
        raise ConfigError(
            f"Azure ML starts hvdrun several times on this node ({evidence}), but it starts the ranks itself: set "
            "process_count_per_instance to 1, or run the script without hvdrun"
        )
    if nnodes is not None:
        check_number("Azure ML", nnodes, number, evidence)
    host, port = read_master(facts)
    return Place("Azure ML", evidence, nnodes, number, host, port, "gpu or 1", settings=_POD, key_advice=_AZURE)


# With one of these, RANK numbers processes, as in scripts for Slurm; newer PyTorchJobs have PET_*, and other values.
_OF_A_PROCESS = ("LOCAL_RANK", "PET_NNODES", "SLURM_JOB_ID")


def _per_node_rank(facts: Facts) -> Place | None:
    if not facts.has("RANK", "WORLD_SIZE", "MASTER_ADDR") or any(map(facts.get, _OF_A_PROCESS)):
        return None
    if facts.get("MASTER_ADDR").strip("[]") in OWN_NAMES and not facts.has("KUBERNETES_SERVICE_HOST"):
        return None  # a script's on this machine; only the master of a PyTorchJob, which is a pod, has such a name
    evidence = facts.shown("RANK", "WORLD_SIZE", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT") + ", no LOCAL_RANK"
    nnodes = read_number(facts.get("WORLD_SIZE"), "WORLD_SIZE", 1)
    number = read_number(facts.get("RANK"), "RANK")
    check_number("PAI DLC or PyTorchJob", nnodes, number, evidence)
    host, port = read_master(facts)
    ranks: int | str = facts.get("NPROC_PER_NODE") or "gpu or 1"
    if ranks != "gpu or 1":
        ranks = read_number(str(ranks), "NPROC_PER_NODE", 1)
    return Place(
        "PAI DLC or PyTorchJob", evidence, nnodes, number, host, port, ranks, settings=_POD,
        key_advice=f"on Kubernetes: {_SECRET}; on PAI: an environment variable of the job",
    )  # fmt: skip


def _indexed_job(facts: Facts) -> Place | None:
    if not facts.has("JOB_COMPLETION_INDEX"):
        return None
    number = read_number(facts.get("JOB_COMPLETION_INDEX"), "JOB_COMPLETION_INDEX")
    evidence = facts.shown("JOB_COMPLETION_INDEX")
    name, host = facts.host_name().partition(".")[0], None
    if name.endswith(f"-{number}"):  # the pod has the host name that the Job gives it: JOB-INDEX
        full = facts.full_name()
        label, dot, domain = full.partition(".")
        if dot and label == name:
            host = f"{name.removesuffix(str(number))}0.{domain}"
            evidence += f", host name {full}"
    return Place(
        "Indexed Job",
        evidence,
        None,
        number,
        host,
        PORT if host else None,
        "gpu or 1",
        settings=_POD,
        key_advice=_SECRET,
    )


# fmt: off
PLATFORMS: tuple[Platform, ...] = (
    Platform("Kubeflow Trainer", _trainer, "kubeflow/trainer, pkg/runtime/framework/plugins/torch; torchrun's PET_*",
             "`PET_NNODES`, `PET_NODE_RANK`"),
    Platform("Kubeflow Trainer for JAX", _jax_trainer, "kubeflow/trainer, pkg/runtime/framework/plugins/jax",
             "`JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`"),
    Platform("MPIJob", _mpi_job, "kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go",
             "`/etc/mpi/hostfile`, `K_MPI_JOB_ROLE=launcher`"),
    Platform("SageMaker", _sagemaker, "sagemaker-training: environment.py, params.py",
             "`SM_HOSTS`, `SM_CURRENT_HOST`; `/opt/ml/input/config/resourceconfig.json`"),
    Platform("Vertex AI", _vertex, "cloud.google.com/vertex-ai/docs/training/distributed-training", "`CLUSTER_SPEC`"),
    Platform("Azure ML, MPI", _azure_mpi, "learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu",
             "`AZ_BATCH_MASTER_NODE` or `AZ_BATCHAI_MPI_MASTER_NODE`, with `OMPI_COMM_WORLD_RANK`"),
    Platform("Azure ML, PyTorch", _azure_torch,
             "learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu",
             "`NODE_RANK`, `MASTER_ADDR`, and a variable `AZUREML_*`"),
    Platform("PAI DLC, PyTorchJob v1", _per_node_rank,
             "kubeflow/training-operator v1, pkg/controller.v1/pytorch; PAI DLC's documentation",
             "`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, and neither `LOCAL_RANK` nor `SLURM_JOB_ID`"),
    Platform("TF_CONFIG", _tf_config, "tensorflow.org/guide/distributed_training",
             "`TF_CONFIG`"),
    Platform("Indexed Job, JobSet", _indexed_job, "kubernetes.io/docs/concepts/workloads/controllers/job",
             "`JOB_COMPLETION_INDEX`"),
)
# fmt: on
"""The platforms. The first one that fits gives its name to the place; one that is part of another comes later."""
