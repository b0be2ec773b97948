"""Requests on a GPU where there is no engine, and the engine's call for memory of a GPU."""

import numpy as np
import pytest

from horovodlike._engine import ops
from horovodlike._engine.native import ffi
from horovodlike._engine.ops import Allocation, Device, DType, GpuStream, Kind, Request, RequestList
from horovodlike.errors import NotInitializedError

NO_HANDLE = 0


def call(allocation, shape=(3, 2)):
    output = ffi.new("hvl_output *", {"shape": shape, "ndim": len(shape), "dtype": DType["float32"]})
    output.num_bytes = 4 * int(np.prod(shape))
    return allocation.callbacks.allocate(allocation.callbacks.context, 1, output)


def test_what_is_asked_and_answered():
    asked = []

    def allocate(*arguments):
        asked.append(arguments)
        return 4096

    allocation = Allocation(allocate)
    assert int(ffi.cast("uintptr_t", call(allocation))) == 4096
    assert asked == [(1, (3, 2), DType["float32"])]


def test_empty_outputs_have_an_address_too():
    assert call(Allocation(lambda *_: 0), (0, 2)) != ffi.NULL


def test_a_failure_is_no_memory():
    def allocate(*_):
        raise RuntimeError("no more")

    allocation = Allocation(allocate)
    assert call(allocation) == ffi.NULL
    assert str(allocation.failure) == "no more"


def test_a_signal_handler_interrupts_the_wait_and_not_the_collective():
    interruptions = [KeyboardInterrupt("by hand")]

    def allocate(*_):
        if interruptions:
            raise interruptions.pop()
        return 4096

    allocation = Allocation(allocate)
    assert int(ffi.cast("uintptr_t", call(allocation))) == 4096
    assert allocation.failure is None
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        ops.wait(NO_HANDLE)
    with pytest.raises(KeyError):
        ops.wait(NO_HANDLE)


def test_without_init():
    request = Request(Kind.ALLREDUCE, "x", [(DType["float32"], (2,))], device=Device.CUDA)
    handles = []
    for enqueue in (
        lambda: request.enqueue_on_stream([64], [64], GpuStream(0, 0)),
        lambda: RequestList([request]).enqueue_inplace_on_stream([64], handles, GpuStream(0, 0)),
    ):
        with pytest.raises(NotInitializedError, match=r"^horovodlike has not been initialized; use hvd.init\(\).$"):
            enqueue()
    assert not handles


def test_wrong_numbers_of_tensors():
    request = Request(Kind.ALLREDUCE, "x", [(DType["float32"], (2,))], device=Device.CUDA)
    with pytest.raises(ValueError, match="'x' has 1 tensors, not 2"):
        request.enqueue_on_stream([64, 128], [64, 128], GpuStream(0, 0))
    with pytest.raises(ValueError, match="1 requests need as many addresses, not 0"):
        RequestList([request]).enqueue_inplace_on_stream([], [], GpuStream(0, 0))
