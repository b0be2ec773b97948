"""Changes of tensors whose memory the engine has: none reaches the engine, and none makes the ranks differ."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import horovodlike.torch as hvd
from horovodlike.errors import HorovodInternalError
from horovodlike.torch._ops import loan

SIZES = (3, 1 << 16)  # the second is too large for malloc's bins: what is freed is gone


def _shrink_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _set_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def _export(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] = -1.0


# By what they are: what is done, and whether there is still a place for the result.
CHANGES: dict[str, tuple[Callable[[torch.Tensor], object], bool]] = {
    "nothing": (lambda t: None, True),
    "set_": (lambda t: t.set_(torch.zeros_like(t)), True),
    "data": (_set_data, True),
    "written": (lambda t: t.zero_(), True),
    "written through data": (lambda t: t.data.zero_(), True),
    "written through a view": (lambda t: t[1:].zero_(), True),
    "written by NumPy": (_export, True),
    "shared": (lambda t: t.share_memory_(), True),
    "swapped": (lambda t: torch.utils.swap_tensors(t, torch.zeros_like(t)), True),
    "made larger": (lambda t: t.resize_(4 * t.numel()), False),
    "no storage": (_shrink_storage, False),
}


def _in_place(change: str, numel: int) -> None:
    alter, has_place = CHANGES[change]
    of_a_group = lambda t, **how: hvd.grouped_allreduce_async_([t, torch.ones(3)], **how)  # noqa: E731  # used once
    for begin in (hvd.allreduce_async_, hvd.allreduce_async_, of_a_group):  # a name is known the second time
        tensor = torch.full((numel,), hvd.rank() + 1.0)
        handle = begin(tensor, name="in place", op=hvd.Sum)
        alter(tensor)
        gc.collect()
        rubbish = [torch.full((numel,), -7.0) for _ in range(8)]  # where the memory would be that was let go of
        if has_place:
            result = hvd.synchronize(handle)
            assert (result[0] if isinstance(result, tuple) else result) is tensor
            assert torch.equal(tensor, torch.full((numel,), hvd.size() * (hvd.size() + 1) / 2))
        else:
            with pytest.raises(ValueError, match=r"in place: its tensor .* was resized before its result was there"):
                hvd.synchronize(handle)
            if change == "made larger":
                tensor.zero_()  # torch can write to it again
        assert all(torch.equal(one, torch.full((numel,), -7.0)) for one in rubbish)


def _to_new(change: str, numel: int) -> None:
    """The tensor as it was handed over is sent."""
    alter, _ = CHANGES[change]
    rank, size = hvd.rank(), hvd.size()
    everyone = torch.arange(1.0, size + 1)
    rows = numel * size
    cases = [
        (hvd.allreduce_async, {"op": hvd.Sum}, torch.full((rows,), size * (size + 1) / 2)),
        (hvd.allgather_async, {}, everyone.repeat_interleave(rows)),
        (hvd.broadcast_async, {"root_rank": size - 1}, torch.full((rows,), float(size))),
        (hvd.reducescatter_async, {"op": hvd.Sum}, torch.full((numel,), size * (size + 1) / 2)),
        (hvd.alltoall_async, {}, everyone.repeat_interleave(numel)),
    ]
    for begin, options, expected in cases:
        tensor = torch.full((rows,), rank + 1.0)
        handle = begin(tensor, name="to new", **options)
        alter(tensor)
        rubbish = [torch.full((rows,), -7.0) for _ in range(4)]
        result = hvd.synchronize(handle)
        assert torch.equal(result[0] if isinstance(result, tuple) else result, expected), begin.__name__
        del rubbish


def _views_of_one_storage() -> None:
    """Several operations on parts of one storage share it: no part is copied for another one's sake."""
    flat = torch.full((4, 1 << 12), hvd.rank() + 1.0)
    address = flat.data_ptr()
    handles = [hvd.allreduce_async_(row, name=f"row.{n}", op=hvd.Sum) for n, row in enumerate(flat)]
    for handle in handles:
        hvd.synchronize(handle)
    assert flat.data_ptr() == address
    assert torch.equal(flat, torch.full_like(flat, hvd.size() * (hvd.size() + 1) / 2))


def _many_small() -> None:
    """Results are put in place together, also of those that are waited for in another order, or not at all."""
    expected = hvd.size() * (hvd.size() + 1) / 2
    for turn in range(6):
        tensors = [torch.full((3,), hvd.rank() + 1.0) for _ in range(40)]
        flat = torch.full((5,), -1.0)  # the last of them begins within a storage
        tensors.append(flat[2:].copy_(tensors[0]))
        handles = [hvd.allreduce_async_(t, name=f"small.{n}", op=hvd.Sum) for n, t in enumerate(tensors)]
        tensors[7].set_(torch.zeros(3))
        del tensors[9]
        order = handles[::-1] if turn % 2 else handles[20:] + handles[:20]
        with torch.no_grad():
            results = {handle: hvd.synchronize(handle) for handle in order}
        assert all(torch.equal(result, torch.full((3,), expected)) for result in results.values())
        assert flat.tolist() == [-1.0, -1.0, expected, expected, expected]
        assert hvd.synchronize(handles[0]) is None
        with pytest.raises(ValueError, match="does not belong to an operation in flight"):
            hvd.poll(handles[0])


