"""Gradients of the collectives. The loss of a rank is weighted by its rank, so that an average shows."""

from __future__ import annotations

import pytest
import torch

import horovodlike.torch as hvd


def _leaf(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape).mul(hvd.rank() + 1).requires_grad_()


def _weight() -> float:
    return hvd.rank() + 1.0


def _weights() -> list[float]:
    return [rank + 1.0 for rank in range(hvd.size())]


def _allreduce() -> None:
    total, mean = sum(_weights()), sum(_weights()) / hvd.size()
    for op, expected in ((hvd.Sum, total), (hvd.Average, mean), (None, mean)):
        tensor = _leaf(3, 5)
        (hvd.allreduce(tensor, op=op) * _weight()).sum().backward()
        assert torch.allclose(tensor.grad, torch.full((3, 5), expected))
    tensor = _leaf(7)
    (hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25) * _weight()).sum().backward()
    assert torch.allclose(tensor.grad, torch.full((7,), total * 0.5))


def _compressed() -> None:
    tensor = _leaf(7)
    reduced = hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert reduced.dtype == torch.float32
    (reduced * _weight()).sum().backward()
    assert tensor.grad.dtype == torch.float32
    assert torch.allclose(tensor.grad, torch.full((7,), sum(_weights())))


def _grouped_allreduce() -> None:
    first, second, counts = _leaf(3), _leaf(2, 2).double().detach().requires_grad_(), torch.ones(4, dtype=torch.int64)
    results = hvd.grouped_allreduce([first, second, counts], op=hvd.Sum)
    assert results[2].tolist() == [hvd.size()] * 4
    ((results[0].sum() + 10 * results[1].sum()) * _weight()).backward()
    assert torch.allclose(first.grad, torch.full((3,), sum(_weights())))
    assert torch.allclose(second.grad, torch.full((2, 2), 10 * sum(_weights()), dtype=torch.float64))
    # An output that the loss does not depend on.
    first.grad = None
    (hvd.grouped_allreduce([first, second], op=hvd.Sum)[0].sum()).backward()
    assert torch.allclose(first.grad, torch.full((3,), float(hvd.size())))


def _allgather() -> None:
    rows = [2 * rank for rank in range(hvd.size())]  # rank 0 has none
    tensor = _leaf(rows[hvd.rank()], 3)
    gathered = hvd.allgather(tensor)
    places = torch.arange(1.0, sum(rows) + 1).unsqueeze(1)
    (gathered * places * _weight()).sum().backward()
    mean = sum(_weights()) / hvd.size()
    start = sum(rows[: hvd.rank()])
    own = places[start : start + rows[hvd.rank()]].expand(-1, 3) * mean
    assert tensor.grad.shape == tensor.shape
    assert torch.allclose(tensor.grad, own)


def _grouped_allgather() -> None:
    first, second = _leaf(hvd.rank() + 1), _leaf(2, 2)
    gathered = hvd.grouped_allgather([first, second])
    ((gathered[0].sum() + 3 * gathered[1].sum()) * _weight()).backward()
    mean = sum(_weights()) / hvd.size()
    assert torch.allclose(first.grad, torch.full((hvd.rank() + 1,), mean))
    assert torch.allclose(second.grad, torch.full((2, 2), 3 * mean))


def _broadcast() -> None:
    for root in {0, hvd.size() - 1}:
        tensor = _leaf(4)
        (hvd.broadcast(tensor, root) * _weight()).sum().backward()
        mean = sum(_weights()) / hvd.size()
        assert torch.allclose(tensor.grad, torch.full((4,), mean if hvd.rank() == root else 0.0))
        first, second = _leaf(3), _leaf(2, 2)
        one, counts, other = hvd.grouped_broadcast([first, torch.arange(3), second], root)
        assert not counts.requires_grad
        ((one.sum() + 5 * other.sum()) * _weight()).backward()
        assert torch.allclose(first.grad, torch.full((3,), mean if hvd.rank() == root else 0.0))
        assert torch.allclose(second.grad, torch.full((2, 2), 5 * mean if hvd.rank() == root else 0.0))


def _names_match_in_any_order() -> None:
    """The backward pass runs the operations in another order on each rank."""
    tensors = [_leaf(3) for _ in range(4)]
    outputs = [hvd.allreduce(tensor, op=hvd.Sum, name=f"any.{i}") for i, tensor in enumerate(tensors)]
    order = range(4) if hvd.rank() % 2 == 0 else reversed(range(4))
    threads = []
    import threading

    for i in order:  # of a synchronous operation the ranks have to call as many at once as they call in other orders
        thread = threading.Thread(target=lambda i=i: (outputs[i] * (i + 1)).sum().backward())
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(30)
    for i, tensor in enumerate(tensors):
        assert torch.allclose(tensor.grad, torch.full((3,), float(hvd.size() * (i + 1))))


def _twice() -> None:
    """The gradient of a gradient."""
    tensor = torch.tensor([2.0, 3.0], requires_grad=True)
    loss = (hvd.allreduce(tensor, op=hvd.Sum, name="twice") ** 3).sum()
    (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
    n = hvd.size()
    assert torch.allclose(gradient, 3 * (n * tensor) ** 2 * n)
    gradient.sum().backward()
    assert torch.allclose(tensor.grad, 6 * n**3 * tensor)


def _what_has_no_gradient() -> None:
    tensor = _leaf(3)
    assert not hvd.allreduce(tensor.detach()).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(tensor)).requires_grad
    smallest = hvd.allreduce(tensor, op=hvd.Min)
    with pytest.raises(NotImplementedError, match="op=Average and op=Sum"):
        smallest.sum().backward()


CASES = (
    _allreduce,
    _compressed,
    _grouped_allreduce,
    _allgather,
    _grouped_allgather,
    _broadcast,
    _names_match_in_any_order,
    _twice,
    _what_has_no_gradient,
)


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_gradient(ranks, case, size):
    ranks(size).run(case)
