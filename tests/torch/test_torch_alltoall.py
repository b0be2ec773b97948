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


def _grouped() -> None:
    rank, size = hvd.rank(), hvd.size()
    for scale in (0, 1, 17, 30_011):
        tensors = [_input(rank, size, scale, dtype, spare=2) for dtype in DTYPES[: 3 if scale > 17 else None]]
        splits = _splits(rank, size, scale)
        received = [_splits(other, size, scale)[rank] for other in range(size)]
        of_each = [splits if index % 2 else torch.tensor(splits) for index in range(len(tensors))]
        started = hvd.grouped_alltoall_async(tensors, of_each)
        for pairs in (hvd.grouped_alltoall(tensors, of_each, name="again"), hvd.synchronize(started)):
            assert len(pairs) == len(tensors)
            for tensor, (rows, counts) in zip(tensors, pairs, strict=True):
                assert rows.dtype is tensor.dtype
                assert torch.equal(rows, _expected(size, scale, tensor.dtype, spare=2))
                assert counts.dtype is torch.int32 and counts.tolist() == received


def _grouped_of_different_splits() -> None:
    """Of tensors that have rows for some of the ranks only, or are divided evenly, or have no elements at all."""
    rank, size = hvd.rank(), hvd.size()
    to_first = torch.full((3, 2), float(rank))
    even = torch.arange(2 * size) + 100 * rank
    empty = torch.ones(size, 0)
    of_evenly = [100 * other + 2 * rank + i for other in range(size) for i in range(2)]
    for name in (None, "again", "again"):
        (rows, received), evenly, nothing = hvd.grouped_alltoall(
            [to_first, even.t(), empty], [[3] + [0] * (size - 1), None, None], name=name
        )
        assert received.tolist() == [3 * (rank == 0)] * size
        assert rows[:, 1].tolist() == [float(other) for other in range(size) for _ in range(3)] * (rank == 0)
        assert evenly.tolist() == of_evenly
        assert nothing.shape == (size, 0)
    assert [one.tolist() for one in hvd.grouped_alltoall((even, even))] == [of_evenly] * 2
    ((evenly, received),) = hvd.synchronize(hvd.grouped_alltoall_async([even]))
    assert evenly.tolist() == of_evenly and received.tolist() == [2] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [_grouped, _grouped_of_different_splits])
def test_grouped(ranks, size, check):
    ranks(size).run(check)


def _gradient_of_group() -> None:
    rank, size = hvd.rank(), hvd.size()
    splits = _splits(rank, size, 2)
    mine = torch.ones(sum(splits) + 3, 2, dtype=torch.float64, requires_grad=True)
    counts = torch.arange(size)
    even = torch.ones(size, requires_grad=True)
    (rows, received), exchanged, evenly = hvd.grouped_alltoall([mine, counts, even], [splits, None, None])
    assert not received.requires_grad and not exchanged.requires_grad
    assert exchanged.tolist() == [rank] * size
    ((rows * (10 + rank)).sum() + (evenly * (1 + rank)).sum()).backward()
    assert mine.grad[:, 1].tolist() == [10.0 + to for to in range(size) for _ in range(splits[to])] + [0.0] * 3
    assert even.grad.tolist() == [1.0 + to for to in range(size)]


@pytest.mark.parametrize("size", [1, 3])
def test_gradient_of_group(ranks, size):
    ranks(size).run(_gradient_of_group)


def _errors_of_groups() -> None:
    rank, size = hvd.rank(), hvd.size()
    ones = torch.ones(size, 2)
    one_each = [1] * size
    none = [0] * (size - 1)
    for tensors, splits, text in (
        ([], None, "the list of tensors is empty"),
        ([ones, ones], [one_each], "splits for 1 tensors, but there are 2"),
        ([ones, ones], [None, [1]], f"1 splits for {size} ranks"),
        ([ones, torch.ones(5)], None, f"5 rows cannot be divided evenly among {size}"),
        (
            [ones, torch.ones(3)],
            [one_each, [4, *none]],
            "tensor 1 of 'grouped_alltoall.wrong' are more than its 3 rows",
        ),
        ([ones, torch.ones(3)], [one_each, [-1, *none]], "tensor 1 of 'grouped_alltoall.wrong' must not be negative"),
        ([ones, torch.tensor(1.0)], [None, one_each], "a scalar has no rows"),
        ([ones, torch.ones(size, dtype=torch.complex64)], None, "complex64"),
    ):
        for call in (hvd.grouped_alltoall, hvd.grouped_alltoall_async):
            with pytest.raises(ValueError, match=text):
                call(tensors, splits, name="wrong")
    with pytest.raises(TypeError, match=r"grouped_alltoall.wrong: expected a torch.Tensor, got list"):
        hvd.grouped_alltoall([ones, [1.0, 2.0]], name="wrong")
    of_ranks = (
        "rank 0 has {}, rank 1 has {}" if size == 2 else "ranks 0, 1 have {}, rank 2 has {}"  # the last rank differs
    )
    last = rank == size - 1
    for tensors, text in (
        (
            [ones, ones.long() if last else ones],
            "data types .* tensor with index 1 .*" + of_ranks.format("float32", "int64"),
        ),
        ([ones, ones[:, :1] if last else ones], r"dimensions other than the first .* \[\*, 2\]"),
        ([ones] * (3 if last else 2), "numbers of tensors .*" + of_ranks.format(2, 3)),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=f"Mismatched {text}"):
            hvd.grouped_alltoall(tensors, name="differs")
    (again, _) = hvd.grouped_alltoall([ones, ones], name="differs")
    assert again.tolist() == [[1.0, 1.0]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_errors_of_groups_on_all_ranks(ranks, size):
    ranks(size).run(_errors_of_groups)


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
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, got list"):
        hvd.alltoall([1.0, 2.0])
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
