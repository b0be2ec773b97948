"""Gradients on a GPU, of a double of CUDA, for Keras with torch. TensorFlow's are in `test_tensorflow_gpu.py`."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
from support import gpus


def _the_host_reads_nothing_of_the_gpu(groups):
    import keras
    import torch

    import horovodlike.keras as hvd

    read = []

    def tolist(tensor):
        read.append(tensor.dtype)
        return original(tensor)

    original = torch.Tensor.tolist
    last = hvd.rank() == hvd.size() - 1
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5), groups=groups, op=hvd.Sum)
    with (
        gpus.pretend(on_cpu=(torch.uint8,)),
        mock.patch.object(torch.Tensor, "tolist", tolist),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of Keras: that there are variables without gradients
        variables = [keras.Variable(value, name=f"v{i}") for i, value in enumerate([0.0, 0.0, 1.0])]
        gradients = [torch.tensor(1.0), torch.tensor(4.0) if last else None, None]
        wrapped.apply_gradients(zip(gradients, variables, strict=True))
    assert [float(variable.numpy()) for variable in variables] == [-hvd.size(), -4.0, 1.0]
    assert read == [torch.uint8]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("groups", [None, 2])
def test_the_host_does_not_wait_for_gradients(keras_gpu_ranks, groups, size):
    keras_gpu_ranks(size).run(_the_host_reads_nothing_of_the_gpu, groups)
