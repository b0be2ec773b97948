"""Broadcasts of parameters, optimizer state and Python objects, and an allgather of objects.

Objects are sent as cloudpickle data, and unpickling runs code that the sender chose. The job's secret key authenticates
objects before they are unpickled. All ranks of a job hold this key and trust each other; do not use the object
functions across a trust boundary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from horovodlike import basics, objects
from horovodlike.errors import HorovodInternalError, MismatchError
from horovodlike.process_set import ProcessSet, global_process_set, registered_id
from horovodlike.torch._ops import disable_compile
from horovodlike.torch._ops.handles import full_name
from horovodlike.torch.mpi_ops import broadcast_async_, synchronize

T = TypeVar("T")


def broadcast_parameters(
    params: Mapping[str, torch.Tensor | None] | Iterable[torch.Tensor | tuple[str, torch.Tensor | None]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the parameters of every rank, in place, with the root rank's parameters.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors. Entries that are None
            are skipped. Names must be the same on all ranks; tensors without names must be in the same order.
        root_rank: The rank whose values are sent.
        process_set: The ranks that take part.

    Raises:
        ValueError: `params` is none of these, or an entry is neither a tensor nor None.
        MismatchError: The ranks' parameters differ in name, shape or dtype; the message names the first that differs.
    """
    if isinstance(params, Mapping):
        entries: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        entries = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, tensor in entries:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"invalid params: {name} is of type {type(tensor)}, not a tensor")
    present = [(name, tensor) for name, tensor in entries if tensor is not None]
    _check_names([str(name) for name, _ in present], process_set)
    _broadcast_all(present, root_rank, process_set)


def _check_names(names: list[str], process_set: ProcessSet) -> None:
    """Raise the same error on all ranks if they have different parameters: all would wait for one that a rank lacks."""
    digest = zlib.crc32(repr(sorted(names)).encode())
    if len(set(allgather_object(digest, "parameters", process_set))) > 1:
        of_all = allgather_object(names, "parameters.names", process_set)
        odd = sorted(set().union(*of_all) - set(of_all[0]).intersection(*of_all))
        if not odd:
            numbers = [len(each) for each in of_all]
            raise MismatchError(f"broadcast_parameters: the ranks give {numbers} tensors; all must give as many")
        ranks = process_set.ranks or range(len(of_all))
        lacking = [rank for rank, each in zip(ranks, of_all, strict=True) if odd[0] not in each]
        raise MismatchError(f"broadcast_parameters: ranks {lacking} do not have {odd[0]}: all need the same parameters")


def _broadcast_all(named: Iterable[tuple[str | None, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in named]
    first_error: HorovodInternalError | None = None
    for handle in handles:
        try:
            synchronize(handle)
        except HorovodInternalError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


class _TensorPlace(NamedTuple):
    """The placeholder of a tensor in optimizer state that is sent as an object; the tensors are sent separately."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _replace(node: object, kind: type[T], replacement: Callable[[T], object]) -> Any:
    """Return a copy of `node` in which all objects of type `kind`, in nested dicts, lists and tuples, are replaced."""
    if isinstance(node, kind):
        return replacement(node)
    if isinstance(node, dict):
        return {key: _replace(value, kind, replacement) for key, value in node.items()}
    if isinstance(node, (list, tuple)) and type(node) in (list, tuple):  # a named tuple is left as it is
        return type(node)(_replace(value, kind, replacement) for value in node)
    return node


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the root's optimizer state: the state of each parameter, and all options of the parameter groups.

    The root's state is sent as it is. No step is made to create missing state: if the root has not stepped yet, the
    other ranks have no state afterwards either. No parameter changes. Works with any optimizer that can load its own
    `state_dict()`.

    Args:
        optimizer: An optimizer of the same parameters on all ranks, wrapped in a `DistributedOptimizer` or not.
        root_rank: The rank whose state is sent.
        model: Not needed; accepted for scripts that pass it.
        process_set: The ranks that take part.

    Raises:
        ValueError: The optimizer's groups differ from the root's.
        HorovodInternalError: The job is broken or shut down.
    """
    del model
    is_root = basics.rank() == root_rank
    tensors: list[torch.Tensor] = []

    def describe(tensor: torch.Tensor) -> _TensorPlace:
        tensors.append(tensor.detach().cpu())  # a rank that lacks the tensor does not know its device yet
        return _TensorPlace(len(tensors) - 1, tensor.dtype, tuple(tensor.shape))

    def allocate(place: _TensorPlace) -> torch.Tensor:
        tensors.append(torch.empty(place.shape, dtype=place.dtype, device="cpu"))
        return tensors[-1]

    described = _replace(optimizer.state_dict(), torch.Tensor, describe) if is_root else None
    described = broadcast_object(described, root_rank, "optimizer_state", process_set)
    state: dict[str, Any] = {} if is_root else _replace(described, _TensorPlace, allocate)
    named = [(f"optimizer_state.{number}", tensor) for number, tensor in enumerate(tensors)]
    _broadcast_all(named, root_rank, process_set)
    if not is_root:
        load_exactly(optimizer, state)


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state without changing any of its values. The optimizer may keep the tensors of `state`.

    `load_state_dict` alone converts tensors to their parameter's dtype, and breaks strings by iterating over them.
    """
    optimizer.load_state_dict(state)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, entries in state.get("state", {}).items():
        loaded = optimizer.state.get(params[index]) if isinstance(index, int) and index < len(params) else None
        if not isinstance(loaded, dict) or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            current = loaded.get(key)
            if isinstance(value, torch.Tensor):
                if isinstance(current, torch.Tensor) and current.dtype != value.dtype:
                    loaded[key] = value.to(current.device)
            elif not isinstance(value, (dict, list, tuple)):
                loaded[key] = value


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object: the object itself on the root, a copy of it elsewhere.

    Args:
        obj: Anything that cloudpickle can serialize; ignored on the other ranks.
        root_rank: The rank whose object is sent.
        name: The name by which the ranks match the operation. None: a count of unnamed calls, not the object's type.
        process_set: The ranks that take part.

    Raises:
        IntegrityError: (A `HorovodInternalError`.) The object was changed on its way, and was not unpickled.
        HorovodInternalError: The job is broken; or the root could not pickle its object (the root raises the cause).
        ValueError: The root is not one of the ranks that take part.
    """
    process_set_id = registered_id(process_set)
    return objects.broadcast_object(obj, root_rank, full_name("object", name, process_set_id), process_set_id)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks. This rank's own object is a copy as well.

    Args:
        obj: Anything that cloudpickle can serialize.
        name: The name by which the ranks match the operation. None: a count of unnamed calls, not the object's type.
        process_set: The ranks that take part.

    Raises:
        IntegrityError: (A `HorovodInternalError`.) An object was changed on its way; none was unpickled.
        HorovodInternalError: The job is broken; or a rank could not pickle its object (that rank raises the cause).
    """
    process_set_id = registered_id(process_set)
    return objects.allgather_object(obj, full_name("object", name, process_set_id), process_set_id)


disable_compile(allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters)
