"""Indices of words in the part of a vocabulary that a rank has."""

from __future__ import annotations

import torch

from horovodlike.torch.nn._region import Region


def local_indices(
    indices: torch.Tensor, vocabulary: int, region: Region, name: str, ignored: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices within this rank's part, 0 for words of other ranks, and a mask of the latter.

    On a GPU and in a compiled function, indices outside the vocabulary become invalid ones, so that a lookup fails
    there; elsewhere they are an error here. No rank has the word `ignored`.

    Args:
        indices: int32 or int64, of any shape.
        vocabulary: The number of words, which the number of ranks divides.
        region: The ranks.
        name: The name of the indices for messages.
        ignored: An index that may be outside the vocabulary.

    Raises:
        IndexError: An index is outside the vocabulary.
        TypeError: The indices are no integers.
    """
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {indices.dtype}")
    outside = (indices < 0) | (indices >= vocabulary)
    if ignored is not None:
        outside &= indices != ignored
    if indices.device.type == "cpu" and not torch.compiler.is_compiling() and bool(outside.any()):
        raise IndexError(
            f"{name} {int(indices[outside][0])} is outside the vocabulary of {vocabulary} words: give indices from 0 "
            f"to {vocabulary - 1}"
        )
    share = vocabulary // region.num_ranks
    own = indices - region.place * share
    foreign = (own < 0) | (own >= share)
    if ignored is not None:
        foreign |= indices == ignored
    return own.masked_fill(foreign, 0).masked_fill(outside, vocabulary), foreign
