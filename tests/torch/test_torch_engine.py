"""The training loop `Engine`: the same bits as a loop written by hand, hooks, averages, and arguments."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from support.training import flat_parameters, loss_of, make_batches, make_model, make_sgd, my_part, train_model

import horovodlike.torch as hvd
from horovodlike._engine.ops import counters
from horovodlike.data import DynamicPartition, StaticPartition, cut_into_tasks
from horovodlike.errors import MismatchError
from horovodlike.torch.training_loop import HOOKS, LoopState

MODES = ("overlapped", "synchronous")
mse = torch.nn.functional.mse_loss


class Shares:
    """Each rank's part of the batches of `support.training`, for the ranks that there are at the time."""

    def __init__(self, steps: int = 20) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((my_part(x), my_part(y)) for x, y in make_batches()[: self.steps])


def _engine(model: torch.nn.Module | None = None, **options: object) -> hvd.Engine:
    model = model or make_model()
    return hvd.Engine(model, mse, make_sgd(model), **{"progress": False, **options})


def _trained(mode: str, op: int) -> None:
    engine = _engine(mode=mode, op=op)
    engine.train(Shares(), 1)
    by_hand = train_model({"op": op})
    assert torch.equal(flat_parameters(engine.model), by_hand)
    if op == hvd.Average:
        torch.testing.assert_close(by_hand, train_model(None), rtol=0, atol=1e-12)
    elif hvd.size() > 1:
        assert not torch.equal(by_hand, train_model({}))


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("op", (hvd.Average, hvd.Sum))
@pytest.mark.parametrize("mode", MODES)
def test_the_parameters_are_those_of_a_loop_by_hand(ranks, mode, op, size):
    ranks(size).run(_trained, mode, op)


def _reports() -> None:
    with mock.patch("horovodlike.torch.training_loop.report_progress") as report:
        engine = _engine()
        engine.train([*Shares(2)], 1)
        averages = engine.train(Shares(1), 2)  # whose length is not known
    first, second, *whole = [call.args for call in report.call_args_list]
    assert [first, second] == [(0.5, 1), (1.0, 1)]
    assert whole == [(1, 1, mock.ANY), (1.0, 2), (2, 2, averages)]


def test_the_progress_is_reported(ranks):
    ranks(2).run(_reports)


def _begins_with_rank_0() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)).double()
    model[1].running_mean += hvd.rank()
    adam = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    seen = []

    def look(loop: LoopState) -> None:
        seen.append([flat_parameters(model).tolist(), model[1].running_mean.tolist(), adam.param_groups[0]["lr"]])

    hvd.Engine(model, mse, adam, hooks={"start": look}, progress=False).train(Shares(1), 1)
    of_all = hvd.allgather_object(seen)
    assert of_all == [of_all[0]] * hvd.size() and of_all[0][0][2] == 0.1


def test_all_ranks_begin_with_rank_0s_model_and_optimizer(ranks):
    ranks(2).run(_begins_with_rank_0)


def _hooks_in_order(mode: str) -> None:
    calls: list[tuple[object, ...]] = []

    def note(point: str) -> Callable[[LoopState], None]:
        def hook(loop: LoopState) -> None:
            calls.append((point, loop.epoch, loop.batch, loop.step))
            assert (loop.sample[0] is None) == (point in (*HOOKS[:2], *HOOKS[-2:]))
            assert (loop.output is None) == (point in (*HOOKS[:3], *HOOKS[-2:]))
            assert (loop.loss is None) == (point in (*HOOKS[:4], *HOOKS[-2:]))
            assert ("loss" in loop.metrics) == (loop.epoch > 0 or point == "end_epoch")

        return hook

    _engine(mode=mode, hooks={point: [note(point)] for point in HOOKS}).train(Shares(3), 2)
    in_step = HOOKS[2:-2]
    expected: list[tuple[object, ...]] = [("start", 0, 0, 0)]
    for epoch in range(2):
        expected.append(("start_epoch", epoch, 0, 3 * epoch))
        expected += [(point, epoch, batch, 3 * epoch + batch) for batch in range(3) for point in in_step]
        expected.append(("end_epoch", epoch, 3, 3 * epoch + 3))
    assert calls == [*expected, ("end", 2, 0, 6)]


