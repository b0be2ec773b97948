"""Loans, which keep the memory of tensors that the engine uses in place, even if Python changes the tensors meanwhile.

A reference to a tensor does not keep its memory: `set_`, an assignment to `.data` and `Module.to` give the tensor
another storage, `resize_` and `share_memory_` give its storage other memory. So a loan holds a copy-on-write clone of
the tensor (`torch._lazy_clone`), which costs a fraction of a microsecond and copies nothing. If the tensor, or another
view of its storage, is written to while the engine uses the memory, torch moves that storage to a copy, and the clone
keeps the memory. So no change of the tensor affects the engine, not even one through `.data`, which has a version
counter of its own; and the new address of the storage shows that there was a change (`has_moved`).

Where torch makes no such clone:

* on a GPU an alias keeps the storage: only `resize_` gives that other memory;
* an alias keeps shared memory, too: torch neither resizes nor moves it;
* all other memory is copied: memory whose address other code may hold, so that a clone must not take it over (NumPy's,
  and torch's after `Tensor.numpy()`), memory of other allocators, and all memory with torch before 2.3.
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
# The address of a tensor's storage. To read it by data_ptr() would move a storage that has clones to a copy.
_storage_address: Callable[[torch.Tensor], int] = getattr(
    torch._C, "_data_address", lambda tensor: tensor.untyped_storage().data_ptr()
)
_cloning = threading.RLock()  # torch releases the interpreter's lock: two first clones of a storage would collide

os.register_at_fork(before=_cloning.acquire, after_in_parent=_cloning.release, after_in_child=_cloning.release)

_REMEDY = "Call synchronize() before you change a tensor that was given to an asynchronous operation"

# The tensor; the clone, alias or copy whose memory the engine uses; the address of that one's storage, or _COPIED; the
# operation's name. A plain tuple, since it takes a tenth of the time of a class.
Loan: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, str]
_COPIED = 0  # in place of the address of the storage: the engine uses a copy


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element. A tensor that is lent keeps its memory."""
    return _storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def lend(tensor: torch.Tensor, name: str) -> Loan:
    """Return the loan of a tensor without gaps. It is copied if its memory cannot be kept.

    Args:
        tensor: On the CPU or a GPU.
        name: The operation's name, for messages.
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
    """Return a lazy clone of a tensor; None if torch cannot make one."""
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
    """Copy the engine's result to the tensor, if the engine used a copy or the tensor has other memory by now.

    Raises:
        ValueError: The tensor has no place for the result, since it was resized; or the lent memory was moved.
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
    """Return references that keep the memory of the tensors in `held`, for operations that are not waited for."""
    tensors = [one for one in held if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    return [one for tensor in tensors for one in (_clone(tensor), tensor.untyped_storage())]


def put(result: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Copy a result to its tensor.

    Raises:
        ValueError: The tensor had another shape when it was handed over, or its storage has become too small.
    """
    shape = result.shape
    place = tensor.detach()  # it keeps the storage, even if another thread gives the tensor another one
    if place.shape != shape or not fits_its_storage(place):
        raise ValueError(
            f"{name}: its tensor had the shape {tuple(shape)} when it was handed over, and was resized before its "
            f"result was there (now {tuple(place.shape)}, in a storage of {place.untyped_storage().nbytes()} bytes). "
            f"{_REMEDY}"
        )
    with torch.no_grad():
        place.copy_(result)
