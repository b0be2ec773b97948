from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from horovodlike.launcher.agent.host_probe import Host, detect_host, parse_cpu_list
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning import Binding, JobSpec
from horovodlike.launcher.planning.hosts import HostSlots
from horovodlike.launcher.planning.plan import JobIdentity, RankPlan, bind, choose_omp_threads, plan_ranks

# Two NUMA nodes, four cores of two threads each.
BIG = Host(
    cpus=tuple(range(8)),
    cores=((0, 4), (1, 5), (2, 6), (3, 7)),
    numa_nodes=((0, 1, 4, 5), (2, 3, 6, 7)),
)
IDENTITY = JobIdentity("job", "ab" * 32, "127.0.0.1", 1234)


def plan(
    job: JobSpec, command: tuple[str, ...], environ: dict[str, str] | None = None
) -> tuple[list[RankPlan], list[str]]:
    [placement] = job.placements
    return plan_ranks(job, command, placement, BIG, IDENTITY, environ or {})


def test_the_environment_of_ranks() -> None:
    job = JobSpec(3, ("x",), {"HOROVODLIKE_CYCLE_TIME": "2"}, start_timeout=30.0)
    plans, said = plan(job, ("/bin/x", "y"))
    assert [each.rank for each in plans] == [each.local_rank for each in plans] == [0, 1, 2]
    assert all(each.command == ("/bin/x", "y") and each.cpus is None for each in plans)
    assert plans[2].environ == {
        "HOROVODLIKE_RANK": "2",
        "HOROVODLIKE_SIZE": "3",
        "HOROVODLIKE_LOCAL_RANK": "2",
        "HOROVODLIKE_LOCAL_SIZE": "3",
        "HOROVODLIKE_CROSS_RANK": "0",
        "HOROVODLIKE_CROSS_SIZE": "1",
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "2",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVODLIKE_NODE_ID": "localhost",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVODLIKE_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVODLIKE_RENDEZVOUS_PORT": "1234",
        "HOROVODLIKE_SECRET_KEY": "ab" * 32,
        "HOROVODLIKE_JOB_ID": "job",
        "HOROVODLIKE_START_TIMEOUT": "30",
        "HOROVODLIKE_CYCLE_TIME": "2",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
        "TF_NUM_INTRAOP_THREADS": "2",
        "TF_NUM_INTEROP_THREADS": "2",
        "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=33554432"
        ":glibc.malloc.hugetlb=1",
    }
    assert said == ["OMP_NUM_THREADS=2 for each of 3 ranks (8 cores); set it yourself to change that"]


def test_the_variables_of_torch_distributed() -> None:
    job = JobSpec(4, ("x",), hosts=(HostSlots("a", 2), HostSlots("b", 2)), here=None)
    identity = replace(IDENTITY, master=("10.0.0.1", 2345))
    plans, _ = plan_ranks(job, ("x",), job.placements[1], BIG, identity, {})
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345"}
    assert expected.items() <= plans[1].environ.items()
    plans, _ = plan_ranks(job, ("x",), job.placements[1], BIG, identity, {"MASTER_PORT": "1", "RANK": ""})
    assert "MASTER_PORT" not in plans[1].environ and plans[1].environ["RANK"] == "3"


def test_the_ranks_of_several_hosts() -> None:
    job = JobSpec(4, ("x",), hosts=(HostSlots("a", 2), HostSlots("b", 1), HostSlots("c", 9)), here=None)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    found = []
    for placement in job.placements:
        plans, _ = plan_ranks(job, ("x",), placement, BIG, IDENTITY, {})
        for each in plans:
            assert each.rank == int(each.environ["HOROVODLIKE_RANK"])
            assert each.environ["HOROVODLIKE_NODE_ID"] == each.environ["HOROVOD_HOSTNAME"] == placement.name
            found.append((placement.name, *(int(each.environ[f"HOROVOD_{name}"]) for name in names)))
    assert found == [("a", 0, 4, 0, 2, 0, 3), ("a", 1, 4, 1, 2, 0, 1), ("b", 2, 4, 0, 1, 1, 3), ("c", 3, 4, 0, 1, 2, 3)]


