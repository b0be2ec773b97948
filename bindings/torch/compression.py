"""Compression of gradients: a tensor is sent as it is, or in fewer bits.

To add one, derive from `Compressor` and pass the class where `compression=` is accepted. A method that does not
reduce to "one tensor, summed over the ranks" is a `GradientReducer`, of which `DistributedOptimizer` takes an instance.
"""

from __future__ import annotations

import torch

from horovodlike.torch._optimizer.gradient_reducer import Collectives, GradientReducer
from horovodlike.torch._optimizer.powersgd import PowerSGD
from horovodlike.torch._optimizer.topk import TopK

__all__ = [
    "BF16Compressor",
    "Collectives",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "GradientReducer",
    "NoneCompressor",
    "PowerSGD",
    "TopK",
]


class Compressor:
    """Interface of a compression: two static functions, of which the second undoes the first."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor to send and whatever `decompress` needs to know about the original."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return `tensor`, which has been reduced over the ranks, in the form that the original had."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type, and others as they are."""

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return the tensor in the dtype `ctx`, that of the original."""
        assert isinstance(ctx, torch.dtype)
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as IEEE half precision: 11 bits of precision, nothing above 65504."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor as float16 (if it is floating point), and its dtype."""
        return tensor.to(torch.float16) if tensor.is_floating_point() else tensor, tensor.dtype


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, the range of float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor as bfloat16 (if it is floating point), and its dtype."""
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor, tensor.dtype


class Compression:
    """The compressions that come with the package, as values of the `compression` arguments.

    `none`, `fp16` and `bf16` are passed as they are. `powersgd` and `topk` make an object that `DistributedOptimizer`
    takes, as in `compression=Compression.powersgd(rank=2)`; the collectives do not take them.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD
    topk = TopK
