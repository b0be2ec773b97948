"""The command line of an elastic job: what is accepted, and the job that results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from horovodlike.launcher.cli import parse
from horovodlike.launcher.elastic.elastic_job import make_policy
from horovodlike.launcher.elastic.host_health import Backoff
from horovodlike.launcher.elastic.state import Policy
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import ElasticSpec, JobSpec


def spec(*words: object, environ: dict[str, str] | None = None) -> JobSpec:
    return parse([*map(str, words), "python", "train.py"], environ or {})


def policy(*words: object) -> Policy:
    job = spec(*words)
    assert job.elastic is not None
    return make_policy(job, job.elastic)


def test_a_job_is_not_elastic_unless_it_is_asked_for() -> None:
    assert spec("-np", 2).elastic is None
    assert spec("-np", 2, "--elastic-timeout", 9).elastic is None


@pytest.mark.parametrize("words", [("--min-np", 1), ("--max-np", 4), ("--host-discovery-script", "./hosts.sh")])
def test_what_makes_a_job_elastic(words: tuple[object, ...]) -> None:
    job = spec("-np", 2, *words)
    assert job.elastic is not None
    assert job.settings == {"HOROVODLIKE_NETWORK_TIMEOUT": "5"}


def test_all_options() -> None:
    job = spec(
        *("-np", 3, "--min-np", 2, "--max-np", 8, "--slots", 4, "--reset-limit", 0, "--elastic-timeout", 60),
        *("--blacklist-cooldown-range", 10, 100.5, "--heartbeat-timeout", 2, "--host-discovery-script", "./hosts.sh"),
        *("--grace-period", 90),
    )
    assert job.elastic == ElasticSpec(2, 8, "./hosts.sh", 4, 0, (10.0, 100.5), 60.0, 2.0, 90.0)
    assert job.settings == {
        "HOROVODLIKE_ELASTIC_TIMEOUT": "60",
        "HOROVODLIKE_HEARTBEAT_TIMEOUT": "2",
        "HOROVODLIKE_GRACE_PERIOD": "90",
        "HOROVODLIKE_NETWORK_TIMEOUT": "2",
    }


def test_horovods_spellings() -> None:
    job = spec("-np", 3, "--min-num-proc", 2, "--max-num-proc", 8, "--slots-per-host", 4)
    assert job.elastic == ElasticSpec(2, 8, slots=4)
    assert spec("-np", 1, "--min-np", 1, environ={"HOROVOD_ELASTIC_TIMEOUT": "7"}).elastic == ElasticSpec(
        1, elastic_timeout=7.0
    )


def test_with_compat_they_are_without_effect_in_jobs_that_are_not_elastic() -> None:
    words = ("-np", 2, "--slots-per-host", 4, "--reset-limit", 3, "--blacklist-cooldown-range", 10, 100)
    job = spec("--compat", *words, "--tcp")
    assert job.elastic is None
    assert job.ignored == ("--tcp", "--slots-per-host", "--reset-limit", "--blacklist-cooldown-range")
    assert spec("--compat", *words, "--min-np", 1).ignored == ()


NODES = ("--rendezvous", "x:1", "-np", 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--nnodes", "2:4", "--node-rank", 0), (4, 0, 2)),
        (("--nnodes", "1:1", "--node-rank", 0), (1, 0, 1)),
        (("--nnodes", "2:4", "--min-np", 3), (4, None, 2)),
    ],
)
def test_nodes_that_come_and_go(words: tuple[object, ...], expected: tuple[int, int | None, int]) -> None:
    job = parse([*map(str, (*words, *NODES)), "train.py"], {"HOROVODLIKE_SECRET_KEY": "ab" * 32})
    assert job.nodes is not None
    assert (job.nodes.count, job.nodes.number, job.nodes.least) == expected
    assert job.elastic is not None
    assert job.elastic.min_np == (3 if "--min-np" in words else None)
    assert job.num_proc == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nnodes", "3:2"), "--nnodes 3:2: the first number, with which the job begins, must not be the greater one"),
        (("--nnodes", "0:2"), "--nnodes 0:2: there must be at least one node"),
        (("--nnodes", ":2"), "--nnodes :2 cannot be used: write a number, or MIN:MAX for an elastic job"),
        (("--nnodes", "1:70000"), "a job can have 65536 nodes at most"),
        (("--nnodes", "1:2", "--node-rank", 2), "--node-rank 2: of 2 nodes, the first one is 0 and the last one 1"),
        (("--nnodes", "1:2", "-H", "a:1"), "--nnodes and -H contradict each other"),
        (("--nnodes", "1:2", "--mpi"), "--mpi cannot be used for an elastic job"),
    ],
)
def test_nodes_that_cannot_be_used(words: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse([*map(str, (*words, *NODES)), "train.py"], {"HOROVODLIKE_SECRET_KEY": "ab" * 32})


def test_the_policy() -> None:
    assert policy("-np", 3, "--max-np", 5) == Policy(3, 3, 5)
    assert policy("--min-np", 2) == Policy(2, 2)
    assert policy("-np", 3, "--min-np", 2, "--reset-limit", 7) == Policy(3, 2, reset_limit=7)
    assert policy("--compat", "--min-np", 2) == Policy(2, 2, resets_like_horovod=True)
    assert policy("-H", "a:2,b:4", "--max-np", 5) == Policy(5, 5, 5)
    found = policy("-np", 1, "--min-np", 1, "--blacklist-cooldown-range", 1, 2)
    assert found.backoff == Backoff(1, 2, patient=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-np", 2, "--min-np", 0), "--min-np 0 cannot be used: it must be an integer >= 1"),
        (("-np", 2, "--max-np", "x"), "--max-np x cannot be used"),
        (
            ("-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 5, 1),
            "--blacklist-cooldown-range 5 1 cannot be used",
        ),
        (("-np", 2, "--reset-limit", 1), "--reset-limit is for elastic jobs; add --min-np, --max-np or --host"),
        (("-np", 2, "--slots", 1), "--slots is for elastic jobs"),
        (("-np", 2, "--slots-per-host", 1), "--slots-per-host is for elastic jobs"),
        (("-np", 2, "--min-num-proc", 0), "--min-num-proc 0 cannot be used"),
        (("-np", 2, "--min-np", 1, "--mpi"), "--mpi cannot be used for an elastic job"),
        (
            ("-np", 2, "--min-np", 1, "--nnodes", 2, "--node-rank", 0, "--rendezvous", "x:1"),
            "--nnodes 2 cannot be used for an",
        ),
        (("--host-discovery-script", "x"), "how many ranks"),
        (("-np", 1, "--host-discovery-script", "x", "-H", "a:1"), "the hosts are given in two ways"),
        (("-np", 1, "--min-np", 1, "--elastic-timeout", 0), "--elastic-timeout='0' cannot be used"),
        (("-np", 1, "--min-np", 1, "--heartbeat-timeout", 0.5), "--heartbeat-timeout='0.5' cannot be used"),
    ],
)
def test_options_that_cannot_be_used(words: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-np", 2, "--min-np", 3), "--min-np 3 is more than -np 2"),
        (("-np", 2, "--max-np", 1), "--max-np 1 is less than -np 2"),
    ],
)
def test_numbers_that_contradict_each_other(words: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        policy(*words)


def test_a_plan_of_faults_reaches_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("- {rank: 0, step: 3, point: step, action: SIGKILL}\n")
    (tmp_path / "bad.yaml").write_text("- {rank: 0, step: 3, point: nowhere, action: SIGKILL}\n")
    settings = spec("-np", 1, "--chaos", tmp_path / "plan.yaml").settings
    [fault] = json.loads(settings["HOROVODLIKE_FAULT_PLAN"])
    assert (fault["rank"], fault["step"], fault["point"], fault["action"]) == (0, 3, "step", "SIGKILL")
    with pytest.raises(UsageError, match="bad.yaml.*nowhere"):
        spec("-np", 1, "--chaos", tmp_path / "bad.yaml")
    with pytest.raises(UsageError, match="none.yaml"):
        spec("-np", 1, "--chaos", tmp_path / "none.yaml")
