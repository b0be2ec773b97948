"""The grammar of the settings that choose a transport by operation and size."""

from __future__ import annotations

import pytest

from horovodlike import routes
from horovodlike._engine.native import lib
from horovodlike._engine.types import Kind
from horovodlike.config import SETTINGS, load
from horovodlike.errors import ConfigError

CPU = SETTINGS["cpu_operations"].choices


def test_operations_are_those_that_the_engine_can_send_by_several_transports():
    native = {kind.name.lower() for kind in Kind if lib.hvl_implements(lib.HVL_EXTERNAL, kind, lib.HVL_CPU)}
    assert set(routes.OPERATIONS) == native
    assert native == {kind.name.lower() for kind in Kind if lib.hvl_implements(lib.HVL_STAGING, kind, lib.HVL_CUDA)}


def test_equal_values_are_equal_texts():
    assert routes.normalise(" MPI , allreduce :< 64K = Native", CPU) == "mpi,allreduce:<64k=native"
    assert load({"HOROVOD_CPU_OPERATIONS": "Broadcast=mpi, auto "}).cpu_operations == "broadcast=mpi,auto"


def test_the_choices_for_an_operation():
    text = routes.normalise("allreduce:<64K=mpi,mpi,allreduce:<1m=auto,allreduce=gloo,reduce:<7=native", CPU)
    assert routes.of_operation(text, "allreduce") == [(65536, "mpi"), (1 << 20, "auto"), (None, "gloo")]
    assert routes.of_operation(text, "reduce") == [(7, "native"), (None, "mpi")]
    assert routes.of_operation(text, "scatter") == [(None, "mpi")]
    assert routes.of_operation("broadcast=mpi", "scatter") == [(None, "auto")]
    assert routes.of_operation("mpi", "scatter") == [(None, "mpi")]
    assert routes.names("broadcast=mpi") == {"mpi", "auto"}
    assert routes.names(",".join(["mpi", *(f"{operation}=auto" for operation in routes.OPERATIONS)])) == {"auto"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("allreduce=nccl", "in 'allreduce=nccl', 'nccl' must be one of auto, mpi, native, gloo, ccl"),
        ("mpi,", "'' is none of its parts: write NAME, OPERATION=NAME or OPERATION:<SIZE=NAME"),
        ("allreduce=", "in 'allreduce=', '' must be one of auto, mpi"),
        ("=mpi", "in '=mpi', '' must be one of allreduce, allgather,"),
        ("allreduce=mpi=auto", "'allreduce=mpi=auto' is none of its parts"),
        ("allreduce:64K=mpi", "'allreduce:64k=mpi' is none of its parts"),
        ("barrier=mpi", "in 'barrier=mpi', 'barrier' must be one of allreduce"),
        ("send=mpi", "in 'send=mpi', 'send' must be one of allreduce"),
        ("allreduce:<64T=mpi", "the size '64t' must be a number of bytes greater than 0, such as 512, 64K or 1M"),
        ("allreduce:<0=mpi", "the size '0' must be a number of bytes greater than 0"),
        ("allreduce:<=mpi", "the size '' must be a number of bytes greater than 0"),
        ("allreduce:<-1=mpi", "the size '-1' must be a number of bytes greater than 0"),
        ("allreduce:<99999999999G=mpi", "the size '99999999999g' must be a number of bytes greater than 0"),
        ("allreduce:<\u0661=mpi", "must be a number of bytes greater than 0"),
        ("mpi,auto", "'auto' is the second part without an operation: keep one of them"),
        ("allreduce=mpi,allreduce:<4=auto", "'allreduce:<4=auto' has no effect, since a part before it covers these"),
        ("allreduce:<8=mpi,allreduce:<8=auto", "'allreduce:<8=auto' has no effect"),
        ("reduce=mpi,reduce=mpi", "write the smaller size first, and the part without a size last, or leave it out"),
    ],
)
def test_bad_values_name_the_part_and_the_remedy(text, told):
    with pytest.raises(ConfigError) as raised:
        load({"HOROVODLIKE_CPU_OPERATIONS": text})
    assert f"HOROVODLIKE_CPU_OPERATIONS={text!r} cannot be used: " in str(raised.value)
    assert told in str(raised.value)


def test_plain_values_are_what_they_were():
    for value in CPU:
        assert load({"HOROVODLIKE_CPU_OPERATIONS": value.upper()}).cpu_operations == value
    with pytest.raises(ConfigError, match="one of auto, mpi, native, gloo, ccl; or rules, such as allreduce:<64K=mpi"):
        load({"HOROVODLIKE_CPU_OPERATIONS": "tcp"})
    with pytest.raises(ConfigError, match="'mpi' must be one of auto, nccl, staging"):
        load({"HOROVODLIKE_GPU_OPERATIONS": "allreduce=mpi"})
