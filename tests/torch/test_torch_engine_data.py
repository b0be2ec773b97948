"""The data of `Engine`: prefetching, partitions, samplers, and training that continues where it was interrupted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from unittest import mock

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from support.generations import Generation
from support.training import flat_parameters, make_batches, make_model, make_sgd, my_part

import horovodlike.torch as hvd
from horovodlike.data import DynamicPartition, RecordReader, StaticPartition, cut_into_tasks, list_records
from horovodlike.elastic._state_file import StateFile
from horovodlike.errors import ShutDownError
from horovodlike.torch._ops import gpu
from horovodlike.torch._training.batches import BatchSource
from horovodlike.torch.training_loop import LoopState

mse = torch.nn.functional.mse_loss
BOUND_S = 20.0
LEFT = "rank 1 has shut the job down: .*BrokenDataError: this is {}"
CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["first", "second"])


def _shares(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(my_part(x), my_part(y)) for x, y in make_batches(steps)]


def _engine(**options: object) -> hvd.Engine:
    model = make_model()
    return hvd.Engine(model, mse, make_sgd(model), **{"progress": False, **options})


def _data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "horovodlike-data"]


def test_the_number_of_batches_that_are_read_ahead_is_bounded():
    read, go_on = [], threading.Semaphore(0)

    def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(10):
            read.append(number)
            go_on.release()
            yield torch.ones(1), torch.ones(1)

    with contextlib.closing(BatchSource(data(), None, CPU, 3).batches(0)) as batches:
        next(batches)
        for _ in range(5):  # the one that is out, three in the queue, one in the hands of the thread
            assert go_on.acquire(timeout=BOUND_S)
        assert not go_on.acquire(timeout=0.1) and read == [*range(5)]
        (thread,) = _data_threads()
    assert not thread.is_alive() and not _data_threads()


def test_nothing_is_read_ahead_without_a_thread():
    read = []
    data = (read.append(number) or (torch.ones(1), torch.ones(1)) for number in range(10))
    batches = BatchSource(data, None, CPU, 0).batches(0)
    next(batches)
    assert read == [0] and not _data_threads()


@pytest.mark.parametrize("ahead", (0, 2))
def test_tensors_in_all_places_are_copied_to_the_device(ahead):
    inputs = {"a": [torch.ones(3, 2), 1.5], "b": Pair(torch.zeros(3), "text")}
    source = BatchSource([(inputs, torch.ones(3))], None, torch.device("meta"), ahead)
    (batch,) = source.batches(0)
    assert batch.inputs["a"][0].is_meta and batch.inputs["b"].first.is_meta and batch.targets.is_meta
    assert (batch.inputs["a"][1], batch.inputs["b"].second, batch.samples) == (1.5, "text", 3)
    assert isinstance(batch.inputs["b"], Pair) and not inputs["a"][0].is_meta


def test_copies_to_a_gpu_go_to_a_stream_of_their_own(monkeypatch):
    """The copy, then its event on the copy's stream, for which the stream that trains waits."""
    done: list[str] = []

    @contextlib.contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        done.append(f"into {stream} in {threading.current_thread().name}")
        yield
        done.append(f"out of {stream}")

    tensor = mock.Mock(record_stream=lambda stream: done.append(f"kept for {stream.name}"))
    event = mock.Mock(record=lambda stream: done.append(f"event on {stream}"))
    training = mock.Mock(wait_event=lambda waited: done.append(f"waits for {'it' if waited is event else waited}"))
    training.name = "training"
    fake = {"Stream": lambda device: f"copies to {device}", "Event": lambda: event, "stream": on_stream}
    monkeypatch.setattr(torch, "cuda", mock.Mock(**fake, current_stream=lambda device: training))
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    stream = gpu.copy_stream(torch.device("cuda", 1))
    assert stream is not None and gpu.copy_stream(CPU) is None
    with stream.copying() as end:
        done.append("copy")
    stream.receive(end, [tensor])
    copies = "copies to cuda:1"
    expected = [f"into {copies} in MainThread", "copy", f"event on {copies}", f"out of {copies}"]
    assert done == [*expected, "waits for it", "kept for training"]


class BrokenDataError(Exception):
    pass


def _data_that_fails() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from _shares(2)
    raise BrokenDataError("the disk is gone")


