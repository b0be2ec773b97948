"""Compression of single tensors: each is sent as it is, or in fewer bits."""

from __future__ import annotations

import torch


class Compressor:
    """The interface of a compression: `decompress` undoes `compress`; neither needs an instance."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor to send and a context for `decompress`, such as the original's dtype."""
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

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        """Return the tensor, in the narrower type if it is floating-point, and its original dtype."""
        return tensor.to(cls.narrow) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        """Return the tensor in its original dtype, `ctx`."""
        assert isinstance(ctx, torch.dtype)
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as IEEE half precision: 11 bits of precision, nothing above 65504."""

    narrow = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, the range of float32."""

    narrow = torch.bfloat16