def _small_and_saved() -> None:
    """Autograd refuses a tensor that it has saved and that a result has been written over."""
    for _ in range(3):
        saved, others = torch.ones(3, requires_grad=True), [torch.ones(3) for _ in range(3)]
        work = saved.detach().clone().requires_grad_()
        inner = work * 2
        product = inner * inner
        with torch.no_grad():
            handles = [
                hvd.allreduce_async_(t, name=f"saved.{n}", op=hvd.Sum) for n, t in enumerate([*others, inner.detach()])
            ]
            for handle in handles:
                while not hvd.poll(handle):
                    pass
                hvd.synchronize(handle)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def _small_over_an_end() -> None:
    """An operation in flight when the job ends is lost, and waiting for it says so."""
    for _ in range(2):
        hvd.allreduce_(torch.ones(3), name="ended")
    handle = hvd.allreduce_async_(torch.ones(3), name="ended")
    part = torch.ones(1 << 14)[4:]
    hvd.allreduce_async_(part, name="emptied")
    part.untyped_storage().resize_(0)
    hvd.barrier()  # all ranks have called
    hvd.shutdown()
    hvd.init()
    with pytest.raises(HorovodInternalError, match="is of the job before"):
        hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(3), name="ended", op=hvd.Sum).tolist() == [hvd.size()] * 3


def _memory_of_numpy() -> None:
    """It is reduced where it lies, and the array sees the result."""
    array = np.full(1 << 12, hvd.rank() + 1.0, dtype=np.float32)
    handle = hvd.allreduce_async_(torch.from_numpy(array), op=hvd.Sum)
    hvd.synchronize(handle)
    assert (array == hvd.size() * (hvd.size() + 1) / 2).all()


def _without_clones() -> None:
    """As with a torch that cannot clone lazily, or memory of another allocator: it is copied."""
    clone, loan._lazy_clone = loan._lazy_clone, None
    try:
        _in_place("set_", 5)
        _to_new("written", 5)
    finally:
        loan._lazy_clone = clone


def _no_memory() -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    for begin in (hvd.allreduce_, hvd.allreduce_async_, hvd.allgather, hvd.broadcast_async):
        root = {"root_rank": 0} if begin is hvd.broadcast_async else {}
        with pytest.raises(ValueError, match=r"'\w+\.gone' has no memory for its 32 bytes"):
            begin(tensor, name="gone", **root)
    flat = torch.ones(8)
    part = flat[4:]
    for begin in (hvd.allreduce_, hvd.allreduce_async_):  # whose calls are remembered by their names
        for _ in range(2):
            hvd.synchronize(begin(part, name="gone")) if begin is hvd.allreduce_async_ else begin(part, name="gone")
    for num_bytes in (20, 0):
        part.untyped_storage().resize_(num_bytes)
        for begin in (hvd.allreduce_, hvd.allreduce_async_, hvd.allreduce_async, hvd.allgather_async):
            with pytest.raises(ValueError, match=r"'\w+\.gone' has no memory for its 16 bytes"):
                begin(part, name="gone")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for storage_is_small in (False, False, True):
        model(torch.ones(3)).sum().backward()
        if storage_is_small:
            model.bias.grad.untyped_storage().resize_(4)
            with pytest.raises(ValueError, match=r"'allreduce.bias' has no memory for its 12 bytes"):
                optimizer.step()
        else:
            optimizer.step()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


def _frames(thread: threading.Thread) -> traceback.StackSummary:
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.StackSummary.extract(traceback.walk_stack(frame)) if frame else traceback.StackSummary()


def _set_while_another_thread_waits() -> None:
    """The synchronous calls keep the memory that the engine has, so that the other rank gets what was handed over."""
    for begin in (hvd.allreduce_, hvd.allreduce_, hvd.allreduce):  # a name is known the second time
        tensor = torch.full((SIZES[1],), hvd.rank() + 1.0)
        if hvd.rank() == 1:
            hvd.barrier()
            assert torch.equal(begin(tensor, name="waited for", op=hvd.Sum), torch.full((SIZES[1],), 3.0))
            continue
        waiting = threading.Thread(target=begin, args=(tensor,), kwargs={"name": "waited for", "op": hvd.Sum})
        waiting.start()
        while not any(frame.name == "until_complete" for frame in _frames(waiting)):
            os.sched_yield()
        tensor.set_(torch.zeros(3))
        gc.collect()
        rubbish = [torch.full((SIZES[1],), -7.0) for _ in range(8)]  # where the memory would be that was let go of
        hvd.barrier()
        waiting.join()
        del rubbish