class Restartable:
    def __init__(self, make: Callable[[], Iterator[object]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[object]:
        return self._make()


def _fails_in_the_data(prefetch: int) -> None:
    engine = _engine(prefetch=prefetch)
    for use in (engine.evaluate, lambda data: engine.train(data, 1)):
        with pytest.raises(BrokenDataError, match="the disk is gone"):
            use(Restartable(_data_that_fails))
        assert not _data_threads()


def _raises_stop_iteration(prefetch: int) -> None:
    """An iterator that `read` has emptied is an error: the rest of the data must not be lost silently."""
    empty: Iterator[object] = iter(())
    engine = _engine(prefetch=prefetch, read=lambda batch: next(empty))
    with pytest.raises(RuntimeError, match="StopIteration"):
        engine.train(_shares(2), 1)


@pytest.mark.parametrize("prefetch", (0, 2))
def test_a_stop_iteration_of_read_is_an_error(ranks, prefetch):
    ranks(1).run(_raises_stop_iteration, prefetch)


def _evaluates_bad_data() -> None:
    engine = _engine()
    engine.model[1].eval()
    with pytest.raises(BrokenDataError):
        engine.evaluate(Restartable(_data_that_fails))
    assert [module.training for module in engine.model] == [True, False, True, True, True]


def test_the_modules_have_their_modes_again_after_an_error(ranks):
    ranks(1).run(_evaluates_bad_data)


@pytest.mark.parametrize("prefetch", (0, 2))
def test_exceptions_of_the_data_come_through(ranks, prefetch):
    ranks(1).run(_fails_in_the_data, prefetch)


def _stops_early() -> None:
    closed = []

    def endless() -> Iterator[object]:
        try:
            while True:
                yield from _shares(1)
        finally:
            closed.append(True)

    def stop(loop: LoopState) -> None:
        loop.stop = loop.step == 3
        assert len(_data_threads()) == 1

    engine = _engine(hooks={"after_update": stop})
    engine.train(Restartable(endless), 1)
    assert closed == [True] and not _data_threads()


def test_an_early_stop_leaves_no_thread(ranks):
    ranks(2).run(_stops_early)


WHERE = ("start", "sample", "backward", "before_update", "after_update", "end_epoch", "read", "metric")


def _raises_on_one_rank(jobs: list[Generation], rank: int) -> float:
    """In one job after the other, rank 1 raises; return the longest time until a training has ended."""
    times = []
    for where, job in zip(WHERE, jobs, strict=True):
        job.enter(rank)

        def fail(*_: object, where: str = where) -> object:
            if rank == 1:
                raise BrokenDataError(f"this is {where}")
            return _shares(1)[0]

        options = {"read": {"read": fail}, "metric": {"metrics": {"mae": lambda o, y, fail=fail: len(fail())}}}
        engine = _engine(**options.get(where, {"hooks": {where: fail}}))
        begun = time.monotonic()
        error, text = (BrokenDataError, f"this is {where}") if rank == 1 else (ShutDownError, LEFT.format(where))
        with pytest.raises(error, match=text):
            engine.train(_shares(3), 2)
        times.append(time.monotonic() - begun)
        assert not _data_threads() and not hvd.is_initialized()
    return max(times)


def test_an_exception_on_one_rank_ends_the_training_on_all(fresh_ranks, generations):
    jobs = generations(*[3] * len(WHERE))
    times = fresh_ranks(3).run_each(_raises_on_one_rank, [(jobs, rank) for rank in range(3)])
    assert max(times) < BOUND_S


def _read(samples: torch.Tensor) -> Callable[[object], tuple[torch.Tensor, torch.Tensor]]:
    def read(batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor([index for _, index in batch.samples()])
        return samples[chosen], samples[chosen][:, :3]

    return read


def _samples(count: int) -> torch.Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _dynamic(record: str, count: int, file: str | None = None) -> None:
    """The mean is that over the samples of a step, also of the last one, in which a rank may have none."""
    samples, seen = _samples(count), []
    records = None if file is None else list_records(file)
    tasks = cut_into_tasks({"a": count}, 7) if records is None else records.tasks(7)
    partition = DynamicPartition(tasks, 3, shuffle=False, record=record)
    data = partition if records is None else RecordReader(records, partition)

    def note(loop: LoopState) -> None:
        seen.append(len(loop.sample[0]))

    engine = _engine(read=_read(samples), hooks={"sample": note})
    engine.train(data, 2)
    assert sum(hvd.allgather_object(sum(seen))) == 2 * count
    hvd.check_consistency(engine.model)
    alone = make_model()
    optimizer = make_sgd(alone)
    parts = [
        [
            [index for _, index in batch.samples()]
            for batch in DynamicPartition(cut_into_tasks({"a": count}, 7), 3, shuffle=False, rank=rank, size=hvd.size())
        ]
        for rank in range(hvd.size())
    ]
    for _ in range(2):
        for of_ranks in zip(*parts, strict=True):
            chosen = [index for part in of_ranks for index in part]
            optimizer.zero_grad()
            mse(alone(samples[chosen]), samples[chosen][:, :3]).backward()
            optimizer.step()
    torch.testing.assert_close(flat_parameters(engine.model), flat_parameters(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", (19, 23))  # the last step has one sample for three ranks, and five
@pytest.mark.parametrize("record", ("auto", "manual"))
def test_a_dynamic_partition_weighs_each_sample_the_same(ranks, record, count):
    ranks(3).run(_dynamic, record, count)


def test_so_it_does_if_its_records_are_read(ranks, tmp_path):
    file = tmp_path / "numbers.parquet"
    parquet.write_table(pyarrow.table({"number": range(19)}), file)
    ranks(3).run(_dynamic, "manual", 19, str(file))


def _epochs_of_records(file: str) -> None:
    records, orders = list_records(file), []
    reader = RecordReader(records, StaticPartition(records.tasks(2), 2, seed=1))

    def read(batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        orders.append([record["number"] for record in batch.records])
        return torch.ones(len(batch), 6, dtype=torch.float64), torch.ones(len(batch), 3, dtype=torch.float64)

    _engine(read=read).train(reader, 2)
    assert orders[:10] != orders[10:] and sorted(orders[:10]) == sorted(orders[10:])


def test_each_epoch_of_records_has_an_order_of_its_own(ranks, tmp_path):
    file = tmp_path / "numbers.parquet"
    parquet.write_table(pyarrow.table({"number": range(20)}), file)
    ranks(1).run(_epochs_of_records, str(file))


def _static() -> None:
    samples = _samples(20)
    engine = _engine(read=_read(samples))
    partition = StaticPartition(cut_into_tasks({"a": 20}, 3), 2)
    engine.train(partition, 2)
    hvd.check_consistency(engine.model)
    result = engine.evaluate(partition)
    with torch.no_grad():
        assert result == {"loss": pytest.approx(mse(engine.model(samples), samples[:, :3]).item(), rel=1e-12)}


def test_a_static_partition_of_uneven_shares(ranks):
    ranks(3).run(_static)


def _loader(sampler: object, samples: torch.Tensor) -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(samples, samples[:, :3])
    return torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)


def _data(kind: str) -> tuple[object, dict[str, object]]:
    samples = _samples(40)
    if kind == "batches":
        return _shares(7), {}
    if kind == "elastic sampler":
        return _loader(hvd.elastic.ElasticSampler(samples), samples), {}
    if kind == "sampler":
        return _loader(torch.utils.data.DistributedSampler(samples, hvd.size(), hvd.rank()), samples), {}
    record = kind.removeprefix("partition, ")
    return DynamicPartition(cut_into_tasks({"a": 40}, 6), 3, record=record), {"read": _read(samples)}


class InterruptedError(Exception):
    pass


def _train(kind: str, path: str | None, interrupted_at: int | None) -> tuple[list[int], list[float], float]:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.95)
    steps = []

    def interrupt(loop: LoopState) -> None:
        if loop.step == interrupted_at:
            raise InterruptedError

    def step(loop: LoopState) -> None:
        schedule.step()
        steps.append(loop.step)

    data, options = _data(kind)
    hooks = {"backward": interrupt, "after_update": step}
    state = {"schedule": schedule}
    engine = hvd.Engine(
        model, mse, adam, hooks=hooks, state=state, checkpoint=path, commit_every=3, progress=False, **options
    )
    with contextlib.suppress(InterruptedError, ShutDownError):
        engine.train(data, 3)
    return steps, flat_parameters(model).tolist(), schedule.get_last_lr()[0]


OTHERS = ("batches", "sampler", "elastic sampler", "partition, manual")


def _interrupted_and_continued(kind: str, jobs: list[Generation], path: str, rank: int) -> None:
    at, resumed_at = 13, 12  # in the second epoch; commits after each third step
    jobs[0].enter(rank)
    whole = _train(kind, None, None)
    steps, *_ = _train(kind, path, at)
    assert steps == [*range(len(steps))] and resumed_at <= len(steps) <= at
    assert not hvd.is_initialized()
    jobs[1].enter(rank)
    again = _train(kind, path, None)
    assert again[0] == [*range(resumed_at, len(whole[0]))]
    assert again[1:] == whole[1:]


@pytest.mark.parametrize("kind", ("partition, auto", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)))
def test_a_job_that_is_started_again_comes_to_the_same(fresh_ranks, generations, tmp_path, kind):
    jobs, path = generations(2, 2), str(tmp_path / "state")
    fresh_ranks(2).run_each(_interrupted_and_continued, [(kind, jobs, path, rank) for rank in range(2)])


class NoisyData(torch.utils.data.Dataset):
    """Samples that are drawn anew in each epoch, with the random numbers of Python, NumPy and PyTorch."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + np.random.random() + torch.rand(1).item()
        return torch.full((6,), (index + noise) / 14, dtype=torch.float64), torch.ones(3, dtype=torch.float64)


def _random_data(kind: str) -> tuple[Iterable[object], int]:
    """Return the data and `prefetch`; a thread that reads ahead may only draw when an iteration begins."""
    fixed = torch.utils.data.TensorDataset(_samples(14), _samples(14)[:, :3])
    if kind == "shuffled":
        return torch.utils.data.DataLoader(fixed, batch_size=2, shuffle=True), 2
    if kind == "generator":
        own = torch.Generator().manual_seed(hvd.rank())
        return torch.utils.data.DataLoader(fixed, batch_size=2, shuffle=True, generator=own), 2
    return torch.utils.data.DataLoader(NoisyData(), batch_size=2, shuffle=True), 0


def _train_randomly(kind: str, path: str, commit_every: int, at: tuple[str, int] | None) -> list[object]:
    """Train with dropout, up to an interruption; each rank draws other numbers. Return all that must be the same."""
    seed = 100 * (at is None) + hvd.rank()  # another one in a job that continues
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).double()
    metrics: list[dict[str, float]] = []

    def interrupt(loop: LoopState, point: str) -> None:
        torch.rand(1)
        if (point, loop.step) == at:
            raise InterruptedError

    hooks = {point: partial(interrupt, point=point) for point in ("start", "start_epoch", "backward", "end_epoch")}
    hooks["end_epoch"] = [lambda loop: metrics.append(dict(loop.metrics)), hooks["end_epoch"]]
    data, prefetch = _random_data(kind)
    options = {"checkpoint": path, "commit_every": commit_every, "prefetch": prefetch, "progress": False}
    engine = hvd.Engine(model, mse, make_sgd(model), hooks=hooks, **options)
    with contextlib.suppress(InterruptedError, ShutDownError):
        engine.train(data, 3)
    drawn = [random.random(), np.random.random(), torch.rand(1).item()]
    return [flat_parameters(model).tolist(), drawn, metrics[-1] if metrics else {}]


AMID_EPOCH = (3, ("backward", 13))


def _interrupted_amid_random_numbers(
    kind: str, interruptions: list[tuple[int, tuple[str, int]]], jobs: list[Generation], folder: str, rank: int
) -> None:
    job = iter(jobs)
    next(job).enter(rank)
    whole = _train_randomly(kind, f"{folder}/whole", 0, ("never", 0))
    hvd.shutdown()
    for number, (commit_every, at) in enumerate(interruptions):
        path = f"{folder}/{number}"
        next(job).enter(rank)
        assert _train_randomly(kind, path, commit_every, at) != whole
        next(job).enter(rank)
        *same, metrics = _train_randomly(kind, path, commit_every, None)
        assert same == whole[:2] and metrics == pytest.approx(whole[2], rel=1e-12), at
        hvd.shutdown()


@pytest.mark.parametrize(
    ("kind", "interruptions"),
    [
        ("shuffled", [AMID_EPOCH]),
        pytest.param("generator", [AMID_EPOCH], marks=pytest.mark.slow),
        pytest.param(
            "noisy", [AMID_EPOCH, (0, ("backward", 9)), (7, ("end_epoch", 14))], marks=pytest.mark.slow, id="noisy"
        ),
    ],
)
def test_a_job_that_is_started_again_continues_with_the_same_random_numbers(
    fresh_ranks, generations, tmp_path, kind, interruptions
):
    jobs = generations(*[2] * (1 + 2 * len(interruptions)))
    common = kind, interruptions, jobs, str(tmp_path)
    fresh_ranks(2).run_each(_interrupted_amid_random_numbers, [(*common, rank) for rank in range(2)])


def _train_on(path: str) -> list[int]:
    """A training that has ended does nothing more; with more epochs it goes on."""
    epochs: list[int] = []
    engine = _engine(checkpoint=path, hooks={"start_epoch": lambda loop: epochs.append(loop.epoch)})
    first = engine.train(_shares(2), 2)
    assert engine.train(_shares(2), 2) == first
    engine.train(_shares(2), 3)
    return epochs


def test_a_training_that_has_ended_goes_on_with_more_epochs_only(ranks, tmp_path):
    assert ranks(2).run(_train_on, str(tmp_path / "state")) == [[0, 1, 2]] * 2
    assert ranks(2).run(_train_on, str(tmp_path / "state")) == [[]] * 2


def _asked_to_leave(path: str) -> object:
    def ask(loop: LoopState) -> None:
        if (hvd.rank(), loop.step) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    engine = _engine(checkpoint=path, hooks={"after_update": ask})
    try:
        engine.train(make_batches(), 9)
    except SystemExit as leaving:
        return leaving.code
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("size", [2, 3])
def test_sigterm_to_a_rank_has_all_leave_at_the_next_commit(fresh_ranks, tmp_path, size):
    path = str(tmp_path / "state")
    assert fresh_ranks(size).run(_asked_to_leave, path) == [143] * size
    assert StateFile(path).commits() == 1  # at the end of the epoch
