"""Top-k: of each gradient only the elements of largest magnitude are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from horovodlike.errors import MismatchError
from horovodlike.torch._ops import gpu
from horovodlike.torch._optimizer.error_feedback import ErrorFeedbackReducer, State
from horovodlike.torch._optimizer.gradient_reducer import Collectives, NamedGradients

_MAX_INT32 = torch.iinfo(torch.int32).max


class TopK(ErrorFeedbackReducer):
    """Sends the largest elements of each gradient, with error feedback.

    The residual, the part that earlier steps did not send, is added to the gradient. The fraction `ratio` of the sum's
    elements (rounded up) that is largest in magnitude is sent: values in the gradient's dtype, and indices as int32
    (int64 where there are more than 2^31-1 elements), in one allgather for all gradients. Every rank adds up the
    elements of all ranks in the order of the ranks, divides by the number of ranks, and keeps the part that it did
    not send as the residual. Gradients not worth compressing are averaged as they are, in one operation. The traffic of
    an allgather grows with the number of ranks; the traffic of an allreduce does not.

    Sources: Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory", arXiv:1809.07599; Lin et al. 2018, "Deep
    Gradient Compression", arXiv:1712.01887, without its momentum correction.

    Args:
        ratio: The share of the elements that is sent, in (0, 1].
        start_step: The number of first steps in which all gradients are averaged as they are.

    Raises:
        ValueError: `ratio` is out of its range, or `start_step` is negative.
    """

    def __init__(self, ratio: float = 0.01, start_step: int = 0) -> None:
        super().__init__(start_step)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be > 0 and <= 1, got {ratio}")
        self._ratio = ratio

    def _count(self, gradient: torch.Tensor) -> int:
        return math.ceil(self._ratio * gradient.numel())

    def _pays(self, gradient: torch.Tensor) -> bool:
        value = gradient.element_size()
        return self._count(gradient) * (value + _index_dtype(gradient).itemsize) < gradient.numel() * value

    def _reduce_compressed(self, gradients: NamedGradients, ranks: Collectives) -> State:
        if not gradients:
            return {}
        totals = [self._total(name, gradient).view(-1) for name, gradient in gradients]
        chosen, values = [], []
        for (_, gradient), total in zip(gradients, totals, strict=True):
            indices = total.abs().topk(self._count(gradient), sorted=False).indices
            chosen.append(indices.to(_index_dtype(gradient)))
            values.append(total[indices].to(gradient.dtype))
            total[indices] -= values[-1]  # the error of rounding stays in the residual
        gathered = _gather_and_check([*values, *chosen], gradients, ranks)
        all_values, all_indices = gathered[: len(values)], gathered[len(values) :]
        for (_, gradient), total, from_ranks, places in zip(gradients, totals, all_values, all_indices, strict=True):
            gradient.copy_(_mean(from_ranks, places, torch.zeros_like(total)).view(gradient.shape))
        residuals = (total.view(gradient.shape) for (_, gradient), total in zip(gradients, totals, strict=True))
        return {"residuals": {name: residual for (name, _), residual in zip(gradients, residuals, strict=True)}}


def _index_dtype(gradient: torch.Tensor) -> torch.dtype:
    return torch.int32 if gradient.numel() <= _MAX_INT32 else torch.int64


def _gather_and_check(
    tensors: Sequence[torch.Tensor], gradients: NamedGradients, ranks: Collectives
) -> Sequence[torch.Tensor]:
    """Gather values and indices, and check that the sizes of their gradients are equal on all ranks.

    For tensors on a GPU the sizes are gathered separately on the CPU, so that the host does not wait for the GPU.
    """
    sizes = torch.tensor([gradient.numel() for _, gradient in gradients], device="cpu")
    if gpu.is_on_gpu(tensors[0]):
        gathered = ranks.gather(tensors, "largest")
        (all_sizes,) = ranks.gather([sizes], "sizes")
    else:
        *gathered, all_sizes = ranks.gather([*tensors, sizes.to(tensors[0].device)], "largest")
    _check_sizes(all_sizes, gradients)
    return gathered


def _check_sizes(sizes: torch.Tensor, gradients: NamedGradients) -> None:
    """Raise an error, on all ranks, if gradients have different sizes: wrong indices could go unnoticed otherwise."""
    for (name, _), by_rank in zip(gradients, sizes.t().tolist(), strict=True):
        if len(set(by_rank)) > 1:
            raise MismatchError(f"{name}: the gradients of ranks 0 to {len(by_rank) - 1} have {by_rank} elements")


def _mean(values: torch.Tensor, indices: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return the mean of sparse vectors, one in each row, using the memory of `zeros`."""
    # Row by row: within a row no index occurs twice, so the order of additions, and the bits, are the same everywhere.
    for row, places in zip(values, indices, strict=True):
        zeros.index_add_(0, places, row.to(zeros.dtype))
    return zeros.div_(len(values))
