from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import RemoteStart
from horovodlike.launcher.planning.hosts import HostSlots
from horovodlike.launcher.schedulers import AGENT, JobAllocation, Scheduler
from horovodlike.launcher.schedulers.flux import parse_resources
from horovodlike.launcher.schedulers.registry import SCHEDULERS, find_allocation, find_hosts, scheduler_of
from horovodlike.launcher.schedulers.ssh import Ssh

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "n[1-2],m",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),6",
}


@pytest.mark.parametrize("scheduler", [*SCHEDULERS, Ssh()], ids=lambda scheduler: scheduler.name)
def test_the_interface(scheduler: Scheduler) -> None:
    remote = RemoteStart(scheduler=scheduler.name)
    assert scheduler_of(remote).name == scheduler.name
    assert bool(scheduler.job_variable) == (scheduler in SCHEDULERS)
    words = scheduler.start_command("node-1", remote, 30.0)
    assert words[0] == scheduler.program
    assert any("node-1" in word for word in words)
    assert " ".join(words).endswith(shlex.join(AGENT))


def test_slurm() -> None:
    hosts = (HostSlots("n1", 4), HostSlots("n2", 4), HostSlots("m", 3))
    cpus = {"n1": 8, "n2": 8, "m": 6}
    assert find_allocation(SLURM) == JobAllocation("Slurm", hosts, cpus)
    for pseudo_step in ("4294967290", "4294967291"):  # an interactive shell, the batch script
        assert find_allocation({**SLURM, "SLURM_STEP_ID": pseudo_step}) == JobAllocation("Slurm", hosts, cpus)
    few = {"SLURM_JOB_ID": "77", "SLURM_NODELIST": "n1"}
    assert find_allocation(few) == JobAllocation("Slurm", (HostSlots("n1", 1),), {})


def test_no_allocation() -> None:
    assert find_allocation({}) is None
    assert find_allocation({"SLURM_JOB_NODELIST": "n1"}) is None
    assert find_allocation({**SLURM, "SLURM_STEP_ID": "0"}) is None  # srun has started this process
    assert find_allocation({"PBS_NODEFILE": "x"}) is None
    assert find_allocation({"LSB_JOBID": "1"}) is None


