"""Alltoall over ranks, counts, dtypes and forms, with its gradient and its errors."""

from __future__ import annotations

import pytest
import torch

import horovodlike.torch as hvd

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip


def _splits(rank: int, size: int, scale: int) -> list[int]:
    return [(rank * 2 + to * 3) % 4 * scale for to in range(size)]


def _input(rank: int, size: int, scale: int, dtype: torch.dtype, spare: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + scale)
    return torch.randint(0, 2, (sum(_splits(rank, size, scale)) + spare, 3), generator=generator).to(dtype)


def _expected(size: int, scale: int, dtype: torch.dtype, spare: int = 0) -> torch.Tensor:
    blocks = []
    for rank in range(size):
        splits = _splits(rank, size, scale)
        rows = _input(rank, size, scale, dtype, spare)[: sum(splits)]
        blocks.append(rows.split(splits)[hvd.rank()])
    return torch.cat(blocks)


def _grid() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for scale in (0, 1, 17):
            mine = _input(rank, size, scale, dtype, spare=2)
            splits = _splits(rank, size, scale)
            rows, received = hvd.alltoall(mine, splits, name="again")
            assert rows.dtype is dtype and torch.equal(rows, _expected(size, scale, dtype, spare=2))
            assert received.dtype is torch.int32
            assert received.tolist() == [_splits(other, size, scale)[rank] for other in range(size)]
            rows, received = hvd.synchronize(hvd.alltoall_async(mine, torch.tensor(splits)))
            assert torch.equal(rows, _expected(size, scale, dtype, spare=2))
    large = _input(rank, size, 30_011, torch.float32)
    rows, _ = hvd.alltoall(large, _splits(rank, size, 30_011))
    assert torch.equal(rows, _expected(size, 30_011, torch.float32))


def _even() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.arange(size * 2) + 100 * rank
    received = hvd.alltoall(mine)
    assert received.tolist() == [100 * other + 2 * rank + i for other in range(size) for i in range(2)]
    rows, counts = hvd.synchronize(hvd.alltoall_async(mine))
    assert torch.equal(rows, received) and counts.tolist() == [2] * size
    strided = torch.arange(size * 4).reshape(size, 4)[:, ::2]
    assert hvd.alltoall(strided).tolist() == [[4 * rank, 4 * rank + 2]] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [_grid, _even])
def test_alltoall(ranks, size, check):
    ranks(size).run(check)


def _gradient() -> None:
    rank, size = hvd.rank(), hvd.size()
    splits = _splits(rank, size, 2)
    mine = torch.ones(sum(splits) + 3, 2, dtype=torch.float64, requires_grad=True)
    rows, received = hvd.alltoall(mine, splits)
    assert not received.requires_grad
    (rows * (10 + rank)).sum().backward()
    expected = [10.0 + to for to in range(size) for _ in range(splits[to])] + [0.0] * 3
    assert mine.grad[:, 1].tolist() == expected
    even = torch.ones(size, requires_grad=True)
    (hvd.alltoall(even) * (1 + rank)).sum().backward()
    assert even.grad.tolist() == [1.0 + to for to in range(size)]


@pytest.mark.parametrize("size", [1, 3])
def test_gradient(ranks, size):
    ranks(size).run(_gradient)


def _errors() -> None:
    rank, size = hvd.rank(), hvd.size()
    for splits, text in (
        ([1], "1 splits for 2 ranks"),
        ([3, 2], "more than its 4 rows"),
        ([-1, 2], "negative"),
        (torch.tensor([[1, 1]]), "in one dimension"),
        (torch.tensor([0.5, 0.5]), "must be integers"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.alltoall(torch.ones(4, 2), splits)
    with pytest.raises(ValueError, match="cannot be divided evenly"):
        hvd.alltoall(torch.ones(3))
    with pytest.raises(ValueError, match="scalar"):
        hvd.alltoall(torch.tensor(1.0))
    with pytest.raises(
        hvd.HorovodInternalError, match=r"Mismatched data types .* rank 0 has float32, rank 1 has int64"
    ):
        hvd.alltoall(torch.ones(size, dtype=(torch.float32, torch.int64)[rank]), name="dtypes")
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched dimensions other than the first"):
        hvd.alltoall(torch.ones(size, 2 + rank), name="shapes")
    assert hvd.alltoall(torch.ones(size)).tolist() == [1.0] * size


def test_errors_on_all_ranks(ranks):
    ranks(2).run(_errors)
