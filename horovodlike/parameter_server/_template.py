"""The arrays of a parameter server as callers pass and receive them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovodlike.arrays.memory import HostArray, NumpyArray, check_distinct, describe


class Template:
    """The number, shapes, element types and library of the arrays; it does not keep their elements.

    Attributes:
        given: The arrays as the core sees them, until `forget`.
        is_list: Whether callers pass and receive a list.
        shapes: The shape of each array.
        dtypes: The element type of each array.
        sizes: The number of elements of each array.
    """

    def __init__(self, value: Any, label: str) -> None:
        """Take an array, or a list of arrays.

        Args:
            value: The array or the list.
            label: The name of the parameter server, for errors.

        Raises:
            TypeError: `value` is something else.
            ValueError: An array cannot be used.
        """
        self._label = label
        self.is_list = isinstance(value, (list, tuple))
        self.given = [_on_host(each, label) for each in (value if self.is_list else [value])]
        self.shapes = [each.shape for each in self.given]
        self.dtypes = [each.dtype for each in self.given]
        self.sizes = [each.array.size for each in self.given]
        self._models = [each.without_memory() for each in self.given]

    def forget(self) -> None:
        """Release the arrays that were given."""
        self.given = []

    def match(self, given: Any, index: int, operation: str, shape: tuple[int, ...] | None = None) -> HostArray:
        """Return an array as the core sees it; an error says how it differs from the template's array.

        Args:
            given: The array.
            index: Its number.
            operation: The name of the call, for errors.
            shape: The shape that it must have; None: the template's shape.
        """
        label, shape = f"{self._label}: {operation}", self.shapes[index] if shape is None else shape
        found, which = _on_host(given, label), f"array {index}" if self.is_list else "the array"
        if found.shape != shape:
            raise ValueError(f"{label}: {which} must have the shape {shape}, got {found.shape}")
        if found.dtype != self.dtypes[index]:
            wanted = self.dtypes[index].name
            raise ValueError(f"{label}: {which} must have elements of {wanted}, got {found.dtype.name}")
        return found

    def match_all(self, given: Any, operation: str) -> list[HostArray]:
        """Return an array, or the arrays of a list, as the core sees them."""
        if isinstance(given, (list, tuple)) != self.is_list or (self.is_list and len(given) != len(self.shapes)):
            wanted = f"a list of {len(self.shapes)} arrays" if self.is_list else "one array"
            got = f"{len(given)} of them" if isinstance(given, (list, tuple)) else type(given).__name__
            raise TypeError(f"{self._label}: {operation}: expected {wanted}, as in the constructor, got {got}")
        listed = given if self.is_list else [given]
        return [self.match(each, index, operation) for index, each in enumerate(listed)]

    def sendable(self, given: Any, operation: str) -> list[NumpyArray]:
        """As `match_all`; return NumPy arrays whose elements lie row by row without gaps."""
        model = self._models[0].array
        if type(given) is np.ndarray and not self.is_list:  # the usual case, at a fifth of the time
            flags = given.flags
            if given.dtype is model.dtype and given.shape == model.shape and flags.c_contiguous and flags.aligned:
                return [given]
        return [in_memory(each) for each in self.match_all(given, operation)]

    def writable(self, out: Any, operation: str) -> list[HostArray]:
        """As `match_all`, for arrays that will be written."""
        targets = self.match_all(out, operation)
        check_distinct(targets, f"{self._label}: {operation}")
        return targets

    def rows(self, indices: Any, operation: str) -> tuple[NumpyArray, tuple[int, ...], int]:
        """Return the numbers of rows for the core, the shape of these rows, and the number of elements of one."""
        label, shape = f"{self._label}: {operation}", self.shapes[0]
        if self.is_list or not shape:
            raise ValueError(f"{label}: rows are those of one array with dimensions; make a ParameterServer of it")
        found = np.asarray(indices)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise TypeError(f"{label}: indices must be integers in one dimension, got {found.dtype} in {found.ndim}")
        wrong = found[(found < 0) | (found >= shape[0])]
        if wrong.size:
            raise ValueError(f"{label}: there is no row {wrong[0]}: the array has {shape[0]} rows")
        return np.ascontiguousarray(found, np.int64), (found.size, *shape[1:]), math.prod(shape[1:])

    def empty(self, index: int, shape: tuple[int, ...] | None = None) -> NumpyArray:
        """Return memory for an array, or for rows of it with another shape."""
        return self._models[index].empty(self.shapes[index] if shape is None else shape)

    def empty_all(self) -> list[NumpyArray]:
        """Return memory for all arrays."""
        return [self.empty(index) for index in range(len(self.shapes))]

    def wrap(self, memory: Sequence[NumpyArray]) -> Any:
        """Return memory as arrays of the library of those that were given: one, or a list."""
        wrapped = [model.wrap(each) for model, each in zip(self._models, memory, strict=True)]
        return wrapped if self.is_list else wrapped[0]

    @property
    def named(self) -> list[tuple[tuple[int, ...], str]]:
        """The shape and the name of the element type of each array."""
        return [(shape, dtype.name) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]


def in_memory(array: HostArray) -> NumpyArray:
    """Return the array, or a copy, whose elements lie row by row without gaps."""
    return array.in_memory(allows_columns=False)[0]


def address(array: NumpyArray) -> int:
    """Return the address of an array's first element."""
    found: int = array.__array_interface__["data"][0]
    return found


def written(out: Any, targets: Sequence[HostArray], memory: Sequence[NumpyArray]) -> Any:
    """Copy the received elements to arrays of the caller that have gaps; return the caller's object."""
    for target, each in zip(targets, memory, strict=True):
        if each is not target.array:
            target.write(each)
    return out


def _on_host(given: Any, operation: str) -> HostArray:
    array = describe(given, operation)
    if not isinstance(array, HostArray):
        raise ValueError(f"{operation}: the array is on a GPU; copy it to the memory of the host first")
    return array
