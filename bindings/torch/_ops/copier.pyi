"""The extension made from copier.c."""

from collections.abc import Callable

import torch

from horovodlike._engine.ops import Request

def use_torch(tensor: type, parameter: type, exchange_api: object, *functions: Callable[[], object]) -> None: ...
def copier(
    request: Request, address: int, dtype_code: int, dtype_bits: int, shape: tuple[int, ...]
) -> tuple[Callable[[torch.Tensor], int], Callable[[int, torch.Tensor], int]]: ...
