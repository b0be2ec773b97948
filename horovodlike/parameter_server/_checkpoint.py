"""Files with the elements and the rules' state of a parameter server: NumPy's format of several arrays (.npz).

The file has for each array i ``values.i`` and, if 'momentum' or 'adam' has been used, ``slot_0.i`` and ``slot_1.i``
(arrays like the values) and ``counters.i`` with ``blocks.i``: how often 'adam' has updated a block, and where the block
begins. Nothing in it depends on the servers; with other servers, a block takes the count of the saved block in which
it begins.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np

from horovodlike._engine.parameters import Array, Remembered, Update
from horovodlike.arrays.memory import NumpyArray
from horovodlike.elastic._state_file import replacing
from horovodlike.errors import StateFileError
from horovodlike.parameter_server._handles import Handle
from horovodlike.parameter_server._sharding import Part, blocks
from horovodlike.parameter_server._template import Template, address

_SLOTS = {"slot_0": Remembered.SLOT_0, "slot_1": Remembered.SLOT_1}
_FORMAT = "horovodlike parameters 1"


def save(
    path: str | os.PathLike[str], arrays: Sequence[Array], template: Template, parts: Sequence[Sequence[Part]]
) -> bool:
    """Write arrays to a file, see `ParameterServer.save`; return False if they have changed while they were read.

    All shards are asked for their numbers of updates before anything else is read, and again after all that: so if no
    number has changed, there was a moment at which all shards were as the file has them.
    """
    before = _num_updates(arrays, parts)
    found: dict[str, NumpyArray] = {"format": np.array(_FORMAT)}
    found["dtypes"] = np.array([dtype.name for dtype in template.dtypes])
    calls = []
    for index, array in enumerate(arrays):
        values = template.empty(index)
        found[f"values.{index}"] = _storable(values)
        calls.append(array.receive(0, values.size, address(values), values))
        if not _is_remembered(template, index):
            continue
        for name, state in _SLOTS.items():
            slot = found[f"{name}.{index}"] = template.empty(index)
            calls.append(array.receive_state(state, address(slot), slot))
        counters = found[f"counters.{index}"] = np.zeros(array.num_blocks, np.uint64)
        calls.append(array.receive_state(Remembered.COUNTERS, address(counters), counters))
        found[f"blocks.{index}"] = np.array(blocks(parts[index]), np.int64)
    Handle(calls).wait()
    is_consistent = _num_updates(arrays, parts) == before
    kept = {name: each for name, each in found.items() if not name.startswith("slot") or each.any()}
    with replacing(os.fspath(path), "the parameters") as file:
        np.savez(file, **kept)  # type: ignore[arg-type]
    return is_consistent


def _num_updates(arrays: Sequence[Array], parts: Sequence[Sequence[Part]]) -> list[list[int]]:
    counts = [np.zeros(len(of_array), np.uint64) for of_array in parts]
    pairs = zip(arrays, counts, strict=True)
    Handle([array.receive_state(Remembered.UPDATES, address(each), each) for array, each in pairs]).wait()
    return [each.tolist() for each in counts]


def load(
    path: str | os.PathLike[str],
    arrays: Sequence[Array],
    template: Template,
    parts: Sequence[Sequence[Part]],
    label: str,
) -> None:
    """Restore arrays from a file; see `ParameterServer.load`."""
    found = _read(path, template, label)
    zeros = _missing_slots(found, arrays, template)
    calls = []
    for index, array in enumerate(arrays):
        values = found[f"values.{index}"]
        calls.append(array.send(Update("copy"), 0, values.size, address(values), values))
        if not _is_remembered(template, index):
            continue
        for name, state in _SLOTS.items():
            slot = (found if f"{name}.{index}" in found else zeros).get(f"{name}.{index}")
            if slot is not None:
                calls.append(array.send_state(state, address(slot), slot))
        block = np.searchsorted(found[f"blocks.{index}"], blocks(parts[index]), side="right") - 1
        counters = np.ascontiguousarray(found[f"counters.{index}"][block])
        calls.append(array.send_state(Remembered.COUNTERS, address(counters), counters))
    Handle(calls).wait()


def _missing_slots(
    found: Mapping[str, NumpyArray], arrays: Sequence[Array], template: Template
) -> dict[str, NumpyArray]:
    """Return zeros for the slots that servers have and the file lacks; a server makes a slot when it receives one."""
    wanted = [(index, name) for index in range(len(arrays)) for name in _SLOTS if _is_remembered(template, index)]
    held = {(index, name): template.empty(index) for index, name in wanted if f"{name}.{index}" not in found}
    Handle([arrays[i].receive_state(_SLOTS[name], address(each), each) for (i, name), each in held.items()]).wait()
    return {f"{name}.{index}": np.zeros_like(each) for (index, name), each in held.items() if each.any()}


def _read(path: str | os.PathLike[str], template: Template, label: str) -> dict[str, NumpyArray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.require(file[name], requirements=["C", "A"]) for name in file.files}
        if str(found["format"]) != _FORMAT:
            raise ValueError(f"its format is {found['format']}, and this release reads {_FORMAT!r}")
        theirs = [(found[f"values.{index}"].shape, str(dtype)) for index, dtype in enumerate(found["dtypes"])]
        problem = _difference(theirs, template)
        if problem is None:
            for index in range(len(theirs)):
                _check_entries(found, index, template)
    except (ValueError, KeyError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise StateFileError(
            f"{os.fspath(path)} is damaged, or was not written by ParameterServer.save(): {error}"
        ) from error
    if problem is not None:
        raise ValueError(f"{label}: {os.fspath(path)}{problem}")
    return found


def _difference(theirs: Sequence[tuple[tuple[int, ...], str]], template: Template) -> str | None:
    """Return how the shapes and types of a file differ from the servers' shapes and types; None: not at all."""
    if len(theirs) != len(template.named):
        return f" has {len(theirs)} arrays, and the servers have {len(template.named)}"
    for index, (has, wanted) in enumerate(zip(theirs, template.named, strict=True)):
        if has != wanted:
            return (
                f": array {index} has the shape {has[0]} and elements of {has[1]}, and the servers have {wanted[0]} "
                f"and {wanted[1]}"
            )
    return None


