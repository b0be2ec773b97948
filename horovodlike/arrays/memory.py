"""Arrays of any library as the engine sees them: an address, a shape and an element type; and the way back for results.

An array in the host's memory, of any library, becomes a NumPy array on the same memory. An array on a GPU stays an
array of its library, which also makes the arrays for results there.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from horovodlike._engine.ops import MAX_DIMENSIONS, DType, MemoryFormat
from horovodlike.arrays import dlpack
from horovodlike.arrays.dlpack import DeviceType, Exported

NumpyArray: TypeAlias = np.ndarray[Any, Any]

# Element types that NumPy itself lacks, with the NumPy types of the same size that are used for them.
_RAW = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class Memory(NamedTuple):
    """An address, and the object that keeps the memory."""

    address: int
    keeper: object


class _Foreign:
    """Memory of another library, as a source for a NumPy array, which keeps this object and thus the capsule."""

    def __init__(self, exported: Exported) -> None:
        dtype = np.dtype(_RAW.get(exported.dtype.name, exported.dtype.name))
        strides = exported.strides
        self._capsule = exported.capsule
        self.__array_interface__ = {
            "version": 3,
            "data": (exported.address, exported.read_only),
            "shape": exported.shape,
            "strides": None if strides is None else tuple(stride * dtype.itemsize for stride in strides),
            "typestr": dtype.str,
        }


class HostArray:
    """An array in the host's memory.

    Attributes:
        given: The caller's object.
        array: A NumPy array on its memory.
        dtype: The element type.
        gpu: None, since the array is not on a GPU.
    """

    __slots__ = ("_library", "array", "dtype", "given")
    gpu: int | None = None

    def __init__(self, given: Any, array: NumpyArray, dtype: DType, library: Any = None) -> None:
        self.given = given
        self.array = array
        self.dtype = dtype
        self._library = library  # converts NumPy arrays to arrays like the caller's; None if those are NumPy's

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents by dimension."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def is_writable(self) -> bool:
        """True if an operation in place can write the array."""
        return self.array.flags.writeable

    def overlaps_itself(self) -> bool:
        """Return whether elements share memory, as in an array that was broadcast to its shape."""
        if self.array.flags.forc or self.array.size == 0:
            return False
        reach = self.array.itemsize  # the bytes spanned by the dimensions with smaller strides
        for stride, extent in sorted(zip(map(abs, self.array.strides), self.array.shape, strict=True)):
            if extent > 1 and stride < reach:
                return True
            reach += (extent - 1) * stride
        return False

    def in_memory(self, allows_columns: bool) -> tuple[NumpyArray, MemoryFormat]:
        """Return the array, or a copy, whose elements lie without gaps; and their order.

        Args:
            allows_columns: True if the operation also takes arrays that lie column by column.
        """
        flags = self.array.flags
        if flags.c_contiguous and flags.aligned:
            return self.array, MemoryFormat.ROW_MAJOR
        if allows_columns and flags.f_contiguous and flags.aligned and self.array.ndim <= MAX_DIMENSIONS:
            return self.array, MemoryFormat.COLUMN_MAJOR
        return self.array.copy(order="C"), MemoryFormat.ROW_MAJOR

    def empty(self, shape: Sequence[int], memory_format: MemoryFormat = MemoryFormat.ROW_MAJOR) -> NumpyArray:
        """Return an uninitialised array for a result."""
        return np.empty(shape, self.array.dtype, "F" if memory_format == MemoryFormat.COLUMN_MAJOR else "C")

    def without_memory(self) -> HostArray:
        """Return a description without the array, of which only the shape, `empty`, `wrap` and so on can be used."""
        shape_only = np.broadcast_to(np.empty((), self.array.dtype), self.shape)
        given = types.SimpleNamespace(dtype=getattr(self.given, "dtype", None))
        return HostArray(given, shape_only, self.dtype, self._library)

    def memory_of(self, array: NumpyArray) -> Memory:
        """Return the memory of the caller's array, a copy or a result."""
        return Memory(array.__array_interface__["data"][0], array)

    def write(self, result: NumpyArray) -> None:
        """Copy a result to the caller's array."""
        self.array[...] = result

    def wrap(self, result: NumpyArray) -> Any:
        """Return a result as an array of the caller's library."""
        if self._library is None:
            return result
        made = self._library.from_dlpack(result)
        return made.view(self.given.dtype) if self.dtype.name in _RAW else made

    def adopt(self, memory: Any, shape: Sequence[int]) -> Any:
        """Return memory that the engine has allocated for a result as an array of the caller's library."""
        return self.wrap(np.frombuffer(memory, self.array.dtype).reshape(shape))


