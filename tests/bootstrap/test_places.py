"""The table of platforms: one row after the other, rows that agree, rows that contradict each other, bad values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.platforms import TRAINER

from horovodlike._bootstrap.place import Facts, Place
from horovodlike._bootstrap.places import detect_place, find_failure_file
from horovodlike._bootstrap.platforms import PLATFORMS
from horovodlike.errors import ConfigError


def find(environ: dict[str, str], files: dict[str, str] | None = None, name: str = "me.example") -> Place | None:
    return detect_place(Facts(environ, (files or {}).get, lambda: name.partition(".")[0], lambda: name))


def found(environ: dict[str, str], files: dict[str, str] | None = None, name: str = "me.example") -> Place:
    place = find(environ, files, name)
    assert place is not None
    return place


def nodes(place: Place) -> tuple[Any, ...]:
    return place.platform, place.nnodes, place.node_rank, place.host, place.port, place.ranks


VERTEX = {
    "cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]},
    "task": {"type": "workerpool1", "index": 1, "trial": "x"},
    "environment": "cloud",
}
TF = {"cluster": {"chief": ["a-0:2222"], "worker": ["b-0:2222", "b-1:2222"]}, "task": {"type": "worker", "index": 1}}
HOSTS = [f"algo-{number}" for number in (1, 10, 11, 12, 2, 3, 4, 5, 6, 7, 8, 9)]
MPI = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
HOSTFILE = {"/etc/mpi/hostfile": "a.job.ns.svc slots=4\nb.job.ns.svc slots=4\n"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TRAINER, ("Kubeflow Trainer", 3, 2, "job-node-0-0.job", 29500, 4)),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, ("Kubeflow Trainer", 1, 0, None, None, "auto")),
        ({**TRAINER, "PET_NNODES": "1:4"}, ("Kubeflow Trainer", None, 2, "job-node-0-0.job", 29500, 4)),
        ({**TRAINER, "PET_NNODES": "3:3"}, ("Kubeflow Trainer", 3, 2, "job-node-0-0.job", 29500, 4)),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "[fd00::1]:4000"},
            ("Kubeflow Trainer", 2, 1, "fd00::1", 4000, "gpu or 1"),
        ),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666"},
            ("Kubeflow Trainer for JAX", 2, 1, "job-node-0-0.job", 6666, "gpu or 1"),
        ),
        (
            {"SM_HOSTS": json.dumps(HOSTS), "SM_CURRENT_HOST": "algo-10", "SM_NUM_GPUS": "8"},
            ("SageMaker", 12, 9, "algo-1", 7777, 8),
        ),
        (
            {
                "SM_HOSTS": '["algo-2", "algo-1"]',
                "SM_CURRENT_HOST": "algo-2",
                "SM_NUM_GPUS": "0",
                "SM_MASTER_PORT": "9",
            },
            ("SageMaker", 2, 1, "algo-1", 9, 1),
        ),
        ({"CLUSTER_SPEC": json.dumps(VERTEX)}, ("Vertex AI", 3, 2, "a-0", 2222, "gpu or 1")),
        ({"TF_CONFIG": json.dumps(TF)}, ("TF_CONFIG", 3, 2, "a-0", 2222, "gpu or 1")),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'},
            ("TF_CONFIG", 2, 0, "a", 1, "gpu or 1"),
        ),
        (
            {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            ("Azure ML", 2, 1, "10.0.0.4", 29400, "gpu or 1"),
        ),
        (
            {"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            ("Azure ML", 1, 0, "10.0.0.4", 29400, "gpu or 1"),
        ),
        (
            {"NODE_RANK": "1", "AZUREML_NODE_COUNT": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"},
            ("Azure ML", 2, 1, "10.0.0.4", 6105, "gpu or 1"),
        ),
        (
            {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4", "WORLD_SIZE": "8", "AZUREML_RUN_ID": "run"},
            ("Azure ML", None, 1, "10.0.0.4", 29400, "gpu or 1"),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"},
            ("PAI DLC or PyTorchJob", 2, 1, "dlc-master-0", 23456, "gpu or 1"),
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "localhost",
                "NPROC_PER_NODE": "8",
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            },
            ("PAI DLC or PyTorchJob", 2, 0, "me", 29400, 8),
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, ("Indexed Job", None, 3, None, None, "gpu or 1")),
    ],
)
def test_each_row(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    place = found(environ)
    assert nodes(place) == expected
    assert next(iter(environ)) in str(place) or place.platform in ("TF_CONFIG", "Vertex AI")


def test_pods_of_an_indexed_job_know_the_name_of_the_first() -> None:
    place = found({"JOB_COMPLETION_INDEX": "12"}, name="train-12.svc.ns.svc.cluster.local")
    assert (place.node_rank, place.host, place.port) == (12, "train-0.svc.ns.svc.cluster.local", 29400)
    jobset = found({"JOB_COMPLETION_INDEX": "1"}, name="set-workers-0-1.set")
    assert jobset.host == "set-workers-0-0.set"
    assert found({"JOB_COMPLETION_INDEX": "1"}, name="train-1").host is None  # no Service gives it a domain


@pytest.mark.parametrize("groups", [1, 2])
def test_sagemaker_without_its_toolkit(groups: int) -> None:
    config = {
        "current_host": "algo-2",
        "hosts": ["algo-1", "algo-2", "algo-10"],
        "network_interface_name": "eth1",
        "instance_groups": [{"hosts": ["algo-1"]}, {"hosts": ["algo-10", "algo-2"]}][-groups:],
    }
    place = found({"SAGEMAKER_BASE_DIR": "/base"}, {"/base/input/config/resourceconfig.json": json.dumps(config)})
    expected = (3, 1, "algo-1") if groups == 1 else (2, 0, "algo-2")
    assert (place.nnodes, place.node_rank, place.host) == expected
    assert find_failure_file(Facts({"SAGEMAKER_BASE_DIR": "/base"})) == "/base/output/failure"
    assert find_failure_file(Facts({"HOROVODLIKE_RANK": "0"})) is None
    assert place.settings["network_interface"] == "eth1"
    assert (place.settings["grace_period"], place.ranks) == ("110", "gpu or 1")


def test_an_mpi_job() -> None:
    files = HOSTFILE | {"/etc/mpi/discover_hosts.sh": "#!/bin/sh"}
    place = found({**MPI, "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}, files)
    assert (place.hostfile, place.discovery) == ("/etc/mpi/hostfile", "/etc/mpi/discover_hosts.sh")
    assert (place.slots, place.ssh_options, place.nnodes) == (4, "-o ConnectionAttempts=10", None)
    for name in ("I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"):
        place = found({name: "/etc/mpi/hostfile"}, {"/etc/mpi/hostfile": "a:1\nb:2\n"})
        assert (place.hostfile, place.discovery, place.slots) == ("/etc/mpi/hostfile", None, None)
    assert found({}, HOSTFILE).platform == "MPIJob"
    assert find({"HYDRA_HOST_FILE": "/home/me/hosts"}, {"/home/me/hosts": "a"}) is None  # not a platform's
    assert find({**MPI, "OMPI_COMM_WORLD_RANK": "0"}, HOSTFILE) is None  # a rank of mpirun's


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "", "WORLD_SIZE": " ", "JOB_COMPLETION_INDEX": ""},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1]"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1", "SLURM_JOB_ID": "7"},
        {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "WORLD_SIZE": "8"},
        {"NODE_RANK": "0", "MASTER_ADDR": "node-1", "WORLD_SIZE": "8"},
        {"TF_CONFIG": json.dumps({"cluster": TF["cluster"]})},
        {"TF_CONFIG": json.dumps({**TF, "task": {"type": "evaluator", "index": 0}})},
        {"TF_CONFIG": "{}"},
        {"MASTER_ADDR": "a"},
        {"AZ_BATCH_MASTER_NODE": "a:1"},
        {**TRAINER, "TORCHELASTIC_RUN_ID": "1"},
        {**TRAINER, "HOROVODLIKE_RANK": "0"},
        {**TRAINER, "HOROVOD_RANK": "0"},
    ],
)
def test_nothing_says_that_this_is_a_node(environ: dict[str, str]) -> None:
    assert find(environ) is None


def test_rows_that_agree_complete_each_other() -> None:
    place = found({"CLUSTER_SPEC": json.dumps(VERTEX), "TF_CONFIG": json.dumps(TF)})
    assert nodes(place) == ("Vertex AI", 3, 2, "a-0", 2222, "gpu or 1")
    assert "as TF_CONFIG: task of type worker" in place.evidence
    place = found({**TRAINER, "JOB_COMPLETION_INDEX": "2"}, name="job-node-0-2.job")  # a TrainJob is a JobSet
    assert nodes(place) == ("Kubeflow Trainer", 3, 2, "job-node-0-0.job", 29500, 4)
    bare = {"PET_NNODES": "3", "JOB_COMPLETION_INDEX": "2"}
    assert nodes(found(bare, name="job-2.svc")) == ("Kubeflow Trainer", 3, 2, "job-0.svc", 29400, "gpu or 1")
    # A PyTorchJob counts processes in WORLD_SIZE where it sets PET_NNODES.
    assert found({**TRAINER, "RANK": "2", "WORLD_SIZE": "12", "MASTER_ADDR": "x"}).nnodes == 3
    assert found({**MPI, "JOB_COMPLETION_INDEX": "0"}, HOSTFILE).hostfile is not None
    # Vertex AI describes the same nodes to PyTorch, with names or addresses that cannot be compared.
    torch = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "3333"}
    assert found({"CLUSTER_SPEC": json.dumps(VERTEX), **torch}).port == 2222


@pytest.mark.parametrize(
    ("environ", "files", "name", "both"),
    [
        ({**TRAINER, "JOB_COMPLETION_INDEX": "1"}, {}, "the number of this node", ("PET_NODE_RANK=2", "INDEX=1")),
        (
            {"CLUSTER_SPEC": json.dumps(VERTEX), "RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
            {},
            "the number of nodes",
            ("Vertex AI", "WORLD_SIZE=4"),
        ),
        (
            {**TRAINER, "NODE_RANK": "2", "AZUREML_NODE_COUNT": "3", "MASTER_ADDR": "other.job"},
            {},
            "node 0",
            ("job-node-0-0.job", "other.job"),
        ),
        ({**TRAINER, **MPI}, HOSTFILE, "the hosts", ("PET_NNODES=3", "/etc/mpi/hostfile")),
    ],
)
def test_rows_that_contradict_each_other(
    environ: dict[str, str], files: dict[str, str], name: str, both: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError, match=f"contradict each other in {name}: ") as caught:
        find(environ, files)
    assert all(each in str(caught.value) for each in (*both, "--no-detect"))


def _vertex(**change: Any) -> dict[str, str]:
    return {"CLUSTER_SPEC": json.dumps({**VERTEX, **change})}


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({**TRAINER, "PET_NNODES": "two"}, "PET_NNODES='two' is not an integer of at least 1"),
        ({**TRAINER, "PET_NNODES": "0"}, "PET_NNODES='0' is not an integer of at least 1"),
        ({**TRAINER, "PET_NNODES": "4:1"}, "PET_NNODES='1' is not an integer of at least 4"),
        ({**TRAINER, "PET_NNODES": "1:2"}, "node 2 is not one of 2 nodes"),
        ({**TRAINER, "PET_NODE_RANK": "3"}, "node 3 is not one of 3 nodes"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE='many'"),
        ({**TRAINER, "PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT='70000' is no port"),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a b"}, "PET_RDZV_ENDPOINT='a b' is not like host:port"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS is no JSON"),
        ({"SM_HOSTS": "{}", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS is no list of names"),
        ({"SM_HOSTS": "[1]", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS is no list of names"),
        ({"SM_HOSTS": "[]", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS is no list of names"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "this host, algo-2, is not among algo-1"),
        ({"CLUSTER_SPEC": "[" * 100000}, "CLUSTER_SPEC is no JSON"),
        ({"CLUSTER_SPEC": "[]"}, "CLUSTER_SPEC is no JSON object"),
        ({"CLUSTER_SPEC": "{}"}, "CLUSTER_SPEC does not have a cluster and a task"),
        (_vertex(task={"type": "workerpool1", "index": 2}), "node 2 is not one of 2 nodes"),
        (_vertex(task={"type": "workerpool1", "index": None}), "task.index='None'"),
        (_vertex(task={"type": "workerpool2", "index": 0}), "this replica is of workerpool2.*evaluators"),
        ({"TF_CONFIG": json.dumps({**TF, "task": {"type": "ps", "index": 0}})}, "this task is of type ps"),
        (
            {"NODE_RANK": "0", "MASTER_ADDR": "a", "AZUREML_NODE_COUNT": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "8"},
            "starts hvdrun several times.*process_count_per_instance to 1",
        ),
        (
            {
                "AZ_BATCH_MASTER_NODE": "a:1",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "starts hvdrun 2 times.*process_count_per_instance to 1",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "node 2 is not one of 2 nodes"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX='-1'"),
    ],
)
def test_what_makes_no_sense_is_an_error(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find(environ)


def test_the_page_has_every_row_and_each_has_a_source() -> None:
    page = (Path(__file__).parents[2] / "docs/users/clouds.md").read_text()
    table = page.partition("## What it looks at")[2].partition("\n- ")[0]
    shown = re.findall(r"^\| ([^|]*) \| ([^|]*) \|", table, re.MULTILINE)[1:]
    assert shown == [(row.name, row.signs) for row in PLATFORMS]
    assert all(row.source for row in PLATFORMS)
