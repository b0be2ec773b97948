"""Operations in place work in the memory of the array that they are given; a new array is the only other memory."""

from __future__ import annotations

import array as array_module

import numpy as np
import pytest

import horovodlike as hvd

MIB = 1 << 20
LARGE = 64 * MIB
# What the engine and Python may take besides: less than a quarter of the array.
SLACK = 16 * MIB


@pytest.fixture
def seen(monkeypatch):
    """The addresses that the engine gets, of a job of one."""
    from horovodlike._engine.ops import Request

    addresses = []
    enqueue, enqueue_inplace = Request.enqueue, Request.enqueue_inplace

    def note(self, inputs, outputs):
        addresses.append((*inputs, *outputs))
        return enqueue(self, inputs, outputs)

    def note_inplace(self, address):
        addresses.append((address,))
        return enqueue_inplace(self, address)

    monkeypatch.setattr(Request, "enqueue", note)
    monkeypatch.setattr(Request, "enqueue_inplace", note_inplace)
    hvd.init()
    yield addresses
    hvd.shutdown()


def address_of(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("make", [np.ones, lambda shape: np.asfortranarray(np.ones(shape))])
def test_the_engine_gets_the_address_of_the_array(seen, make):
    array = make((3, 4))
    for call in (
        lambda: hvd.allreduce_(array),
        lambda: hvd.allreduce_(array, name="named"),
        lambda: hvd.allreduce_(array, name="named"),
        lambda: hvd.synchronize(hvd.allreduce_async_(array)),
        lambda: hvd.grouped_allreduce_([array]),
    ):
        seen.clear()
        call()
        assert {*seen[0]} == {address_of(array)}
    seen.clear()
    result = hvd.allreduce(array, name="new")
    assert seen == [(address_of(array), address_of(result))]
    assert result.strides == array.strides


@pytest.mark.parametrize("memory", [bytearray(8), array_module.array("i", [1, 2]), memoryview(bytearray(8)).cast("i")])
def test_the_engine_gets_the_address_of_a_buffer(seen, memory):
    assert hvd.broadcast_(memory, 0) is memory
    assert {*seen[0]} == {address_of(np.frombuffer(memory, np.uint8))}


def _peak():
    """The largest memory that this process has had, after the present one is made the largest."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10


def _growth(call):
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    before = _peak()
    call()
    return _peak() - before


def _memory():
    array = np.full(LARGE // 8, float(hvd.rank()))
    columns = np.full((1024, LARGE // 8192), 1.0, order="F")
    hvd.allreduce_(np.ones(MIB), name="warm")  # the engine's own memory
    growths = {
        "allreduce_": _growth(lambda: hvd.allreduce_(array, op=hvd.Sum)),
        "column-major": _growth(lambda: hvd.allreduce_(columns, op=hvd.Sum)),
        "broadcast_": _growth(lambda: hvd.broadcast_(array, 0)),
        "async": _growth(lambda: hvd.synchronize(hvd.allreduce_async_(array, op=hvd.Sum))),
    }
    new = _growth(lambda: hvd.allreduce(array, op=hvd.Sum))
    return growths, new


def test_no_memory_for_a_copy(fresh_ranks):
    for growths, new in fresh_ranks(2).run(_memory):
        assert {name: growth for name, growth in growths.items() if growth > SLACK} == {}
        assert LARGE - SLACK < new < LARGE + SLACK


def _is_kept():
    """The memory of an operation in flight is kept, whatever becomes of the array."""
    array = np.full(300_000, hvd.rank() + 1.0)
    handle = hvd.allreduce_async(array, op=hvd.Sum)
    with pytest.raises(ValueError, match="resize"):
        array.resize(1)
    del array
    buffer = bytearray(4)
    in_place = hvd.allreduce_async_(buffer, op=hvd.Max)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    np.full(300_000, -1.0)
    assert set(hvd.synchronize(handle)) == {sum(range(1, hvd.size() + 1))}
    assert hvd.synchronize(in_place) is buffer
    buffer.extend(b"more")


def test_memory_in_flight_is_kept(ranks):
    ranks(2).run(_is_kept)
