"""Compression of gradients: a tensor is sent as it is, or in fewer bits.

To add one, derive from `Compressor` and pass the class where `compression=` is accepted.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Interface of a compression: two static functions, of which the second undoes the first."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor to send and a context for `decompress`, such as the original's dtype."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return `tensor`, which has been reduced over the ranks, in the form that the original had."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every tensor as it is."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor itself."""
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type, and others as they are."""

    narrow: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor, in the narrower type if it is floating point, and its original dtype."""
        return tf.cast(tensor, cls.narrow) if tensor.dtype.is_floating else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor in the dtype `ctx`, the original tensor's."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as IEEE half precision: 11 bits of precision, nothing above 65504."""

    narrow = tf.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, the range of float32."""

    narrow = tf.bfloat16


class Compression:
    """The compressions that come with the package, as values of the `compression` arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