class Scalar(HostArray):
    """A number of Python or NumPy, as a copy: no operation in place can change it."""

    __slots__ = ()

    def __init__(self, given: Any, label: str) -> None:
        array = array_of_number(given, label)
        array.flags.writeable = False
        super().__init__(given, array, _checked_dtype(array, label))

    def without_memory(self) -> Scalar:
        """Return the description itself: a number takes no memory worth the name."""
        return self

    def wrap(self, result: NumpyArray) -> Any:
        """Return a result as a number of the caller's library."""
        return number_like(self.given, result)


def is_number(given: Any) -> bool:
    """Return whether this is a real number of Python or any of NumPy."""
    return isinstance(given, (float, int, np.generic))


def array_of_number(number: Any, label: str) -> NumpyArray:
    """Return a new array of no dimensions. A bool of Python becomes bool, an int int64 and a float float64.

    Raises:
        ValueError: An integer does not fit.
    """
    if isinstance(number, np.generic):
        return np.array(number)
    kind = "bool" if isinstance(number, bool) else "int64" if isinstance(number, int) else "float64"
    try:
        return np.array(number, kind)
    except OverflowError:
        raise ValueError(f"{label}: integers are sent as int64, and {number} does not fit") from None


def number_like(given: Any, array: NumpyArray) -> Any:
    """Return the element of an array of no dimensions as a number of the library of another number."""
    return array[()] if isinstance(given, np.generic) else array.item()


class GpuArray:
    """An array on a GPU. Attributes and methods are as in `HostArray`; `array` is one of the caller's library.

    The library makes the default stream wait for the work that it has queued for the array. The engine is called on the
    default stream, so its work comes after that.
    """

    __slots__ = ("_exported", "_label", "_library", "array", "dtype", "given", "gpu")

    def __init__(self, given: Any, gpu: int, label: str) -> None:
        self.given = self.array = given
        self.gpu = gpu
        self._label = label
        self._library = _library_of(given, label)
        self._exported = dlpack.export(given, label, dlpack.DEFAULT_STREAM)
        self.dtype = self._exported.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents by dimension."""
        return self._exported.shape

    @property
    def is_writable(self) -> bool:
        """True if its library lets other code write the array."""
        return not self._exported.read_only

    def overlaps_itself(self) -> bool:
        """Return whether elements share memory, as in an array that was broadcast to its shape."""
        strides = self._exported.strides or ()  # without strides there are no gaps
        return any(extent > 1 and not stride for extent, stride in zip(self.shape, strides, strict=False))

    def in_memory(self, allows_columns: bool) -> tuple[Any, MemoryFormat]:
        """Return the array, or a copy, whose elements lie row by row without gaps."""
        del allows_columns
        if self._exported.is_row_major:
            return self.array, MemoryFormat.ROW_MAJOR
        copy = self.empty(self.shape)
        copy[...] = self.array
        return copy, MemoryFormat.ROW_MAJOR

    def empty(self, shape: Sequence[int], memory_format: MemoryFormat = MemoryFormat.ROW_MAJOR) -> Any:
        """Return an uninitialised array for a result. Any thread may call this."""
        del memory_format
        try:
            return self._library.empty(tuple(shape), dtype=self.given.dtype, device=self.given.device)
        except TypeError:  # CuPy's takes no device, and uses the current one
            with self.given.device:
                return self._library.empty(tuple(shape), dtype=self.given.dtype)

    def memory_of(self, array: Any) -> Memory:
        """Return the memory of the caller's array, a copy or a result. The default stream waits for the work on it."""
        exported = self._exported
        if array is not self.array:
            exported = dlpack.export(array, self._label, dlpack.DEFAULT_STREAM)
        return Memory(exported.address, exported.capsule)

    def write(self, result: Any) -> None:
        """Copy a result to the caller's array."""
        self.given[...] = result

    def wrap(self, result: Any) -> Any:
        """Return a result, which is of the caller's library already."""
        return result


Array: TypeAlias = HostArray | GpuArray
COUNTS = HostArray(None, np.empty(0, np.int32), DType["int32"])
"""A model for the second result of an alltoall, the number of rows received from each rank."""


