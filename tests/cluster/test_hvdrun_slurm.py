"""`hvdrun` inside an allocation of Slurm's: hosts and slots come from Slurm, and so do the agents, through `srun`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import slurm
from cluster.hosts import Cluster, environment
from cluster.namespaces import wait_until
from cluster.slurm import Slurm

pytestmark = pytest.mark.cluster("slurm", "munge")

HVDRUN = [sys.executable, "-m", "horovodlike.launcher"]
SHOW = (
    'echo "$(hostname) $HOROVODLIKE_RANK $HOROVODLIKE_SIZE $HOROVODLIKE_LOCAL_RANK $HOROVODLIKE_LOCAL_SIZE '
    '$HOROVODLIKE_CROSS_RANK $HOROVODLIKE_CROSS_SIZE $HOROVODLIKE_NODE_ID $OF_THE_TEST"'
)
PLACES = ["h0 0 3 0 2 0 2 h0 given", "h0 1 3 1 2 0 1 h0 given", "h1 2 3 0 1 1 2 h1 given"]
GIVEN = environment(OMP_NUM_THREADS="1", OF_THE_TEST="given")
GRACE_S = 5.0
SLACK_S = 30.0


@pytest.fixture(scope="module")
def hosts(cluster: Callable[..., Cluster]) -> Cluster:
    return cluster(2)


@pytest.fixture(scope="module")
def commands(hosts: Cluster) -> Slurm:
    return slurm.start(hosts)


def shown(out: str) -> list[str]:
    return sorted(line.partition(">: ")[2] for line in out.splitlines() if "]<stdout>: " in line)


def test_from_outside_of_the_nodes(commands: Slurm, tmp_path: Path) -> None:
    done = commands.salloc([*HVDRUN, "sh", "-c", SHOW], ntasks=3, nodes=2, cwd=tmp_path, env=GIVEN)
    assert shown(done.stdout) == PLACES, done.stderr


@pytest.mark.slow
def test_in_a_batch_script(commands: Slurm, tmp_path: Path) -> None:
    script = f"{' '.join(HVDRUN)} --verbose sh -c '{SHOW}'"
    done = commands.sbatch(script, ntasks=3, nodes=2, cwd=tmp_path, env=GIVEN)
    assert shown(done.stdout) == PLACES
    assert "hvdrun: the hosts are those that Slurm has given" in done.stdout
    assert " on h0" not in done.stdout  # the script runs there itself
    assert " on h1" in done.stdout


def test_fewer_ranks_than_tasks_and_named_hosts(commands: Slurm, tmp_path: Path) -> None:
    show = "echo $(hostname) $HOROVODLIKE_RANK"
    words = [*HVDRUN, "-H", "h1:1,h0:1", "sh", "-c", show]
    assert shown(commands.salloc(words, ntasks=2, nodes=2, cwd=tmp_path, env=GIVEN).stdout) == ["h0 1", "h1 0"]
    words = [*HVDRUN, "-np", "1", "sh", "-c", show]
    assert shown(commands.salloc(words, ntasks=2, nodes=2, cwd=tmp_path, env=GIVEN).stdout) == ["h0 0"]


def test_each_agent_may_use_all_processors_of_its_node(commands: Slurm, tmp_path: Path) -> None:
    show = f"{sys.executable} -c 'import os; print(len(os.sched_getaffinity(0)))'"
    done = commands.salloc([*HVDRUN, "sh", "-c", show], ntasks=2, nodes=2, cwd=tmp_path, env=GIVEN)
    assert shown(done.stdout) == [str(len(os.sched_getaffinity(0)))] * 2


def test_a_rank_that_fails(commands: Slurm, tmp_path: Path) -> None:
    script = 'if [ "$HOROVODLIKE_RANK" = 1 ]; then echo the cause >&2; exit 3; fi; exec sleep 1000'
    done = commands.salloc([*HVDRUN, "sh", "-c", script], ntasks=2, nodes=2, cwd=tmp_path, env=GIVEN, check=False)
    assert done.returncode == 3
    assert "on h1) exited with code 3; its last lines:\n    the cause" in done.stderr
    commands.wait_until_idle()


@pytest.mark.parametrize("killed", ["srun", "hvdrun"])
def test_a_killed_launcher_takes_the_ranks_with_it(
    hosts: Cluster, commands: Slurm, tmp_path: Path, killed: str
) -> None:
    words = ["salloc", "--quiet", "--ntasks=2", "--nodes=2", *HVDRUN, "sh", "-c", "echo ready; exec sleep 31415"]
    job = hosts.launcher.popen(
        words, cwd=tmp_path, env=GIVEN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    for _ in range(2):
        assert "ready" in job.stdout.readline()
    beginning = "srun " if killed == "srun" else " ".join(HVDRUN)
    found = [pid for pid, line in hosts.launcher.processes().items() if line.startswith(beginning)]
    os.kill(found[0], signal.SIGKILL)
    _, err = job.communicate(timeout=GRACE_S + SLACK_S)
    if killed == "srun":
        assert (job.returncode, "hvdrun: the agent on h" in err) == (1, True)

    def ranks() -> list[str]:
        return [words for host in hosts.hosts for words in host.processes().values() if "31415" in words]

    wait_until(lambda: ranks() == [], "the end of the ranks", GRACE_S + SLACK_S)
    commands.wait_until_idle()
