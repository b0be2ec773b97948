"""`TorchState` and `ElasticSampler` in one job: saving, restoring, and the same state on all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader

import horovodlike.torch as hvd
from horovodlike import basics
from horovodlike.errors import MismatchError, StateFileError
from horovodlike.torch.elastic import ElasticSampler, TorchState, get_handler_registry, set_handler_registry
from horovodlike.torch.elastic.state import StateHandler


class Counted(torch.nn.Module):
    """Has a buffer that is in no state dict, one that grows, and a state of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("scale", torch.tensor([1.0, float("nan")]), persistent=False)
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
        self.notes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(len(x))
        self.seen = torch.cat([self.seen, torch.tensor([len(x)])])
        return self.norm(self.layer(x))

    def get_extra_state(self) -> list[int]:
        return self.notes

    def set_extra_state(self, state: list[int]) -> None:
        self.notes = state


def _bits(state: TorchState) -> dict[str, object]:
    """Everything in a state, as something that can be compared to the bit."""

    def comparable(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return {key: comparable(entry) for key, entry in value.items()}
        return [comparable(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    tensors = [*state.model.named_parameters(), *state.model.named_buffers()]
    return copy.deepcopy(
        {
            "model": comparable(dict(tensors)),
            "notes": state.model.notes,
            "optimizer": comparable(state.optimizer.state_dict()),
            "schedule": comparable(state.schedule.state_dict()),
            "others": (state.epoch, state.losses),
        }
    )


def _make(seed: int, wraps: bool = True, **options: object) -> TorchState:
    torch.manual_seed(seed)
    model = Counted()
    adam = torch.optim.Adam([{"params": model.layer.parameters()}, {"params": model.norm.parameters(), "lr": 0.5}])
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), **options) if wraps else adam
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return TorchState(model, optimizer, schedule=schedule, epoch=0, losses=[])


def _step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    loss = state.model(torch.randn(4, 3)).square().sum()
    loss.backward()
    state.optimizer.step()
    state.schedule.step(1.0)
    state.epoch += 1
    state.losses.append(state.epoch)


def _restores() -> None:
    state = _make(seed=1)
    at_first = _bits(state)
    held = [id(tensor) for tensor in state.model.parameters()]
    for _ in range(2):
        _step(state)
    state.restore()
    assert _bits(state) == at_first and state.optimizer.state_dict()["state"] == {}
    for _ in range(2):
        _step(state)
    state.commit()
    committed = _bits(state)
    for _ in range(2):
        for _ in range(2):
            _step(state)
        assert _bits(state) != committed
        state.model.layer.weight.grad = torch.ones(2, 3)
        state.restore()
        assert _bits(state) == committed and state._commits == 1
        assert all(parameter.grad is None for parameter in state.model.parameters())
    assert [id(tensor) for tensor in state.model.parameters()] == held
    # What came back is trained, and not the copy.
    _step(state)
    state.restore()
    assert _bits(state) == committed


def test_a_restore_brings_back_every_bit_in_place(ranks):
    ranks(2).run(_restores)


def _synchronizes(root: int) -> None:
    state = _make(seed=hvd.rank(), wraps=False)
    if hvd.rank() == root:
        for _ in range(3):  # only here the optimizer has state for each parameter
            _step(state)
            state._commits += 1
    roots = hvd.broadcast_object(_bits(state), root)
    assert (_bits(state) == roots) == (hvd.rank() == root)
    state.sync()
    assert _bits(state) == roots and state._commits == 3
    _step(state)
    assert _bits(state) != roots
    state.restore()
    assert _bits(state) == roots, "what was synchronized has been saved"
    # The other way round: a rank that has state, and a root that has none.
    state = _make(seed=hvd.rank(), wraps=False)
    if hvd.rank() != root:
        _step(state)
    else:
        state._commits = 1
    state.sync()
    assert state.optimizer.state_dict()["state"] == {} and state.losses == []
    assert len(set(hvd.allgather_object(repr(_bits(state))))) == 1


@pytest.mark.parametrize("root", (0, 1))
def test_all_ranks_take_the_state_of_who_has_committed_most(ranks, root):
    ranks(2).run(_synchronizes, root)


class Late(torch.nn.Module):
    """Has buffers that the first forward pass makes, drops or gives another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.inner.register_buffer("cache", None, persistent=False)
        self.register_buffer("start", torch.ones(2))
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner.cache is None:
            self.inner.cache, self.start, self.mask = torch.zeros(3), None, torch.tensor([True, False, True])
            self.register_buffer("late", torch.zeros(1))
        self.inner.cache += 1
        self.late += 1
        return self.inner(x)


def _buffers(model: torch.nn.Module) -> dict[str, object]:
    found = {name: (str(buffer.dtype), buffer.tolist()) for name, buffer in model.named_buffers()}
    return {**found, "persistent": sorted(model.state_dict())}


def _late_buffers(root: int) -> None:
    at_first = _buffers(Late())
    # The rank with the most commits has made two forward passes, the others none; and the other way round.
    for passes_on_root, passes_elsewhere in ((2, 0), (0, 2), (2, 1)):
        model = Late()
        state = TorchState(model, step=0)
        for _ in range(passes_on_root if hvd.rank() == root else passes_elsewhere):
            model(torch.ones(1, 1))
        state._commits = int(hvd.rank() == root)
        state.sync()
        everywhere = hvd.allgather_object((_buffers(model), torch.cat([p.flatten() for p in model.parameters()])))
        assert all(buffers == everywhere[root][0] for buffers, _ in everywhere)
        assert all(torch.equal(parameters, everywhere[root][1]) for _, parameters in everywhere)
        assert (everywhere[0][0] == at_first) == (passes_on_root == 0)
        model(torch.ones(1, 1))
        assert model.inner.cache.tolist() == [passes_on_root + 1.0] * 3 and model.late.item() == passes_on_root + 1
        state.restore()  # also to the time before the first forward pass
        assert _buffers(model) == everywhere[root][0]
        model(torch.ones(1, 1))
        state.commit()
        assert model.mask.dtype == torch.bool and model.start is None


@pytest.mark.parametrize("size", (2, 3))
def test_buffers_that_the_first_forward_pass_makes_are_those_of_the_root(ranks, size):
    for root in (0, size - 1):
        ranks(size).run(_late_buffers, root)


def _persists_late_buffers(path: str) -> None:
    first, resumed = Late(), Late()
    states = [TorchState(model, step=0) for model in (first, resumed)]
    for state in states:
        state.persist(path)
    first(torch.ones(1, 1))
    states[0].commit()
    states[1]._resume()
    assert _buffers(resumed) == _buffers(first)
    other = TorchState(torch.nn.Linear(5, 1), step=0)
    other.persist(path)
    with pytest.raises(StateFileError, match=f"the state in {path} does not fit .* other parameters .*weight"):
        other._resume()


def test_a_model_with_such_buffers_resumes_from_disk_and_another_one_does_not(ranks, tmp_path):
    ranks(1).run(_persists_late_buffers, str(tmp_path / "state"))


def _other_parameters() -> None:
    state = TorchState(torch.nn.Linear(2, 2, bias=hvd.rank() == 0))
    with pytest.raises(MismatchError, match=r"ranks \[1\] do not have bias: all need the same parameters"):
        state.sync()
    buffers = Late()
    if hvd.rank() == 0:
        buffers(torch.ones(1, 1))
    else:
        del buffers.inner.cache
        buffers.inner.cache = None  # no buffer: it cannot become one
    state = TorchState(buffers)
    with pytest.raises(KeyError, match="cache") if hvd.rank() else pytest.raises(hvd.HorovodInternalError):
        try:
            state.sync()
        except BaseException as error:
            basics.shutdown(error)  # as `run` does
            raise


def test_a_model_that_differs_is_an_error_that_names_the_tensor(fresh_ranks):
    fresh_ranks(2).run(_other_parameters)


def _error_feedback(make_reducer) -> None:
    """A new rank takes over what is the same on all ranks, and has nothing of its own to send later."""
    options = {"compression": make_reducer()}
    state = _make(seed=1, **options)
    reducer = options["compression"]
    for _ in range(3):
        _step(state)
    state.commit()
    committed = copy.deepcopy(reducer.state_dict())
    assert committed["residuals"] and committed["steps"] == 3
    _step(state)
    state.restore()
    restored = reducer.state_dict()
    assert restored["steps"] == 3
    for kind in ("residuals", "factors"):
        assert all(torch.equal(restored[kind][name], tensor) for name, tensor in committed[kind].items())
    if hvd.rank() == 1:
        reducer.load_state_dict({"steps": 0, "residuals": {}, "factors": {}})
        state._commits = 0
    state.sync()
    synced = reducer.state_dict()
    assert synced["steps"] == 3 and synced["factors"].keys() == committed["factors"].keys()
    assert bool(synced["residuals"]) == (hvd.rank() == 0)
    _step(state)
    hvd.check_consistency(state.model.named_parameters())


def test_what_compression_remembers_is_part_of_the_state(ranks):
    ranks(2).run(_error_feedback, lambda: hvd.Compression.powersgd(rank=1, min_compression=0))


def _persists(path: str) -> None:
    state, resumed = _make(seed=1, wraps=False), _make(seed=2, wraps=False)
    for each in (state, resumed):
        each.persist(path)
    _step(state)
    state.commit()
    committed = _bits(state)
    resumed._resume()
    resumed.sync()
    assert _bits(resumed) == committed and resumed._commits == 1


def test_a_state_resumes_from_disk(ranks, tmp_path):
    ranks(1).run(_persists, str(tmp_path / "state"))


def _assignments() -> None:
    state = TorchState(torch.nn.Linear(1, 1), best=None, history=[])
    other = torch.nn.Linear(2, 2)
    weights = other.weight.detach().clone()
    state.model = other
    torch.nn.init.zeros_(other.weight)
    state.restore()
    assert state.model is other and torch.equal(other.weight, weights), "saved when it was assigned"
    state.best = torch.nn.Linear(1, 1)  # from a value without a handler to one with
    kept = state.best
    torch.nn.init.zeros_(kept.weight)
    state.restore()
    assert state.best is kept and kept.weight.item() != 0
    state.model = None
    state.restore()
    assert state.model is None
    state.history.append(1)
    state.commit()
    state.history.append(2)
    state.other = "no part of the state"
    state.restore()
    assert state.history == [1] and state.other == "no part of the state"
    saved = state._saved_to_bytes()
    before = kept.weight.detach().clone()
    torch.nn.init.zeros_(kept.weight)
    state.history.append(3)
    state.save()
    state._saved_from_bytes(saved)
    state.restore()
    assert state.history == [1] and torch.equal(kept.weight, before)
    with pytest.raises(ValueError, match=r"with \['best'\] was persisted, and this one has \['model'\]"):
        TorchState(torch.nn.Linear(1, 1))._saved_from_bytes(saved)


def test_assigned_values_are_saved_at_once(ranks):
    ranks(2).run(_assignments)


def test_what_cannot_be_a_state_says_so(ranks):
    ranks(1).run(_refused)


def _refused() -> None:
    with pytest.raises(ValueError, match="models holds a Linear.*name of its own"):
        TorchState(models=[torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="schedules holds a StepLR"):
        TorchState(
            schedules={"a": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), 1)}
        )
    with pytest.raises(ValueError, match="cannot be called 'commit'"):
        TorchState(commit=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"weight of the model has no shape yet"):
        TorchState(torch.nn.LazyLinear(1))
    state = TorchState(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    state.model.append(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"other parameters than .*1\.weight, 1\.bias; .*assign"):
        state.restore()
    state.model = state.model
    state.restore()


class Text:
    def __init__(self, words: str) -> None:
        self.words = words


def _of_ones_own() -> None:
    class TextHandler(StateHandler):
        def save(self) -> None:
            self.kept = self.value.words

        def restore(self) -> None:
            self.value.words = self.kept

        def sync(self, root_rank: int) -> None:
            self.value.words = hvd.broadcast_object(self.value.words, root_rank)

    registry = get_handler_registry()
    try:
        set_handler_registry([(Text, TextHandler), *registry])
        text = Text(f"of rank {hvd.rank()}")
        state = TorchState(text=text)
        state._commits = hvd.rank()
        state.sync()
        assert state.text is text and text.words == f"of rank {hvd.size() - 1}"
        text.words = "changed"
        state.restore()
        assert text.words == f"of rank {hvd.size() - 1}"
        with pytest.raises(NotImplementedError, match=r"text cannot be persisted: TextHandler\.save"):
            state._saved_to_bytes()
        with pytest.raises(TypeError, match="pairs of a type"):
            set_handler_registry([TextHandler])
    finally:
        set_handler_registry(registry)
    assert isinstance(TorchState(text=Text("")).text, Text)


def test_handlers_of_ones_own(ranks):
    ranks(2).run(_of_ones_own)


def _sampler(length: int, batch_size: int) -> list[int]:
    """Return the indices that this rank gets of an epoch that is interrupted after each batch."""
    sampler = ElasticSampler(range(length), seed=3)
    state = TorchState(sampler=sampler)
    seen = []
    while len(sampler) > 0:
        loader = DataLoader(torch.arange(length), batch_size=batch_size, sampler=sampler)
        assert len(loader) == -(-len(sampler) // batch_size)
        whole = torch.cat(list(loader)).tolist()
        assert whole == list(sampler) and len(whole) == len(sampler)
        (first, *_) = loader
        seen += first.tolist()
        sampler.record_batch(0, len(first))
        state.commit()
        sampler.record_batch(1, 1000)  # of a batch that is lost
        state.restore()
        state.on_reset()
    sampler.set_epoch(1)
    assert sampler.processed_num == 0 and len(sampler) == -(-length // hvd.size())
    return seen


@pytest.mark.parametrize("size", (1, 2, 3))
def test_an_interrupted_epoch_has_every_sample_once(ranks, size):
    for length, batch_size in ((24, 2), (25, 2), (7, 3), (1, 4), (0, 4)):
        seen = ranks(size).run(_sampler, length, batch_size)
        everything = [index for of_rank in seen for index in of_rank]
        assert set(everything) == set(range(length))
        # Only the last batch is filled up, so that all ranks have as many.
        assert len(everything) - length < size
        assert {len(of_rank) for of_rank in seen} == {-(-length // size)}


def _orders() -> tuple[list[int], list[int], list[int]]:
    sampler, plain = ElasticSampler(range(10), seed=5), ElasticSampler(range(10), shuffle=False)
    first = list(sampler)
    sampler.set_epoch(1)
    other = ElasticSampler(range(10), seed=5)
    other.load_state_dict({"epoch": 1, "processed_num": 4})
    assert other.state_dict() == {"epoch": 1, "processed_num": 4}
    assert list(other) == sampler.remaining_indices[4:][hvd.rank() :: hvd.size()]
    return first, list(sampler), list(plain)


def test_the_order_is_the_same_on_all_ranks_and_another_in_each_epoch(ranks):
    (first0, second0, plain0), (first1, second1, plain1) = ranks(2).run(_orders)
    assert sorted(first0 + first1) == sorted(second0 + second1) == list(range(10))
    assert first0 != second0 and plain0 == [0, 2, 4, 6, 8] and plain1 == [1, 3, 5, 7, 9]


def test_a_sampler_before_init():
    with pytest.raises(ValueError, match=r"use hvd\.init"):
        ElasticSampler(range(3))
