"""`check_consistency`: a check that all ranks hold the same model."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horovodlike.arrays.consistency import Record, check, record
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch._ops import disable_compile

Model = torch.nn.Module | Mapping[str, torch.Tensor | None] | Iterable[tuple[str, torch.Tensor | None]]


def check_consistency(model: Model, process_set: ProcessSet = global_process_set) -> None:
    """Raise on every rank unless all ranks hold the same tensors: same names, shapes, dtypes and bits.

    Every rank of the set has to call this, one thread at a time, and it returns on all of them or raises on all. It
    sends BLAKE2b hashes only. The tensors' order, strides and devices do not matter. 0.0 and -0.0 are not equal.

    Args:
        model: A module, whose parameters and buffers are compared (also non-persistent buffers); a state dict; or an
            iterable of pairs of name and tensor. Entries that are None are skipped. Tensors may be of any dtype.
        process_set: The ranks that are compared.

    Raises:
        MismatchError: (A `HorovodInternalError`.) The ranks differ. The message, the same on all of them, has the first
            tensor that differs, parameters first, the kind of difference, and which ranks agree. The job continues.
        HorovodInternalError: The job is broken or shut down.
        ValueError: An entry is no dense tensor with values, or a name occurs twice. Only this rank raises it.
    """
    check(records_of(_named_tensors(model)), process_set)


def _named_tensors(model: Model) -> list[tuple[str, torch.Tensor]]:
    entries: Any = [*model.named_parameters(), *model.named_buffers()] if isinstance(model, torch.nn.Module) else model
    if not isinstance(entries, Iterable) or isinstance(entries, (str, bytes, torch.Tensor)):
        raise ValueError(f"expected a module, a state dict or pairs of name and tensor, got {type(model)}")
    named: dict[str, torch.Tensor] = {}
    for entry in entries.items() if isinstance(entries, Mapping) else entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(f"expected pairs of name and tensor, got an entry of type {type(entry)}")
        name, tensor = entry
        if name in named:
            raise ValueError(f"{name}: the name occurs twice")
        if tensor is not None:
            _check(name, tensor)
            named[name] = tensor
    return list(named.items())


def _check(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor)}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: tensors of layout {tensor.layout} are not supported; use .to_dense() first")
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name}: the tensor has no values yet")


def records_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[Record]:
    """Return the records of dense tensors; lazy parameters without values are left out."""
    return [_record(name, tensor) for name, tensor in named if not torch.nn.parameter.is_lazy(tensor)]


def _record(name: str, tensor: torch.Tensor) -> Record:
    in_order = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return record(name, str(tensor.dtype).removeprefix("torch."), tensor.shape, _memory(in_order))


def _memory(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor on the CPU in a form that `hashlib` takes, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""


disable_compile(check_consistency)
