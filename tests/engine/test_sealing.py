"""Data between hosts that is sealed: the same results, and what is refused."""

import hashlib
import os

import pytest

from horovodlike import basics
from horovodlike._engine import options
from horovodlike.config import Config, load
from horovodlike.errors import ConfigError

SIZES = (1, 1009, 70_001, 300_007)


def _digest_on_two_hosts(seals: str) -> str:
    """Of the results of a job of two hosts, which are hosts in name."""
    import numpy as np
    from support.collectives import enqueue

    from horovodlike._engine import ops
    from horovodlike._engine.ops import Kind, ReduceOp

    rank = basics.rank()
    basics.shutdown()
    os.environ["HOROVODLIKE_HOSTID"] = f"host {rank % 2}"
    os.environ["HOROVODLIKE_SEAL_DATA"] = seals
    basics.init()
    assert basics.cross_size() == 2
    generator = np.random.default_rng(rank)
    arrays = [generator.standard_normal(size).astype(kind) for size in SIZES for kind in ("float32", "float16")]
    handles = [enqueue(Kind.ALLREDUCE, f"sum.{i}", [array], op=ReduceOp.AVERAGE) for i, array in enumerate(arrays)]
    handles += [enqueue(Kind.BROADCAST, "from 1", [copy := arrays[-1].copy()], root_rank=1)]
    ops.wait_all(handles)
    return hashlib.sha256(b"".join(array.tobytes() for array in [*arrays, copy])).hexdigest()


@pytest.mark.parametrize("size", [2, 4])
def test_sealed_data_has_the_same_bits(fresh_ranks, size):
    pool = fresh_ranks(size)
    digests = {digest for seals in ("0", "1") for digest in pool.run(_digest_on_two_hosts, seals)}
    assert len(digests) == 1


def test_what_mpi_moves_cannot_be_sealed(monkeypatch):
    monkeypatch.setenv("HOROVODLIKE_SEAL_DATA", "1")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "mpi")
    with pytest.raises(ConfigError, match="SEAL_DATA=1 cannot be used with HOROVODLIKE_CPU_OPERATIONS=mpi"):
        basics.init()


def _refused_nccl() -> str:
    rank = basics.rank()
    basics.shutdown()
    os.environ["HOROVODLIKE_HOSTID"] = f"host {rank % 2}"
    os.environ["HOROVODLIKE_SEAL_DATA"] = "1"
    os.environ["HOROVODLIKE_GPU_OPERATIONS"] = "nccl"
    try:
        basics.init()
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_what_nccl_moves_between_hosts_cannot_be_sealed(fresh_ranks):
    for told in fresh_ranks(2).run(_refused_nccl):
        assert "HOROVODLIKE_SEAL_DATA=1 cannot be used with HOROVODLIKE_GPU_OPERATIONS=nccl on several hosts" in told


def test_it_is_off_unless_it_is_asked_for():
    assert not load({}).seal_data
    assert load({"HOROVODLIKE_SEAL_DATA": "1"}).seal_data
    options.check(Config(seal_data=True))
