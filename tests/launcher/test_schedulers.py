from __future__ import annotations

from pathlib import Path

import pytest

from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.hosts import HostSlots
from horovodlike.launcher.schedulers import JobAllocation
from horovodlike.launcher.schedulers.registry import find_allocation

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "n[1-2],m",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),6",
}


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
