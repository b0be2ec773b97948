"""Operations whose result sizes depend on the tensors of all ranks: allgather and alltoall."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from horovodlike._engine.ops import Allocation, DType, Output
from horovodlike.torch._ops import gpu
from horovodlike.torch._ops.handles import Call, Result, Tensors, lent, start
from horovodlike.torch._ops.loan import Loan
from horovodlike.torch._ops.tensor import check, from_output

_SPLITS = torch.empty(0, dtype=torch.int32, device="cpu")


def start_allgather(call: Call, tensors: Sequence[torch.Tensor], single: bool, waits: bool = False) -> int:
    """Enqueue an allgather and return its handle. The results get memory when the ranks know their sizes.

    `waits`: see `start_in_place`.
    """
    for tensor in tensors:
        check(tensor, call.name)

    def arrange(results: Tensors) -> Result:
        return results[0] if single else results

    return _start_varying(call, tensors, tensors, arrange, waits)


def start_alltoall(
    call: Call, tensors: Sequence[torch.Tensor], splits: Sequence[Sequence[int]], single: bool, waits: bool = False
) -> int:
    """Enqueue an alltoall and return its handle; `splits`: the rows of each tensor for each member of the process set.

    The result is, for each tensor, the rows received and the number from each member (int32, on the CPU).
    `waits`: see `start_in_place`.
    """
    for tensor in tensors:
        check(tensor, call.name)
        if tensor.dim() == 0:
            raise ValueError(f"{call.name}: a scalar has no rows; an alltoall needs at least one dimension")

    def arrange(results: Tensors) -> Result:
        pairs = tuple(zip(results[::2], results[1::2], strict=True))
        return pairs[0] if single else pairs

    likes = [like for tensor in tensors for like in (tensor, _SPLITS)]
    return _start_varying(call, tensors, likes, arrange, waits, list(itertools.chain.from_iterable(splits)))


def _start_varying(
    call: Call,
    tensors: Sequence[torch.Tensor],
    likes: Sequence[torch.Tensor],
    arrange: Callable[[Tensors], Result],
    waits: bool,
    arguments: Sequence[int] = (),
) -> int:
    """Enqueue an operation whose results are like `likes`, except for their rows, which depend on all ranks."""
    inputs, loans = lent(tensors, call.name, waits)
    if not waits:  # the caller may resize its tensors meanwhile
        likes = [like if like is _SPLITS else like.new_empty((0, *like.shape[1:])) for like in likes]
    if inputs and gpu.is_on_gpu(inputs[0]):
        return _start_varying_on_gpu(call, inputs, loans, likes, arrange, arguments)

    def finish(outputs: list[Output]) -> Result:
        return arrange(tuple(from_output(output, like) for output, like in zip(outputs, likes, strict=True)))

    return start(call, inputs, inputs, [*inputs, *loans], finish, arguments)


def _start_varying_on_gpu(
    call: Call,
    inputs: Sequence[torch.Tensor],
    loans: Sequence[Loan | None],
    likes: Sequence[torch.Tensor],
    arrange: Callable[[Tensors], Result],
    arguments: Sequence[int],
) -> int:
    borrowed: list[object] = [*inputs, *loans]
    made: dict[int, torch.Tensor] = {}
    allocate_on_gpu = gpu.allocator(inputs[0])

    def allocate(index: int, shape: Sequence[int], _: DType) -> int:
        like = likes[index]
        whole = (shape[0], *like.shape[1:])
        if like is _SPLITS:
            made[index] = torch.empty(whole, dtype=like.dtype, device="cpu")
        else:
            made[index] = allocate_on_gpu(whole, like.dtype)
            borrowed.append(made[index])
        return made[index].data_ptr()

    def finish(_: list[Output]) -> Result:
        return arrange(tuple(made[index] for index in range(len(likes))))

    return start(call, inputs, (), borrowed, finish, arguments, Allocation(allocate))
