"""Replicas of a module, kept between steps, whose parameters are branches of the module's own.

The module itself is replica 0. Each other replica consists of *twins*, one for each module in the tree. Before each
forward pass a twin receives the attributes that its original has then, so every change of the module reaches the
replica, and nothing is left in a twin from its last pass, as in a new replica.

Where a replica is on the device of the module, its parameters have the memory of the module's parameters. Elsewhere
they are copies, which are written again when the parameters have changed. Buffers are always copies: each updates its
own, and only the module's own updates are kept. A node of the autograd graph adds the gradients of the replicas.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from horovodlike.torch.sync_batch_norm import SyncBatchNorm

Tensors = dict[int, torch.Tensor]  # by the id of the tensor of the module
Gradients = list[torch.Tensor | None]

# About this many bytes of parameters share a node of the graph, which adds their gradients when all are there.
_BUCKET_BYTES = 1 << 20


def modules_of(root: Module) -> list[Module]:
    """Return all modules of a tree, each once."""
    modules, seen = [root], {root}
    for module in modules:  # which grows
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies of tensors on a device; tensors of other devices are moved there as one tensor for each dtype.

    Differentiable. A copy may share memory with others.
    """
    groups: dict[torch.dtype, list[int]] = defaultdict(list)
    result = list(tensors)
    for index, tensor in enumerate(tensors):
        if tensor.device != device and tensor.layout is torch.strided:
            groups[tensor.dtype].append(index)
        else:
            result[index] = tensor.to(device, copy=True)
    for group in groups.values():
        flat = torch.cat([tensors[index].reshape(-1) for index in group]).to(device, non_blocking=device.type != "cpu")
        pieces = torch.split_with_sizes(flat, [tensors[index].numel() for index in group])
        for index, piece in zip(group, pieces, strict=True):
            result[index] = piece.view(tensors[index].shape)
    return result


