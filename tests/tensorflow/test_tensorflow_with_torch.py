"""Two frameworks in one process share one engine, and do not get into each other's way."""

from __future__ import annotations

import pytest
import tensorflow as tf
import torch

import horovodlike.tensorflow as hvd
import horovodlike.torch as hvd_torch
from horovodlike._engine.ops import counters


def _interleaved():
    size, first = hvd.size(), hvd.rank() == 0
    assert hvd_torch.size() == size

    @tf.function
    def total(tensor):
        return hvd.allreduce(tensor, op=hvd.Sum, name="same"), hvd.allgather(tensor[:1], name="same")

    total(tf.ones([5]))
    before = counters()["executed"]
    for i in range(20):
        data = torch.full((1009,), float(i))
        handle = hvd_torch.allreduce_async_(data, op=hvd_torch.Sum, name="same")
        # Rank 0 waits for torch's result last, the others first.
        if not first:
            hvd_torch.synchronize(handle)
        eager = hvd.allreduce(tf.fill([7], float(i)), op=hvd.Sum, name="same.eager")
        in_function, gathered = total(tf.fill([5], float(i)))
        if first:
            hvd_torch.synchronize(handle)
        assert data.unique().tolist() == [size * i]
        assert eager.numpy().tolist() == [size * i] * 7
        assert in_function.numpy().tolist() == [size * i] * 5
        assert gathered.numpy().tolist() == [i] * size
    assert counters()["executed"] == before + 4 * 20
    # Memory goes from one to the other.
    tensor = hvd.allreduce(tf.constant(torch.arange(4.0).numpy()), op=hvd.Sum)
    assert torch.equal(torch.from_numpy(tensor.numpy()), torch.arange(4.0) * size)


def _backward_in_both():
    model = torch.nn.Linear(3, 2)
    optimizer = hvd_torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    weight = tf.Variable(tf.ones([3]))
    model(torch.ones(4, 3)).sum().backward()  # gradients that torch's binding may defer until a thread waits
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * float(hvd.rank()))
    if hvd.rank() == 0:
        optimizer.step()
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight)
    else:
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight)
        optimizer.step()
    assert gradient.numpy().tolist() == [(hvd.size() - 1) / 2] * 3


def _import_triton_first() -> None:
    import torch._dynamo  # noqa: F401  # which imports Triton if there is one; after TensorFlow that crashes


@pytest.mark.thorough
def test_torch_and_tensorflow_interleaved(fresh_ranks):
    ranks = fresh_ranks(2)
    ranks.run(_import_triton_first, timeout=240)
    ranks.run(_interleaved, timeout=240)
    ranks.run(_backward_in_both)
