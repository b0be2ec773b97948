"""Split layers: output, gradients of inputs and of weights are the unsplit layer's; so are the first weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.parallel_layers import assert_close, assert_same_parameters, assert_same_step, parts_of
from torch.nn import functional

import horovodlike.torch as hvd

SIZES = (1, 2, 3, 4)
SHAPES = ((), (5,), (2, 3), (0,))  # before the features
SETS = {2: ([0], [1]), 3: ([0, 2], [1]), 4: ([0, 2], [1, 3])}
EMBED, HEADS, LENGTH = 24, 12, 5
F64 = {"dtype": torch.float64}


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), **F64)


def _pair(make, make_plain):
    """Make both layers from the same seed, and check that they have the same weights and the same seed afterwards."""
    torch.manual_seed(17)
    split = make()
    after = torch.rand(3)
    torch.manual_seed(17)
    plain = make_plain()
    assert torch.equal(torch.rand(3), after)
    assert_same_parameters(split, plain)
    return split, plain


def _column(chosen: hvd.ProcessSet) -> None:
    for bias in (True, False):
        split, plain = _pair(
            partial(hvd.nn.ColumnParallelLinear, 7, 12, bias, process_set=chosen, **F64),
            partial(torch.nn.Linear, 7, 12, bias, **F64),
        )
        assert split.weight.shape == (12 // chosen.size(), 7)
        for shape in SHAPES:
            assert_same_step(split, plain, _x(*shape, 7))
        split.gather_output = False
        part = split(_x(5, 7))
        assert_close(part, plain(_x(5, 7)).chunk(chosen.size(), -1)[chosen.rank()])


def _row(chosen: hvd.ProcessSet) -> None:
    for bias in (True, False):
        split, plain = _pair(
            partial(hvd.nn.RowParallelLinear, 12, 7, bias, process_set=chosen, **F64),
            partial(torch.nn.Linear, 12, 7, bias, **F64),
        )
        assert split.weight.shape == (7, 12 // chosen.size())
        for shape in SHAPES:
            assert_same_step(split, plain, _x(*shape, 12))
        split.input_is_parallel = True
        mine = _x(5, 12).chunk(chosen.size(), -1)[chosen.rank()].requires_grad_()
        whole = _x(5, 12).requires_grad_()
        output = split(mine)
        output.square().sum().backward()
        plain(whole).square().sum().backward()
        assert_close(output, plain(whole))
        assert_close(mine.grad, whole.grad.chunk(chosen.size(), -1)[chosen.rank()])


def _the_bias_is_added_once(chosen: hvd.ProcessSet) -> None:
    """Its predecessor added it on every rank before the sum."""
    split = hvd.nn.RowParallelLinear(12, 3, process_set=chosen, **F64)
    with torch.no_grad():
        split.weight.zero_()
        split.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    output = split(_x(4, 12))
    assert torch.equal(output, torch.tensor([[1.0, 2.0, 3.0]] * 4, **F64))
    output.sum().backward()
    assert split.bias.grad.tolist() == [4.0] * 3


def _the_gradient_of_the_input_is_that_of_all_features(chosen: hvd.ProcessSet) -> None:
    """Its predecessor summed gradients of different slices of the input, as if they were of the same."""
    split = hvd.nn.RowParallelLinear(12, 1, False, process_set=chosen, **F64)
    whole = torch.arange(1.0, 13.0, **F64)
    with torch.no_grad():
        split.weight.copy_(split.part("weight", whole.unsqueeze(0)))
    x = torch.zeros(12, requires_grad=True, **F64)
    split(x).backward()
    assert torch.equal(x.grad, whole)


def _mlp(chosen: hvd.ProcessSet) -> None:
    class Plain(torch.nn.Module):
        def __init__(self, out, activation, bias):
            super().__init__()
            self.activation = activation
            self.up, self.down = torch.nn.Linear(5, 24, bias, **F64), torch.nn.Linear(24, out, bias, **F64)

        def forward(self, x):
            return self.down(self.activation(self.up(x)))

    for out, activation, bias in ((None, functional.gelu, True), (3, torch.nn.ReLU(), False)):
        split, plain = _pair(
            partial(hvd.nn.ParallelMLP, 5, 24, out, activation, bias, process_set=chosen, **F64),
            partial(Plain, out or 5, activation, bias),
        )
        for shape in SHAPES:
            assert_same_step(split, plain, _x(*shape, 5))


def _attention(chosen: hvd.ProcessSet) -> None:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    of_heads = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5), **F64)
    of_batch = (torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(6)) < 0.7) | torch.eye(
        LENGTH, dtype=torch.bool
    )
    for bias in (True, False):
        split, plain = _pair(
            partial(hvd.nn.ParallelSelfAttention, EMBED, HEADS, bias=bias, process_set=chosen, **F64),
            partial(torch.nn.MultiheadAttention, EMBED, HEADS, bias=bias, batch_first=True, **F64),
        )
        if bias:
            for layer in (split, plain):  # which are zeros at first
                with torch.no_grad():
                    whole = torch.linspace(-1, 1, 3 * EMBED, **F64)
                    layer.in_proj_bias.copy_(split.part("in_proj_bias", whole) if layer is split else whole)
                    layer.out_proj.bias.fill_(0.25)
        cases = (
            ({}, None),
            ({"is_causal": True}, ~causal),
            ({"attn_mask": causal}, ~causal),
            ({"attn_mask": of_heads}, of_heads.expand(2, -1, -1, -1).reshape(-1, LENGTH, LENGTH)),
            ({"attn_mask": of_batch}, ~of_batch.expand(-1, HEADS, -1, -1).reshape(-1, LENGTH, LENGTH)),
        )
        for options, mask in cases:
            assert_same_step(
                split,
                plain,
                _x(2, LENGTH, EMBED),
                lambda x: split(x, **options),  # noqa: B023
                lambda x: plain(x, x, x, need_weights=False, attn_mask=mask)[0],  # noqa: B023
            )
        assert_close(split(_x(LENGTH, EMBED)), split(_x(LENGTH, EMBED).unsqueeze(0)).squeeze(0))
        assert split(_x(0, LENGTH, EMBED)).shape == (0, LENGTH, EMBED)


def _embedding(chosen: hvd.ProcessSet) -> None:
    indices = torch.tensor([[0, 23, 7, 11], [12, 5, 23, 2]])
    for padding in (None, 7, -1):
        split, plain = _pair(
            partial(hvd.nn.VocabParallelEmbedding, 24, 3, padding, process_set=chosen, **F64),
            partial(torch.nn.Embedding, 24, 3, padding, **F64),
        )
        assert split.weight.shape == (24 // chosen.size(), 3)
        for chosen_indices in (indices, indices.int(), indices[0, 0], indices[:0]):
            assert torch.equal(assert_same_step(split, plain, chosen_indices), plain(chosen_indices))


def _tied_head(chosen: hvd.ProcessSet) -> None:
    """Embedding, logits of the same weights, and the loss, beside torch's."""
    tokens = torch.tensor([[3, 0, 22, 9], [1, 15, 16, 23]])
    embedding, plain = _pair(
        partial(hvd.nn.VocabParallelEmbedding, 24, 6, process_set=chosen, **F64),
        partial(torch.nn.Embedding, 24, 6, **F64),
    )
    head = hvd.nn.ColumnParallelLinear(6, 24, bias=False, gather_output=False, process_set=chosen, **F64)
    head.weight = embedding.weight
    loss = hvd.nn.vocab_parallel_cross_entropy(head(embedding(tokens[:, :-1])), tokens[:, 1:], chosen)
    expected = functional.cross_entropy((plain(tokens[:, :-1]) @ plain.weight.T).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    expected.backward()
    assert_close(loss, expected)
    assert_close(embedding.weight.grad, parts_of(embedding, "weight", plain.weight.grad))


def _cross_entropy(chosen: hvd.ProcessSet) -> None:
    part = 24 // chosen.size()
    own = slice(chosen.rank() * part, (chosen.rank() + 1) * part)
    targets = torch.tensor([[0, 23, -100], [12, 11, 7]])
    for scale in (1.0, 300.0):
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                for ignored in (-100, 12):
                    target = targets.clamp(min=0) if ignored == 12 else targets
                    logits = (_x(2, 3, 24) * scale).requires_grad_()
                    mine = logits.detach()[..., own].clone().requires_grad_()
                    options = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
                    loss = hvd.nn.vocab_parallel_cross_entropy(mine, target, chosen, **options)
                    expected = functional.cross_entropy(logits.movedim(-1, 1), target, **options)
                    assert_close(loss, expected)
                    weights = torch.linspace(1, 2, loss.numel(), **F64).reshape(loss.shape)
                    (loss * weights).sum().backward()
                    (expected * weights).sum().backward()
                    assert_close(mine.grad, logits.grad[..., own])
    empty = hvd.nn.vocab_parallel_cross_entropy(_x(0, part), targets[:0, 0], chosen, reduction="sum")
    assert empty.item() == 0.0
    halves = _x(4, part).bfloat16().requires_grad_()
    loss = hvd.nn.vocab_parallel_cross_entropy(halves, torch.tensor([0, 1, 5, 23]), chosen)
    loss.backward()
    assert loss.dtype == torch.float32 and halves.grad.dtype == torch.bfloat16


def _other_dtypes(chosen: hvd.ProcessSet) -> None:
    split = hvd.nn.ParallelMLP(5, 24, process_set=chosen, dtype=torch.bfloat16)
    assert split(_x(3, 5).bfloat16()).dtype == torch.bfloat16
    split = hvd.nn.ParallelMLP(5, 24, process_set=chosen)
    with torch.autocast("cpu", torch.bfloat16):
        output = split(_x(3, 5).float())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert split.up.weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), split(_x(3, 5).float()), rtol=0.05, atol=0.05)


