"""Comparisons of the ranks' models by hashes, at the cost of a pass over each rank's tensors; for the bindings."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovodlike import basics, objects
from horovodlike.arrays.functions import allreduce_async, synchronize
from horovodlike.errors import MismatchError
from horovodlike.process_set import ProcessSet, global_process_set, joined_sets, registered_id

_REMEDY = "Call hvd.broadcast_parameters or broadcast_variables first, or use BroadcastGlobalVariablesCallback(0)"


class Record(NamedTuple):
    """Name, dtype, shape and hash of one tensor of a rank."""

    name: str
    dtype: str
    shape: list[int]
    digest: str


def record(name: str, dtype: str, shape: Iterable[int], memory: Any) -> Record:
    """Return the record of a tensor whose elements, in row-major order, are in this memory."""
    return Record(name, dtype, list(shape), hashlib.blake2b(memory, digest_size=16).hexdigest())


def check_consistency(model: Any, process_set: ProcessSet = global_process_set) -> None:
    """Raise on every rank unless all ranks hold the same values, as `horovodlike.torch.check_consistency` does.

    Args:
        model: A built model or optimizer of Keras, a `tf.Module`, or variables: in a list, or by name in a dictionary.
        process_set: The ranks that are compared.

    Raises:
        MismatchError: (A `HorovodInternalError`.) The ranks differ. The job continues.
        ValueError: The model is not built.
    """
    if not getattr(model, "built", True):
        raise ValueError(f"{model.name} has no variables yet: build it, or call it once, on all ranks")
    check(of_variables(getattr(model, "weights", None) or getattr(model, "variables", model)), process_set)


def of_variables(variables: Any) -> list[Record]:
    """Return the records of variables, named without the numbers by which Keras counts the layers of a process."""
    if not isinstance(variables, Mapping):
        paths = [getattr(each, "path", None) or str(getattr(each, "name", "")) for each in variables]
        names = [f"{i}.{re.sub(r'_[0-9]+(?=/|$)|:0$', '', path)}" for i, path in enumerate(paths)]
        variables = dict(zip(names, variables, strict=True))
    arrays = {name: each.numpy() if hasattr(each, "numpy") else each for name, each in variables.items()}
    return [record(name, str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()]


def check(records: Sequence[Record], process_set: ProcessSet) -> None:
    """Raise a `MismatchError` on every rank of the set unless all have the same records. Collective."""
    if process_set.size() == 1:
        return
    set_id = registered_id(process_set)
    if len({*objects.allgather_object(_digest_of_all(records), "allgather.consistency.digest", set_id)}) > 1:
        held = objects.allgather_object(records, "allgather.consistency.records", set_id)
        raise MismatchError(describe_difference(held, process_set.ranks or range(len(held))))


def compare(records: Callable[[], list[Record]], process_set: ProcessSet, name: str) -> Callable[[], None]:
    """Start to compare the ranks' first parameters; return a function that waits for this, and warns if they differ.

    All ranks must call this once in each job, also those that have been in another job. Not in an elastic job, where a
    new rank receives the parameters with the state and makes its first step after many steps of others; nor after a
    `join`, from which a rank may come without a step. The `name` matches the requests.
    """
    if process_set.size() == 1 or basics.is_elastic() or registered_id(process_set) in joined_sets:
        return lambda: None
    own = records()
    hashes = np.frombuffer(bytes.fromhex("".join(each.digest for each in own)), np.uint8).reshape(len(own), 16)
    handle = allreduce_async(
        np.stack([hashes, ~hashes]), f"first_parameters.{name}", basics.Max, process_set=process_set
    )

    def warn() -> None:
        agree = (synchronize(handle).sum(0) == 255).all(1)  # the highest hash and complement add up if ranks agree
        if not agree.all():
            which = f"{own[agree.argmin()].name} ({(~agree).sum()} of {len(own)} differ)"
            warnings.warn(f"the ranks train from different first parameters: {which}. {_REMEDY}", stacklevel=2)

    return warn


def is_second_step(first: Any) -> bool:
    """Count a step of this job in an attribute of its first variable; return whether it is the second one.

    Scripts for Horovod broadcast after the first step, when all variables exist.
    """
    generation, steps = getattr(first, "_horovodlike_steps", (0, 0))
    steps = steps + 1 if generation == basics.generation() else 1
    first._horovodlike_steps = basics.generation(), steps
    return steps == 2


def _digest_of_all(records: Sequence[Record]) -> bytes:
    """Return one hash of all records, sorted first: another rank may have filled its dict in another order."""
    return hashlib.blake2b(json.dumps(sorted(records)).encode(), digest_size=32).digest()


def describe_difference(held: Sequence[Sequence[Record]], ranks: Sequence[int]) -> str:
    """Return a text on the first tensor that differs among the ranks; `held` has their records in the same order."""
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
