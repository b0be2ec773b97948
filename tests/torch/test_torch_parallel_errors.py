"""Split layers that cannot be made, and inputs that they do not take: each error names the numbers and the remedy."""

from __future__ import annotations

import pytest
import torch
from support.parallel_layers import compiler

import horovodlike.torch as hvd

nn = hvd.nn


def _cannot_be_split() -> None:
    three = hvd.global_process_set
    for make, message in (
        (lambda: nn.ColumnParallelLinear(4, 10, process_set=three), r"out_features=10 .* among 3 ranks: .* 9 or 12"),
        (lambda: nn.RowParallelLinear(10, 3), r"RowParallelLinear: in_features=10 .* among 3 ranks"),
        (lambda: nn.RowParallelLinear(2, 3), r"in_features=2 .* multiple of 3, such as 3, or a process set"),
        (lambda: nn.ColumnParallelLinear(2, 0), r"out_features=0 cannot be split"),
        (lambda: nn.ParallelMLP(4, 16), r"out_features=16 .* among 3 ranks"),
        (lambda: nn.ParallelSelfAttention(16, 4), r"num_heads=4 .* among 3 ranks"),
        (lambda: nn.ParallelSelfAttention(16, 3), r"embed_dim=16 .* num_heads=3: take a multiple of 3"),
        (lambda: nn.ParallelSelfAttention(12, 3, dropout=1.0), r"dropout must be .* below 1, got 1.0"),
        (lambda: nn.VocabParallelEmbedding(50257, 4), r"num_embeddings=50257 .* 50256 or 50259"),
        (lambda: nn.VocabParallelEmbedding(9, 4, padding_idx=9), r"padding_idx=9 is outside the vocabulary of 9"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def _process_sets() -> None:
    registered = hvd.add_process_set([0, 1])
    layers = (
        lambda chosen: nn.ColumnParallelLinear(4, 4, process_set=chosen),
        lambda chosen: nn.ParallelMLP(4, 4, process_set=chosen),
        lambda chosen: nn.ParallelSelfAttention(4, 2, process_set=chosen),
        lambda chosen: nn.VocabParallelEmbedding(4, 2, process_set=chosen),
        lambda chosen: nn.vocab_parallel_cross_entropy(torch.zeros(1, 2), torch.zeros(1).long(), chosen),
    )
    for make in layers:
        with pytest.raises(TypeError, match="process_set must be a ProcessSet"):
            make([0, 1])
        with pytest.raises(ValueError, match="not registered: call hvd.add_process_set"):
            make(hvd.ProcessSet([0, 2]))
        if registered.included():
            make(registered)
        else:
            with pytest.raises(ValueError, match="rank 2 is not a member of ProcessSet"):
                make(registered)
    hvd.barrier()
    hvd.remove_process_set(registered)


def _inputs() -> None:
    embedding, attention = nn.VocabParallelEmbedding(12, 4), nn.ParallelSelfAttention(6, 3)
    rows = nn.RowParallelLinear(6, 4), nn.RowParallelLinear(6, 4, input_is_parallel=True)
    logits, target = torch.zeros(2, 4), torch.tensor([1, 11])
    entropy = nn.vocab_parallel_cross_entropy
    for error, call, message in (
        (ValueError, lambda: nn.ColumnParallelLinear(4, 6)(torch.zeros(2, 5)), r"dimension is 4, got .*\(2, 5\)"),
        (ValueError, lambda: nn.ColumnParallelLinear(4, 6)(torch.zeros(())), r"dimension is 4, got .*\(\)"),
        (ValueError, lambda: rows[0](torch.zeros(2, 2)), r"dimension is 6, got .*\(2, 2\).*input_is_parallel=True"),
        (ValueError, lambda: rows[1](torch.zeros(2, 6)), r"dimension is 2, got .*\(2, 6\).*input_is_parallel=False"),
        (ValueError, lambda: attention(torch.zeros(2, 5, 4)), r"dimension is 6"),
        (ValueError, lambda: attention(torch.zeros(1, 2, 5, 6)), r"\(N, L, E\) or \(L, E\), got \(1, 2, 5, 6\)"),
        (ValueError, lambda: attention(torch.zeros(2, 6), torch.ones(2, 2).bool(), True), "not both"),
        (ValueError, lambda: attention(torch.zeros(2, 6), torch.zeros(2, 2, 2)), "1 or num_heads=3"),
        (IndexError, lambda: embedding(torch.tensor([0, 12])), "index 12 is outside the vocabulary of 12.* 0 to 11"),
        (IndexError, lambda: embedding(torch.tensor(-1)), "index -1 is outside"),
        (TypeError, lambda: embedding(torch.zeros(2)), "must be int32 or int64, got torch.float32"),
        (IndexError, lambda: entropy(logits, torch.tensor([0, 12])), "target 12 is outside"),
        (IndexError, lambda: entropy(logits, torch.tensor([0, -100]), ignore_index=3), "target -100 is outside"),
        (TypeError, lambda: entropy(logits.long(), target), "logits must be floating-point"),
        (TypeError, lambda: entropy(logits, target.double()), "target must be int32 or int64"),
        (ValueError, lambda: entropy(logits, target[:1]), r"got \(2, 4\) and \(1,\)"),
        (ValueError, lambda: entropy(logits, target, reduction="max"), "mean, sum, none, got 'max'"),
        (ValueError, lambda: entropy(logits, target, label_smoothing=2), "label_smoothing must be from 0 to 1"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert embedding(torch.tensor([0, 11])).shape == (2, 4), "nothing was sent before"


def _in_a_graph() -> None:
    """An index outside the vocabulary fails in torch's lookup."""
    embedding = nn.VocabParallelEmbedding(12, 4)
    with compiler(), pytest.raises(IndexError, match="out of range"):
        torch.compile(embedding, backend="eager", fullgraph=True)(torch.tensor([0, 12]))


CASES = (_cannot_be_split, _process_sets, _inputs)


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_errors(ranks, case, size):
    ranks(size).run(case)


@pytest.mark.slow
def test_errors_in_a_graph(ranks):
    ranks(2).run(_in_a_graph)


def test_before_init():
    import subprocess
    import sys

    script = "import horovodlike.torch as hvd; hvd.nn.ColumnParallelLinear(2, 2)"
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=60)
    assert "has not been initialized; use hvd.init()" in done.stderr
