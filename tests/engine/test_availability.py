"""The table of transports, and the rules that choose them, without MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import pytest

import horovodlike as hvd
from horovodlike import basics
from horovodlike._engine import options
from horovodlike.availability import Availability
from horovodlike.config import Config
from horovodlike.errors import ConfigError, RendezvousError

MOVES = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "gather", "scatter", "reduce")


def _states(table: Availability, transport: str, device: str) -> dict[str, str]:
    return {operation: table.find(transport, operation, device).state for operation in (*MOVES, "barrier", "send")}


def test_the_installation(monkeypatch):
    for name in ("CUDA", "NCCL"):
        monkeypatch.setenv(f"HOROVODLIKE_{name}_LIBRARY", "/nowhere/lib.so")
    monkeypatch.setattr(basics, "mpi_built", lambda: False)
    table = hvd.collective_availability()
    assert not table.of_job
    assert len(table.cells) == 5 * 2 * 2 * 11
    for transport in ("shared memory", "TCP"):
        assert set(_states(table, transport, "cpu").values()) == {"available"}
        assert set(_states(table, transport, "gpu").values()) == {"unimplemented"}
    for transport, device in (("MPI", "cpu"), ("NCCL", "gpu"), ("staging", "gpu")):
        expected = {
            operation: "unavailable" if operation in MOVES else "unimplemented" for operation in (*MOVES, "send")
        }
        assert _states(table, transport, device) == {**expected, "barrier": "unimplemented"}
    assert table.find("MPI", "reduce").reason == "mpi4py is not installed"
    assert table.find("NCCL", "reduce", "gpu", "async").reason.startswith("/nowhere/lib.so cannot be opened")
    assert table.find("TCP", "barrier", mode="async").state == "unimplemented"
    assert table.find("TCP", "send", mode="async").state == "available"
    with pytest.raises(KeyError):
        table.find("TCP", "allreduce", "tpu")


def test_the_table_that_is_printed(monkeypatch):
    monkeypatch.setattr(basics, "mpi_built", lambda: False)
    lines = str(hvd.collective_availability()).splitlines()
    assert lines[0].split() == ["device", "operation", "mode", "shared", "memory", "TCP", "MPI", "NCCL", "staging"]
    row = next(line.split() for line in lines if line.startswith("cpu") and " allreduce " in line)
    assert row[:7] == ["cpu", "allreduce", "sync,", "async", "available", "available", "unavailable"]
    assert any(line.endswith(" mpi4py is not installed") and line.startswith("(") for line in lines)


def test_a_gpu(fake_gpu, monkeypatch):
    for name in ("CUDA", "NCCL"):
        monkeypatch.setenv(f"HOROVODLIKE_{name}_LIBRARY", str(fake_gpu))
    table = hvd.collective_availability()
    for transport in ("NCCL", "staging"):
        assert {table.find(transport, operation, "gpu").state for operation in MOVES} == {"available"}
    monkeypatch.setenv("HOROVODLIKE_NCCL_LIBRARY", "/nowhere/lib.so")
    table = hvd.collective_availability()
    assert [table.find(name, "reduce", "gpu").state for name in ("NCCL", "staging")] == ["unavailable", "available"]


def _restarted(settings: Mapping[str, str], hosts: int = 1) -> Availability:
    rank = basics.rank()
    basics.shutdown()
    os.environ.update(settings, HOROVODLIKE_HOSTID=f"host {rank % hosts}")
    basics.init()
    return hvd.collective_availability()


def _of_job(settings: Mapping[str, str], hosts: int, transport: str, operation: str, device: str) -> list[object]:
    table = _restarted(settings, hosts)
    cell = table.find(transport, operation, device)
    return [table.of_job, cell.state, cell.reason]


@pytest.mark.parametrize(
    ("size", "hosts", "transport", "operation", "reason"),
    [
        (2, 1, "shared memory", "allreduce", None),
        (2, 1, "TCP", "allreduce", "all ranks are on one host"),
        (2, 1, "TCP", "send", "all ranks are on one host"),
        (2, 2, "shared memory", "send", "no other rank is on this host"),
        (2, 2, "TCP", "send", None),
        (4, 2, "shared memory", "reduce", None),
        (4, 2, "TCP", "reduce", None),
        (1, 1, "shared memory", "reduce", "the job has one rank"),
    ],
)
def test_hosts(fresh_ranks, size, hosts, transport, operation, reason):
    said = fresh_ranks(size).run(_of_job, {}, hosts, transport, operation, "cpu")
    assert said == [[True, "unavailable" if reason else "available", reason or ""]] * size


def test_mpi_is_not_asked_for(fresh_ranks, monkeypatch):
    (state, reason), _ = [said[1:] for said in fresh_ranks(2).run(_of_job, {}, 1, "MPI", "allreduce", "cpu")]
    assert state == "unavailable"
    assert reason in ("mpi4py is not installed", "HOROVODLIKE_CPU_OPERATIONS=auto chooses another transport")


@pytest.mark.parametrize(
    ("rules", "nccl", "staging"),
    [
        ("auto", ["available", ""], ["available", "where NCCL cannot be used"]),
        ("nccl", ["available", ""], ["available", "where NCCL cannot be used"]),
        (
            "staging",
            ["unavailable", "HOROVODLIKE_GPU_OPERATIONS=staging chooses another transport"],
            ["available", ""],
        ),
        (
            "allreduce:<1M=staging",
            ["available", "1048576 bytes and more"],
            ["available", "0 to 1048575 bytes; others where NCCL cannot be used"],
        ),
    ],
)
def test_gpus_of_a_job(fresh_ranks, fake_gpu, rules, nccl, staging):
    libraries = {f"HOROVODLIKE_{name}_LIBRARY": str(fake_gpu) for name in ("CUDA", "NCCL")}
    settings = {**libraries, "HOROVODLIKE_GPU_OPERATIONS": rules}
    pool = fresh_ranks(2)
    for transport, expected in (("NCCL", nccl), ("staging", staging)):
        assert pool.run(_of_job, settings, 1, transport, "allreduce", "gpu") == [[True, *expected]] * 2


def _refused(variable: str, text: str) -> str:
    rank = basics.rank()
    basics.shutdown()
    os.environ[variable] = text.format(rank)
    try:
        basics.init()
    except (ConfigError, RendezvousError) as error:
        return str(error)
    return "accepted"


def test_ranks_that_disagree(fresh_ranks):
    told = fresh_ranks(2).run(_refused, "HOROVODLIKE_GPU_OPERATIONS", "allreduce:<4{}=staging")
    expected = "HOROVODLIKE_GPU_OPERATIONS differs between the ranks: allreduce:<40=staging on rank 0, allreduce:<41="
    assert all(expected in each for each in told)


def test_a_bad_rule_is_an_error_of_init(fresh_ranks):
    told = fresh_ranks(2).run(_refused, "HOROVODLIKE_CPU_OPERATIONS", "allreduce:<4K=native,allsum=native")
    assert all("'allsum' must be one of allreduce" in each for each in told)


def _sum(rules: str) -> list[object]:
    _restarted({"HOROVODLIKE_CPU_OPERATIONS": rules})
    return [basics.mpi_enabled(), hvd.allreduce(np.arange(3.0), op=hvd.Sum).tolist()]


def test_rules_without_mpi_change_nothing(fresh_ranks):
    assert fresh_ranks(2).run(_sum, "allreduce:<64K=gloo,native") == [[False, [0.0, 2.0, 4.0]]] * 2


def test_rules_that_contradict_other_settings(monkeypatch):
    for rules in ("broadcast=mpi", "allreduce:<64k=mpi"):
        with pytest.raises(ConfigError, match=f"SEAL_DATA=1 cannot be used with HOROVODLIKE_CPU_OPERATIONS={rules}"):
            options.check(Config(seal_data=True, cpu_operations=rules))
    options.check(Config(seal_data=True, cpu_operations="broadcast=native"))
    monkeypatch.setenv("HOROVODLIKE_CPU_OPERATIONS", "broadcast=mpi")
    monkeypatch.setenv("HOROVODLIKE_DRIVER_PORT", "1")
    with pytest.raises(ConfigError, match="broadcast=mpi cannot be used in an elastic job: the ranks of MPI are fixed"):
        basics.init()