@pytest.mark.parametrize("mode", MODES)
def test_hooks_are_called_in_order(ranks, mode):
    ranks(2).run(_hooks_in_order, mode)


def _clips(mode: str) -> None:
    """Clip in a hook and by hand; the gradients that the hook gets are reduced."""
    engine = _engine(
        mode=mode,
        hooks={"before_update": lambda loop: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)},
    )
    engine.train(Shares(), 1)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for x, y in Shares():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert torch.equal(flat_parameters(engine.model), flat_parameters(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_clips_reduced_gradients(ranks, mode):
    ranks(3).run(_clips, mode)


def _replaces() -> None:
    """Halve inputs, outputs and the loss in hooks, and by hand."""

    def halve_inputs(loop: LoopState) -> None:
        loop.sample = (loop.sample[0] / 2, loop.sample[1] + 1)

    def halve_output(loop: LoopState) -> None:
        loop.output = loop.output / 2

    def halve_loss(loop: LoopState) -> None:
        loop.loss = loop.loss / 2

    engine = _engine(hooks={"sample": halve_inputs, "forward": halve_output, "loss": halve_loss})
    engine.train(Shares(), 1)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for x, y in Shares():
        optimizer.zero_grad()
        (mse(model(x / 2) / 2, y + 1) / 2).backward()
        optimizer.step()
    assert torch.equal(flat_parameters(engine.model), flat_parameters(model))


def test_hooks_replace_the_sample_the_output_and_the_loss(ranks):
    ranks(2).run(_replaces)


def _uneven(mode: str) -> None:
    """Rank r has r + 1 batches in each epoch; afterwards all have the parameters of the last rank."""
    engine = _engine(mode=mode, hooks={"end": lambda loop: steps.append(loop.step)}, check=3)
    steps: list[int] = []
    data = list(Shares(hvd.size()))[: hvd.rank() + 1]
    engine.train(data, 2)
    assert steps == [2 * hvd.size()]
    hvd.check_consistency(engine.model)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
    assert torch.equal(flat_parameters(engine.model), flat_parameters(model))


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_other_numbers_of_batches_join(ranks, mode):
    ranks(3).run(_uneven, mode)


def _stops(on: list[int]) -> None:
    def stop(loop: LoopState) -> None:
        if hvd.rank() in on and loop.epoch == 1 and loop.batch == 2:
            loop.stop = True

    epochs: list[tuple[int, int]] = []
    hooks = {"after_update": stop, "end_epoch": lambda loop: epochs.append((loop.epoch, loop.batch))}
    engine = _engine(hooks=hooks)
    engine.train(Shares(5), 4)
    assert epochs == [(0, 5), (1, 3 if len(on) == hvd.size() else 5)]
    hvd.check_consistency(engine.model)
    epochs.clear()
    engine.train(Shares(5), 4)
    assert epochs == [(2, 5), (3, 5)], "another call goes on"


@pytest.mark.parametrize("on", ([0], [0, 1, 2]), ids=("one rank", "all ranks"))
def test_a_hook_stops_the_training_on_all_ranks(ranks, on):
    ranks(3).run(_stops, on)


def _stops_after_an_epoch() -> None:
    def stop(loop: LoopState) -> None:
        loop.stop = hvd.rank() == 1 and loop.metrics["loss"] > 0

    ends: list[int] = []
    engine = _engine(hooks={"end_epoch": stop, "end": lambda loop: ends.append(loop.epoch)})
    engine.train(Shares(2), 5)
    assert ends == [1]


def test_a_hook_at_the_end_of_an_epoch_stops_all_ranks(ranks):
    ranks(2).run(_stops_after_an_epoch)


def _averages() -> None:
    """Uneven batches on all ranks, the last one short: the averages are those over all samples at once."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout(0.5)).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    model[0].eval()
    x, y = (torch.cat(parts) for parts in zip(*make_batches(3), strict=True))
    mine = slice(hvd.rank() * 10, hvd.rank() * 10 + 7 * hvd.rank())  # rank 0 has none
    share = [(part_x, part_y) for part_x, part_y in zip(x[mine].split(4), y[mine].split(4), strict=True)]
    engine = _engine(model, metrics={"mae": lambda output, y: (output - y).abs().mean().item()})
    result = engine.evaluate(iter(share if hvd.rank() else []))
    chosen = torch.cat([torch.arange(rank * 10, rank * 10 + 7 * rank) for rank in range(hvd.size())])
    with torch.no_grad():
        output = model[0](x[chosen])
    expected = {"loss": mse(output, y[chosen]).item(), "mae": (output - y[chosen]).abs().mean().item()}
    assert result == pytest.approx(expected, rel=1e-12)
    assert [module.training for module in model.modules()] == [True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert engine.train(Shares(1), 1).keys() == {"loss", "mae"}


def test_averages_are_over_the_samples_of_all_ranks(ranks):
    ranks(3).run(_averages)


def _training_loss() -> None:
    """The averages of an epoch are over all samples, those of a short last batch included."""
    x, y = make_batches(1)[0]
    model = torch.nn.Linear(6, 3).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    share = list(zip(my_part(x).split(5), my_part(y).split(5), strict=True))
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    result = hvd.Engine(model, mse, still, progress=False).train(share, 1)
    assert result == {"loss": pytest.approx(mse(model(x), y).item(), rel=1e-12)}


def test_the_loss_of_an_epoch_is_over_all_samples(ranks):
    ranks(3).run(_training_loss)


def _finds_a_changed_replica(mode: str) -> str:
    def change(loop: LoopState) -> None:
        if hvd.rank() == 1 and loop.step == 4:
            with torch.no_grad():
                loop.model[0].bias[0] += 1e-12

    steps: list[int] = []
    hooks = {"after_update": [change, lambda loop: steps.append(loop.step)]}
    engine = _engine(mode=mode, check=3, hooks=hooks)
    with pytest.raises(MismatchError) as caught:
        engine.train(Shares(), 1)
    assert steps[-1] == 5, "the check after the sixth step finds what was changed in the fifth"
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size(), "the job continues"
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_the_check_finds_a_changed_replica(ranks, mode):
    (text,) = set(ranks(3).run(_finds_a_changed_replica, mode))
    assert "0.bias: values: rank 1 differs from ranks 0, 2" in text


def _prints(progress: bool) -> None:
    _engine(progress=progress).train(Shares(2), 2)


def test_rank_0_prints_a_line_for_each_epoch_where_there_is_no_terminal(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(_prints, False)
    pool.run(_prints, True)
    first, second = pool.output(0).splitlines()
    for number, line in enumerate((first, second), start=1):
        assert re.fullmatch(rf"epoch {number}/2  loss \d\.\d+  \d+\.\d s", line), line
    assert pool.output(1) == ""


def _refused(error: type[Exception], match: str, call: Callable[[], object]) -> None:
    before = counters()
    with pytest.raises(error, match=match):
        call()
    assert counters() == before, f"something was sent before {match!r}"


def _bad_arguments() -> None:
    for error, match, options in (
        (ValueError, "mode must be one of synchronous, overlapped, got 'async'", {"mode": "async"}),
        (ValueError, "op must be hvd.Average or hvd.Sum", {"op": hvd.Adasum}),
        (ValueError, "op must be one of", {"op": True}),
        (ValueError, "prefetch must be 0 or more, got -1", {"prefetch": -1}),
        (TypeError, "check must be an integer, got True", {"check": True}),
        (ValueError, "commit_every must be 0 or more", {"commit_every": -1}),
        (ValueError, "no point 'update' for hooks; there are start, start_epoch, sample", {"hooks": {"update": print}}),
        (TypeError, r"hooks\['start'\] must be a function, got 1", {"hooks": {"start": 1}}),
        (ValueError, "a metric cannot be called 'loss'", {"metrics": {"loss": mse}}),
        (TypeError, "mae must be a function", {"metrics": {"mae": 1}}),
        (TypeError, "read must be a function", {"read": 1}),
        (ValueError, "there is no folder", {"checkpoint": "/missing/folder/state"}),
        (ValueError, "state has the names epoch", {"elastic": True, "state": {"epoch": 1}}),
    ):
        _refused(error, match, partial(_engine, **options))
    model = make_model()
    _refused(TypeError, "model must be a torch.nn.Module", lambda: hvd.Engine(mse, mse, make_sgd(model)))
    _refused(TypeError, "loss must be a function", lambda: hvd.Engine(model, 1.0, make_sgd(model)))
    _refused(TypeError, "optimizer must be a torch.optim.Optimizer", lambda: hvd.Engine(model, mse, mse))
    wrapped = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    _refused(ValueError, "is a DistributedOptimizer already", lambda: hvd.Engine(model, mse, wrapped))


def _bad_data() -> None:
    engine, elastic = _engine(), _engine(elastic=True)
    tasks = cut_into_tasks({"a": 8}, 4)
    dynamic, static = DynamicPartition(tasks, 2), StaticPartition(tasks, 2)
    _refused(TypeError, "data must be an iterable", lambda: engine.train(1, 1))
    _refused(TypeError, "data is an iterator", lambda: engine.train(iter([]), 1))
    _refused(ValueError, "epochs must be 0 or more", lambda: engine.train([], -1))
    _refused(ValueError, "a partition yields ranges: give read", lambda: engine.evaluate(static))
    _refused(ValueError, "use a StaticPartition", lambda: engine.evaluate(dynamic))
    sampler = torch.utils.data.DistributedSampler(range(8), 2, 0)
    loader = torch.utils.data.DataLoader(range(8), sampler=sampler)
    _refused(ValueError, "ElasticSampler or horovodlike.data.Dynamic", lambda: elastic.train(loader, 1))
    synchronized = torch.nn.Sequential(torch.nn.Linear(6, 3), hvd.SyncBatchNorm(3))
    _refused(ValueError, "SyncBatchNorm waits for all ranks", lambda: _engine(synchronized).train(dynamic, 1))


def test_bad_arguments_are_refused(ranks):
    ranks(1).run(_bad_arguments)
    ranks(1).run(_bad_data)


def _bad_values() -> None:
    for match, error, options, data in (
        ("a batch must be a pair of inputs and targets, got .*Tensor", TypeError, {}, [torch.ones(3)]),
        (
            "mae must be a number or a tensor of one element, got 'x'",
            TypeError,
            {"metrics": {"mae": lambda o, y: "x"}},
            None,
        ),
        ("no rank has got a batch in epoch 0", ValueError, {}, []),
    ):
        with pytest.raises(error, match=match):
            _engine(**options).train(Shares(1) if data is None else data, 1)
    with pytest.raises(ValueError, match="no rank has a sample"):
        _engine().evaluate([])


def test_values_that_cannot_be_used_are_errors(ranks):
    ranks(1).run(_bad_values)


def test_it_needs_a_job():
    with pytest.raises(ValueError, match="not been initialized"):
        _engine()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shows_a_bar() -> None:
    with mock.patch("sys.stdout", Terminal()) as terminal:
        _engine(progress=True).train(list(Shares(3)), 1)
    if hvd.rank() == 0:
        assert "3/3" in terminal.getvalue() and "epoch 1/1  loss" in terminal.getvalue()
    else:
        assert terminal.getvalue() == ""


def test_rank_0_shows_a_bar_on_a_terminal(ranks):
    ranks(2).run(_shows_a_bar)
