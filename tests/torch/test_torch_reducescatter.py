"""Reducescatter over sizes, row counts, dtypes, operations and forms: a rank's rows of what an allreduce gives."""

from __future__ import annotations

import pytest
import torch

import horovodlike.torch as hvd

SIZES = (1, 2, 3, 4)
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SHAPES = ((0,), (0, 3), (1,), (2, 3), (4, 0), (17,), (101, 3, 2), (3, 1, 2, 1, 2, 1, 2, 1, 3))
LARGE = ((300_007, 5), (3, 700_001), (1_000_003,))


def _input(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Small integers, so that sums and products are exact in every dtype; different on each rank."""
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + len(shape))
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return torch.randint(low, 3, shape, generator=generator).to(dtype)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share, reckoned in another way than the product does: rows are dealt out one by one."""
    counts = torch.bincount(torch.arange(tensor.shape[0]) % hvd.size(), minlength=hvd.size()).tolist()
    return tensor.split(counts)[hvd.rank()]


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)


def _grid() -> None:
    for dtype in DTYPES:
        for op in OPS:
            if dtype is torch.bool and op == hvd.Average:
                continue
            tensors = {shape: _input(dtype, shape) for shape in SHAPES}
            before = {shape: tensor.clone() for shape, tensor in tensors.items()}
            handles = {s: hvd.reducescatter_async(t, op=op, name=f"rs.{s}") for s, t in tensors.items()}
            for shape, tensor in tensors.items():
                expected = _rows(hvd.allreduce(tensor, op=op))
                assert _same(hvd.synchronize(handles[shape]), expected), (dtype, op, shape)
                assert _same(hvd.reducescatter(tensor, op=op, name=f"again.{shape}"), expected), (dtype, op, shape)
                assert torch.equal(tensor, before[shape]), (dtype, op, shape)


def _large() -> None:
    for shape in LARGE:
        for dtype, op in ((torch.float32, hvd.Average), (torch.bfloat16, hvd.Sum), (torch.int8, hvd.Max)):
            tensor = _input(dtype, shape)
            assert _same(hvd.reducescatter(tensor, op=op), _rows(hvd.allreduce(tensor, op=op))), (shape, dtype)
    noisy = torch.randn(100_003, generator=torch.Generator().manual_seed(hvd.rank()))
    scaled = {"prescale_factor": 0.3, "postscale_factor": 7.0}
    expected = _rows(hvd.allreduce(noisy, op=hvd.Sum, **scaled))
    assert _same(hvd.reducescatter(noisy, op=hvd.Sum, **scaled), expected)  # the same bits
    half = hvd.reducescatter(noisy, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert half.dtype is torch.float32
    assert torch.allclose(half, _rows(hvd.allreduce(noisy, op=hvd.Sum)), atol=0.05)


def _grouped_and_strided() -> None:
    tensors = [_input(dtype, (7, 2)) for dtype in DTYPES]
    expected = [_rows(hvd.allreduce(tensor, op=hvd.Max)) for tensor in tensors]
    together = hvd.grouped_reducescatter(tensors, op=hvd.Max)
    assert isinstance(together, list)
    later = hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Max, name="later"))
    for actual in (together, later):
        assert all(_same(a, e) for a, e in zip(actual, expected, strict=True))
    columns = _input(torch.float32, (6, 5)).t()
    assert _same(hvd.reducescatter(columns, op=hvd.Sum), _rows(hvd.allreduce(columns, op=hvd.Sum)))


def _gradients() -> None:
    n, weight = hvd.size(), hvd.rank() + 1.0
    weights = torch.cat([torch.full((5 // n + (rank < 5 % n), 3), rank + 1.0) for rank in range(n)])
    for options, factor in (
        ({}, 1.0),
        ({"op": hvd.Sum}, n),
        ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}, 1.5 * n),
    ):
        leaf = torch.ones(5, 3, requires_grad=True)
        (hvd.reducescatter(leaf, **options) * weight).sum().backward()
        assert torch.allclose(leaf.grad, weights * factor), (options, leaf.grad)
        reduced = hvd.reducescatter(leaf, **options)
        gradient = torch.ones_like(reduced)
        reduced.backward(gradient)
        assert torch.equal(gradient, torch.ones_like(reduced))  # it may be used elsewhere
    first, second = torch.ones(5, 3, requires_grad=True), torch.ones(4, dtype=torch.int64)
    results = hvd.grouped_reducescatter([first, second], op=hvd.Average)
    (results[0] * weight).sum().backward()
    assert torch.allclose(first.grad, weights)
    leaf = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="Average and op=Sum only"):
        hvd.reducescatter(leaf, op=hvd.Max).sum().backward()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [_grid, _large, _grouped_and_strided, _gradients])
def test_reducescatter(ranks, size, case):
    ranks(size).run(case)


def _bad_arguments() -> None:
    for bad, error, text in (
        (lambda: hvd.reducescatter(torch.tensor(1.0), name="scalar"), ValueError, "scalar"),
        (lambda: hvd.reducescatter(torch.ones(2, dtype=torch.complex64)), ValueError, "complex64"),
        (lambda: hvd.reducescatter([1.0]), TypeError, "list"),
        (lambda: hvd.reducescatter(torch.ones(2), op=17), ValueError, "17"),
        (lambda: hvd.grouped_reducescatter([]), ValueError, "empty"),
    ):
        with pytest.raises(error, match=text):
            bad()


def test_bad_arguments_are_refused_at_once(ranks):
    ranks(2).run(_bad_arguments)


def _mismatches() -> list[str]:
    rank, texts = hvd.rank(), []
    for name, start in (
        ("shape", lambda: hvd.reducescatter(torch.ones(4 + rank), name="shape")),
        ("dtype", lambda: hvd.reducescatter(torch.ones(4, dtype=(torch.float32, torch.int32)[rank]), name="dtype")),
        ("op", lambda: hvd.reducescatter(torch.ones(4), op=(hvd.Sum, hvd.Max)[rank], name="op")),
        ("factor", lambda: hvd.reducescatter(torch.ones(4), prescale_factor=1.0 + rank, name="factor")),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=f"reducescatter.{name}") as caught:
            start()
        texts.append(str(caught.value))
    assert hvd.reducescatter(torch.ones(4), op=hvd.Sum).tolist() == [2.0, 2.0]  # the job goes on
    return texts


def test_a_mismatch_is_the_same_error_on_every_rank(ranks):
    first, second = ranks(2).run(_mismatches)
    assert first == second
    for text, values in zip(first, (("[4]", "[5]"), ("float32", "int32"), ("Sum", "Max"), ("1", "2")), strict=True):
        assert all(value in text for value in values), text