def describe(given: Any, label: str) -> Array:
    """Return the array as the engine sees it.

    Args:
        given: A NumPy array, an array of another library with DLPack, an object with the buffer protocol, or a number.
        label: The name of the operation in messages.

    Raises:
        TypeError: `given` is not an array.
        ValueError: Its elements cannot be sent, or are not where the engine can reach them.
    """
    if isinstance(given, np.ndarray):
        return _of_numpy(given, np.asarray(given), label)
    if is_number(given):
        return Scalar(given, label)
    if dlpack.is_array(given):
        kind, number = dlpack.device_of(given, label)
        if kind in (DeviceType.CUDA, DeviceType.CUDA_MANAGED):
            return GpuArray(given, number, label)
        exported = dlpack.export(given, label)
        return HostArray(given, np.asarray(_Foreign(exported)), exported.dtype, _library_of(given, label))
    try:
        view = memoryview(given)
    except TypeError:
        raise TypeError(
            f"{label}: expected a NumPy array, an array with __dlpack__(), an object with the buffer protocol or a "
            f"real number, got {type(given).__name__}; "
            f"{'its .toarray()' if hasattr(given, 'toarray') else 'numpy.asarray()'} makes an array of it"
        ) from None
    try:
        array = np.asarray(view)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"{label}: elements of the format {view.format!r} cannot be sent: {error}") from error
    return _of_numpy(given, array, label)


def check_averages(dtypes: Sequence[DType], label: str) -> None:
    """Make sure that the average, which is meant where the caller has chosen no reduction, is exact but for rounding.

    Raises:
        ValueError: A type is of integers or bool; the message has the choices.
    """
    for dtype in dtypes:
        if dtype.name == "bool":
            raise ValueError(f"{label}: bool has no average: give op=hvd.Max (or) or op=hvd.Min (and)")
        if "int" in dtype.name:
            raise ValueError(
                f"{label}: the average of {dtype.name} would be truncated: give op=hvd.Sum, or op=hvd.Average if "
                "truncation is meant"
            )


def _of_numpy(given: Any, array: NumpyArray, label: str) -> HostArray:
    if hasattr(given, "mask"):
        raise TypeError(f"{label}: the mask of a {type(given).__name__} cannot be sent; send .filled() or .data")
    return HostArray(given, array, _checked_dtype(array, label))


def _checked_dtype(array: NumpyArray, label: str) -> DType:
    dtype = _engine_dtype(array.dtype)
    if dtype is None:
        raise ValueError(dlpack.unknown_dtype(array.dtype, label))
    if not array.dtype.isnative:
        raise ValueError(
            f"{label}: the elements are not in the byte order of this machine ({array.dtype.str}); "
            f"array.astype(array.dtype.newbyteorder('=')) brings them into it"
        )
    return dtype


@functools.lru_cache(maxsize=64)  # NumPy takes 2 us to make the name
def _engine_dtype(dtype: np.dtype[Any]) -> DType | None:
    return DType.__members__.get(dtype.name)


def _library_of(array: Any, label: str) -> Any:
    """Return the module that has `from_dlpack` for arrays of this type.

    Raises:
        TypeError: There is no such module.
    """
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    for base in type(array).__mro__:
        module = sys.modules.get(base.__module__.partition(".")[0])
        if hasattr(module, "from_dlpack"):
            return module
    raise TypeError(
        f"{label}: the library of {type(array).__name__} has no from_dlpack() to make the result with; pass "
        f"numpy.from_dlpack(array), or its own module of horovodlike if it has one"
    )


def check_distinct(arrays: Sequence[Array], label: str) -> None:
    """Make sure that an operation in place can write the arrays, and that no two elements share memory.

    Raises:
        ValueError: An array is read-only, or elements share memory.
    """
    for array in arrays:
        if not array.is_writable:
            raise ValueError(f"{label}: an array that is read-only cannot be overwritten; the form without '_' copies")
        if array.overlaps_itself():
            raise ValueError(f"{label}: elements of an array share memory, as after broadcast_to(); copy it first")
    if len(arrays) > 1:
        check_no_overlap(arrays, label)


def check_no_overlap(arrays: Sequence[Array], label: str) -> None:
    """Make sure that arrays in the host's memory have no memory in common.

    Raises:
        ValueError: Two arrays share memory.
    """
    on_host = [array.array for array in arrays if isinstance(array, HostArray) and array.array.size]
    begun: list[tuple[int, NumpyArray]] = []  # arrays that may reach into the next one, with their ends
    for begin, end, index in sorted((*_bounds(array), index) for index, array in enumerate(on_host)):
        begun = [(its_end, other) for its_end, other in begun if its_end > begin]
        if any(np.shares_memory(on_host[index], other) for _, other in begun):
            raise ValueError(f"{label}: two of the arrays share memory; copy one of them first")
        begun.append((end, on_host[index]))


def _bounds(array: NumpyArray) -> tuple[int, int]:
    """Return the address of the first byte of an array, and the address after its last byte."""
    reaches = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    address: int = array.__array_interface__["data"][0]
    return address + sum(min(reach, 0) for reach in reaches), address + sum(
        max(reach, 0) for reach in reaches
    ) + array.itemsize
