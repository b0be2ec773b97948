"""Loans: the memory of tensors in the hands of the engine, which stays where it is whatever Python does meanwhile.

A reference to a tensor does not keep its memory: `set_`, an assignment to `.data` and `Module.to` give the tensor
another storage, `resize_` and `share_memory_` give its storage other memory. So a loan holds a copy-on-write clone of
the tensor (`torch._lazy_clone`), which costs a fraction of a microsecond and copies nothing. If the tensor, or another
view of its storage, is written to while the engine has its memory, torch moves that storage to a copy of its own, and
the engine's memory stays with the clone: whatever is done to the tensor, also through `.data`, whose version counter is
its own, the engine neither sees nor is disturbed by it, and the address identifies it.

Where torch makes no such clone:

* on a GPU an alias keeps the storage, which all but `resize_` leave the memory;
* so it does for shared memory, which torch neither resizes nor moves;
* what remains is copied: memory whose address others may hold, so that a clone must not take it over (NumPy's, and
  torch's after `Tensor.numpy()`), memory of other allocators, and all with torch before 2.3.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from horovodlike.torch._ops import gpu
from horovodlike.torch._ops.tensor import fits_its_storage

_lazy_clone: Callable[[torch.Tensor], torch.Tensor] | None = getattr(torch, "_lazy_clone", None)
# The address of a tensor's storage. To ask for it otherwise moves a storage with clones to a copy.
_storage_address: Callable[[torch.Tensor], int] = getattr(
    torch._C, "_data_address", lambda tensor: tensor.untyped_storage().data_ptr()
)
_cloning = threading.RLock()  # torch lets the interpreter's lock go, and two first clones of one storage would collide

os.register_at_fork(before=_cloning.acquire, after_in_parent=_cloning.release, after_in_child=_cloning.release)

_REMEDY = "Call synchronize() before you change a tensor that was given to an asynchronous operation"

# The tensor, the tensor by which the engine knows its memory, the address of the storage of that, and the name of the
# operation: a plain tuple, since it takes a tenth of the time of a class.
Loan: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, str]
_COPIED = 0  # in place of the address of the storage: the engine has a copy


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element, also if it is lent, and without moving it."""
    return _storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def lend(tensor: torch.Tensor, name: str) -> Loan:
    """Keep the memory of a tensor that lies in memory without gaps, or copy it where that cannot be kept.

    Args:
        tensor: On the CPU or a GPU.
        name: That of the operation, for messages.
    """
    storage = tensor.untyped_storage()
    # torch has no annotations of `is_shared`.
    if gpu.is_on_gpu(tensor) or (not storage.resizable() and tensor.is_shared()):  # type: ignore[no-untyped-call]
        kept: torch.Tensor | None = tensor.detach()
    else:
        kept = _clone(tensor)
    if kept is None:
        return tensor, tensor.detach().clone(), _COPIED, name
    return tensor, kept, _storage_address(kept), name


def _clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """Clone a tensor lazily; None where torch cannot."""
    if _lazy_clone is None or not tensor.untyped_storage().resizable():
        return None
    try:
        with _cloning:
            return _lazy_clone(tensor)
    except RuntimeError:  # the storage has another allocator's memory
        return None


def has_moved(loan: Loan) -> bool:
    """Return whether the tensor has other memory than was lent: it was written to, resized or given another storage."""
    return loan[2] not in (_COPIED, _storage_address(loan[0]))


def give_back(loan: Loan) -> None:
    """Put what the engine has made into the tensor, if the engine had a copy or the tensor has other memory by now.

    Raises:
        ValueError: It has another shape, too: there is no place for the result.
    """
    if loan[2] != _storage_address(loan[0]):
        _make_writable(loan[0])
        put(_result(loan), loan[0], loan[3])


def _make_writable(tensor: torch.Tensor) -> None:
    """Give a tensor other memory if torch cannot write to it, as after `resize_` while the storage had a clone."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        if fits_its_storage(tensor):
            with torch.no_grad():
                tensor.set_(tensor.clone())  # type: ignore[call-overload]  # not annotated in full


def _result(loan: Loan) -> torch.Tensor:
    _, kept, storage_address, name = loan
    if storage_address not in (_COPIED, _storage_address(kept)):
        raise ValueError(f"{name}: the memory of its tensor was moved before its result was there. {_REMEDY}")
    return kept


def keep(held: Iterable[object]) -> list[object]:
    """Keep the memory of the tensors among objects from now on, of operations that will not be waited for."""
    tensors = [one for one in held if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    return [one for tensor in tensors for one in (_clone(tensor), tensor.untyped_storage())]


def put(result: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Copy a result to the tensor that it is for.

    Raises:
        ValueError: The tensor has had another shape when it was handed over, or its storage has become too small.
    """
    shape = result.shape
    place = tensor.detach()  # it keeps the storage, whatever another thread gives the tensor meanwhile
    if place.shape != shape or not fits_its_storage(place):
        raise ValueError(
            f"{name}: its tensor had the shape {tuple(shape)} when it was handed over, and was resized before its "
            f"result was there (now {tuple(place.shape)}, in a storage of {place.untyped_storage().nbytes()} bytes). "
            f"{_REMEDY}"
        )
    with torch.no_grad():
        place.copy_(result)
