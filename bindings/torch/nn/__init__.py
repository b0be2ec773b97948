"""Layers that are split among the ranks of a process set (tensor parallelism): ``import horovodlike.torch.nn``.

Example::

    hvd.init()
    torch.manual_seed(0)  # on all ranks of the set: each has its part of the weights that the unsplit layer has
    mlp = hvd.nn.ParallelMLP(1024, 4096)
    output = mlp(input)  # the same input on all ranks, and the same output

Output, gradients of the input and gradients of the weights are the same as with the unsplit layer.
docs/users/model_parallel.md describes how to combine the layers with data parallelism.

The modules behind this façade:

* :mod:`horovodlike.torch.nn.linear`: `ColumnParallelLinear`, `RowParallelLinear`
* :mod:`horovodlike.torch.nn.mlp`: `ParallelMLP`
* :mod:`horovodlike.torch.nn.attention`: `ParallelSelfAttention`
* :mod:`horovodlike.torch.nn.embedding`: `VocabParallelEmbedding`
* :mod:`horovodlike.torch.nn.loss`: `vocab_parallel_cross_entropy`
* :mod:`horovodlike.torch.nn.state`: the state of a model and of its optimizer in unsplit form, and `clip_grad_norm_`
"""

from horovodlike.torch.nn._module import ParallelModule
from horovodlike.torch.nn.attention import ParallelSelfAttention
from horovodlike.torch.nn.embedding import VocabParallelEmbedding
from horovodlike.torch.nn.linear import ColumnParallelLinear, RowParallelLinear
from horovodlike.torch.nn.loss import vocab_parallel_cross_entropy
from horovodlike.torch.nn.mlp import ParallelMLP
from horovodlike.torch.nn.state import (
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelMLP",
    "ParallelModule",
    "ParallelSelfAttention",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "vocab_parallel_cross_entropy",
]
