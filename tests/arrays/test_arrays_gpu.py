"""Arrays on a GPU, of a library that has DLPack, with a double of CUDA whose memory is the host's."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.gpus import double

import horovodlike as hvd
from horovodlike.arrays import dlpack

CUDA, ROCM = 2, 10


class Gpu:
    """A device of the library: a context, as CuPy's."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class GpuArray:
    """An array of the library. Its stream is another than the default one, on which the engine is called."""

    exports: list[int] = []  # the streams that were made to wait for the library's
    kind = CUDA

    def __init__(self, array):
        self.array = array
        self.dtype, self.shape, self.device = array.dtype, array.shape, Gpu()

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, stream=None, max_version=None):
        GpuArray.exports.append(stream)
        capsule = self.array.__dlpack__()
        tensor, _ = dlpack._contents(capsule, self, "")
        tensor.device.type = CUDA
        return capsule

    def __setitem__(self, key, value):
        self.array[key] = value.array

    def __array_namespace__(self):
        return Namespace

    def __iadd__(self, other):
        self.array += other.array
        return self


class Namespace:
    @staticmethod
    def empty(shape, dtype):
        return GpuArray(np.empty(shape, dtype))


@contextlib.contextmanager
def _checked():
    GpuArray.exports.clear()
    gpu = double()
    yield gpu
    assert gpu.violations() == ""
    assert set(GpuArray.exports) == {dlpack.DEFAULT_STREAM}


def _collectives():
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    with _checked() as gpu:
        for dtype in (np.float32, np.int64, np.bool_):
            mine = GpuArray(np.full((4, 3), rank + 1).astype(dtype))
            memory = mine.array
            result = hvd.allreduce(mine, op=hvd.Sum)
            assert type(result) is GpuArray and result.dtype == dtype
            assert np.array_equal(result.array, np.full((4, 3), total).astype(dtype))
            for _ in range(2):
                assert hvd.allreduce_(mine, op=hvd.Max, name="named") is mine
            assert mine.array is memory and np.array_equal(memory, np.full((4, 3), size).astype(dtype))
            rows = [np.full((of + 1, 2), of).astype(dtype) for of in range(size)]
            assert np.array_equal(hvd.allgather(GpuArray(rows[rank])).array, np.concatenate(rows))
            assert np.array_equal(hvd.broadcast(GpuArray(rows[rank][:1]), size - 1).array, rows[-1][:1])
            scattered = hvd.reducescatter(GpuArray(np.full((2 * size, 2), 1).astype(dtype)), op=hvd.Max)
            assert np.array_equal(scattered.array, np.ones((2, 2), dtype))
            received, counts = hvd.alltoall(GpuArray(np.full((size, 2), rank).astype(dtype)), splits=[1] * size)
            assert np.array_equal(received.array, np.stack([np.full(2, of).astype(dtype) for of in range(size)]))
            assert type(counts) is np.ndarray and counts.tolist() == [1] * size
        strided = GpuArray(np.arange(12.0).reshape(3, 4)[:, ::2])
        expected = strided.array * size
        assert np.array_equal(hvd.allreduce(strided, op=hvd.Sum).array, expected)
        assert hvd.allreduce_(strided, op=hvd.Sum) is strided
        assert np.array_equal(strided.array, expected)
        first, second = hvd.grouped_allreduce([GpuArray(np.array(2.0)), GpuArray(np.empty(0))], op=hvd.Sum)
        assert first.array == 2.0 * size and second.shape == (0,)
        assert any(call.startswith("cuStreamWaitEvent engine") for call in gpu.calls())


def _errors():
    on_host, on_gpu = np.ones(2), GpuArray(np.ones(2))
    with pytest.raises(ValueError, match="on the same device"):
        hvd.grouped_allreduce([on_host, on_gpu])
    elsewhere = GpuArray(np.ones(2))
    elsewhere.kind = ROCM
    with pytest.raises(ValueError, match="'bad': .*GpuArray is not in memory that can be sent"):
        hvd.allreduce(elsewhere, name="bad")
    with pytest.raises(ValueError, match="elements of an array share memory"):
        hvd.allreduce_(GpuArray(np.lib.stride_tricks.as_strided(np.ones(2), (3, 2), (0, 8))))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(gpu_ranks, size):
    gpu_ranks(size).run(_collectives)


def test_errors(gpu_ranks):
    gpu_ranks(1).run(_errors)
