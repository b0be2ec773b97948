"""Arrays of other libraries, through DLPack and the buffer protocol: results are arrays of the same library."""

from __future__ import annotations

import array as array_module
import ctypes
import mmap

import numpy as np
import pytest

import horovodlike as hvd


@pytest.fixture
def modules():
    return ("torch",)


def _torch_tensors():
    import torch

    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.float8_e5m2):
        mine = torch.full((3, 2), float(rank + 1)).to(dtype)
        total = sum(range(1, size + 1))
        reduced = hvd.allreduce(mine, op=hvd.Sum)
        assert type(reduced) is torch.Tensor and reduced.dtype is dtype and reduced.shape == (3, 2)
        assert set(reduced.flatten().tolist()) == {total}
        address = mine.data_ptr()
        for _ in range(2):
            assert hvd.broadcast_(mine, 0, name="t") is mine
        assert mine.data_ptr() == address and set(mine.flatten().tolist()) == {1.0}
        gathered = hvd.allgather(torch.full((rank, 2), 1.0).to(dtype))
        assert gathered.dtype is dtype and gathered.shape == (sum(range(size)), 2)
        rows, counts = hvd.alltoall(torch.zeros(size, 2).to(dtype), splits=torch.ones(size, dtype=torch.int64))
        assert rows.dtype is dtype and rows.shape == (size, 2)
        assert type(counts) is np.ndarray and counts.tolist() == [1] * size
        scattered = hvd.reducescatter(torch.full((size, 2), 1.0).to(dtype), op=hvd.Max)
        assert scattered.dtype is dtype and scattered.tolist() == [[1.0, 1.0]]
    strided = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(hvd.allreduce(strided, op=hvd.Max), strided)
    assert torch.equal(hvd.allreduce_(strided[:, 0], op=hvd.Sum), torch.arange(3.0) * size)
    assert strided[:, 0].tolist() == [0.0, size, 2.0 * size] and strided[:, 1].tolist() == [3.0, 4.0, 5.0]
    assert hvd.allreduce(torch.tensor(rank), op=hvd.Max).item() == size - 1
    assert hvd.allreduce(torch.tensor([True]), op=hvd.Product).tolist() == [True]
    assert hvd.allreduce(torch.empty(0, 3), op=hvd.Sum).shape == (0, 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(hvd.allreduce(parameter.detach(), op=hvd.Sum)) is torch.Tensor
    with pytest.raises(ValueError, match="require gradient"):
        hvd.allreduce(parameter)
    for cannot in (torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="allreduce 'bad': "):
            hvd.allreduce(cannot, name="bad")


def _mixed_libraries():
    """The ranks may have arrays of different libraries, and a group too."""
    import torch

    make = torch.from_numpy if hvd.rank() % 2 else np.asarray
    mine = make(np.arange(4, dtype=np.float32))
    assert type(hvd.allreduce(mine, op=hvd.Max)) is type(mine)
    tensor, array = hvd.grouped_allreduce([torch.ones(2), np.ones(3)], op=hvd.Max)
    assert type(tensor) is torch.Tensor and type(array) is np.ndarray


class Old:
    """An array of a library that has DLPack of before version 1, and a namespace."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        assert stream is None
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return OldNamespace

    def __iadd__(self, other):
        self.array += other
        return self


class OldNamespace:
    @staticmethod
    def from_dlpack(array):
        return Old(np.from_dlpack(array))


class New(Old):
    """The same with DLPack of version 1, which says whether an array may be written."""

    def __dlpack__(self, stream=None, max_version=None):
        return self.array.__dlpack__(max_version=max_version)


class Immutable:
    """An array of a library whose arrays never change."""

    def __init__(self, array):
        self.array = array

    __dlpack__, __dlpack_device__ = Old.__dlpack__, Old.__dlpack_device__
    __array_namespace__ = Old.__array_namespace__


class Bare:
    """An array of a library that cannot be found."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def _by_dlpack():
    old = Old(np.arange(6.0).reshape(2, 3)[:, ::2])
    result = hvd.allreduce(old, op=hvd.Sum)
    assert type(result) is Old
    assert np.array_equal(result.array, old.array * hvd.size())
    hvd.allreduce_(old, op=hvd.Sum)
    assert np.array_equal(result.array, old.array)
    with pytest.raises(TypeError, match="Bare has no from_dlpack"):
        hvd.allreduce(Bare(np.ones(1)))
    read_only = np.ones(2)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(New(read_only))
    with pytest.raises(ValueError, match="read-only"):
        hvd.broadcast_(Immutable(np.ones(2)), 0)
    for cannot_be_written in (New(read_only), Immutable(np.ones(2))):
        assert hvd.broadcast(cannot_be_written, 0).array.tolist() == [1.0, 1.0]


def _buffers():
    rank, size = hvd.rank(), hvd.size()
    shared = mmap.mmap(-1, 4096)
    for memory, values in (
        (bytes([rank]), [size - 1]),
        (bytearray([rank, 1]), [size - 1, 1]),
        (array_module.array("d", [rank]), [size - 1]),
        (memoryview(array_module.array("h", [rank, 3])), [size - 1, 3]),
        ((ctypes.c_float * 2)(rank, 2), [size - 1, 2]),
        (memoryview(bytearray(range(8)))[::2], [0, 2, 4, 6]),
    ):
        result = hvd.allreduce(memory, op=hvd.Max)
        assert type(result) is np.ndarray and result.tolist() == values
        if memory.__class__ is not bytes:
            assert hvd.allreduce_(memory, op=hvd.Max) is memory
            assert np.asarray(memory).tolist() == values if not isinstance(memory, bytearray) else [*memory] == values
        else:
            with pytest.raises(ValueError, match="read-only"):
                hvd.allreduce_(memory, op=hvd.Max)
    shared[:4] = bytes([rank] * 4)
    hvd.broadcast_(shared, size - 1)
    assert shared[:4] == bytes([size - 1] * 4)
    assert hvd.allgather(bytes([rank])).tolist() == list(range(size))
    record = np.array([[rank, 1]], np.int32).view(np.recarray)  # of a subclass of NumPy's array
    assert hvd.allreduce_(record, op=hvd.Max) is record and record.tolist() == [[size - 1, 1]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", [_torch_tensors, _mixed_libraries, _by_dlpack, _buffers])
def test_results_are_of_the_same_library(ranks, case, size):
    ranks(size).run(case)
