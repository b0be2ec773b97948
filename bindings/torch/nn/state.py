"""The state of models with split layers in the form of the unsplit model, and the norm of all its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.linalg import vector_norm

from horovodlike.basics import Max, Sum
from horovodlike.process_set import ProcessSet
from horovodlike.splits import Split
from horovodlike.torch.mpi_ops import allgather, allreduce
from horovodlike.torch.nn._module import ParallelModule


def full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the `state_dict()` of the unsplit model, on all ranks.

    All ranks of the process sets of the model's layers have to call this. Unsplit entries are taken from this rank.

    Args:
        model: A model, some of whose layers are split.

    Returns:
        Tensors by the names that they have in `model.state_dict()`, without a gradient and on the devices of the
        parameters. Split ones are new tensors; the others share memory with the model's.

    Raises:
        HorovodInternalError: The ranks have different models, or the job is broken or shut down.
    """
    state: dict[str, Any] = model.state_dict()
    for key, layer, split in _split_parameters(model):
        state[key] = _joined(state[key], layer, split, f"full_state_dict.{key}")
    return state


def load_full_state_dict(model: torch.nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """Load the state of the unsplit model: each split layer takes this rank's part. Nothing is sent.

    Args:
        model: A model, some of whose layers are split, in any way.
        state: The result of `full_state_dict` for a model that was split in any way, or the `state_dict()` of an
            unsplit model with the same names.
        strict: As for `torch.nn.Module.load_state_dict`.

    Returns:
        The result of `load_state_dict`: the missing and the unexpected names.

    Raises:
        RuntimeError: Names or shapes do not fit, as `load_state_dict` says.
        ValueError: The shape of a split parameter does not fit; nothing has been loaded.
    """
    own = model.state_dict()
    chosen = dict(state)
    for key, layer, split in _split_parameters(model):
        if key in chosen:
            expected = _whole_shape(own[key], layer, split)
            if list(chosen[key].shape) != expected:
                raise ValueError(
                    f"load_full_state_dict: {key} has the shape {tuple(chosen[key].shape)}, and the unsplit model's is "
                    f"{tuple(expected)}: give the state of a model with the same sizes, as full_state_dict returns it"
                )
            chosen[key] = layer.part(key.rpartition(".")[2], chosen[key])
    return model.load_state_dict(chosen, strict=strict)


def full_optimizer_state_dict(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Return the `state_dict()` of an optimizer of the unsplit model, on all ranks.

    Joined are tensors of the shape of their parameter, such as the momenta of SGD and Adam; other state is taken from
    this rank. All ranks of the process sets of the model's layers have to call this, after the same steps.

    Args:
        optimizer: An optimizer of the model's parameters; also a `DistributedOptimizer`.
        model: A model, some of whose layers are split.

    Raises:
        HorovodInternalError: The ranks have different models or optimizers, or the job is broken or shut down.
    """
    packed = optimizer.state_dict()
    owners = _owners(optimizer, model)
    state = {}
    for index in sorted(packed["state"]):
        state[index] = dict(packed["state"][index])
        if index in owners:
            parameter, key, layer, split = owners[index]
            for name, value in sorted(state[index].items()):
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[index][name] = _joined(value, layer, split, f"full_optimizer_state_dict.{key}.{name}")
    return {**packed, "state": state}


def load_full_optimizer_state_dict(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Mapping[str, Any]
) -> None:
    """Load the state of an optimizer of the unsplit model: this rank takes its parts. Nothing is sent.

    Args:
        optimizer: An optimizer of the model's parameters, in the same order as in the saved optimizer.
        model: A model, some of whose layers are split, in any way.
        state: The result of `full_optimizer_state_dict`, or the `state_dict()` of an optimizer of the unsplit model.

    Raises:
        ValueError: The parameters do not fit, as `Optimizer.load_state_dict` says.
    """
    owners = _owners(optimizer, model)
    chosen = {index: dict(values) for index, values in state["state"].items()}
    for index, (parameter, key, layer, split) in owners.items():
        for name, value in chosen.get(index, {}).items():
            if isinstance(value, torch.Tensor) and list(value.shape) == _whole_shape(parameter, layer, split):
                chosen[index][name] = layer.part(key.rpartition(".")[2], value)
    optimizer.load_state_dict({**state, "state": chosen})


@torch.no_grad()
def clip_grad_norm_(
    model: torch.nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does in the unsplit model; return their norm before.

    All ranks of the process sets of the model's layers have to call this, when the gradients are reduced. The arguments
    are as for torch's function, except for the model; `norm_type` must be above 0. The norm is in float64.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be above 0, got {norm_type}")
    power, op = (1.0, Max) if norm_type == float("inf") else (norm_type, Sum)
    split = [(layer._parameters[key.rpartition(".")[2]], layer) for key, layer, _ in _split_parameters(model)]
    sets = {id(parameter): layer.process_set for parameter, layer in split}
    gradients: list[torch.Tensor] = []
    norms: dict[ProcessSet | None, list[torch.Tensor]] = {}  # by the ranks that have parts; None: of whole gradients
    for parameter in model.parameters():
        of_set = norms.setdefault(sets.get(id(parameter)), [parameter.new_zeros((), dtype=torch.float64)])
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            of_set.append(vector_norm(parameter.grad, norm_type, dtype=torch.float64))
    totals = []
    for process_set, of_set in norms.items():
        total = vector_norm(torch.stack(of_set), norm_type)
        if process_set is not None:
            total = allreduce(total**power, name="clip_grad_norm_", op=op, process_set=process_set) ** (1 / power)
        totals.append(total)
    norm: torch.Tensor = vector_norm(torch.stack(totals), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm.item()}; skip the step, or leave out the check"
        )
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _owners(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[int, tuple[torch.Tensor, str, ParallelModule, Split]]:
    """Return each split parameter, its key in the model's state, its layer and its split, by its index."""
    known = {}
    for key, layer, split in _split_parameters(model):
        known[id(layer._parameters[key.rpartition(".")[2]])] = key, layer, split
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {i: (one, *known[id(one)]) for i, one in enumerate(parameters) if id(one) in known}


def _joined(part: torch.Tensor, layer: ParallelModule, split: Split, name: str) -> torch.Tensor:
    if layer.process_set.size() == 1:
        return part
    parts = allgather(part.detach().unsqueeze(0), name=name, process_set=layer.process_set)
    joined: torch.Tensor = split.join(parts.unbind(0), torch.cat)
    return joined


def _whole_shape(part: torch.Tensor, layer: ParallelModule, split: Split) -> list[int]:
    shape = list(part.shape)
    shape[split.dim] *= layer.process_set.size() or 1
    return shape


def _split_parameters(model: torch.nn.Module) -> Iterator[tuple[str, ParallelModule, Split]]:
    """Yield each split parameter's key in the state, its layer and its split, in the order of the model."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelModule):
            for name, split in module.splits.items():
                if split is not None and module._parameters.get(name) is not None:
                    yield f"{prefix}.{name}" if prefix else name, module, split