def _drawn_anew(chosen: hvd.ProcessSet) -> None:
    for split in (
        hvd.nn.ColumnParallelLinear(6, 24, process_set=chosen, device="meta"),
        hvd.nn.RowParallelLinear(24, 6, process_set=chosen, device="meta"),
        hvd.nn.VocabParallelEmbedding(24, 6, process_set=chosen, device="meta"),
        hvd.nn.ParallelSelfAttention(24, 12, process_set=chosen, device="meta"),
    ):
        split.to_empty(device="cpu")
        parameters = list(split.parameters())
        torch.manual_seed(3)
        split.reset_parameters()
        assert all(map(torch.equal, parameters, split.parameters()))
        torch.manual_seed(3)
        assert_same_parameters(split, split.unsplit())


def _gradients_of_gradients(chosen: hvd.ProcessSet) -> None:
    torch.manual_seed(4)
    layers = (
        hvd.nn.ColumnParallelLinear(3, 12, process_set=chosen, **F64),
        hvd.nn.RowParallelLinear(12, 3, process_set=chosen, **F64),
    )

    def penalised(first, second, x):
        output = second(first(x).tanh()).square().sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        return gradient.square().sum()

    plain = [layer.unsplit(**F64) for layer in layers]
    for split, unsplit in zip(layers, plain, strict=True):
        unsplit.load_state_dict(hvd.nn.full_state_dict(split))
    x = _x(2, 3)
    losses = [penalised(*each, x.clone().requires_grad_()) for each in (layers, plain)]
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    for split, unsplit in zip(layers, plain, strict=True):
        assert_close(split.weight.grad, parts_of(split, "weight", unsplit.weight.grad))


CASES = (
    _column,
    _row,
    _the_bias_is_added_once,
    _the_gradient_of_the_input_is_that_of_all_features,
    _mlp,
    _attention,
    _embedding,
    _tied_head,
    _cross_entropy,
    _other_dtypes,
    _drawn_anew,
    _gradients_of_gradients,
)


def _of_all_ranks(case) -> None:
    case(hvd.global_process_set)


def _of_some_ranks(sets: list[list[int]]) -> None:
    """All cases on process sets of some ranks, which work at the same time."""
    registered = [hvd.add_process_set(ranks) for ranks in sets]
    (mine,) = (one for one in registered if one.included())
    for case in CASES:
        case(mine)
    hvd.barrier()
    for one in registered:
        hvd.remove_process_set(one)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_as_the_unsplit_layer(ranks, case, size):
    ranks(size).run(_of_all_ranks, case)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_a_process_set(ranks, size):
    ranks(size).run(_of_some_ranks, SETS[size])