def _copied(sources: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies outside the graph, each with a version counter of its own."""
    with torch.inference_mode(False), torch.no_grad():
        return [value.data for value in moved(sources, device)]


def _state_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return values that differ after a write to the tensor, or after it got other memory; None if there are none."""
    return None if tensor.is_inference() or tensor.layout is not torch.strided else (tensor.data_ptr(), tensor._version)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a tensor, and the states of both when it was made."""

    source: torch.Tensor
    value: torch.Tensor
    source_state: tuple[int, int] | None
    value_state: tuple[int, int] | None

    def is_current(self) -> bool:
        return (
            self.source_state is not None
            and self.source_state == _state_of(self.source)
            and self.value_state == _state_of(self.value)
        )

    def fits(self, source: torch.Tensor) -> bool:
        """Return whether this is a copy of the tensor, which still has its shape and dtype."""
        return self.source is source and self.value.shape == source.shape and self.value.dtype is source.dtype


class Copies:
    """Copies of parameters on a device, written again when the parameter or the copy was written to.

    Writes are seen by the version counters of autograd; so those through `.data` are not.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without copies."""
        self._device = device
        self._copies: dict[int, _Copy] = {}

    def of(self, sources: Mapping[int, torch.Tensor]) -> Tensors:
        """Return the copies of these tensors, and forget all others."""
        known = {key: self._copies[key] for key, each in sources.items() if key in self._copies}
        known = {key: each for key, each in known.items() if each.fits(sources[key])}
        missing = {key: source for key, source in sources.items() if key not in known}
        stale = {key: each.source for key, each in known.items() if not each.is_current()}
        values = {key: each.value for key, each in known.items()}
        for keys in _buckets(missing):
            values.update(zip(keys, _copied([missing[key] for key in keys], self._device), strict=True))
        for keys in _buckets(stale):
            self._write([values[key] for key in keys], [stale[key] for key in keys])
        for key in (*missing, *stale):
            known[key] = _Copy(sources[key], values[key], _state_of(sources[key]), _state_of(values[key]))
        self._copies = known
        return values

    def _write(self, values: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Write to the copies; a graph that still needs their earlier values raises the error it has for parameters."""
        with torch.no_grad():
            is_here = all(source.device == self._device for source in sources)
            torch._foreach_copy_(values, sources if is_here else moved(sources, self._device))


class _BranchContext(FunctionCtx):
    width: int
    devices: list[torch.device]


class _Branch(torch.autograd.Function):
    """Give each replica its values of some tensors; in the backward pass, add the replicas' gradients in a tree."""

    @staticmethod
    def forward(
        ctx: _BranchContext, values: Sequence[Sequence[torch.Tensor]], *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.width = len(sources)
        ctx.devices = [source.device for source in sources]
        ctx.set_materialize_grads(False)  # a parameter that no replica uses receives no gradient
        return tuple(value.detach() for value in itertools.chain.from_iterable(values))

    @staticmethod
    def backward(ctx: _BranchContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        replicas = [list(grads[at : at + ctx.width]) for at in range(0, len(grads), ctx.width)]
        while len(replicas) > 1:
            pairs = list(zip(replicas[::2], replicas[1::2], strict=False))
            replicas = [_sums(*pair) for pair in pairs] + replicas[2 * len(pairs) :]
        return None, *_on_devices(replicas[0], ctx.devices)


def _sums(ours: Gradients, theirs: Gradients) -> Gradients:
    """Return the sums of gradients of two replicas, on the device of the first one; differentiable."""
    result = [b if a is None else a for a, b in zip(ours, theirs, strict=True)]
    both = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a is not None and b is not None]
    first = [each for i in both if (each := ours[i]) is not None]
    second = [each for i in both if (each := theirs[i]) is not None]
    brought = _on_devices(second, [each.device for each in first])
    sums = torch._foreach_add(first, [each for each in brought if each is not None]) if first else ()
    for i, each in zip(both, sums, strict=True):
        result[i] = each
    return result


def _on_devices(grads: Sequence[torch.Tensor | None], devices: Sequence[torch.device]) -> Gradients:
    """Return gradients on the given devices; those that must be moved to one device are moved together."""
    result = list(grads)
    away: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, (grad, device) in enumerate(zip(grads, devices, strict=True)):
        if grad is not None and grad.device != device:
            away[device].append((index, grad))
    for device, moving in away.items():
        for (index, _), grad in zip(moving, moved([grad for _, grad in moving], device), strict=True):
            result[index] = grad
    return result


def _buckets(sources: Mapping[int, torch.Tensor]) -> Iterator[list[int]]:
    """Yield the keys of the tensors that share a node."""
    bucket: list[int] = []
    nbytes = 0
    for key, source in sources.items():
        bucket.append(key)
        nbytes += source.nbytes
        if nbytes >= _BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
    if bucket:
        yield bucket


class Replica:
    """A replica of a module, other than the module itself.

    Args:
        device: Where the replica is.
        shares: True if that is the device of the module, so that parameters need no copies.
    """

    def __init__(self, device: torch.device, shares: bool) -> None:
        """Start without twins; see the class."""
        self._device = device
        self._copies = None if shares else Copies(device)
        self._twins: dict[Module, Module] = {}

    def values(self, parameters: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor]) -> Tensors:
        """Return the values of the module's tensors on the device of the replica.

        Buffers are copied each time: layers such as batch normalization write to them without counting a version.
        """
        copies = dict(zip(buffers, _copied([*buffers.values()], self._device), strict=True))
        return {**(parameters if self._copies is None else self._copies.of(parameters)), **copies}

    def assemble(self, modules: Sequence[Module], values: Tensors) -> Module:
        """Return the twin of the first module, the root of the others, with values for parameters and buffers.

        Raises:
            TypeError: A module that is new in the tree cannot be replicated.
        """
        self._twins = {module: self._refreshed(module) for module in modules}
        for module, twin in self._twins.items():
            state = twin.__dict__
            for kind in ("_parameters", "_buffers"):
                tensors = module.__dict__[kind]
                state[kind] = {name: None if each is None else values[id(each)] for name, each in tensors.items()}
            children = module._modules.items()
            state["_modules"] = {name: None if child is None else self._twins[child] for name, child in children}
        return self._twins[modules[0]]

    def _refreshed(self, module: Module) -> Module:
        """Return the twin of a module with the attributes that the module has now."""
        twin = self._twins.get(module)
        if twin is None or type(module)._replicate_for_data_parallel is not Module._replicate_for_data_parallel:
            # Some classes do it in a way of their own.
            twin = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # untyped
        else:
            twin.__dict__.clear()
            twin.__dict__.update(module.__dict__, _is_replica=True)
        state = twin.__dict__
        state.pop("_compiled_call_impl", None)  # it would run the original
        forward = state.get("forward")  # if an instance attribute replaces the class's method
        if isinstance(forward, MethodType) and forward.__self__ is module:
            state["forward"] = MethodType(forward.__func__, twin)
        return twin


def check_replicable(modules: Sequence[Module]) -> None:
    """Check that all modules of a tree can be replicated.

    Raises:
        TypeError: One cannot; the message says which and why.
        ValueError: A lazy module has not seen its input yet.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not loaded if nothing has been compiled
    for module in modules:
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name}: DataParallel cannot replicate a ScriptModule: give the module it was made of")
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            raise TypeError(f"{name}: DataParallel cannot replicate a compiled module: give the module it was made of")
        if isinstance(module, SyncBatchNorm):
            raise TypeError(
                f"{name} in DataParallel: the replicas would call its collectives in any order. Use one device for "
                "each rank with DistributedOptimizer, or torch's BatchNorm"
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            raise ValueError(f"{name} has to see an input before it can be replicated: call the module itself once")


def assemble(replicas: Sequence[Replica], modules: Sequence[Module]) -> list[Module]:
    """Return the root of each replica for the next forward pass.

    Args:
        replicas: The replicas, other than the module itself.
        modules: The modules of the tree, its root first.
    """
    parameters = {id(each): each for module in modules for each in module._parameters.values() if each is not None}
    buffers = {id(each): each for module in modules for each in module._buffers.values() if each is not None}
    all_values = [replica.values(parameters, buffers) for replica in replicas]
    if torch.is_grad_enabled():
        sources: Tensors = {**parameters, **buffers}
        for keys in _buckets({key: source for key, source in sources.items() if source.requires_grad}):
            values = [[each[key] for key in keys] for each in all_values]
            given = [sources[key] for key in keys]
            branches = iter(_Branch.apply(values, *given))  # type: ignore[no-untyped-call]  # untyped
            for each in all_values:
                each.update(zip(keys, branches, strict=False))
    return [replica.assemble(modules, values) for replica, values in zip(replicas, all_values, strict=True)]
