"""Split layers beside the unsplit ones, for the tests of `horovodlike.torch.nn`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

TOLERANCE = 1e-12


def parts_of(split: torch.nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a value of the unsplit model's parameter `name`."""
    path, _, last = name.rpartition(".")
    owner = split.get_submodule(path)
    return owner.part(last, whole) if hasattr(owner, "splits") and last in owner.splits else whole


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_parameters(split: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Check that both have the same names, and to the bit the same values."""
    own, whole = dict(split.named_parameters()), dict(plain.named_parameters())
    assert own.keys() == whole.keys()
    for name, value in own.items():
        assert torch.equal(value, parts_of(split, name, whole[name])), name


def assert_same_step(
    split: torch.nn.Module,
    plain: torch.nn.Module,
    input: torch.Tensor,
    run_split: Callable[[Any], torch.Tensor] | None = None,
    run_plain: Callable[[Any], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run both forward and backward, check output and gradients, and return the split layer's output.

    The loss weighs each output differently. The layers are not first ones: the gradient of the input is checked too.
    """
    for model in (split, plain):
        model.zero_grad(set_to_none=True)
    inputs = [input.detach().clone(), input.detach().clone()]
    outputs = []
    for tensor, run in zip(inputs, (run_split or split, run_plain or plain), strict=True):
        differentiable = tensor.is_floating_point()
        # Not a leaf, and used elsewhere too: a gradient that is overwritten in place would be seen here.
        between = tensor.requires_grad_() * 1.5 if differentiable else tensor
        output = run(between)
        weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
        loss = (output * weights).sum() + (between.square().sum() if differentiable else 0)
        loss.backward()
        outputs.append(output.detach())
    assert_close(*outputs)
    if inputs[0].grad is not None:
        assert_close(inputs[0].grad, inputs[1].grad)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in split.named_parameters():
        assert_close(parameter.grad, parts_of(split, name, gradients[name]))
    return outputs[0]


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """A compiler that remembers nothing, and whose own warnings are no errors."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


class Gpt(torch.nn.Module):
    """A small language model: embedding, a block of attention and MLP, and a head that shares the embedding.

    Args:
        process_set: The ranks that share each layer; None: the unsplit model, made of torch's layers.
    """

    WORDS, WIDTH, HEADS, LENGTH = 24, 8, 4, 6

    def __init__(self, process_set: Any = None, dropout: float = 0.0) -> None:
        super().__init__()
        import horovodlike.torch as hvd

        self.set, options = process_set, {"dtype": torch.float64}
        width = self.WIDTH
        self.position = torch.nn.Parameter(torch.zeros(self.LENGTH, width, **options))
        self.norm = torch.nn.LayerNorm(width, **options)
        if process_set is None:
            self.embedding = torch.nn.Embedding(self.WORDS, width, **options)
            self.attention = torch.nn.MultiheadAttention(width, self.HEADS, dropout, batch_first=True, **options)
            self.mlp = torch.nn.ModuleDict()
            self.mlp["up"] = torch.nn.Linear(width, 4 * width, **options)
            self.mlp["down"] = torch.nn.Linear(4 * width, width, **options)
            self.head = torch.nn.Linear(width, self.WORDS, False, **options)
        else:
            options["process_set"] = process_set
            self.embedding = hvd.nn.VocabParallelEmbedding(self.WORDS, width, **options)
            self.attention = hvd.nn.ParallelSelfAttention(width, self.HEADS, dropout, **options)
            self.mlp = hvd.nn.ParallelMLP(width, 4 * width, **options)
            self.head = hvd.nn.ColumnParallelLinear(width, self.WORDS, False, False, **options)
        self.head.weight = self.embedding.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        if self.set is not None:
            x = x + self.attention(normed, is_causal=True)
            return x + self.mlp(x)
        mask = torch.ones(self.LENGTH, self.LENGTH, dtype=torch.bool).triu(1)
        x = x + self.attention(normed, normed, normed, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp["down"](torch.nn.functional.gelu(self.mlp["up"](x)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting tokens [:, 1:] from tokens [:, :-1]; of shape (N, LENGTH + 1)."""
        return self.loss(self.block(self.embedding(tokens[:, :-1]) + self.position), tokens[:, 1:])

    def loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        import horovodlike.torch as hvd

        logits = self.head(x)
        if self.set is not None:
            return hvd.nn.vocab_parallel_cross_entropy(logits, target, self.set)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(count: int) -> torch.Tensor:
    """Return sequences for `Gpt`, the same on all ranks."""
    return torch.randint(0, Gpt.WORDS, (count, Gpt.LENGTH + 1), generator=torch.Generator().manual_seed(3))
