"""Self-attention whose heads are split among the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from horovodlike.process_set import ProcessSet, global_process_set
from horovodlike.splits import Split, even_share
from horovodlike.torch._ops import disable_compile
from horovodlike.torch.nn._module import ParallelModule
from horovodlike.torch.nn._region import Region, own_random_stream
from horovodlike.torch.nn.linear import RowParallelLinear

_QUERY_KEY_VALUE = Split(0, blocks=3)


class ParallelSelfAttention(ParallelModule):
    """Self-attention whose heads are split among the ranks of a process set.

    A forward pass costs one allreduce, and so does a backward pass. The unsplit layer is
    `torch.nn.MultiheadAttention(..., batch_first=True)`, whose parameters have the same names: `in_proj_weight`,
    `in_proj_bias`, `out_proj.weight` and `out_proj.bias`.

    Dropout of attention weights is random for each head, so each rank needs numbers of its own. In each forward pass in
    training mode with `dropout` above 0, the layer draws one number from torch's generator on the CPU, which must have
    the same state on all ranks of the set. That number and the rank's place in the set are the seed of a stream that is
    used in this pass only. So ranks drop independently of each other, activation checkpointing recomputes the same
    result, and after the pass the generators still agree. With dropout the output differs from the unsplit layer's.

    The requirements on the ranks are the same as for `ColumnParallelLinear`.

    Args:
        embed_dim: The size of the last dimension of the input and the output; a multiple of `num_heads`.
        num_heads: The heads of all ranks together; a multiple of the number of ranks.
        dropout: The probability with which an attention weight becomes 0 in training mode.
        bias: True if the projections add a bias.
        process_set: The ranks.
        device: As for `torch.nn.MultiheadAttention`.
        dtype: As for `torch.nn.MultiheadAttention`.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: The heads or the features cannot be split evenly, `dropout` is no probability, or this rank is not
            in the process set. In forward: the input or the mask has a wrong shape.
        HorovodInternalError: In forward and backward: the ranks disagree, or the job is broken or shut down.
    """

    in_proj_weight: torch.nn.Parameter
    in_proj_bias: torch.nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__({"in_proj_weight": _QUERY_KEY_VALUE, "in_proj_bias": _QUERY_KEY_VALUE}, process_set)
        self._own_heads = even_share(num_heads, "ParallelSelfAttention: num_heads", self._region.num_ranks)
        if embed_dim <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"ParallelSelfAttention: embed_dim={embed_dim} cannot be split evenly among num_heads={num_heads}: "
                f"take a multiple of {num_heads}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"ParallelSelfAttention: dropout must be at least 0 and below 1, got {dropout!r}")
        self.embed_dim, self.num_heads, self.dropout, self.has_bias = embed_dim, num_heads, dropout, bias
        self.out_proj = RowParallelLinear(embed_dim, embed_dim, bias, True, process_set, "meta", dtype)
        self.take_parts(self.unsplit(device, dtype))

    def unsplit(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.nn.MultiheadAttention:
        """Return a new `torch.nn.MultiheadAttention` of the same options."""
        return torch.nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, self.has_bias, batch_first=True, device=device, dtype=dtype
        )

    def take_parts(self, unsplit: torch.nn.Module) -> None:
        """Set the parameters to this rank's parts of an unsplit layer's."""
        super().take_parts(unsplit)
        self.out_proj.take_parts(unsplit.get_submodule("out_proj"))

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}, bias={self.has_bias}"

    def forward(
        self, input: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        """Return a tensor of the input's shape, (N, L, embed_dim) or (L, embed_dim), the same on all ranks.

        Args:
            input: The sequences, with the batch first.
            attn_mask: As for `torch.nn.functional.scaled_dot_product_attention`, and the same on all ranks: True where
                a position may be attended to (the opposite of `torch.nn.MultiheadAttention`), or numbers to add. Of a
                shape that broadcasts to (N, num_heads, L, L).
            is_causal: True: each position attends to itself and those before. Not together with `attn_mask`.
        """
        self._check_width(input, self.embed_dim)
        if input.dim() not in (2, 3):
            raise ValueError(f"ParallelSelfAttention: expected an input (N, L, E) or (L, E), got {tuple(input.shape)}")
        if is_causal and attn_mask is not None:
            raise ValueError("ParallelSelfAttention: give attn_mask or is_causal, not both")
        if attn_mask is not None:
            attn_mask = self._mask_of_own_heads(attn_mask)
        projected = functional.linear(self._region.copy(input), self.in_proj_weight, self.in_proj_bias)
        # (..., L, 3 * heads * features) -> 3 tensors (..., heads, L, features)
        of_heads = projected.view(*input.shape[:-1], 3, self._own_heads, self.embed_dim // self.num_heads)
        query, key, value = of_heads.transpose(-4, -2).unbind(-3)
        dropout = self.dropout if self.training else 0.0
        attend = _attend if dropout == 0.0 else _attend_with_dropout
        attended = attend(query, key, value, attn_mask, dropout, is_causal, self._region)
        output: torch.Tensor = self.out_proj(attended.transpose(-3, -2).flatten(-2))
        return output

    def _mask_of_own_heads(self, mask: torch.Tensor) -> torch.Tensor:
        of_heads = mask.shape[-3] if mask.dim() > 2 else 1
        if of_heads not in (1, self.num_heads):
            raise ValueError(
                f"ParallelSelfAttention: attn_mask of shape {tuple(mask.shape)} has masks for {of_heads} heads in its "
                f"third last dimension: give it 1 or num_heads={self.num_heads}, those of all ranks"
            )
        return mask if of_heads == 1 else mask.narrow(-3, self._region.place * self._own_heads, self._own_heads)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    region: Region,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)


def _attend_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    region: Region,
) -> torch.Tensor:
    with own_random_stream(region, query.device):
        return _attend(query, key, value, mask, dropout, is_causal, region)


disable_compile(_attend_with_dropout)