def test_the_key_is_not_shown() -> None:
    plans, _ = plan(JobSpec(1, ("x",)), ("x",))
    assert "ab" * 32 not in repr(plans) + repr(IDENTITY)


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(2, 2, 1), (8, 2, 4), (8, 3, 2), (2, 16, 1), (1, 1, 1)])
def test_threads_share_the_cores(cpus: int, ranks: int, threads: int) -> None:
    number, reason = choose_omp_threads({}, cpus, ranks)
    assert number == threads
    assert reason.startswith(f"OMP_NUM_THREADS={threads} for ")


def test_threads_are_left_alone_when_set() -> None:
    assert choose_omp_threads({"OMP_NUM_THREADS": "7"}, 8, 2)[0] is None
    plans, said = plan(JobSpec(2, ("x",)), ("x",), {"OMP_NUM_THREADS": "7"})
    assert said == []
    assert "OMP_NUM_THREADS" not in plans[0].environ
    assert plans[0].environ["TF_NUM_INTRAOP_THREADS"] == plans[0].environ["TF_NUM_INTEROP_THREADS"] == "7"
    plans, _ = plan(JobSpec(2, ("x",)), ("x",), {"TF_NUM_INTEROP_THREADS": "7"})
    assert plans[0].environ["OMP_NUM_THREADS"] == plans[0].environ["TF_NUM_INTRAOP_THREADS"] == "4"
    assert "TF_NUM_INTEROP_THREADS" not in plans[0].environ


@pytest.mark.parametrize(
    "name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"]
)
@pytest.mark.parametrize("value", ["", "glibc.malloc.arena_max=1", "1048576"])
def test_malloc_is_left_alone_when_set(name: str, value: str) -> None:
    plans, _ = plan(JobSpec(2, ("x",)), ("x",), {name: value})
    assert plans[0].environ.keys().isdisjoint({"GLIBC_TUNABLES", name})


@pytest.mark.parametrize(
    ("how", "ranks", "cpus"),
    [
        (Binding.NONE, 2, [None, None]),
        (Binding.CORE, 2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        (Binding.CORE, 3, [(0, 4), (1, 5), (2, 6)]),
        (Binding.CORE, 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (Binding.NUMA, 1, [(0, 1, 4, 5)]),
        (Binding.NUMA, 3, [(0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7)]),
        (Binding.NUMA, 4, [(0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7), (2, 3, 6, 7)]),
    ],
)
def test_binding(how: Binding, ranks: int, cpus: list[tuple[int, ...] | None]) -> None:
    assert bind(how, BIG, ranks)[0] == cpus


def test_more_ranks_than_cores_cannot_be_bound_to_cores() -> None:
    with pytest.raises(
        UsageError, match="5 ranks, but this process may use only 4 cores; use at most -np 4, or --bind"
    ):
        bind(Binding.CORE, BIG, 5)


def test_the_quota_bounds_the_cores() -> None:
    assert Host((0, 1, 2, 3), (), (), quota=2.5).usable_cpus == 2
    assert Host((0, 1), (), (), quota=0.3).usable_cpus == 1
    assert Host((0, 1), (), (), quota=64.0).usable_cpus == 2


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert parse_cpu_list("") == ()


def test_this_host_is_consistent() -> None:
    host = detect_host()
    assert sorted(cpu for core in host.cores for cpu in core) == list(host.cpus)
    assert {cpu for node in host.numa_nodes for cpu in node} <= set(host.cpus)
    assert 1 <= host.usable_cpus <= len(host.cpus)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    assert detect_host(tmp_path).quota is None
    new = write(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        },
    )
    assert detect_host(new).quota == 1.5
    old = write(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert detect_host(old).quota == 3.0
