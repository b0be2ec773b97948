"""Files with the elements of a parameter server and what its rules remember: NumPy's format of several arrays (.npz).

The file has for each array i ``values.i`` and, if 'momentum' or 'adam' has been used, ``slot_0.i`` and ``slot_1.i``
(arrays like the values) and ``counters.i`` with ``blocks.i``: how often 'adam' has updated a block, and where the block
begins. Nothing in it depends on the servers; elements of a block of other servers get the count of the block in which
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
) -> None:
    """Write arrays to a file; see `ParameterServer.save`."""
    found: dict[str, NumpyArray] = {"format": np.array(_FORMAT)}
    found["dtypes"] = np.array([dtype.name for dtype in template.dtypes])
    calls = []
    for index, array in enumerate(arrays):
        values = template.empty(index)
        # Elements of types that NumPy lacks are written as integers: the file could not be read otherwise.
        found[f"values.{index}"] = values if values.dtype.isbuiltin == 1 else values.view(f"u{values.itemsize}")
        calls.append(array.receive(0, values.size, address(values), values))
        if template.dtypes[index].name not in ("float32", "float64"):
            continue  # no rule remembers anything of it
        for name, state in _SLOTS.items():
            slot = found[f"{name}.{index}"] = template.empty(index)
            calls.append(array.receive_state(state, address(slot), slot))
        counters = found[f"counters.{index}"] = np.zeros(array.num_blocks, np.uint64)
        calls.append(array.receive_state(Remembered.COUNTERS, address(counters), counters))
        found[f"blocks.{index}"] = np.array(blocks(parts[index]), np.int64)
    Handle(calls).wait()
    kept = {name: each for name, each in found.items() if not name.startswith("slot") or each.any()}
    with replacing(os.fspath(path), "the parameters") as file:
        np.savez(file, **kept)  # type: ignore[arg-type]


def load(
    path: str | os.PathLike[str],
    arrays: Sequence[Array],
    template: Template,
    parts: Sequence[Sequence[Part]],
    label: str,
) -> None:
    """Restore arrays from a file; see `ParameterServer.load`."""
    found = _read(path)
    _check(found, template, f"{label}: {os.fspath(path)}")
    calls = []
    for index, array in enumerate(arrays):
        values = found[f"values.{index}"]
        calls.append(array.send(Update("copy"), 0, values.size, address(values), values))
        if f"counters.{index}" not in found:
            continue
        for name, state in _SLOTS.items():
            slot = found.get(f"{name}.{index}", np.zeros(values.shape, values.dtype))
            calls.append(array.send_state(state, address(slot), slot))
        block = np.searchsorted(found[f"blocks.{index}"], blocks(parts[index]), side="right") - 1
        counters = np.ascontiguousarray(found[f"counters.{index}"][block])
        calls.append(array.send_state(Remembered.COUNTERS, address(counters), counters))
    Handle(calls).wait()


def _read(path: str | os.PathLike[str]) -> dict[str, NumpyArray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: np.require(file[name], requirements=["C", "A"]) for name in file.files}
        if str(found["format"]) != _FORMAT:
            raise ValueError(f"its format is {found['format']}, and this release reads {_FORMAT!r}")
    except (ValueError, KeyError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise StateFileError(
            f"{os.fspath(path)} is damaged, or was not written by ParameterServer.save(): {error}"
        ) from error
    return found


def _check(found: Mapping[str, NumpyArray], template: Template, label: str) -> None:
    theirs = [(found[f"values.{index}"].shape, str(dtype)) for index, dtype in enumerate(found["dtypes"])]
    if len(theirs) != len(template.named):
        raise ValueError(f"{label} has {len(theirs)} arrays, and the servers have {len(template.named)}")
    for index, (has, wanted) in enumerate(zip(theirs, template.named, strict=True)):
        if has != wanted:
            raise ValueError(
                f"{label}: array {index} has the shape {has[0]} and elements of {has[1]}, and the servers have "
                f"{wanted[0]} and {wanted[1]}"
            )
