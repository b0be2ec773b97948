"""Signal handlers that raise at any point of a call: the memory in flight is kept, and the next call works.

For the memory one rank is enough: for the package its requests do not end, whatever the engine says.
"""

from __future__ import annotations

import gc
import signal
import weakref

import numpy as np
import pytest
from support.collectives import allreduce
from support.interruptions import EndlessEngine, Interrupter, Interruption

import horovodlike as hvd

CALLS = {
    "allreduce": lambda array: hvd.allreduce(array, name="x"),
    "allreduce_": lambda array: hvd.allreduce_(array, name="x"),
    "allreduce_async_": lambda array: hvd.synchronize(hvd.allreduce_async_(array)),
    "grouped_allreduce": lambda array: hvd.grouped_allreduce([array, array]),
    "broadcast_": lambda array: hvd.broadcast_(array, 0),
    "allgather": hvd.allgather,
    "alltoall": hvd.alltoall,
    "send": lambda array: hvd.send(array, 0),
}


def _interrupt_everywhere(what):
    """Return at how many points a call was interrupted, and after which of these memory was not kept."""
    from horovodlike._engine import messages, ops, requests
    from horovodlike.arrays import operations

    call = CALLS[what]
    for _ in range(3):
        call(np.ones(5))
    gc.freeze()  # what is there need not be looked through each time
    lib, count, failures, is_over = ops.lib, 0, [], False
    while not is_over:
        ops.lib = requests.lib = messages.lib = engine = EndlessEngine(lib)
        array = np.ones(5)
        is_kept = weakref.ref(array)
        interrupter = Interrupter(count)
        try:
            with interrupter:
                call(array)
        except Interruption:
            pass
        is_over = interrupter.left >= 0
        del array
        gc.collect()
        in_flight = {*engine.handles} - {0}
        if in_flight - {*operations._in_flight, *requests._given_up} or (
            in_flight and what not in ("allreduce", "grouped_allreduce") and is_kept() is None
        ):
            failures.append(f"point {count}: {interrupter.where}")
        ops.lib = requests.lib = messages.lib = lib
        for handle in [*operations._in_flight, *requests._given_up]:
            lib.hvl_wait(handle, 10.0, ops.ffi.NULL, ops.ffi.NULL)
        operations._in_flight.clear()
        requests._given_up.clear()
        count += 1
    return count, failures


@pytest.mark.parametrize("what", CALLS)
def test_memory_is_kept_wherever_a_handler_raises(what, fresh_ranks):
    ((count, failures),) = fresh_ranks(1).run(_interrupt_everywhere, what)
    assert count > 10
    assert not failures


def _make_twice():
    """Rank 0 is interrupted in each call and makes the next one, while the others come to the first."""
    from horovodlike._engine import ops, requests

    rank, armed = hvd.rank(), []

    def interrupt():
        if armed:
            armed.pop()
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    ops.before_waiting(interrupt)
    try:
        for name in ("x", None):  # an unnamed call that was interrupted is counted
            for in_place in (False, True):
                call = hvd.allreduce_ if in_place else hvd.allreduce
                if rank == 0:
                    armed.append(True)
                    with pytest.raises(KeyboardInterrupt):
                        call(np.full(3, 1.0), name=name, op=hvd.Sum)
                allreduce("was interrupted", np.ones(1))
                for _ in range(1 if rank == 0 else 2):
                    result = call(np.full(3, rank + 1.0), name=name, op=hvd.Sum)
                assert result.tolist() == [3.0] * 3
    finally:
        requests._before_waiting.remove(interrupt)


def test_what_was_interrupted_counts_as_made(ranks):
    ranks(2).run(_make_twice)
