"""PowerSGD: gradients sent as two thin matrices whose product is a low-rank approximation."""

from __future__ import annotations

import zlib

import torch

from horovodlike.torch._optimizer.error_feedback import ErrorFeedbackReducer, State, computing_dtype
from horovodlike.torch._optimizer.gradient_reducer import Collectives, NamedGradients


class PowerSGD(ErrorFeedbackReducer):
    """Approximates gradients by matrices of low rank, with error feedback.

    A gradient of two or more dimensions is treated as an n x m matrix, n being its first dimension. M is this matrix
    plus the residual, the part that earlier steps did not send. One power iteration, which starts with Q of the
    previous step, gives P = M Q, averaged and orthogonalised, and a new Q = M^T P, averaged. This sends r(n+m) numbers
    instead of nm, in two allreduces for all gradients together. Every rank uses P Q^T, and keeps M - P Q^T as the
    residual. Gradients not worth compressing (vectors, small matrices) are averaged as they are, in one operation.

    Gradients narrower than float32 are converted to float32, also for sending. Every rank computes P Q^T itself, from
    the same numbers: the bits are equal where all ranks have the same hardware and the same library versions.

    Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", arXiv:1905.13727.

    Args:
        rank: r, the rank of the approximation: 1, 2 and 4 are common. A higher rank is more exact, and sends more.
        min_compression: A gradient is compressed if that sends less than its bytes divided by this.
        start_step: The number of first steps in which all gradients are averaged as they are.
        seed: The seed of the first Q; the same on all ranks.

    Raises:
        ValueError: `rank` is not positive, or `min_compression` or `start_step` is negative.
    """

    def __init__(self, rank: int = 4, min_compression: float = 2.0, start_step: int = 0, seed: int = 0) -> None:
        super().__init__(start_step, "factors")
        if rank < 1:
            raise ValueError(f"rank must be > 0, got {rank}")
        if min_compression < 0:
            raise ValueError(f"min_compression must be >= 0, got {min_compression}")
        self._rank = rank
        self._min_compression = min_compression
        self._seed = seed

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        rank = min(self._rank, rows, columns)
        sent = rank * (rows + columns) * computing_dtype(gradient).itemsize
        return sent * self._min_compression < gradient.numel() * gradient.element_size()

    def _reduce_compressed(self, gradients: NamedGradients, ranks: Collectives) -> State:
        totals = [self._total(name, gradient) for name, gradient in gradients]
        matrices = [total.view(total.shape[0], -1) for total in totals]
        starts = [self._start(name, matrix) for (name, _), matrix in zip(gradients, matrices, strict=True)]
        lefts = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        ranks.average(lefts, "p")
        # QR uses Householder reflections, so the columns are orthonormal even where P is zero or lacks full rank.
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        ranks.average(rights, "q")
        state: State = {"residuals": {}, "factors": {}}
        for (name, gradient), total, left, right in zip(gradients, totals, lefts, rights, strict=True):
            gradient.copy_((left @ right.t()).view(total.shape))
            state["residuals"][name] = total.sub_(gradient)  # the gradient as it is used may have a narrower dtype
            state["factors"][name] = right
        return state

    def _start(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return Q of the previous step, or random numbers, which are equal on all ranks and differ between names."""
        columns = matrix.shape[1]
        shape = torch.Size((columns, min(self._rank, *matrix.shape)))
        known = self._recall("factors", name, matrix, shape)
        if known is not None:
            return known.to(matrix.dtype)
        generator = torch.Generator().manual_seed(self._seed + zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, dtype=matrix.dtype, device="cpu").to(matrix.device)
