"""The extension made from native_calls.c: tensors to the engine, and results back, in one call each.

All functions hold the interpreter's lock, but for the waiting in `enqueue_and_wait`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from horovodlike._engine.ops import Request

_Enqueue: TypeAlias = Callable[[torch.Tensor, list[Any]], int]
_Take: TypeAlias = Callable[[int, torch.Tensor], int]

def use_torch(tensor: type, parameter: type, exchange_api: object, *functions: Callable[[], object]) -> None:
    """Take PyTorch's functions, in the order in which native_calls.c keeps them.

    Raises:
        TypeError: A function is no built-in one without arguments, or DLPack's exchange API has not got version 1.
        ValueError: `exchange_api` is no capsule of DLPack's exchange API.
    """

def context(
    request: Request, address: int, of_dtype: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
) -> object:
    """Describe tensors on the CPU without gaps that have this shape and these strides, and the dtype of another tensor.

    `address` is the address of the request's description in the engine. Raises TypeError if DLPack does not know the
    dtype.
    """

def calls(context: object) -> tuple[_Enqueue, _Take, _Enqueue, _Take]:
    """Return `enqueue_copied`, `take_copied`, `enqueue_and_wait` and `take`, for the tensors of a context."""

def memory(contexts: list[object], tensors: list[torch.Tensor]) -> tuple[list[int], list[torch.UntypedStorage]] | None:
    """Return the addresses of tensors and the storages that keep them; None if a tensor does not fit its context."""
