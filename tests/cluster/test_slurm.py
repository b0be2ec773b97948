"""Slurm's own commands over the hosts."""

from __future__ import annotations

import sys

import pytest

from cluster import slurm

pytestmark = pytest.mark.cluster("slurm", "munge")


@pytest.fixture(scope="module")
def commands(cluster):
    return slurm.start(cluster(2))


def test_srun_on_two_hosts(commands):
    done = commands.srun(["hostname"], ntasks=4, nodes=2, options=["--ntasks-per-node=2"])
    assert sorted(done.stdout.split()) == ["h0", "h0", "h1", "h1"]
    assert done.stderr == ""


def test_srun_has_more_tasks_than_this_machine_has_processors(commands):
    done = commands.srun(["sh", "-c", "echo $SLURM_PROCID"], ntasks=16, nodes=2)
    assert sorted(map(int, done.stdout.split())) == list(range(16))


def test_tasks_have_the_environment_of_who_starts_them(commands):
    program = "import os; print(os.environ['GIVEN'], os.environ['SLURMD_NODENAME'])"
    env = {"PATH": "/usr/bin", "GIVEN": "value"}
    done = commands.srun([sys.executable, "-c", program], ntasks=1, nodes=1, env=env)
    assert done.stdout in ("value h0\n", "value h1\n")  # the host of the test before may not be free yet


def test_an_exit_code_comes_back(commands):
    assert commands.srun(["sh", "-c", "exit 3"], ntasks=2, nodes=2, check=False).returncode == 3
    commands.wait_until_idle()


def test_a_program_in_an_allocation(commands):
    words = ["sh", "-c", 'hostname; echo "$SLURM_JOB_NODELIST"; srun hostname']
    done = commands.salloc(words, ntasks=2, nodes=2)
    assert done.stdout.split()[:2] == ["launcher", "h[0-1]"]
    assert sorted(done.stdout.split()[2:]) == ["h0", "h1"]


def test_a_batch_job(commands):
    done = commands.sbatch("hostname\nsrun hostname\necho error >&2\nexit 5", ntasks=2, nodes=2, check=False)
    assert done.returncode == 5
    words = done.stdout.split()
    assert (words[0], sorted(words[1:3]), words[3:]) == ("h0", ["h0", "h1"], ["error"])
