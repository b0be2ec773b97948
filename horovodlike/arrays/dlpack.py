"""The memory of other libraries' arrays, as DLPack (https://dmlc.github.io/dlpack) describes it.

A capsule that a library has made is read and not consumed: it keeps the memory until the capsule itself is collected.
Both layouts of the capsule's content are supported: the one before version 1, and the one of version 1, which tells
whether the memory may be written.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, NamedTuple

from horovodlike._engine.ops import DType

MAX_VERSION = (1, 1)
_READ_ONLY, _IS_COPIED = 1, 2  # flags of version 1
# The stream that a library has to make wait for its work: the default stream of CUDA, by DLPack's number.
DEFAULT_STREAM = 1


class DeviceType(IntEnum):
    """The kinds of memory that the engine can use."""

    CPU = 1
    CUDA = 2
    CUDA_HOST = 3
    CUDA_MANAGED = 13


# Names of `DType`, by DLPack's type code and the number of bits.
_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(4, 16): "bfloat16", (6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"},
    **{(5, 64): "complex64", (5, 128): "complex128"},
}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Not the attributes of `pythonapi`: other code uses those as well, and may set other types of arguments.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


class Exported(NamedTuple):
    """The description of an array by its library.

    Attributes:
        capsule: The object that keeps the memory.
        address: The address of the first element.
        shape: Extents by dimension.
        strides: Strides by dimension, in elements; None: row by row without gaps.
        dtype: The element type.
        read_only: True if the memory must not be written.
    """

    capsule: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    read_only: bool

    @property
    def is_row_major(self) -> bool:
        """True if the elements lie row by row without gaps."""
        if self.strides is None or 0 in self.shape:
            return True
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True


def is_array(candidate: object) -> bool:
    """Return whether an object supports DLPack."""
    return hasattr(candidate, "__dlpack__") and hasattr(candidate, "__dlpack_device__")


def device_of(array: Any, label: str) -> tuple[DeviceType, int]:
    """Return the kind and the number of an array's device.

    Raises:
        ValueError: The engine cannot use memory of this kind, or the library cannot tell the device.
    """
    try:
        kind, number = array.__dlpack_device__()
        return DeviceType(int(kind)), int(number)
    except Exception as error:  # libraries raise different errors for arrays that they cannot export
        raise ValueError(
            f"{label}: {_named(array)} is not in memory that can be sent, which is that of the host and of NVIDIA's "
            f"GPUs; copy it to one of them ({error})"
        ) from error


def export(array: Any, label: str, stream: int | None = None) -> Exported:
    """Return the description of an array by its library.

    Args:
        array: An object with ``__dlpack__``.
        label: The name of the operation in messages.
        stream: A stream of the array's GPU, by DLPack's number, that must wait for the library's work on the array.

    Raises:
        ValueError: The library cannot export the array, or the engine does not know its element type.
    """
    arguments = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = array.__dlpack__(max_version=MAX_VERSION, **arguments)
        except TypeError:  # the library is older than `max_version`
            capsule = array.__dlpack__(**arguments)
    except Exception as error:  # libraries raise different errors for arrays that they cannot export
        raise ValueError(f"{label}: {_named(array)} cannot be exported: {error}") from error
    tensor, flags = _contents(capsule, array, label)
    code, bits = tensor.dtype.code, tensor.dtype.bits
    known = _DTYPES.get((code, bits), f"code {code} and {bits} bits") if tensor.dtype.lanes == 1 else "vectors"
    if known not in DType.__members__:
        raise ValueError(unknown_dtype(known, label))
    return Exported(
        capsule,
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        DType[known],
        bool(flags & (_READ_ONLY | _IS_COPIED)) or _is_immutable(array),
    )


def _is_immutable(array: object) -> bool:
    """Return whether arrays of this type are immutable. JAX's are, although their capsules do not say so."""
    return hasattr(array, "__array_namespace__") and not hasattr(array, "__iadd__")


def unknown_dtype(dtype: object, label: str) -> str:
    """Return the message for an element type that the engine does not know."""
    return f"{label}: arrays of dtype {dtype} cannot be sent; known are {', '.join(DType.__members__)}"


def _contents(capsule: object, array: object, label: str) -> tuple[_Tensor, int]:
    """Return the description in a capsule, and its flags."""
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if versioned.major == MAX_VERSION[0]:
            return versioned.tensor, versioned.flags
    elif _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_pointer_of(capsule, b"dltensor")), 0
    raise ValueError(f"{label}: {_named(array)} is exported in a form that is not of DLPack version 1 or before")


def _named(array: object) -> str:
    return f"an array of type {type(array).__module__}.{type(array).__qualname__}"
