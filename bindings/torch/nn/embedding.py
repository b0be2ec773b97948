"""An embedding whose vocabulary is split among the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.splits import even_share
from horovodlike.torch.nn._module import ROWS, ParallelModule
from horovodlike.torch.nn._vocabulary import local_indices


class VocabParallelEmbedding(ParallelModule):
    """A `torch.nn.Embedding` whose vocabulary is split among the ranks of a process set.

    Forward, each rank looks up the words that it has, and the ranks' results are summed in place. Backward, nothing is
    sent. Parameter: `weight` of shape (num_embeddings / ranks, embedding_dim). A `ColumnParallelLinear` to logits,
    without a bias, may share it: `head.weight = embedding.weight`.

    The requirements on the ranks are the same as for `ColumnParallelLinear`.

    Args:
        num_embeddings: The size of the vocabulary; a multiple of the number of ranks.
        embedding_dim: The size of each embedding.
        padding_idx: As for `torch.nn.Embedding`: the index whose embedding begins as 0 and receives no gradient.
        process_set: The ranks.
        device: As for `torch.nn.Embedding`.
        dtype: As for `torch.nn.Embedding`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: The vocabulary cannot be split evenly, `padding_idx` is outside it, or this rank is not in the
            process set.
        IndexError: In forward: an index is outside the vocabulary. On a GPU and in a compiled function, where this is
            not looked up beforehand, torch's own lookup fails.
        HorovodInternalError: In forward: the ranks disagree, or the job is broken or shut down.
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__({"weight": ROWS}, process_set)
        share = even_share(num_embeddings, "VocabParallelEmbedding: num_embeddings", self._region.num_ranks)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: padding_idx={padding_idx} is outside the vocabulary of {num_embeddings} words"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self._own_padding_idx = None
        if self.padding_idx is not None and self.padding_idx // share == self._region.place:
            self._own_padding_idx = self.padding_idx % share
        self.take_parts(self.unsplit(device, dtype))

    def unsplit(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.nn.Embedding:
        """Return a new `torch.nn.Embedding` of the same options."""
        return torch.nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (..., embedding_dim) of indices (...), which are int32 or int64."""
        name = "VocabParallelEmbedding: index"
        own, foreign = local_indices(input, self.num_embeddings, self._region, name)
        found = functional.embedding(own, self.weight, self._own_padding_idx)
        return self._region.sum(found.masked_fill(foreign.unsqueeze(-1), 0.0))
