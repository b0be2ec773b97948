"""The place of a process in its job, from the environments that the real launchers make."""

import os
from typing import Any

import pytest

from horovodlike._bootstrap.environment import RankInfo, find_ancestor, find_rank_info, misspelt
from horovodlike.config import SETTINGS
from horovodlike.errors import ConfigError, RendezvousError

# Recorded from the launchers, without what does not matter here.
HVDRUN = {
    "HOROVODLIKE_RANK": "1",
    "HOROVODLIKE_SIZE": "2",
    "HOROVODLIKE_LOCAL_RANK": "1",
    "HOROVODLIKE_LOCAL_SIZE": "2",
    "HOROVODLIKE_CROSS_RANK": "0",
    "HOROVODLIKE_CROSS_SIZE": "1",
    "HOROVODLIKE_NODE_ID": "5f3a",
    "HOROVODLIKE_JOB_ID": "77aa",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "46435",
    "TORCHELASTIC_RUN_ID": "8c178d1e-5320-411a-93ec-6962db951447",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node-5141@1",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "node",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "node",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURMD_NODENAME": "node",
}
LAUNCHERS = {"hvdrun": HVDRUN, "torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "MPICH": MPICH, "Slurm": SLURM}
JOBS = {
    "hvdrun": "77aa",
    "torchrun": "torchrun/8c178d1e-5320-411a-93ec-6962db951447/localhost/46435/0",
    "Open MPI": "Open MPI/prterun-node-5141@1/",
    "MPICH": "MPICH/hydra_pmi_proxy-5201-98061",
    "Slurm": "Slurm/4711/0/",
}
NODES = {"hvdrun": "5f3a", "torchrun": "0", "Open MPI": "node", "MPICH": "node", "Slurm": "node"}


def hydra(names: tuple[str, ...]) -> str | None:
    return "hydra_pmi_proxy-5201-98061" if "hydra_pmi_proxy" in names else None


def nobody(names: tuple[str, ...]) -> None:
    return None


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher(name: str) -> None:
    assert find_rank_info(LAUNCHERS[name], hydra) == RankInfo(1, 2, 1, 2, 0, 1, name, JOBS[name], NODES[name])


def test_nobody_makes_a_job_of_one() -> None:
    assert find_rank_info({"PATH": "/bin"}) == RankInfo()


def test_the_first_launcher_in_the_list_wins() -> None:
    environ: dict[str, str] = {}
    for name in reversed(LAUNCHERS):
        environ |= LAUNCHERS[name]
        environ.pop("HOROVODLIKE_JOB_ID", None)
        assert find_rank_info({**environ, "HOROVODLIKE_JOB_ID": "j"}, hydra).launcher == name


def test_horovods_own_names_and_precedence() -> None:
    horovod = {name.replace("HOROVODLIKE", "HOROVOD"): value for name, value in HVDRUN.items()}
    horovod |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "999"}
    place = find_rank_info(horovod)
    assert (place.rank, place.size, place.job) == (1, 2, "hvdrun/10.0.0.1/999")
    assert find_rank_info({**horovod, "HOROVODLIKE_RANK": "0", "HOROVODLIKE_LOCAL_RANK": "0"}).rank == 0


def test_host_id_replaces_the_node() -> None:
    assert find_rank_info({**HVDRUN, "HOROVODLIKE_HOSTID": "mine"}).node_id == "mine"


@pytest.mark.parametrize("step", [None, "", "4294967290", "4294967291"])
def test_a_slurm_batch_script_is_a_job_of_one(step: str | None) -> None:
    environ = {**SLURM, "SLURM_PROCID": "0"}
    del environ["SLURM_STEP_ID"]
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert find_rank_info(environ) == RankInfo()


def test_variables_of_the_user_that_only_look_like_torchruns() -> None:
    assert find_rank_info({"RANK": "captain", "WORLD_SIZE": "big"}) == RankInfo()


