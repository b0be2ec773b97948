"""Arguments that are something else than meant are refused with what was given, before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import horovodlike.torch as hvd
from horovodlike._engine import ops
from horovodlike._engine.ops import counters
from horovodlike.errors import HorovodInternalError, UnsupportedReductionError

ReduceOp = torch.distributed.ReduceOp


def _ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count) * (hvd.rank() + 1)


def _reductions_of_torch() -> None:
    total = sum(range(1, hvd.size() + 1))
    meant = (  # pairs: as keys of a dictionary some would be the same
        (ReduceOp.SUM, total),
        (ReduceOp.AVG, total / hvd.size()),
        (ReduceOp.MAX, hvd.size()),
        (ReduceOp.MIN, 1),
        (ReduceOp(ReduceOp.SUM), total),
        (np.int64(hvd.Sum), total),
    )
    hvd.allreduce_(_ones(), name="same", op=hvd.Average)  # which torch's SUM is equal to, and remembered
    for op, expected in meant:
        assert hvd.allreduce_(_ones(), name="same", op=op)[0] == expected, op
        assert hvd.allreduce(_ones(), name="same", op=op)[0] == expected, op
        assert hvd.grouped_allreduce([_ones()], name="same", op=op)[0][0] == expected, op
        assert hvd.reducescatter(_ones(hvd.size()), name="same", op=op)[0] == expected, op
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=ReduceOp.SUM
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.synchronize()
    assert model.bias.grad is not None and model.bias.grad[0] == hvd.size()


def _refused(match: str, call: object, error: type[Exception] = ValueError) -> None:
    before = counters()
    with pytest.raises(error, match=match):
        call()
    assert counters() == before, f"something was sent before {match!r}"


def _reductions_that_are_none() -> None:
    hvd.allreduce_(_ones(), name="op", op=hvd.Sum)  # is equal to True and 1.0
    for op in (True, False, 1.0, "sum", ReduceOp.BAND, 7, -1, [1]):
        for reduce in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_, hvd.reducescatter):
            _refused(r"'op': op must be one of hvd\.Average.*, got .*", lambda: reduce(_ones(), name="op", op=op))
        for reduce in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_reducescatter):
            _refused(r"op must be one of hvd\.Average", lambda: reduce([_ones()], name="op", op=op))


def _reducescatter_knows_no_adasum() -> None:
    for error in (UnsupportedReductionError, HorovodInternalError, ValueError):
        for reduce in (hvd.reducescatter, hvd.reducescatter_async):
            _refused("got hvd.Adasum", lambda: reduce(_ones(), op=hvd.Adasum), error)
        for reduce in (hvd.grouped_reducescatter, hvd.grouped_reducescatter_async):
            _refused("got hvd.Adasum", lambda: reduce([_ones()], op=hvd.Adasum), error)


def _groups_are_refused_as_a_whole() -> None:
    sparse = torch.ones(4).to_sparse()
    for reduce in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async):
        for other, error, match in (
            (sparse, ValueError, "layout"),
            (torch.ones(4, dtype=torch.int32), ValueError, "floating"),
            ([1.0], TypeError, "list"),
        ):
            _refused(match, lambda: reduce([_ones(), other], name="whole", op=hvd.Adasum), error)
        _refused("list of tensors, got Tensor", lambda: reduce(_ones(), name="whole"), TypeError)


_CALLS = {
    "allreduce": lambda name: hvd.allreduce(_ones(), name=name),
    "allreduce_": lambda name: hvd.allreduce_(_ones(), name=name),
    "grouped_allreduce_async_": lambda name: hvd.grouped_allreduce_async_([_ones()], name=name),
    "allgather": lambda name: hvd.allgather(_ones(), name=name),
    "grouped_allgather": lambda name: hvd.grouped_allgather([_ones()], name=name),
    "broadcast": lambda name: hvd.broadcast(_ones(), 0, name=name),
    "grouped_broadcast_": lambda name: hvd.grouped_broadcast_([_ones()], 0, name=name),
    "alltoall": lambda name: hvd.alltoall(_ones(hvd.size()), name=name),
    "reducescatter": lambda name: hvd.reducescatter(_ones(), name=name),
    "sparse_allreduce_async": lambda name: hvd.sparse_allreduce_async(_ones().to_sparse(), name, hvd.Sum),
}


def _names() -> None:
    for operation, call in _CALLS.items():
        for name in (5, b"bytes", ["list"], 1.5):
            _refused(
                f"{operation.partition('_async')[0].rstrip('_')}.*: name must be a string",
                lambda: call(name),
                TypeError,
            )
        _refused("name is empty", lambda: call(""))
        _refused("NUL", lambda: call("a\0b"))
        _refused("limit", lambda: call("a" * 5000))
        _refused("cannot be encoded", lambda: call("\ud800"))
    long = "ä" * 2000
    assert hvd.allreduce(_ones(), name=long, op=hvd.Max)[0] == hvd.size()


def _splits() -> None:
    rest = [0] * (hvd.size() - 1)
    for bad in (1.0, True, "1", 2**63, 2**70, -(2**70), None):
        _refused("splits must be", lambda: hvd.alltoall(_ones(), [bad, *rest], name="s"))
        _refused("splits must be", lambda: hvd.grouped_alltoall_async([_ones()], [[bad, *rest]], name="s"))
    _refused("splits must be integers", lambda: hvd.alltoall(_ones(), torch.ones(hvd.size())))
    _refused("splits must be a sequence", lambda: hvd.alltoall(_ones(), 5), TypeError)
    _refused("splits must be a list", lambda: hvd.grouped_alltoall([_ones()], 5), TypeError)
    rows, _ = hvd.alltoall(_ones(hvd.size()), np.ones(hvd.size(), np.int32))
    assert rows.tolist() == [rank + 1.0 for rank in range(hvd.size())]


def _handles() -> None:
    handle = hvd.allreduce_async(_ones(), name="handle")
    ops.wait_until_complete(handle)
    for other in ("x", None, float(handle), True, [handle]):
        _refused("handle must be an integer", lambda: hvd.synchronize(other), TypeError)
        _refused("handle must be an integer", lambda: hvd.poll(other), TypeError)
    assert hvd.synchronize(np.int64(handle)) is not None
    assert hvd.synchronize(handle) is None


def _numbers() -> None:
    for bad, error in ((float("nan"), ValueError), (float("inf"), ValueError), ("2", TypeError), (None, TypeError)):
        for which in ("prescale_factor", "postscale_factor"):
            for reduce in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
                _refused(which, lambda: reduce(_ones(), name="n", **{which: bad}), error)
    assert hvd.allreduce(_ones(), op=hvd.Max, postscale_factor=np.float32(2))[0] == 2 * hvd.size()
    for root in (True, 0.0, "0", None):
        _refused("root_rank must be an integer", lambda: hvd.broadcast(_ones(), root), TypeError)
    for process_set in (0, 1, None, "x"):
        _refused("process_set", lambda: hvd.allreduce_(_ones(), name="n", process_set=process_set), TypeError)


def _no_tensors_and_no_compression() -> None:
    for what in ([1.0], np.ones(2), 1.0, None):
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            _refused(
                r"allreduce\.t: expected a torch.Tensor",
                lambda: hvd.allreduce(what, name="t", compression=compression),
                TypeError,
            )
        _refused("expected a torch.Tensor", lambda: hvd.allreduce_(what, name="t"), TypeError)
        _refused("expected a torch.Tensor", lambda: hvd.broadcast_(what, 0), TypeError)
    for no_compression in ("fp16", 16, None, hvd.Compression):
        _refused(
            "compression must be",
            lambda: hvd.allreduce(_ones(), compression=no_compression),
            TypeError,
        )


def _wrappers() -> None:
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, error in (
        ({"op": True}, ValueError),
        ({"op": "sum"}, ValueError),
        ({"gradient_predivide_factor": float("nan")}, ValueError),
        ({"gradient_predivide_factor": 0.0}, ValueError),
        ({"gradient_predivide_factor": "2"}, TypeError),
        ({"backward_passes_per_step": 1.5}, TypeError),
        ({"backward_passes_per_step": True}, TypeError),
        ({"backward_passes_per_step": 0}, ValueError),
        ({"compression": "fp16"}, TypeError),
        ({"process_set": 0}, TypeError),
    ):
        [argument] = options
        _refused(f"{argument}", lambda: hvd.DistributedOptimizer(sgd, **options), error)
    _refused("name", lambda: hvd.DistributedOptimizer(sgd, [(5, p) for p in model.parameters()]), TypeError)
    _refused("torch.optim.Optimizer", lambda: hvd.DistributedOptimizer(model), TypeError)


CASES = (
    _reductions_of_torch,
    _reductions_that_are_none,
    _reducescatter_knows_no_adasum,
    _groups_are_refused_as_a_whole,
    _names,
    _splits,
    _handles,
    _numbers,
    _no_tensors_and_no_compression,
    _wrappers,
)


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("case", CASES)
def test_arguments(ranks, case, size):
    ranks(size).run(case)
