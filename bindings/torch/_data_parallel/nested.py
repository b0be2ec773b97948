"""Tensors in nested dicts, lists, tuples and named tuples: split along a dimension, one part per device, and joined."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

# Outputs of these types are the same on all devices, or cannot be joined.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def scatter(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Sequence[torch.device], dim: int
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split all tensors in arguments as `torch.chunk` does, so that small batches have fewer parts than devices.

    A part of a tensor on the same device has the memory of that tensor. Values that are no tensors are in all parts.

    Returns:
        The positional and the keyword arguments of each part.

    Raises:
        TypeError: There is a `PackedSequence`, whose rows are not a batch's rows.
        ValueError: A tensor does not have the dimension, or the tensors have different numbers of parts.
    """
    tensors = {id(tensor): tensor for tensor in _tensors_in([*inputs, *kwargs.values()])}
    chunks = {key: _chunks(tensor, devices, dim) for key, tensor in tensors.items()}
    counts = {len(each) for each in chunks.values()}
    if len(counts) > 1:
        sizes = sorted({tensor.shape[dim] for tensor in tensors.values()})
        raise ValueError(
            f"the tensors in the input have sizes {sizes} in dimension {dim}, of which {len(devices)} devices get "
            f"{sorted(counts)} parts: give tensors of one batch size; what all replicas need as a whole must not be a "
            "tensor argument, but for example a buffer of the module"
        )
    without_tensors = len(devices) if inputs or kwargs else 1
    count = counts.pop() if counts else without_tensors
    parts = [(_part(inputs, chunks, i), _part(dict(kwargs), chunks, i)) for i in range(count)]
    return tuple(args for args, _ in parts), tuple(named for _, named in parts)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        raise TypeError("a PackedSequence cannot be split into batches: call pack_padded_sequence in the forward pass")
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _chunks(tensor: torch.Tensor, devices: Sequence[torch.device], dim: int) -> list[torch.Tensor]:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} in the input has no dimension {dim} to be split: give a number "
            "in place of a tensor without dimensions, or a tensor with that dimension"
        )
    chunks = tensor.chunk(len(devices), dim)
    if not chunks[0].requires_grad:
        # Each with a version counter of its own: a replica may overwrite its part while another has saved its own.
        chunks = tuple(chunk.data for chunk in chunks)
    return [chunk.to(device, non_blocking=True) for chunk, device in zip(chunks, devices, strict=False)]


def _part(value: Any, chunks: Mapping[int, Sequence[torch.Tensor]], index: int) -> Any:
    if isinstance(value, torch.Tensor):
        return chunks[id(value)][index]
    if isinstance(value, dict):
        return _rebuilt(value, [_part(each, chunks, index) for each in value.values()])
    if isinstance(value, (list, tuple)):
        return _rebuilt(value, [_part(each, chunks, index) for each in value])
    return value


def _rebuilt(container: Any, values: Sequence[Any]) -> Any:
    """Return a container of the same type and with the same keys, but other values."""
    if isinstance(container, dict):
        result = copy.copy(container)  # which keeps other state of the type, such as the factory of a defaultdict
        for key, value in zip(container, values, strict=True):
            result[key] = value
        return result
    return container._make(values) if hasattr(container, "_make") else type(container)(values)


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Join the outputs of the replicas: tensors are concatenated, those without dimensions become a vector.

    Raises:
        TypeError: The outputs differ in their types, or are neither tensors nor equal.
        ValueError: Containers differ in their lengths or keys, or a tensor does not have the dimension.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor) and all(isinstance(each, torch.Tensor) for each in outputs):
        return _joined(outputs, device, dim)
    types = [type(each) for each in outputs]
    if any(each is not types[0] for each in types):
        raise TypeError(f"the replicas return different types: {', '.join(each.__name__ for each in types)}")
    if isinstance(first, dict):
        if any(each.keys() != first.keys() for each in outputs):
            raise ValueError(f"the replicas return dicts with different keys: {[list(each) for each in outputs]}")
        return _rebuilt(first, [gather([each[key] for each in outputs], device, dim) for key in first])
    if isinstance(first, (list, tuple)):
        lengths = [len(each) for each in outputs]
        if len(set(lengths)) > 1:
            raise ValueError(f"the replicas return {types[0].__name__}s of different lengths: {lengths}")
        return _rebuilt(first, [gather(each, device, dim) for each in zip(*outputs, strict=True)])
    if all(each is first for each in outputs) or (isinstance(first, _PLAIN) and all(each == first for each in outputs)):
        return first
    raise TypeError(
        f"outputs of type {types[0].__name__} that differ between the replicas cannot be joined: return tensors, or "
        "dicts, lists and tuples of tensors"
    )


def _joined(tensors: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    moved = [tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors]
    if dim in (0, -1) and all(tensor.dim() == 0 for tensor in moved):
        return torch.stack(moved)
    for number, tensor in enumerate(moved):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"replica {number} returns a tensor of shape {list(tensor.shape)}, which has no dimension {dim} to be "
                "joined along"
            )
    return torch.cat(moved, dim) if len(moved) > 1 else moved[0]
