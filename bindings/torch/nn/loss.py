"""Cross-entropy of logits whose vocabulary is split among the ranks."""

from __future__ import annotations

import torch

from horovodlike.basics import Max
from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.torch.mpi_ops import allreduce_
from horovodlike.torch.nn._region import Region
from horovodlike.torch.nn._vocabulary import local_indices

_NAME = "vocab_parallel_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    process_set: ProcessSet = global_process_set,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy of logits of which each rank has the part for its words.

    The result equals `torch.nn.functional.cross_entropy` of the whole logits, the same on all ranks, and so do
    the gradients. The ranks exchange the maximum and two or three sums for each target, never logits. logits of 16 bits
    are computed with in float32, and so is the result.

    Args:
        logits: Floating-point, of shape (..., vocabulary / ranks), as returned by `ColumnParallelLinear` with
            `gather_output=False`.
        target: The indices of the right words, int32 or int64, of shape (...), the same on all ranks.
        process_set: The ranks.
        ignore_index: A target of this value counts for nothing.
        reduction: "mean" over the targets that count, "sum", or "none".
        label_smoothing: The share of the target distribution that is spread evenly over all words, from 0 to 1.

    Raises:
        IndexError: A target is outside the vocabulary.
        TypeError: The logits are not floating-point, or the targets no integers.
        ValueError: The shapes do not fit, an option has a wrong value, or this rank is not in the process set.
        HorovodInternalError: The ranks disagree, or the job is broken or shut down.
    """
    region = Region.of(_NAME, process_set, _NAME)
    _check(logits, target, reduction, label_smoothing)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    vocabulary = logits.shape[-1] * region.num_ranks
    own, foreign = local_indices(target, vocabulary, region, f"{_NAME}: target", ignore_index)
    shifted = logits - _maximum(logits, region)
    right = shifted.gather(-1, own.long().unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
    sums = [shifted.exp().sum(-1), right]
    if label_smoothing > 0.0:
        sums.append(shifted.sum(-1))
    total, right, *of_all_words = region.sum(torch.stack(sums)).unbind(0)
    losses = total.log() - (1.0 - label_smoothing) * right
    for one in of_all_words:
        losses = losses - label_smoothing / vocabulary * one
    ignored = target == ignore_index
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / ignored.logical_not().sum()


def _check(logits: torch.Tensor, target: torch.Tensor, reduction: str, label_smoothing: float) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"{_NAME}: logits must be floating-point, got {logits.dtype}")
    if logits.dim() == 0 or logits.shape[-1] == 0 or logits.shape[:-1] != target.shape:
        raise ValueError(
            f"{_NAME}: expected logits of shape (..., words of this rank) and a target of shape (...), got "
            f"{tuple(logits.shape)} and {tuple(target.shape)}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_NAME}: reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{_NAME}: label_smoothing must be from 0 to 1, got {label_smoothing!r}")


def _maximum(logits: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the largest logit of each target over all ranks, without a gradient: the loss does not depend on it."""
    largest = logits.detach().amax(-1, keepdim=True)
    if region.num_ranks == 1 or largest.is_meta:
        return largest
    return allreduce_(largest, name=f"{region.name}.max", op=Max, process_set=region.process_set)
