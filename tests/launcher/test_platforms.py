"""`hvdrun` on platforms that start it once on each node: the options that it takes from them, and how it ends there."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import GRACE_S, SLACK_S, Ended, Launch
from support.platforms import TRAINER

from horovodlike._bootstrap import job_key
from horovodlike._bootstrap import place as places
from horovodlike.launcher.cli import parse
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import JobSpec

KEY = {"HOROVODLIKE_SECRET_KEY": "ab" * 32}
INDEXED = {"JOB_COMPLETION_INDEX": "1"}


def spec(*words: str, **environ: str) -> JobSpec:
    return parse([*words, "python", "train.py"], environ)


def nodes(job: JobSpec) -> tuple[Any, ...] | None:
    return job.nodes and (job.num_proc, job.nodes.count, job.nodes.number, job.nodes.host, job.nodes.port)


def test_the_platform_gives_what_no_option_says() -> None:
    job = spec(**TRAINER, **KEY)
    assert nodes(job) == (4, 3, 2, "job-node-0-0.job", 29500)
    assert (job.start_timeout, job.grace_period) == (600, 25)
    assert job.place is not None
    assert job.place.startswith("Kubeflow Trainer (PET_NNODES=3, PET_NODE_RANK=2, ")


def test_options_and_settings_win() -> None:
    assert nodes(spec("-np", "1", **TRAINER, **KEY)) == (1, 3, 2, "job-node-0-0.job", 29500)
    assert nodes(spec("--nnodes", "5", "--node-rank", "4", **TRAINER, **KEY)) == (4, 5, 4, "job-node-0-0.job", 29500)
    assert nodes(spec("--rendezvous", "a:1", **TRAINER, **KEY)) == (4, 3, 2, "a", 1)
    job = spec("--start-timeout", "7", **TRAINER, **KEY, HOROVODLIKE_GRACE_PERIOD="3")
    assert (job.start_timeout, job.grace_period) == (7, 3)


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2", "--no-detect"],
        ["-np", "2", "-H", "localhost:2"],
        ["-np", "2", "--mpi"],
        ["-np", "2", "--min-np", "1", "--host-discovery-script", "true"],
    ],
)
def test_it_is_not_asked(words: list[str]) -> None:
    job = spec(*words, **{**TRAINER, "PET_NNODES": "nonsense"})
    assert (job.nodes, job.num_proc, job.place, job.start_timeout) == (None, 2, None, 30)
    full = ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "-np", "2"]
    assert nodes(spec(*full, **{**TRAINER, "PET_NNODES": "nonsense"}, **KEY)) == (2, 2, 0, "a", 1)


def test_one_node_is_a_job_on_this_machine_that_needs_no_key() -> None:
    job = spec(PET_NNODES="1", PET_NPROC_PER_NODE="3", PET_NODE_RANK="0")
    assert (job.nodes, job.num_proc) == (None, 3)
    assert spec("-np", "2", PET_NNODES="1").num_proc == 2


@pytest.mark.parametrize(
    ("wanted", "visible", "number"),
    [("auto", "0,1,2", 3), ("gpu", "0,1", 2), ("", "0,1", 2), ("", "", 1), ("auto", "", None), ("cpu", "0", None)],
)
def test_the_number_of_ranks_of_a_node(wanted: str, visible: str, number: int | None) -> None:
    from horovodlike.launcher.agent.host_probe import detect_host

    job = spec(PET_NNODES="1", PET_NPROC_PER_NODE=wanted, CUDA_VISIBLE_DEVICES=visible)
    assert job.num_proc == (number or detect_host().usable_cpus)


def test_a_gpu_is_wanted_and_missing() -> None:
    with pytest.raises(UsageError, match="needs a GPU for each rank, but CUDA_VISIBLE_DEVICES=; give -np"):
        spec(PET_NNODES="1", PET_NPROC_PER_NODE="gpu", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("environ", [INDEXED, {"JOB_COMPLETION_INDEX": "0"}, {**TRAINER, "PET_NNODES": "1:4"}])
@pytest.mark.parametrize("words", [[], ["-np", "2"], ["--min-np", "1"]])
def test_an_unknown_number_of_nodes_is_not_one(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError, match="how many nodes are there.*give --nnodes N, or --no-detect"):
        spec(*words, **environ, **KEY)
    assert nodes(spec("-np", "2", "--no-detect", **environ)) is None
    assert nodes(spec("-np", "2", "--min-np", "1", "--discover", "dns:train", **environ)) is None


@pytest.mark.parametrize(("nnodes", "count", "least"), [("3", 3, None), ("1:4", 4, 1)])
def test_nodes_of_a_range_are_said_by_an_option(nnodes: str, count: int, least: int | None) -> None:
    job = spec("--nnodes", nnodes, **{**TRAINER, "PET_NNODES": "1:4"}, **KEY)
    assert nodes(job) == (4, count, 2, "job-node-0-0.job", 29500)
    assert job.nodes is not None and job.nodes.least == least


def test_nodes_among_which_a_script_chooses_have_their_numbers() -> None:
    words = ["--nnodes", "1:4", "--host-discovery-script", "true", "--rendezvous", "a:1", "-np", "2"]
    assert nodes(spec(*words, JOB_COMPLETION_INDEX="0", **KEY)) == (2, 4, 0, "a", 1)


def test_an_indexed_job_needs_the_number_of_nodes() -> None:
    given = ("--nnodes", "2", "--rendezvous", "train-0.train:29400")
    assert nodes(spec(*given, **INDEXED, **KEY, CUDA_VISIBLE_DEVICES="")) == (1, 2, 1, "train-0.train", 29400)
    with pytest.raises(UsageError, match=r"--rendezvous HOST:PORT.*Indexed Job \(JOB_COMPLETION_INDEX=1\).*not tell"):
        spec("--nnodes", "2", "-np", "1", **INDEXED, **KEY)


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        (TRAINER, "On Kubeflow Trainer, .*kubectl create secret generic horovodlike --from-lit"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}, 'environm.*={"HOROVODLIKE_SECRET_KEY": '),
    ],
)
def test_without_a_key_it_says_how_to_give_one(
    environ: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_key, "_kept_key", None)  # another test's
    with pytest.raises(UsageError, match=rf"needs a key.*{advice}"):
        spec(**environ)


def test_contradictions_and_nonsense_are_errors_of_usage() -> None:
    with pytest.raises(UsageError, match="contradict each other in the number of this node: Kubeflow Trainer"):
        spec(**TRAINER, **INDEXED, **KEY)
    with pytest.raises(UsageError, match="PET_NODE_RANK='x'"):
        spec(**{**TRAINER, "PET_NODE_RANK": "x"}, **KEY)
    with pytest.raises(UsageError, match="elastic job cannot have one hvdrun on each node"):
        spec("--min-np", "2", **TRAINER, **KEY)
    with pytest.raises(UsageError, match="--servers cannot be used with --nnodes"):
        spec("--servers", "1", **TRAINER, **KEY)


@pytest.fixture
def mpi_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of an MPIJob's launcher, whose folder is one of this test."""
    (tmp_path / "hostfile").write_text("worker-0.job slots=2\nworker-1.job slots=2\n")
    (tmp_path / "discover_hosts.sh").write_text("#!/bin/sh\necho worker-1.job\n")
    monkeypatch.setattr("horovodlike._bootstrap.platforms._MPI_FOLDER", f"{tmp_path}/")
    path = str(tmp_path / "hostfile")
    more = {"OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}
    return {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": path, **more}


def test_an_mpi_job_gives_the_hosts(mpi_job: dict[str, str], tmp_path: Path) -> None:
    job = spec(**mpi_job)
    assert [(each.host, each.slots) for each in job.hosts] == [("worker-0.job", 2), ("worker-1.job", 2)]
    assert (job.num_proc, job.here, job.nodes) == (4, None, None)
    assert job.remote.ssh_options == ("-o", "ConnectionAttempts=10")
    assert spec("-np", "3", "--ssh-options", "-v", **mpi_job).remote.ssh_options == ("-v",)


def test_an_elastic_mpi_job_asks_for_hosts_again_and_again(mpi_job: dict[str, str], tmp_path: Path) -> None:
    elastic = spec("--min-np", "2", **mpi_job).elastic
    assert elastic is not None
    assert (elastic.discovery_script, elastic.slots) == (str(tmp_path / "discover_hosts.sh"), 2)
    elastic = spec("--min-np", "2", "--slots", "1", **mpi_job).elastic
    assert elastic is not None and elastic.slots == 1


# Jobs.


@pytest.fixture
def pods(launch: Callable[..., Launch]) -> Callable[..., list[Launch]]:
    """`pods(2, "python", ...)` starts hvdrun as Kubeflow Trainer does: nothing but variables says where it is."""
    address = "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
    key = secrets.token_hex(32)

    def start(count: int, *words: Any, env: dict[str, str] | None = None) -> list[Launch]:
        return [
            launch(
                *words,
                env={
                    "PET_NNODES": str(count),
                    "PET_NODE_RANK": str(number),
                    "PET_NPROC_PER_NODE": "1",
                    "PET_MASTER_ADDR": address,
                    "PET_MASTER_PORT": "29500",
                    "HOROVODLIKE_SECRET_KEY": key,
                    **(env or {}),
                },
            )
            for number in range(count)
        ]

    return start


def test_the_same_command_on_each_node(pods: Callable[..., list[Launch]]) -> None:
    ended = [job.finish() for job in pods(2, "--verbose", "sh", "-c", "echo $HOROVODLIKE_RANK $HOROVODLIKE_SIZE")]
    assert [job.code for job in ended] == [0, 0], [job.err for job in ended]
    assert [job.out for job in ended] == [b"[0]<stdout>: 0 2\n", b"[1]<stdout>: 1 2\n"]
    for number, job in enumerate(ended):
        assert re.search(
            rf"^hvdrun: Kubeflow Trainer \(PET_NNODES=2, PET_NODE_RANK={number}, .*\): nodes 2, this is node {number}, "
            r"node 0 127.*:29500, ranks 1; --no-detect ignores that$",
            job.err,
            re.M,
        )


def test_a_start_that_fails_says_which_platform_it_is(launch: Callable[..., Launch]) -> None:
    job = launch("--start-timeout", "4", "true", env={**TRAINER, **KEY, "PET_MASTER_ADDR": "127.0.0.9"}).finish()
    assert job.code == 1
    which = r".*\(this is Kubeflow Trainer \(PET_NNODES=3, .*; --no-detect ignores that\)$"
    assert re.search(r"^hvdrun: waiting: node 0 at 127.0.0.9 port 29500 cannot be reached yet" + which, job.err, re.M)
    assert re.search(r"^hvdrun: node 0 at 127.0.0.9 port 29500 cannot be reached" + which, job.err, re.M)


def test_a_node_without_a_number_says_so(launch: Callable[..., Launch]) -> None:
    words = ["--no-detect", "--nnodes", "1:4", "--rendezvous", "127.0.0.9:29500", "-np", "1", "--start-timeout", "1"]
    job = launch(*words, "true", env={**INDEXED, **KEY}).finish()
    assert job.code == 1
    assert "(this node has no number: is there another one with --node-rank 0?)" in job.err


TRAIN = """
import os, signal, sys
import horovodlike
from horovodlike import elastic

horovodlike.init()
state = elastic.ObjectState(bcast_object=horovodlike.broadcast_object, get_rank=horovodlike.rank, step=0)
state.persist({path!r}, every=1000000)

@elastic.run
def train(state):
    print("begins with", state.step)
    while state.step < {last}:
        state.step += 1
        state.commit()
        if state.step % 100 == 0:
            print("step", state.step)
    return state.step

print("ends with", train(state))
"""


def test_sigterm_commits_and_leaves_without_a_driver(launch: Callable[..., Launch], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    path = str(tmp_path / "state")
    program.write_text(TRAIN.format(path=path, last=1000000))
    job = launch("-np", "3", "--grace-period", "60", sys.executable, program)
    job.expect(b"step 200")
    job.signal(signal.SIGTERM)
    ended = job.finish(GRACE_S + SLACK_S)
    assert ended.code == 143
    assert "ending 3 ranks within 60 s" in ended.err
    last = max(int(word) for word in re.findall(rb"step (\d+)", ended.out))
    program.write_text(TRAIN.format(path=path, last=0))
    again = launch("-np", "2", sys.executable, program).finish()
    begun = {int(line.rpartition(b" ")[2]) for rank in range(2) for line in again.lines_of(rank) if b"begins" in line}
    assert len(begun) == 1
    assert last <= begun.pop() < last + 100


@pytest.fixture
def sagemaker(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The folder of a SageMaker container, here of one host, and its variables."""
    folder = tmp_path / "ml"
    (folder / "input/config").mkdir(parents=True)
    (folder / "output").mkdir()
    config = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    (folder / "input/config/resourceconfig.json").write_text(json.dumps(config))
    return folder, {"SAGEMAKER_BASE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["sh", "-c", "echo the cause >&2; exit 3"],
            rf"rank 0 \(pid \d+ on {re.escape(socket.gethostname())}\) exited with code 3; its last lines:\n +the c",
        ),
        (["-np", "1", "--min-np", "1", "sh", "-c", "exit 3"], r"worker \d+ \(pid \d+ on .*\) exited with code 3"),
        (["--nnodes", "2", "true"], "--nnodes needs a key"),
        (["no-such-program"], "no-such-program"),
    ],
)
def test_sagemaker_learns_why_a_job_has_failed(
    hvdrun: Callable[..., Ended], sagemaker: tuple[Path, dict[str, str]], words: list[str], reason: str
) -> None:
    folder, environ = sagemaker
    assert hvdrun(*words, env=environ).code != 0
    assert re.search(reason, (folder / "output/failure").read_text())


def test_sagemaker_learns_that_its_own_description_makes_no_sense(
    hvdrun: Callable[..., Ended], sagemaker: tuple[Path, dict[str, str]]
) -> None:
    folder, environ = sagemaker
    assert hvdrun("true", env={**environ, "SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}).code == 2
    assert "this host, algo-2, is not among algo-1" in (folder / "output/failure").read_text()


def test_what_the_script_says_itself_is_kept(
    hvdrun: Callable[..., Ended], sagemaker: tuple[Path, dict[str, str]]
) -> None:
    folder, environ = sagemaker
    assert hvdrun("sh", "-c", f"echo mine > {folder}/output/failure; exit 3", env=environ).code == 3
    assert (folder / "output/failure").read_text() == "mine\n"
    (folder / "output/failure").unlink()
    assert hvdrun("true", env=environ).code == 0
    assert hvdrun("-np", 1, "--no-detect", "false", env=environ).code == 1
    assert not (folder / "output/failure").exists()


def test_a_file_that_is_no_text_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    assert places.read_text(str(tmp_path / "file")) is None
    assert places.read_text(str(tmp_path / "none")) is None


ALONE = "import horovodlike; horovodlike.init(); print(horovodlike.size())"


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        (TRAINER, "it is on one of 3 nodes (Kubeflow Trainer"),
        (INDEXED, "it is on one of an unknown number of nodes (Indexed Job"),
        ({**TRAINER, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
        ({**TRAINER, "PET_NNODES": "x"}, None),
    ],
)
def test_a_script_that_each_of_several_nodes_runs_alone_says_so(environ: dict[str, str], warning: str | None) -> None:
    words = [sys.executable, "-c", ALONE]
    done = subprocess.run(
        words, env={**os.environ, **environ}, cwd="/", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "1\n"
    assert ("this process is a job of its own" in done.stderr) == (warning is not None)
    assert (warning or "") in done.stderr
