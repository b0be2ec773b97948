"""The fast path of allreduces in place: which tensors take it, and how it ends, by `native_calls.c`."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

import horovodlike.torch as hvd
from horovodlike._engine.ops import is_known, wait_for_given_up
from horovodlike.errors import HorovodInternalError
from horovodlike.torch._ops import fast_path, handles, loan


class _Tensor(torch.Tensor):
    """Its methods may be anything."""


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _in_a_mode(tensor: torch.Tensor) -> int:
    with _Mode():
        return hvd.allreduce_async_(tensor, name="x", op=hvd.Sum)


def _shrunk() -> torch.Tensor:
    tensor = torch.ones(4, 2)
    tensor.untyped_storage().resize_(31)
    return tensor


# Of tensors that are not what a row-major float32 of (4, 2) on the CPU is; the last has no values to reduce.
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "dtype": lambda: torch.ones(4, 2, dtype=torch.float64),
    "shape": lambda: torch.ones(2, 4),
    "dimensions": lambda: torch.ones(8),
    "transposed": lambda: torch.ones(2, 4).t(),
    "strided": lambda: torch.ones(4, 4)[:, ::2],
    "negated": lambda: torch._neg_view(torch.full((4, 2), -1.0)),
    "subclass": lambda: torch.ones(4, 2).as_subclass(_Tensor),
    "shrunk": _shrunk,
}


def _reduce(begin: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> tuple[bool, torch.Tensor]:
    handle = begin(tensor)
    is_copied = handle in fast_path.in_flight
    assert hvd.synchronize(handle) is tensor
    assert not fast_path.in_flight
    return is_copied, tensor


def _plain(tensor: torch.Tensor) -> int:
    return hvd.allreduce_async_(tensor, name="x", op=hvd.Sum)


def _is_copied(other: str) -> None:
    sum_of_ranks = float(hvd.size())
    for form in (torch.ones(4, 2), torch.ones(4, 2), torch.nn.Parameter(torch.ones(4, 2)), torch.ones(8, 2)[3:7]):
        is_first = "x" not in handles._last
        is_copied, result = _reduce(_plain, form)
        assert is_copied != is_first
        assert bool((result == sum_of_ranks).all())
    is_copied, result = _reduce(_in_a_mode, torch.ones(4, 2))
    assert not is_copied
    if other == "shrunk":
        with pytest.raises(ValueError, match="was its storage resized"):
            _plain(OTHERS[other]())
    else:
        is_copied, result = _reduce(_plain, OTHERS[other]())
        assert not is_copied
        assert bool((result == sum_of_ranks).all())


def _waits(other: str) -> None:
    sum_of_ranks = float(hvd.size())
    enqueue = handles.start_again_in_place

    def taken(tensor: torch.Tensor) -> int:
        return enqueue("x", hvd.Sum, (None, 1.0, 1.0, 0), tensor, True)

    for _ in range(2):
        tensor = torch.ones(4, 2)
        assert hvd.allreduce_(tensor, name="x", op=hvd.Sum) is tensor
        assert bool((tensor == sum_of_ranks).all())
    for form in (torch.ones(4, 2), torch.nn.Parameter(torch.ones(4, 2)), torch.ones(8, 2)[3:7]):
        handle = taken(form)
        assert handle > 0
        assert hvd.synchronize(handle) is form
        assert bool((form == sum_of_ranks).all())
    assert taken(OTHERS[other]()) == 0


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_like_the_last_one_is_waited_for_in_c(fresh_ranks, other):
    fresh_ranks(2).run(_waits, other)


def _functions_of(thread: threading.Thread) -> list[str]:
    frames = traceback.walk_stack(sys._current_frames()[thread.ident])
    return [frame.f_code.co_name for frame, _ in frames]


def _keeps_the_memory() -> None:
    for _ in range(2):
        hvd.allreduce_(torch.ones(3), name="x", op=hvd.Sum)
    if hvd.rank() == 0:
        tensor = torch.ones(3)
        storage = weakref.ref(tensor.untyped_storage())
        waits = threading.Thread(target=hvd.allreduce_, args=(tensor,), kwargs={"name": "x", "op": hvd.Sum})
        waits.start()
        while "wait_until_complete" not in _functions_of(waits):  # the wait in C has ended without a result
            pass
        tensor.set_(torch.zeros(3))
        assert storage() is not None
    hvd.barrier()
    if hvd.rank() == 0:
        waits.join()
        assert storage() is None
        assert tensor.tolist() == [0.0] * 3
    else:
        assert hvd.allreduce_(torch.ones(3), name="x", op=hvd.Sum).tolist() == [2.0] * 3


def test_memory_is_kept_until_a_long_wait_ends(fresh_ranks):
    fresh_ranks(2).run(_keeps_the_memory)


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_like_the_last_one_is_copied(fresh_ranks, other):
    fresh_ranks(2).run(_is_copied, other)


def _make_known() -> None:
    """Reduce twice, so that the next call with this name is copied."""
    for _ in range(2):
        _reduce(_plain, torch.ones(3))


def _fails_before_it_is_waited_for(how: str) -> None:
    _make_known()
    if hvd.rank() == 0:
        handle = _plain(torch.ones(3))
        assert handle in fast_path.in_flight
    elif how == "mismatch":
        handle = hvd.allreduce_async_(torch.ones(4), name="x", op=hvd.Sum)
    if how == "shutdown":
        hvd.barrier()  # rank 0 has begun
        if hvd.rank() == 1:
            hvd.shutdown()
            return
    while not hvd.poll(handle):
        pass
    with pytest.raises(HorovodInternalError, match="allreduce.x" if how == "mismatch" else "shut"):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None


@pytest.mark.parametrize("how", ["mismatch", "shutdown"])
def test_an_early_failure_is_raised_by_synchronize(fresh_ranks, how):
    fresh_ranks(2).run(_fails_before_it_is_waited_for, how)


class _Interruption(BaseException):
    """As KeyboardInterrupt."""


def _is_interrupted(waits: bool) -> None:
    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce_(tensor, name="x", op=hvd.Sum) if waits else hvd.synchronize(_plain(tensor))

    for _ in range(2):
        reduce(torch.ones(3))
    last = handles._last["x"]
    path = last.in_place if waits else last.copied
    assert path is not None
    enqueue, enqueued = path.enqueue, []

    def interrupted(tensor: torch.Tensor, kept: list[int]) -> int:
        enqueued.append(enqueue(tensor, kept))
        hvd.allreduce(torch.ones(1), name="of the handler")
        raise _Interruption

    path.enqueue = interrupted
    with pytest.raises(_Interruption):
        reduce(torch.ones(3))
    path.enqueue = enqueue
    assert not fast_path.in_flight
    assert reduce(torch.ones(3)).tolist() == [float(hvd.size())] * 3  # after the request before it is complete
    wait_for_given_up(enqueued[0])
    assert not is_known(enqueued[0])


@pytest.mark.parametrize("waits", [False, True])
def test_a_handler_that_makes_a_call_and_raises_behind_the_enqueue_leaves_the_name_free(fresh_ranks, waits):
    fresh_ranks(2).run(_is_interrupted, waits)


def test_a_result_goes_to_the_memory_that_was_checked(monkeypatch):
    tensor = torch.zeros(3)
    checked = tensor.detach()

    def exchange(_: torch.Tensor) -> bool:  # as another thread may, once the check is over
        tensor.set_(torch.zeros(3))
        return True

    monkeypatch.setattr(loan, "fits_its_storage", exchange)
    loan.put(torch.ones(3), tensor, "x")
    assert checked.tolist() == [1.0] * 3
    assert tensor.tolist() == [0.0] * 3