def _check_entries(found: Mapping[str, NumpyArray], index: int, template: Template) -> None:
    """Raise ValueError or KeyError unless the entries of an array are those that `save` writes for it."""
    like = _storable(template.empty(index))
    wanted = {f"values.{index}": (like.shape, like.dtype)}
    if _is_remembered(template, index):
        wanted |= {name: (like.shape, like.dtype) for slot in _SLOTS if (name := f"{slot}.{index}") in found}
        begins = found[f"blocks.{index}"]
        wanted |= {f"blocks.{index}": ((begins.size,), np.dtype(np.int64))}
        wanted |= {f"counters.{index}": ((begins.size,), np.dtype(np.uint64))}
    for name, (shape, dtype) in wanted.items():
        if (found[name].shape, found[name].dtype) != (shape, dtype):
            raise ValueError(
                f"{name} has the shape {found[name].shape} and elements of {found[name].dtype}, not {shape} and {dtype}"
            )
    if _is_remembered(template, index) and like.size and not (begins.size and begins[0] == 0):
        raise ValueError(f"blocks.{index} does not begin with 0")


def _is_remembered(template: Template, index: int) -> bool:
    """Return whether rules can remember something of an array."""
    return template.dtypes[index].name in ("float32", "float64")


def _storable(values: NumpyArray) -> NumpyArray:
    """Return elements of types that NumPy lacks as integers: the file could not be read otherwise."""
    return values if values.dtype.isbuiltin == 1 else values.view(f"u{values.itemsize}")