def _released_when_complete() -> None:
    """A tensor that was only sent is released when `poll` returns True, and the result is there all the same."""
    for begin in (hvd.allreduce_async, hvd.allgather_async, hvd.reducescatter_async, hvd.alltoall_async):
        tensor = torch.ones(2 * hvd.size(), SIZES[1])
        kept, deadline = weakref.ref(tensor), time.monotonic() + 30
        handle = begin(tensor, name="released")
        del tensor
        while not hvd.poll(handle) and time.monotonic() < deadline:
            pass
        gc.collect()
        assert kept() is None, begin
        result = hvd.synchronize(handle)
        assert (result[0] if begin is hvd.alltoall_async else result).eq(1).all()


@pytest.mark.parametrize("size", (2, 3))
def test_released_when_complete(ranks, size):
    ranks(size).run(_released_when_complete)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("change", CHANGES)
def test_in_place(ranks, change, numel):
    ranks(2).run(_in_place, change, numel)


@pytest.mark.parametrize("change", ("set_", "written through data", "made larger", "no storage", "shared"))
def test_to_new(ranks, change):
    ranks(3).run(_to_new, change, SIZES[1])


@pytest.mark.parametrize(
    "case",
    (
        _views_of_one_storage,
        _many_small,
        _small_and_saved,
        _memory_of_numpy,
        _without_clones,
        _no_memory,
        _set_while_another_thread_waits,
    ),
)
def test_memory(ranks, case):
    ranks(2).run(case)


def test_over_an_end(fresh_ranks):
    fresh_ranks(2).run(_small_over_an_end)


def _clip(gradient: torch.Tensor) -> None:
    gradient.data = gradient.clamp(max=0.5)


GRADIENT_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": _clip,
    "set_": lambda g: g.set_(g.clamp(max=0.5)),
    "clamp_": lambda g: g.clamp_(max=0.5),
    "data.clamp_": lambda g: g.data.clamp_(max=0.5),
    "shared": lambda g: g.share_memory_(),
}
WIDE = 1 << 14  # gradients of 256 KiB


def _gradients(change: str, overlaps: bool, options: dict[str, object]) -> None:
    """With overlap, changes made to gradients on one rank are undone, with a warning; the ranks agree."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, WIDE), torch.nn.Linear(WIDE, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Sum, **options)
    bias_gradient = 2 * model[1].weight.detach().sum(0)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), hvd.rank() + 1.0)).sum().backward()
        if hvd.rank() == 0:
            for parameter in model.parameters():
                GRADIENT_CHANGES[change](parameter.grad)
        rubbish = [torch.full((WIDE,), -7.0) for _ in range(8)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert all(torch.equal(one, torch.full((WIDE,), -7.0)) for one in rubbish)
        if overlaps:
            expected = ["gradients have been changed"] if hvd.rank() == 0 else []
            assert [str(one.message)[:27] for one in caught] == expected
            if step == 0 and not options:
                assert torch.allclose(model[0].bias.grad, bias_gradient * hvd.size())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = hvd.allgather(weights[None])
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


@pytest.mark.parametrize("overlap", ("always", "never"))
def test_gradients(fresh_ranks, overlap):
    pool = fresh_ranks(2, {"HOROVODLIKE_OVERLAP": overlap})
    for change in GRADIENT_CHANGES:
        pool.run(_gradients, change, overlap == "always", {})
    pool.run(_gradients, "data.clamp_", False, {"groups": 1})
    pool.run(_gradients, "set_", False, {"compression": hvd.Compression.fp16})
    if overlap == "always":
        pool.run(_resized_gradient)
    pool.run(_replaced_gradient)
    pool.run(_flat_gradients)
    pool.run(_converted_module)


def _flat_gradients() -> None:
    """Gradients may be parts of one buffer: none of what autograd does to them is taken for a change."""
    model = torch.nn.Sequential(torch.nn.Linear(4, WIDE), torch.nn.Linear(WIDE, 4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model.named_parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    first = 0
    for parameter in model.parameters():
        parameter.grad = flat[first : first + parameter.numel()].view_as(parameter)
        first += parameter.numel()
    for _ in range(3):
        address = flat.data_ptr()
        optimizer.zero_grad(set_to_none=False)
        model(torch.full((2, 4), hvd.rank() + 1.0)).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert flat.data_ptr() == address
    everywhere = hvd.allgather(flat[None])
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def _replaced_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(WIDE))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)], op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1.0)).sum().backward()
        if hvd.rank() == 0:
            parameter.grad = torch.zeros(WIDE)
            with pytest.warns(UserWarning, match="gradients have been changed"):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.equal(parameter.grad, torch.full((WIDE,), 3.0))


def _resized_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(WIDE))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)])
    (parameter * (hvd.rank() + 1.0)).sum().backward()
    parameter.grad.resize_(2 * WIDE)
    with pytest.raises(ValueError, match=r"weight: its tensor had the shape .* and was resized"):
        optimizer.step()
    optimizer.zero_grad()
    (parameter * (hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    assert torch.allclose(parameter, torch.full((WIDE,), -(hvd.size() + 1.0) / 2))


def _converted_module() -> None:
    model = torch.nn.Linear(WIDE, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    (model(torch.ones(1, WIDE)).sum() * (hvd.rank() + 1)).backward()
    model.to(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert torch.allclose(model.weight, torch.full((1, WIDE), -(hvd.size() + 1.0) / 2, dtype=torch.float64))