def test_lsf(tmp_path: Path) -> None:
    environ = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 4 b 2 a 1"}
    expected = JobAllocation("LSF", (HostSlots("a", 5), HostSlots("b", 2)), {})
    assert find_allocation(environ) == expected
    (tmp_path / "hosts").write_text("a\na\na\na\na\nb\nb\n")
    assert find_allocation({**environ, "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}) == expected


def test_pbs(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    environ = {"PBS_JOBID": "5.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert find_allocation(environ) == JobAllocation("PBS", (HostSlots("a", 2), HostSlots("b", 1)), {})


GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def flux(tmp_path: Path) -> dict[str, str]:
    """Variables as in a batch script of Flux's: `fake_flux` is on PATH."""
    folder = tmp_path / "flux"
    folder.mkdir()
    program = folder / "flux"
    text = Path(__file__).with_name("fake_flux.py").read_text()
    program.write_text(f"#!{sys.executable} -IS\n" + text.partition("\n")[2])
    program.chmod(0o755)
    (folder / "resource_list").write_bytes((GOLDEN / "flux_resource_list.txt").read_bytes())
    return {"FLUX_URI": "local:///tmp/flux-kuhwZg/local-0", "PATH": f"{folder}:{os.environ['PATH']}"}


def commands(flux: dict[str, str]) -> list[list[str]]:
    log = Path(flux["PATH"].partition(":")[0], "flux.log")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_flux(flux: dict[str, str]) -> None:
    hosts = (HostSlots("fluke1", 4), HostSlots("fluke2", 4), HostSlots("gold", 2))
    assert find_allocation(flux) == JobAllocation("Flux", hosts)
    assert find_allocation({**flux, **SLURM}) == JobAllocation("Flux", hosts)  # an instance within an allocation
    assert find_allocation({**flux, "FLUX_JOB_ID": "f2Nzy9CbX"}) is None  # `flux run` has started this process
    assert find_allocation({**flux, "FLUX_URI": ""}) is None
    assert [words[:2] for words in commands(flux)] == [["resource", "list"]] * 2


def test_flux_starts_agents_on_hosts_of_its_own(flux: dict[str, str]) -> None:
    assert find_hosts(None, None, 3, flux).scheduler == "Flux"
    assert find_hosts("fluke2:1,gold:2", None, None, flux).scheduler == "Flux"
    assert find_hosts("fluke2:1,other.invalid:2", None, None, flux).scheduler == "ssh"


def test_a_job_within_flux(hvdrun: Callable[..., object], flux: dict[str, str]) -> None:
    show = "echo $HOROVODLIKE_NODE_ID $HOROVODLIKE_LOCAL_RANK ${CUDA_VISIBLE_DEVICES-none} ${FLUX_TASK_RANK-none}"
    job = hvdrun("-np", 5, "--network-interface", "127.0.0.0/8", "sh", "-c", show, env=flux)
    assert job.code == 0, job.err
    assert [job.lines_of(rank) for rank in range(5)] == [
        *([b"fluke1 %d none none" % rank] for rank in range(4)),
        [b"fluke2 0 none none"],
    ]
    expected = (GOLDEN / "flux_run.txt").read_text().replace("PYTHON", sys.executable).split()
    _, *runs = commands(flux)
    assert [words[:-1] for words in sorted(runs)] == [
        [word.replace("HOST", host) for word in expected] for host in ("fluke1", "fluke2")
    ]
    assert all(words[-1].endswith("/start_agent.py") for words in runs)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("asp rank0/core0\n", {"asp": 1}),
        ("a[1-2],b rank[0-1]/core[0-1] rank2/core[0-3]\n", {"a1": 2, "a2": 2, "b": 4}),
        ("a[1-4] rank[0,2]/core[0-1],gpu0 rank[1,3]/core[0-1],gpu[0-1]\n", {"a1": 1, "a2": 2, "a3": 1, "a4": 2}),
        ("a[1-2] rank3/core[0-1] rank1/core[0-2]\n", {"a1": 3, "a2": 2}),  # in the order of the ranks
        ("a,a rank[0-1]/core[0-1]\n", {"a": 4}),  # a test instance: two brokers on one host
    ],
)
def test_resources_of_flux(text: str, hosts: dict[str, int]) -> None:
    assert parse_resources(text) == tuple(HostSlots(host, slots) for host, slots in hosts.items())


@pytest.mark.parametrize("text", ["", "\n", "a rank0", "a,b rank0/core0", "a[1-2 rank[0-1]/core0", "a node0/core0"])
def test_resources_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError):
        parse_resources(text)


def test_flux_does_not_answer(flux: dict[str, str]) -> None:
    Path(flux["PATH"].partition(":")[0], "resource_list").unlink()
    message = "of this Flux job cannot be found: flux resource list: .*: No such file or directory; name them with -H"
    with pytest.raises(UsageError, match=message):
        find_allocation(flux)
    with pytest.raises(UsageError, match="No such file or directory: 'flux'"):
        find_allocation({**flux, "PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, r"of this Slurm job cannot be found: 'n\[1-' is not a list of hosts"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4"}, r"SLURM_TASKS_PER_NODE='4' is for 1 node, but there are 3"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(y2)"}, r"'4\(y2\)' is not a number for each host"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 4 b"}, r"LSF job cannot be found: LSB_MCPU_HOSTS='a 4 b' is no list"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a b"}, r"LSB_MCPU_HOSTS='a b' is no list"),
        ({"PBS_JOBID": "1", "PBS_NODEFILE": "/no/such/file"}, r"PBS job cannot be found: .*No such file.*-H"),
    ],
)
def test_what_makes_no_sense(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_allocation(environ)
