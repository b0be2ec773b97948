"""The extension made from native_calls.c."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from horovodlike._engine.ops import Request

_Enqueue: TypeAlias = Callable[[torch.Tensor], int]
_Take: TypeAlias = Callable[[int, torch.Tensor], int]

def use_torch(tensor: type, parameter: type, exchange_api: object, *functions: Callable[[], object]) -> None: ...
def context(
    request: Request, address: int, of_dtype: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]
) -> object: ...
def calls(context: object) -> tuple[_Enqueue, _Take, _Enqueue, _Take]: ...
def memory(
    contexts: list[object], tensors: list[torch.Tensor]
) -> tuple[list[int], list[torch.UntypedStorage]] | None: ...
