"""Changes that users make to tensors in flight. Many are wrong, but none may corrupt anything."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from horovodlike.torch._ops.tensor import fits_its_storage


def _new_of(tensor: torch.Tensor, extra: int = 0) -> torch.Tensor:
    return torch.zeros(tensor.numel() + extra, dtype=tensor.dtype)


def _set(tensor: torch.Tensor, own: random.Random) -> None:
    tensor.set_(_new_of(tensor, own.choice((0, 0, 10))))


def _set_data(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.data = _new_of(tensor).reshape(tensor.shape)


def _set_data_of_another_type(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.data = tensor.data.double()


def _set_nothing(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.set_()


def _resize_larger(tensor: torch.Tensor, own: random.Random) -> None:
    tensor.resize_(tensor.numel() * 2 + own.choice((1, 100_000)))


def _resize_smaller(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.resize_(tensor.numel() // 2)


def _resize_storage_larger(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() * 2 + 64)


def _resize_storage_smaller(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)


def _empty_storage(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.untyped_storage().resize_(0)


def _share_memory(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.share_memory_()


def _in_place(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.add_(1)


def _data_in_place(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.data.clamp_(0, 1)


def _zero(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.zero_()


def _transpose(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.unsqueeze_(0).t_()


def _swap(tensor: torch.Tensor, _: random.Random) -> None:
    torch.utils.swap_tensors(tensor, _new_of(tensor))


def _detach(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.detach_()


def _through_numpy(tensor: torch.Tensor, _: random.Random) -> None:
    tensor.numpy()[...] = 2


MUTATIONS: dict[str, Callable[[torch.Tensor, random.Random], None]] = {
    "set": _set,
    "set_data": _set_data,
    "set_data_of_another_type": _set_data_of_another_type,
    "set_nothing": _set_nothing,
    "resize_larger": _resize_larger,
    "resize_smaller": _resize_smaller,
    "resize_storage_larger": _resize_storage_larger,
    "resize_storage_smaller": _resize_storage_smaller,
    "empty_storage": _empty_storage,
    "share_memory": _share_memory,
    "in_place": _in_place,
    "data_in_place": _data_in_place,
    "zero": _zero,
    "transpose": _transpose,
    "swap": _swap,
    "detach": _detach,
    "through_numpy": _through_numpy,
}


_RESIZING = {"resize_larger", "resize_storage_larger", "resize_storage_smaller", "empty_storage"}
# While another thread waits for the tensor: an operation of torch would die of it as well.
NOT_BESIDE_A_WAIT = _RESIZING | {"share_memory"}


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether torch itself can use the tensor: it does not look whether a storage has become too small."""
    return tensor.layout is torch.strided and fits_its_storage(tensor)


def mutate(name: str, tensor: torch.Tensor, own: random.Random) -> None:
    """Change a tensor in flight; torch refuses some of this for some tensors, and for those that are being used."""
    if not has_memory(tensor) or (name in _RESIZING and tensor.is_shared()):  # of which torch itself dies
        return
    try:
        MUTATIONS[name](tensor, own)
    except (RuntimeError, TypeError, IndexError):
        return


def _each(change: Callable[[torch.nn.Parameter], None]) -> Callable[[torch.nn.Module, random.Random], None]:
    def change_all(model: torch.nn.Module, _: random.Random) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter)

    return change_all


def _clip_data(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data.clamp(-1, 1)


def _clamp_data(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data.clamp_(-1, 1)


def _set_grad(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.set_(parameter.grad.clone())


def _drop_grad(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def _replace_grad(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


def _zero_grad(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def _clip(model: torch.nn.Module, _: random.Random) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _module_to(model: torch.nn.Module, _: random.Random) -> None:
    model.to(torch.float64)


def _module_half(model: torch.nn.Module, _: random.Random) -> None:
    model.half().float()


def _share_module(model: torch.nn.Module, _: random.Random) -> None:
    model.share_memory()


def _any_of_tensors(model: torch.nn.Module, own: random.Random) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            mutate(own.choice([*MUTATIONS]), parameter.grad, own)


OF_GRADIENTS: dict[str, Callable[[torch.nn.Module, random.Random], None]] = {
    "clip_data": _each(_clip_data),
    "clamp_data": _each(_clamp_data),
    "set_grad": _each(_set_grad),
    "drop_grad": _each(_drop_grad),
    "replace_grad": _each(_replace_grad),
    "zero_grad": _each(_zero_grad),
    "clip": _clip,
    "module_to": _module_to,
    "module_half": _module_half,
    "share_module": _share_module,
    "any_of_gradients": _any_of_tensors,
}


def mutate_gradients(name: str, model: torch.nn.Module, own: random.Random) -> None:
    """Change the gradients of a model between `backward()` and `step()`."""
    if not all(parameter.grad is None or has_memory(parameter.grad) for parameter in model.parameters()):
        return
    try:
        OF_GRADIENTS[name](model, own)
    except RuntimeError:
        return
