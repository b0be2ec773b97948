"""Downpour and EASGD: the bits of a simulation in one process with the same order of events; options and errors."""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.training import flat_parameters, loss_of, make_batches, make_model, make_sgd

import horovodlike.torch as hvd

WRAP = {"downpour": hvd.DownpourOptimizer, "easgd": hvd.EASGDOptimizer}
STEPS = 13  # of each client after the warm-up
BATCHES = make_batches()


def _model_of(rank: int) -> torch.nn.Sequential:
    """Each rank begins elsewhere, so that a test sees whose parameters the servers got."""
    model = make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * rank)
    return model


def _backward(model: torch.nn.Module, step: int, rank: int, size: int) -> None:
    x, y = (whole.chunk(size)[rank] for whole in BATCHES[step % len(BATCHES)])
    loss_of(model, x, y).backward()


def _own_update(accumulated: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    return accumulated.sign() * (-0.1 * group["lr"])


class Client:
    """A client of the simulation: a rank, or the ranks of a data-parallel set, which have the same parameters."""

    def __init__(self, ranks: Sequence[int], size: int) -> None:
        self.models = [_model_of(rank) for rank in ranks]
        self.optimizers = [make_sgd(model) for model in self.models]
        self.ranks, self.size, self.steps = ranks, size, 0
        self.sum: list[torch.Tensor] | None = None
        self.fetched: list[torch.Tensor] | None = None

    def params(self) -> list[torch.Tensor]:
        return [param.data for param in self.models[0].parameters()]

    def load(self, values: list[torch.Tensor]) -> None:
        for model in self.models:
            for param, value in zip(model.parameters(), values, strict=True):
                param.data = value.clone()

    def step(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Train for a step; return the gradients and the changes of the parameters."""
        before = copy.deepcopy(self.params())
        for model, rank in zip(self.models, self.ranks, strict=True):
            model.zero_grad()
            _backward(model, self.steps, rank, self.size)
        gradients = [[param.grad for param in model.parameters()] for model in self.models]
        means = [sum(of_ranks) / len(self.ranks) for of_ranks in zip(*gradients, strict=True)]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for param, mean in zip(model.parameters(), means, strict=True):
                param.grad = mean.clone()
            optimizer.step()
        self.steps += 1
        return means, [now - then for now, then in zip(self.params(), before, strict=True)]


def _simulate(
    method: str,
    clients: list[Client],
    order: list[int],
    *,
    update_frequency: int = 10,
    init_delay: int = 0,
    prefetch: int = 0,
    send_frequency: int = 1,
    local_update: str | Callable[..., torch.Tensor] = "gradient",
    beta: float = 0.9,
    staleness: int | None = None,
) -> list[torch.Tensor]:
    """Train the clients in this order; return the centre."""
    for client in clients:
        for _ in range(init_delay):
            client.step()
    centre = copy.deepcopy(clients[0].params())
    for client in clients:
        client.load(centre)
        client.steps = 0
        if prefetch == update_frequency:
            client.fetched = copy.deepcopy(centre)
    for index in order:
        client = clients[index]
        gradients, changes = client.step()
        is_due = client.steps % update_frequency == 0
        if method == "downpour":
            taken = changes if local_update == "step" else gradients
            client.sum = taken if client.sum is None else [a + b for a, b in zip(client.sum, taken, strict=True)]
            if client.steps % send_frequency == 0:
                group = client.optimizers[0].param_groups[0]
                for value, each in zip(centre, client.sum, strict=True):
                    if callable(local_update):
                        value += local_update(each, group)
                    else:
                        value += each if local_update == "step" else -group["lr"] * each
                client.sum = None
            if is_due:
                client.load(client.fetched if client.fetched is not None else centre)
        elif is_due:
            fetched = client.fetched if client.fetched is not None else centre
            alpha = beta / len(clients)
            moves = [alpha * (x - c) for x, c in zip(client.params(), fetched, strict=True)]
            client.load([x - move for x, move in zip(client.params(), moves, strict=True)])
            for value, move in zip(centre, moves, strict=True):
                value += move
        if is_due:
            client.fetched = None
        if prefetch and (client.steps + prefetch) % update_frequency == 0:
            client.fetched = copy.deepcopy(centre)
    return centre


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _simulated(method: str, groups: list[list[int]], order: list[int], options: dict[str, Any]) -> list[torch.Tensor]:
    """Return what each client, and then the centre, has in the end."""
    clients = [Client(ranks, sum(map(len, groups))) for ranks in groups]
    centre = _simulate(method, clients, order, **options)
    return [*(_flat(client.params()) for client in clients), _flat(centre)]


def _order(clients: int, ahead: int = STEPS) -> list[int]:
    """Return turns of the clients at random, none more than `ahead` steps ahead of another one."""
    choose, done, order = random.Random(clients), [0] * clients, []
    while min(done) < STEPS:
        may = [each for each in range(clients) if done[each] < STEPS and done[each] < min(done) + ahead]
        order.append(choose.choice(may))
        done[order[-1]] += 1
    return order


def _train(optimizer: Any, model: torch.nn.Module, step: int) -> None:
    optimizer.zero_grad()
    _backward(model, step, hvd.rank(), hvd.size())
    optimizer.step()


def _in_turns(method: str, groups: list[list[int]], order: list[int], options: dict[str, Any]) -> list[torch.Tensor]:
    """Train in this order, in which one client at a time takes a step; return what `_simulated` does."""
    model = _model_of(hvd.rank())
    sets = [hvd.add_process_set(ranks) for ranks in groups if len(ranks) > 1]
    mine = next((one for one in sets if one.included()), None)
    optimizer = WRAP[method](
        make_sgd(model), model.named_parameters(), **{"init_delay": 0, **options}, data_parallel_set=mine
    )
    for step in range(options.get("init_delay", 0)):
        _train(optimizer, model, step)
    optimizer.flush()
    steps = 0
    for client in order:
        hvd.barrier()
        if hvd.rank() in groups[client]:
            _train(optimizer, model, steps)
            optimizer.flush()
            steps += 1
    hvd.barrier()
    own = flat_parameters(model)
    hvd.barrier()
    optimizer.pull()
    centre = flat_parameters(model)
    hvd.barrier()
    optimizer.close()
    for one in sets:
        hvd.remove_process_set(one)
    return [own, centre]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "downpour": ("downpour", {"update_frequency": 3}),
    "downpour, sends rarely": ("downpour", {"update_frequency": 3, "send_frequency": 2, "init_delay": 2}),
    "downpour, prefetches": ("downpour", {"update_frequency": 4, "prefetch": 1}),
    "downpour, prefetches at once": ("downpour", {"update_frequency": 3, "prefetch": 3, "init_delay": 1}),
    "downpour, changes": ("downpour", {"update_frequency": 2, "send_frequency": 3, "local_update": "step"}),
    "downpour, function": ("downpour", {"update_frequency": 2, "local_update": _own_update}),
    "downpour, bounded": ("downpour", {"update_frequency": 1, "staleness": 2}),
    "easgd": ("easgd", {"update_frequency": 3}),
    "easgd, warm-up": ("easgd", {"update_frequency": 2, "init_delay": 3, "beta": 0.5}),
    "easgd, prefetches": ("easgd", {"update_frequency": 4, "prefetch": 2}),
    "easgd, prefetches at once": ("easgd", {"update_frequency": 2, "prefetch": 2}),
    "easgd, bounded": ("easgd", {"update_frequency": 1, "staleness": 2}),
}


def _check(pool: Any, groups: list[list[int]], case: str) -> None:
    method, options = CASES[case]
    order = _order(len(groups), options.get("staleness", STEPS))
    *of_clients, centre = _simulated(method, groups, order, options)
    results = pool.run(_in_turns, method, groups, order, options)
    for client, ranks in enumerate(groups):
        for rank in ranks:
            assert torch.equal(results[rank][0], of_clients[client]), rank
            assert torch.equal(results[rank][1], centre), rank
    assert not torch.equal(centre, flat_parameters(_model_of(0)))


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_a_simulation(ranks, case, size):
    _check(ranks(size), [[rank] for rank in range(size)], case)


@pytest.mark.parametrize(
    "case",
    (
        "easgd, prefetches",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("downpour, sends rarely", "downpour, changes", "easgd, bounded")
        ),
    ),
)
def test_the_bits_of_clients_that_are_data_parallel_sets(ranks, case):
    _check(ranks(4), [[0, 1], [2, 3]], case)


def _centre(optimizer: Any, model: torch.nn.Module) -> torch.Tensor:
    """Return the servers' values, without a change of the parameters."""
    return _flat(optimizer.parameter_server.receive(out=[*map(torch.empty_like, model.parameters())]).wait())


def _waits_when_ahead(method: str) -> None:
    """Rank 0 may be 2 steps ahead; at the end of the third it waits for rank 1, and after that one has left, never."""
    model = make_model()
    options = {"update_frequency": 1, "init_delay": 0, "staleness": 2}
    optimizer = WRAP[method](make_sgd(model), model.named_parameters(), **options)
    hvd.barrier()
    for step in range(2 if hvd.rank() == 0 else 0):
        _train(optimizer, model, step)
    hvd.barrier()
    before = _centre(optimizer, model)
    hvd.barrier()
    if hvd.rank() == 0:
        _train(optimizer, model, 2)
        went_on = time.monotonic()
        for step in range(3, 10):
            _train(optimizer, model, step)
    else:
        while torch.equal(_centre(optimizer, model), before):
            pass  # the third step of rank 0 has not been sent yet
        for _ in range(50):
            _centre(optimizer, model)
        started = time.monotonic()
        _train(optimizer, model, 0)
    optimizer.close()
    times = hvd.allgather_object(went_on if hvd.rank() == 0 else started)
    assert times[0] > times[1]


@pytest.mark.parametrize("method", WRAP)
def test_a_rank_waits_only_when_it_is_further_ahead_than_the_staleness(ranks, method):
    ranks(2).run(_waits_when_ahead, method)


BAD_OPTIONS = [
    ({"update_frequency": 0}, ValueError, "update_frequency must be >= 1, got 0"),
    ({"update_frequency": 2.5}, TypeError, "update_frequency must be an integer, got 2.5"),
    ({"init_delay": -1}, ValueError, "init_delay must be >= 0, got -1"),
    ({"update_frequency": 4, "prefetch": 5}, ValueError, r"prefetch must be from 0 to update_frequency \(4\), got 5"),
    ({"prefetch": -1}, ValueError, "prefetch must be >= 0, got -1"),
    ({"staleness": -1}, ValueError, "staleness must be >= 0, got -1"),
]
BAD_OF_DOWNPOUR = [
    ({"send_frequency": 0}, ValueError, "send_frequency must be >= 1, got 0"),
    ({"local_update": "momentum"}, ValueError, 'local_update must be "gradient", "step" or a function'),
]
BAD_OF_EASGD = [
    ({"beta": 0}, ValueError, "beta must be > 0 and <= 1, got 0"),
    ({"beta": 1.5}, ValueError, "beta must be > 0 and <= 1, got 1.5"),
    ({"beta": float("nan")}, ValueError, "beta must be finite"),
]


def _refuses(method: str) -> None:
    """Nothing has been sent, so that the ranks may differ in these."""
    model = make_model()
    wrap = partial(WRAP[method], named_parameters=model.named_parameters())
    for options, kind, text in BAD_OPTIONS + (BAD_OF_DOWNPOUR if method == "downpour" else BAD_OF_EASGD):
        with pytest.raises(kind, match=text):
            wrap(make_sgd(model), **options)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer"):
        wrap(model)
    with pytest.raises(ValueError, match="the optimizer is wrapped already"):
        wrap(hvd.DistributedOptimizer(make_sgd(model)))
    with pytest.raises(ValueError, match="the optimizer is wrapped already"):
        wrap(wrap(make_sgd(model)))
    odd = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    with pytest.raises(ValueError, match=r"parameter 'odd' is of torch.int64.*leave it out"):
        WRAP[method](torch.optim.SGD([odd], lr=0.1), [("odd", odd)])
    if method == "downpour":
        with pytest.raises(ValueError, match='LBFGS calls its closure several times.*local_update="step"'):
            wrap(torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("method", WRAP)
def test_bad_options_are_errors(ranks, method):
    ranks(1).run(_refuses, method)


def _refuses_sets(method: str) -> None:
    model = make_model()
    pair, single = hvd.add_process_set([0, 1]), hvd.add_process_set([2])
    theirs = single if hvd.rank() < 2 else pair
    with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in its data_parallel_set"):
        WRAP[method](make_sgd(model), data_parallel_set=theirs)
    first = 0 if hvd.rank() < 2 else 2
    with pytest.raises(ValueError, match=f"rank {first}, which sends and receives for rank {hvd.rank()}, is not in"):
        WRAP[method](make_sgd(model), process_set=theirs, data_parallel_set=pair if hvd.rank() < 2 else single)
    for one in (pair, single):
        hvd.remove_process_set(one)
    with pytest.raises(ValueError, match="not registered"):
        WRAP[method](make_sgd(model), process_set=pair)


@pytest.mark.parametrize("method", WRAP)
def test_a_rank_that_has_no_part_in_its_sets_is_an_error(ranks, method):
    ranks(3).run(_refuses_sets, method)


def _lives(method: str) -> None:
    model = make_model()
    inner = make_sgd(model)
    earlier = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = WRAP[method](inner, model.named_parameters(), update_frequency=1, init_delay=1)
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups is inner.param_groups and optimizer.parameter_server is None
    with pytest.raises(RuntimeError, match=r"pull\(\) in the warm-up"):
        optimizer.pull()
    for step in range(3):
        _train(optimizer, model, step)
        earlier.step()
        later.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 64)
    state = optimizer.state_dict()
    assert state["state"][0]["momentum_buffer"] is not None
    optimizer.load_state_dict(copy.deepcopy(state))
    assert inner.param_groups is optimizer.param_groups and inner.state is optimizer.state
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(optimizer)
    with pytest.raises(RuntimeError, match="the servers do not hold parameters that are added later"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    whole = model[0].weight.data
    model[0].weight.data = whole[:3]
    with pytest.raises(ValueError, match=r"'0.weight' has changed its shape from \[16, 6\] to \[3, 6\].*wrap a new"):
        optimizer.pull()
    model[0].weight.data = whole
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.pull):
        with pytest.raises(RuntimeError, match=r"of a SGD that has left its servers by close\(\)"):
            call()


@pytest.mark.parametrize("method", WRAP)
def test_the_life_of_an_optimizer(ranks, method):
    ranks(2).run(_lives, method)


def _with_closure(method: str, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """One rank, so that its own updates and nothing else are at the servers."""
    trained = []
    for wrapped in (False, True):
        model = make_model()
        optimizer = make(model.parameters(), lr=0.05)
        if wrapped:
            optimizer = WRAP[method](optimizer, update_frequency=2, init_delay=0, **options)

        def closure(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *BATCHES[0])
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        trained.append((losses, flat_parameters(model)))
        if wrapped:
            optimizer.close()
    if method == "downpour":
        assert trained[1][0] == pytest.approx(trained[0][0], rel=1e-9)
        torch.testing.assert_close(trained[1][1], trained[0][1], rtol=1e-9, atol=1e-12)
    else:
        assert trained[1][0][:2] == trained[0][0][:2] and trained[1][0][-1] < trained[1][0][0]


@pytest.mark.parametrize(
    ("method", "make", "options"),
    [
        ("downpour", torch.optim.SGD, {}),
        ("downpour", torch.optim.Adam, {"local_update": "step"}),
        ("downpour", torch.optim.LBFGS, {"local_update": "step"}),
        ("easgd", torch.optim.LBFGS, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_closures(ranks, method, make, options):
    ranks(1).run(_with_closure, method, make, options)


def _sends_the_rest() -> None:
    model = make_model()
    before = flat_parameters(model)
    optimizer = hvd.DownpourOptimizer(make_sgd(model), update_frequency=8, send_frequency=4, init_delay=0)
    with optimizer:
        _train(optimizer, model, 0)
        hvd.barrier()
        assert torch.equal(_centre(optimizer, model), before)
        hvd.barrier()
        while hvd.rank() == 1 and torch.equal(_centre(optimizer, model), before):
            pass  # rank 0 has not begun to close


def test_close_sends_what_is_left(ranks):
    ranks(2).run(_sends_the_rest)


def _fails() -> None:
    model = make_model()
    with pytest.raises(ZeroDivisionError), hvd.EASGDOptimizer(make_sgd(model), init_delay=0) as optimizer:
        hvd.barrier()
        if hvd.rank() == 0:
            raise ZeroDivisionError
        for step in range(20):
            _train(optimizer, model, step)
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match=r"step\(\) of a SGD that has left its servers"):
        optimizer.step()


def test_after_an_exception_no_rank_waits_for_the_others(ranks):
    ranks(2).run(_fails)
