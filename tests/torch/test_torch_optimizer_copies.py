"""Copies of a `DistributedOptimizer`: deep, shallow and pickled ones are distributed, or say that they are not."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks import RankPool
from support.training import flat_parameters, loss_of, make_batches, make_model, make_sgd, my_part

import horovodlike.torch as hvd
from horovodlike.torch.compression import Compressor


def _is_the_same_everywhere(model: torch.nn.Module) -> bool:
    everywhere = hvd.allgather(flat_parameters(model).unsqueeze(0))
    return all(torch.equal(everywhere[0], other) for other in everywhere)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for x, y in make_batches(steps):
        optimizer.zero_grad()
        loss_of(model, my_part(x) + hvd.rank(), my_part(y)).backward()
        optimizer.step()


def _pickled(both: object) -> object:
    return pickle.loads(pickle.dumps(both))


class _Halved(Compressor):
    """A compression that no other process can import under this name."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, object]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: object) -> torch.Tensor:
        return tensor * 2


_Halved.__qualname__ = "_nowhere._Halved"


def _copies_reduce() -> None:
    for make_copy in (copy.deepcopy, _pickled):
        for options in (
            {},
            {"groups": 2},
            {"op": hvd.Adasum},
            {"op": hvd.Sum, "compression": hvd.Compression.fp16},
            {"gradient_predivide_factor": 2.0},
        ):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), **options)
            _train(model, optimizer)
            copied_model, copied, scheduler = make_copy(
                (model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
            )
            assert type(copied).__name__ == "SGD" and isinstance(copied, torch.optim.SGD)
            assert scheduler.optimizer is copied
            names = {id(p): n for n, p in copied_model.named_parameters()}
            assert copied._parameter_names == {p: names[id(p)] for p in copied._requires_update}
            assert len(copied._requires_update) == len(optimizer._requires_update)
            _train(copied_model, copied)
            assert _is_the_same_everywhere(copied_model), (make_copy, options)
            _train(model, optimizer)  # the same steps, from the same state
            assert torch.equal(flat_parameters(model), flat_parameters(copied_model)), (make_copy, options)


def _copies_keep_explicit_groups_and_passes() -> None:
    model = make_model()
    groups = [list(model.parameters())[:2]]
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), groups=groups)
    optimizer.set_backward_passes_per_step(2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert copied.backward_passes_per_step == 2
    assert copied._groups is not None
    assert [id(p) for p in copied._groups[0]] == [id(p) for p in list(copied_model.parameters())[:2]]


def _a_copy_of_the_optimizer_alone_has_parameters_of_its_own() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    copied = copy.deepcopy(optimizer)
    params = [p for group in copied.param_groups for p in group["params"]]
    for p in params:
        p.grad = torch.full_like(p, float(hvd.rank()))
    copied.step()
    joined = hvd.allgather(torch.cat([p.detach().flatten() for p in params]).unsqueeze(0))
    assert all(torch.equal(joined[0], other) for other in joined)


def _a_shallow_copy_shares_the_reduction() -> None:
    model = make_model()
    shallow = copy.copy(hvd.DistributedOptimizer(make_sgd(model), model.named_parameters()))
    _train(model, shallow)
    assert _is_the_same_everywhere(model)


def _what_cannot_reduce_says_so() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), compression=hvd.Compression.topk(ratio=0.5)
    )
    for make_copy in (copy.deepcopy, _pickled):
        copied_model, copied = make_copy((model, optimizer))
        loss_of(copied_model, *make_batches(1)[0]).backward()
        if hvd.size() == 1:
            copied.step()
            continue
        with pytest.raises(RuntimeError, match=r"compression=TopK has a state.*hvd\.DistributedOptimizer\("):
            copied.step()
        again = hvd.DistributedOptimizer(copied, copied_model.named_parameters())
        again.step()
        _train(copied_model, again)
        assert _is_the_same_everywhere(copied_model)


def _a_compression_that_cannot_be_imported() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), compression=_Halved)
    copied_model, copied = copy.deepcopy((model, optimizer))
    _train(copied_model, copied)
    assert _is_the_same_everywhere(copied_model)
    _, read = pickle.loads(pickle.dumps((model, optimizer)))
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="compression=_Halved cannot be imported"):
            read.step()


def _process_sets() -> None:
    added = hvd.add_process_set([0, 1])
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), process_set=added)
    text = pickle.dumps((model, optimizer, added))
    copied_model, copied, same = pickle.loads(text)
    assert same is added
    for x, y in make_batches(2):
        copied.zero_grad()
        loss_of(copied_model, x + hvd.rank(), y).backward()
        copied.step()
    ranks = hvd.allgather(flat_parameters(copied_model).unsqueeze(0))
    assert torch.equal(ranks[0], ranks[1]) and not torch.equal(ranks[0], ranks[2])
    assert hvd.remove_process_set(added)
    _, copied, unregistered = pickle.loads(text)
    assert unregistered.process_set_id is None and unregistered.ranks == [0, 1]
    with pytest.raises(RuntimeError, match=r"no process set of the ranks \[0, 1\] is registered"):
        copied.step()
    added = hvd.add_process_set([0, 1])
    copied.step()  # a later registration is enough
    assert hvd.remove_process_set(added)


def _a_shallow_copy_of_one_that_does_not_reduce_yet() -> None:
    model = make_model()
    text = pickle.dumps((model, hvd.DistributedOptimizer(make_sgd(model), model.named_parameters(), op=hvd.Sum)))
    hvd.barrier()
    hvd.shutdown()
    model, first = pickle.loads(text)
    second = copy.copy(first)
    hvd.init()
    for optimizer in (second, first, second, first):
        model.zero_grad()
        loss_of(model, *next(iter(make_batches(1)))).backward()
        optimizer.step()
        assert second._reduction is first._reduction
    ranks = hvd.allgather(flat_parameters(model).unsqueeze(0))
    assert torch.equal(ranks[0], ranks[1])


@pytest.mark.parametrize(
    "body",
    [
        _copies_reduce,
        _a_shallow_copy_of_one_that_does_not_reduce_yet,
        _copies_keep_explicit_groups_and_passes,
        _a_copy_of_the_optimizer_alone_has_parameters_of_its_own,
        _a_shallow_copy_shares_the_reduction,
        _what_cannot_reduce_says_so,
        _a_compression_that_cannot_be_imported,
    ],
)
def test_two_ranks(ranks: Callable[[int], RankPool], body: Callable[[], None]) -> None:
    ranks(2).run(body)


def test_process_sets(ranks: Callable[[int], RankPool]) -> None:
    ranks(3).run(_process_sets)


_READ = """
import sys, torch
import horovodlike.torch as hvd
model, optimizer = torch.load(sys.argv[1], weights_only=False)
loss = lambda: model(torch.ones(4, next(model.parameters()).shape[1], dtype=next(model.parameters()).dtype)).sum()
loss().backward()
optimizer.zero_grad()
loss().backward()
optimizer.step()
optimizer.synchronize()
hvd.init()
loss().backward()
optimizer.step()
assert len(optimizer._requires_update) == len(list(model.parameters()))
print("read", type(optimizer).__name__)
"""


def _save(path: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    _train(model, optimizer)
    if hvd.rank() == 0:
        torch.save((model, optimizer), path)


@pytest.mark.slow
def test_what_was_saved_can_be_read_without_a_job_and_in_a_job_of_one(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = str(tmp_path / "saved.pt")
    ranks(2).run(_save, path)
    read = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", _READ, path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    assert read.stdout.split() == ["read", "SGD"]