def test_several_processes_without_local_ranks_are_not_jobs_of_one() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"^RANK=1, WORLD_SIZE=2, .*LOCAL_RANK and LOCAL_WORLD_SIZE.* are not set"):
        find_rank_info(environ)
    assert find_rank_info({**environ, "RANK": "0", "WORLD_SIZE": "1"}) == RankInfo()
    assert find_rank_info({**environ, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).size == 2
    assert find_rank_info({**environ, **OPEN_MPI}).launcher == "Open MPI"


def test_a_restart_of_torchrun_is_another_job() -> None:
    assert find_rank_info(TORCHRUN).job != find_rank_info({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).job


@pytest.mark.parametrize(
    ("environ", "change", "words"),
    [
        (HVDRUN, {"HOROVODLIKE_RANK": "one"}, ["HOROVODLIKE_RANK='one'", "integer", "hvdrun"]),
        (HVDRUN, {"HOROVODLIKE_RANK": "-1"}, ["HOROVODLIKE_RANK='-1'"]),
        (HVDRUN, {"HOROVODLIKE_RANK": "2"}, ["HOROVODLIKE_RANK='2'", "HOROVODLIKE_SIZE='2'"]),
        (HVDRUN, {"HOROVODLIKE_SIZE": "0"}, ["HOROVODLIKE_SIZE='0'"]),
        (HVDRUN, {"HOROVODLIKE_SIZE": None}, ["HOROVODLIKE_SIZE is not set", "HOROVODLIKE_RANK"]),
        (HVDRUN, {"HOROVODLIKE_RANK": " "}, ["HOROVODLIKE_RANK is not set", "HOROVODLIKE_SIZE"]),
        (HVDRUN, {"HOROVODLIKE_LOCAL_SIZE": "3"}, ["HOROVODLIKE_LOCAL_SIZE='3'", "HOROVODLIKE_SIZE='2'"]),
        (HVDRUN, {"HOROVODLIKE_CROSS_RANK": "1"}, ["HOROVODLIKE_CROSS_RANK='1'", "HOROVODLIKE_CROSS_SIZE='1'"]),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": None}, ["LOCAL_WORLD_SIZE is not set"]),
        (TORCHRUN, {"WORLD_SIZE": "99999999999999999999"}, ["WORLD_SIZE='9999"]),
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["OMPI_COMM_WORLD_LOCAL_RANK='2'", "LOCAL_SIZE='2'"]),
        (MPICH, {"MPI_LOCALNRANKS": "x"}, ["MPI_LOCALNRANKS='x'"]),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["SLURM_STEP_TASKS_PER_NODE='two'"]),
    ],
)
def test_values_that_cannot_be(environ: dict[str, str], change: dict[str, Any], words: list[str]) -> None:
    changed = {name: value for name, value in {**environ, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        find_rank_info(changed, hydra)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "size", "local_size", "cross_size"),
    [
        ({**HVDRUN, "HOROVODLIKE_SIZE": "4", "HOROVODLIKE_CROSS_SIZE": "2"}, 4, 2, 2),
        ({**TORCHRUN, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 4, 2, 2),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, 4, 2, 1),  # it does not say
        ({**MPICH, "PMI_SIZE": "4"}, 4, 2, 1),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2,3"},
            5,
            2,
            2,
        ),
    ],
)
def test_several_hosts(environ: dict[str, str], size: int, local_size: int, cross_size: int) -> None:
    place = find_rank_info(environ, hydra)
    assert (place.size, place.local_size, place.cross_size) == (size, local_size, cross_size)


def test_slurm_counts_the_tasks_of_its_node() -> None:
    environ = {**SLURM, "SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2"}
    place = find_rank_info({**environ, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"})
    assert (place.size, place.local_size, place.cross_rank, place.cross_size) == (11, 3, 2, 3)


def test_a_job_without_a_name() -> None:
    with pytest.raises(RendezvousError, match="HOROVODLIKE_JOB_ID"):
        find_rank_info(MPICH, nobody)
    assert find_rank_info({**MPICH, "HOROVODLIKE_JOB_ID": "x"}, nobody).job == "x"
    assert find_rank_info(
        {**MPICH, "PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, nobody
    )


def test_ancestors() -> None:
    with open(f"/proc/{os.getppid()}/comm", encoding="utf-8") as file:
        parent = file.read().strip()
    found = find_ancestor((parent,))
    assert found is not None
    assert found.startswith(f"{parent}-{os.getppid()}-")
    assert find_ancestor(("no such command",)) is None


@pytest.mark.parametrize(
    ("wrong", "right"), [("FUSION_TRESHOLD", "FUSION_THRESHOLD"), ("RENDEZVOUS_ADDRESS", "RENDEZVOUS_ADDR")]
)
def test_a_name_that_is_nearly_that_of_a_setting(wrong: str, right: str) -> None:
    [line] = misspelt({f"HOROVODLIKE_{wrong}": "3", "HOROVODLIKE_CYCLE_TIMES": "", "HOROVOD_FUSION_TRESHOLD": "3"})
    assert line == (f"HOROVODLIKE_{wrong} has no effect: there is no such setting; did you mean HOROVODLIKE_{right}?")


def test_no_name_that_is_one_is_taken_for_another() -> None:
    """Neither settings nor what launchers set, nor names that are like none of these."""
    own = {f"HOROVODLIKE_{name}" for name in ("MONITOR_PORT", "FAULT_PLAN", "SECRET_KEY", "TEST_MARK", "MY_FOLDER")}
    names = {*HVDRUN, *own, *(name for each in SETTINGS.values() for name in each.variables)}
    assert misspelt(dict.fromkeys(names, "1")) == []
