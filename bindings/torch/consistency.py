"""`check_consistency`: a check that all ranks hold the same model.

The ranks compare hashes, so a check costs one pass over the rank's own tensors and a message of some bytes. Only if the
ranks differ, they exchange the hashes of the single tensors to find the tensors that differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from horovodlike import objects
from horovodlike.errors import MismatchError
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch._ops import disable_compile

_DIGEST_BYTES = 16


class Record(NamedTuple):
    """Name, dtype, shape and hash of one tensor of a rank."""

    name: str
    dtype: str
    shape: list[int]
    digest: str


Model = torch.nn.Module | Mapping[str, torch.Tensor | None] | Iterable[tuple[str, torch.Tensor | None]]


def check_consistency(model: Model, process_set: ProcessSet = global_process_set) -> None:
    """Raise on every rank unless all ranks hold the same tensors: same names, shapes, dtypes and bits.

    This is a collective: every rank of the set has to call it, and it returns on all of them or raises on all. Only
    BLAKE2b hashes of the tensors are sent and compared; the tensors' order, strides and devices do not matter. NaNs
    with the same bits are equal; 0.0 and -0.0 are not. Only one thread at a time may call it.

    Args:
        model: A module, whose parameters and buffers are compared (also non-persistent buffers); a state dict; or an
            iterable of pairs of name and tensor. Entries that are None are skipped. Tensors may be of any dtype.
        process_set: The ranks that are compared.

    Raises:
        MismatchError: (A `HorovodInternalError`.) The ranks differ. The message is the same on all of them. It names
            the first tensor that differs, in the order of the model, parameters first. It says whether the tensor is
            missing or differs in shape, dtype or values, and which ranks agree. The job continues.
        HorovodInternalError: The job is broken or shut down.
        ValueError: An entry is no dense tensor with values, or a name occurs twice. Only this rank raises it.
    """
    named = _named_tensors(model)
    if process_set.size() == 1:
        return
    records = [_record(name, tensor) for name, tensor in named]
    set_id = registered_id(process_set)
    digests = objects.allgather_object(_digest_of_all(records), "allgather.consistency.digest", set_id)
    if len(set(digests)) == 1:
        return
    held = objects.allgather_object(records, "allgather.consistency.records", set_id)
    raise MismatchError(describe_difference(held, process_set.ranks or range(len(held))))


def _named_tensors(model: Model) -> list[tuple[str, torch.Tensor]]:
    if isinstance(model, torch.nn.Module):
        entries: list[Any] = [*model.named_parameters(), *model.named_buffers()]
    elif isinstance(model, Mapping):
        entries = list(model.items())
    elif isinstance(model, Iterable) and not isinstance(model, (str, bytes, torch.Tensor)):
        entries = list(model)
    else:
        raise ValueError(f"expected a module, a state dict or pairs of name and tensor, got {type(model)}")
    named: dict[str, torch.Tensor] = {}
    for entry in entries:
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


def _record(name: str, tensor: torch.Tensor) -> Record:
    in_order = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest = hashlib.blake2b(_memory(in_order), digest_size=_DIGEST_BYTES).hexdigest()
    return Record(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest)


def _memory(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor on the CPU in a form that `hashlib` takes, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""


def _digest_of_all(records: Sequence[Record]) -> bytes:
    """Return one hash of all records, sorted first: another rank may have filled its dict in another order."""
    text = json.dumps(sorted(records)).encode()
    return hashlib.blake2b(text, digest_size=32).digest()


def describe_difference(held: Sequence[Sequence[Record]], ranks: Sequence[int]) -> str:
    """Return a text that names the first tensor that is not equal on all ranks, and says how the ranks differ.

    Args:
        held: The records of each rank, in the order of its model. At least one must differ between ranks.
        ranks: The ranks' numbers, in the order of `held`.
    """
    by_rank = [{record.name: record for record in records} for records in held]
    # The names of the first rank in its order, then the names that only other ranks have.
    names = list(dict.fromkeys(record.name for records in held for record in records))
    differing = [name for name in names if any(own.get(name) != by_rank[0].get(name) for own in by_rank)]
    first = [own.get(differing[0]) for own in by_rank]
    return (
        f"the ranks do not hold the same model: {differing[0]}: {_describe(first, ranks)} "
        f"({len(differing)} of {len(names)} tensors differ)"
    )


def _describe(records: Sequence[Record | None], ranks: Sequence[int]) -> str:
    """Return a text on how the records of one tensor differ: by the first of presence, shape, dtype and values."""
    if None in records:
        missing = _groups([record is None for record in records], ranks)
        return f"missing on {_named(missing[True])}, present on {_named(missing[False])}"
    present = [record for record in records if record is not None]
    for what in ("shape", "dtype"):
        groups = _groups([str(getattr(record, what)) for record in present], ranks)
        if len(groups) > 1:
            return f"{what} is " + ", ".join(f"{value} on {_named(group)}" for value, group in groups.items())
    majority, *others = _groups([record.digest for record in present], ranks).values()
    verb = "differs" if len(others) == 1 and len(others[0]) == 1 else "differ"
    among = " and from each other" if len(others) > 1 else ""
    return f"values: {' and '.join(map(_named, others))} {verb} from {_named(majority)}{among}"


def _groups(values: Sequence[Any], ranks: Sequence[int]) -> dict[Any, list[int]]:
    """Return the ranks grouped by value: the largest group first, of equal sizes the group with the lowest rank."""
    groups: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[1])))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


disable_compile(check_consistency)
