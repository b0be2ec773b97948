"""Arguments that cannot be used: an error that names the operation and the remedy, before any rank waits for it."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import scipy.sparse

import horovodlike as hvd

F32 = np.float32
NO_ARRAYS = [None, 3j, "text", [1.0, 2.0], {"a": 1}, object(), np.float32]
NOT_SENT = [
    np.array([None]),
    np.array(["text"]),
    np.zeros(2, np.complex64),
    np.zeros(2, "M8[s]"),
    np.zeros(2, np.uint32),
    np.zeros(2, np.longdouble),
    np.zeros(2, [("a", "i4")]),
]
OTHER_ORDER = np.zeros(2, np.dtype(F32).newbyteorder())


def _read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.fixture(autouse=True)
def job_of_one():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("given", NO_ARRAYS, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter])
def test_what_is_no_array(call, given):
    with pytest.raises(TypeError, match=r"\w+ 'bad': expected a NumPy array, .* got \w+; numpy.asarray"):
        call(given, name="bad")


@pytest.mark.parametrize("given", NOT_SENT, ids=lambda given: given.dtype.name)
def test_elements_that_cannot_be_sent(given):
    text = f"broadcast 'bad': arrays of dtype {given.dtype} cannot be sent; known are uint8"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        hvd.broadcast(given, 0, name="bad")


def test_records_and_reports_have_the_name_that_was_given():
    hvd.allreduce(np.ones(2), name="mine")
    hvd.broadcast_object(3, 0, name="mine")
    assert [each["name"] for each in hvd.flight_recorder()] == ["allreduce.mine", "object.mine"]


REDUCING = ("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "reducescatter", "reducescatter_async")
REDUCING_TO_ROOT = ("reduce", "reduce_", "reduce_async", "reduce_async_")


def _integers_and_bools():
    """An average truncates integers, so the caller must ask for it; floats are averaged by default."""
    text = "the average of int64 would be truncated: give op=hvd.Sum, or op=hvd.Average if"
    for given in (np.arange(3) + hvd.rank(), np.arange(0)):
        calls = {name: functools.partial(getattr(hvd, name), given) for name in REDUCING}
        calls |= {name: functools.partial(getattr(hvd, name), given, 0) for name in REDUCING_TO_ROOT}
        group = [np.ones(2), given]
        calls |= {f"grouped_{name}": functools.partial(getattr(hvd, f"grouped_{name}"), group) for name in REDUCING}
        for name, call in calls.items():
            with pytest.raises(ValueError, match=f"^{name.partition('_async')[0].rstrip('_')}: {text}"):
                call()
        with hvd.Hierarchy(0) as hierarchy, pytest.raises(ValueError, match=f"^Hierarchy.allreduce: {text}"):
            hierarchy.allreduce(given)
    for number in (1, np.uint8(1)):
        with pytest.raises(ValueError, match="would be truncated: give op=hvd.Sum, or op=hvd.Average"):
            hvd.allreduce(number)
    for truth in (True, np.array([True])):
        with pytest.raises(ValueError, match=r"bool has no average: give op=hvd.Max \(or\) or op=hvd.Min \(and\)"):
            hvd.allreduce(truth)
    total = hvd.size() * (hvd.size() - 1) // 2
    assert hvd.allreduce(hvd.rank(), op=hvd.Sum) == total
    assert hvd.allreduce(hvd.rank(), op=hvd.Average) == total // hvd.size()
    assert hvd.allreduce(float(hvd.rank())) == total / hvd.size()


@pytest.mark.parametrize("size", [2, 3])
def test_integers_and_bools_are_not_averaged_unasked(ranks, size):
    ranks(size).run(_integers_and_bools)


def test_splits_use_all_rows(ranks):
    ranks(2).run(_splits_that_leave_rows)


def _splits_that_leave_rows():
    text = "the splits add up to 3, and the array has 4 rows: the others would not be sent; slice the array"
    for rows in (np.ones(4), np.ones((4, 0))):
        with pytest.raises(ValueError, match=f"^alltoall 'few': {text}"):
            hvd.alltoall(rows, [1, 2], "few")
        with pytest.raises(ValueError, match=f"^grouped_alltoall: {text}"):
            hvd.grouped_alltoall([np.ones(3), rows], [np.array([1, 2])] * 2)
    received, _ = hvd.alltoall(np.arange(4.0)[:3], [1, 2])
    assert received.tolist() == ([0, 0] if hvd.rank() == 0 else [1, 2, 1, 2])


@pytest.mark.parametrize("kind", ["csr_array", "coo_matrix"])
def test_sparse_matrices_of_scipy(kind):
    given = getattr(scipy.sparse, kind)(np.eye(2))
    for call in (hvd.allreduce, hvd.allgather):
        with pytest.raises(
            TypeError, match=rf"'bad': expected a NumPy array, .* got {kind}; its .toarray\(\) makes an"
        ):
            call(given, name="bad")
    assert hvd.allreduce(given.toarray(), op=hvd.Sum).tolist() == [[1, 0], [0, 1]]


def test_another_byte_order():
    with pytest.raises(ValueError, match="'bad': the elements are not in the byte order .*newbyteorder"):
        hvd.allreduce(OTHER_ORDER, name="bad")
    assert hvd.allreduce(OTHER_ORDER.astype(OTHER_ORDER.dtype.newbyteorder("=")), name="bad").dtype == F32


def test_memory_that_cannot_be_overwritten():
    for memory in (_read_only(), b"bytes", np.float64(1), memoryview(b"bytes")):
        with pytest.raises(ValueError, match="read-only cannot be overwritten"):
            hvd.allreduce_(memory, op=hvd.Sum)
    assert hvd.allreduce(_read_only()).flags.writeable


def test_elements_that_share_memory():
    whole = np.zeros(10)
    overlapping = np.lib.stride_tricks.as_strided(whole, (4, 4), (8, 16))
    for memory in (np.broadcast_to(whole, (3, 10)), overlapping):
        assert np.array_equal(hvd.allreduce(memory), memory)
    with pytest.raises(ValueError, match="elements of an array share memory"):
        hvd.allreduce_(overlapping)
    for group in ([whole, whole], [whole[:6], whole[5:]], [whole[::2], np.ones(2), whole[4:7]]):
        with pytest.raises(ValueError, match="two of the arrays share memory"):
            hvd.grouped_allreduce_(group)
        assert len(hvd.grouped_allreduce(group)) == len(group)
    for group in ([whole[::2], whole[1::2]], [whole[:5], whole[5:]], [whole[:0], whole], [whole, whole[10:]]):
        assert len(hvd.grouped_allreduce_(group)) == len(group)
    square = np.zeros((4, 4))
    hvd.grouped_allreduce_([square[:, :2], square[:, 2:]])
    hvd.allreduce_(square[1:3, ::-1])


def test_a_mask_would_be_lost():
    with pytest.raises(TypeError, match="mask of a MaskedArray"):
        hvd.allreduce(np.ma.array([1.0, 2.0], mask=[True, False]))


def test_scalars_have_no_rows():
    scalar = np.array(1.0)
    for call in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(ValueError, match="a scalar has no rows"):
            call(scalar)


def test_groups():
    for wrong in (np.zeros((2, 2)), 5, "ab", b"ab"):
        with pytest.raises(TypeError, match="expected a list of arrays"):
            hvd.grouped_allreduce(wrong)
    with pytest.raises(ValueError, match="list of arrays is empty"):
        hvd.grouped_broadcast([], 0)
    with pytest.raises(TypeError, match="an entry for each array"):
        hvd.grouped_alltoall([np.zeros(1)], 3)
    with pytest.raises(ValueError, match="splits for 2 arrays"):
        hvd.grouped_alltoall([np.zeros(1)], [None, None])


def test_other_arguments():
    ones = np.ones(3)
    for error, text, call in (
        (ValueError, "op must be one of", lambda: hvd.allreduce(ones, op=99)),
        (ValueError, "got hvd.Adasum", lambda: hvd.reducescatter(ones, op=hvd.Adasum)),
        (TypeError, "prescale_factor must be a number", lambda: hvd.allreduce(ones, prescale_factor="2")),
        (ValueError, "postscale_factor must be finite", lambda: hvd.allreduce(ones, postscale_factor=float("inf"))),
        (TypeError, "name must be a string", lambda: hvd.allreduce(ones, name=3)),
        (TypeError, "name must be a string", lambda: hvd.allreduce_(ones, name=["unhashable"])),
        (TypeError, "root_rank must be an integer", lambda: hvd.broadcast(ones, 0.5)),
        (ValueError, "not one of|99", lambda: hvd.broadcast(ones, 99)),
        (TypeError, "process_set must be a ProcessSet", lambda: hvd.allgather(ones, process_set=0)),
        (ValueError, "not registered", lambda: hvd.allgather(ones, process_set=hvd.ProcessSet([0]))),
        (ValueError, "2 splits for 1 ranks", lambda: hvd.alltoall(ones, [1, 2])),
        (ValueError, "splits must be integers", lambda: hvd.alltoall(ones, np.ones(1))),
        (TypeError, "splits must be a sequence", lambda: hvd.alltoall(ones, 3)),
        (TypeError, "handle must be an integer", lambda: hvd.synchronize("handle")),
        (ValueError, "handle 123 does not belong", lambda: hvd.synchronize(123)),
        (ValueError, "handle 123 does not belong", lambda: hvd.poll(123)),
    ):
        with pytest.raises(error, match=text):
            call()


def test_what_was_not_checked_is_not_taken_for_what_was():
    ones = np.ones(3)
    hvd.allreduce_(ones, name="n", op=hvd.Sum, prescale_factor=1.0)
    for wrong in (
        {"op": True},
        {"op": 1.0},
        {"op": hvd.Sum, "prescale_factor": "1"},
        {"op": hvd.Sum, "process_set": 0},
    ):
        with pytest.raises((TypeError, ValueError)):
            hvd.allreduce_(ones, name="n", **wrong)


def test_a_handle_is_synchronized_once():
    handle = hvd.allreduce_async(np.ones(2))
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="synchronized once"):
        hvd.synchronize(handle)
    lost = hvd.allreduce_async(np.ones(2))
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.ShutDownError, match="before the last init"):
        hvd.synchronize(lost)


def test_without_init():
    hvd.shutdown()
    for call in (lambda: hvd.allreduce(np.ones(1)), lambda: hvd.barrier(), lambda: hvd.rank()):
        with pytest.raises(hvd.NotInitializedError):
            call()


def _disagree():
    rank = hvd.rank()
    for number, (text, call) in enumerate(
        (
            ("Mismatched shapes", lambda name: hvd.allreduce(np.zeros(rank + 1), name)),
            ("Mismatched data types", lambda name: hvd.allreduce(np.zeros(2, ["f4", "f8"][rank]), name)),
            (
                "Mismatched memory formats .*column-major",
                lambda name: hvd.allreduce(np.zeros((2, 3), order="CF"[rank]), name),
            ),
            (
                "Mismatched reduction operations",
                lambda name: hvd.allreduce_(np.zeros(2), name, [hvd.Sum, hvd.Min][rank]),
            ),
            ("Mismatched root ranks", lambda name: hvd.broadcast(np.zeros(2), rank, name)),
            ("other than the first", lambda name: hvd.allgather(np.zeros((2, rank + 1)), name)),
        )
    ):
        with pytest.raises(hvd.MismatchError, match=text):
            call(f"case.{number}")
    assert hvd.allreduce(np.zeros(2), "case.0").tolist() == [0, 0]


def _refused_on_one_rank():
    """A call that one rank refuses is not counted: the next unnamed ones have the same name on all ranks."""
    for refused in (
        lambda: hvd.allreduce(np.array(["text"])),
        lambda: hvd.allreduce(np.ones(1), op=99),
        lambda: hvd.broadcast(np.ones(1), 99),
        lambda: hvd.alltoall(np.ones(4), [9, 9]),
        lambda: hvd.allreduce(np.array([True])),
    ):
        if hvd.rank() == 1:
            with pytest.raises(ValueError):
                refused()
        assert hvd.allreduce(np.array(hvd.rank()), op=hvd.Max) == 1


def test_ranks_that_disagree(ranks):
    ranks(2).run(_disagree)
    ranks(2).run(_refused_on_one_rank)
