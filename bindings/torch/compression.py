"""Compression of gradients: a tensor is sent as it is, or in fewer bits.

To add a compression, derive from `Compressor` and pass the class where `compression=` is accepted. A method that cannot
be expressed as one tensor summed over the ranks is a `GradientReducer`; `DistributedOptimizer` takes an instance of it.
"""

from __future__ import annotations

from horovodlike.torch._ops.compressors import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
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


class Compression:
    """The compressions that come with the package, as values of the `compression` arguments.

    `none`, `fp16` and `bf16` are passed as they are. `powersgd` and `topk` are called to make an object for
    `DistributedOptimizer`, as in `compression=Compression.powersgd(rank=2)`; the collectives do not accept it.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD
    topk = TopK
