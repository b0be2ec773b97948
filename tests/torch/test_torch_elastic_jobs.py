"""Objects that outlive a job: optimizers of all forms, handles and layers work in the next one, with other ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref

import pytest
import torch
from support.generations import Generation
from support.training import STEPS, flat_parameters, loss_of, make_batches, make_model, make_sgd, my_part, train_model

import horovodlike.torch as hvd
from horovodlike._engine.ops import wait_done
from horovodlike.errors import JobBrokenError

BREAKS_AT = 7
COMMITS_EVERY = 3


def _forms() -> dict[str, dict[str, object]]:
    return {
        "plain": {},
        "sum": {"op": hvd.Sum},
        "groups": {"groups": 2},
        "passes": {"backward_passes_per_step": 2},
        "fp16": {"compression": hvd.Compression.fp16},
        "powersgd": {"compression": hvd.Compression.powersgd(rank=1, min_compression=0)},
        "topk": {"compression": hvd.Compression.topk(ratio=0.1)},
        "adasum": {"op": hvd.Adasum},
    }


class Training:
    """Of one model by an optimizer of one form."""

    def __init__(self, form: str, options: dict[str, object]) -> None:
        self.model = make_model()
        named = [(f"{form}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(make_sgd(self.model), named, **options)
        self.state = hvd.elastic.TorchState(self.model, optimizer, step=0)
        self.passes = options.get("backward_passes_per_step", 1)
        self.divisor = self.passes * (hvd.size() if form == "sum" else 1)

    def backward(self) -> None:
        x, y = (my_part(whole) for whole in make_batches()[self.state.step])
        for px, py in zip(x.chunk(self.passes), y.chunk(self.passes), strict=True):
            (loss_of(self.model, px, py) / self.divisor).backward()

    def finish_step(self) -> None:
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step += 1
        if self.state.step % COMMITS_EVERY == 0:
            self.state._commits += 1
            self.state.save()


def _go_on(trainings: list[Training], after: Generation, rank: int) -> None:
    for training in trainings:
        training.state.restore()
        assert training.state.step == BREAKS_AT // COMMITS_EVERY * COMMITS_EVERY
    after.enter(rank)
    for training in trainings:
        training.state.on_reset()
        training.state.sync()


def _lose_a_rank(victim: int, after: Generation) -> dict[str, torch.Tensor]:
    trainings = {form: Training(form, options) for form, options in _forms().items()}
    survivors = [rank for rank in range(hvd.size()) if rank != victim]
    for _ in range(BREAKS_AT):
        for training in trainings.values():
            training.backward()
            training.finish_step()
    for form, training in trainings.items():
        if hvd.rank() == victim and form == "adasum":
            os.kill(os.getpid(), signal.SIGKILL)
        training.backward()
    for form, training in trainings.items():
        # What the lost rank had handed over may still have been reduced.
        with contextlib.suppress(hvd.HorovodInternalError) if form != "adasum" else pytest.raises(JobBrokenError):
            training.finish_step()
    _go_on(list(trainings.values()), after, survivors.index(hvd.rank()))
    while trainings["plain"].state.step < STEPS:
        for training in trainings.values():
            training.backward()
            training.finish_step()
    for training in trainings.values():
        hvd.check_consistency(training.model)
    return {form: flat_parameters(training.model) for form, training in trainings.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 2])
def test_all_forms_of_the_optimizer_survive_a_lost_rank(fresh_ranks, generations, victim):
    pool = fresh_ranks(3)
    (after,) = generations(2)
    pool.start(_lose_a_rank, [(victim, after)] * 3)
    outcomes = pool.collect(timeout=120)
    results = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert all(results), [(outcome.error, pool.output(rank)) for rank, outcome in enumerate(outcomes)]
    alone = train_model(None)
    for exact in ("plain", "groups", "passes"):
        torch.testing.assert_close(results[0][exact], alone, rtol=0, atol=1e-12)
    for lossy in ("fp16", "powersgd", "topk", "adasum", "sum"):
        assert results[0][lossy].isfinite().all()


def _grow_and_shrink(jobs: list[Generation], ranks_in: list[int | None]) -> list[list[float]]:
    """Train in one job after the other, with the rank that this process has in each; None: it has none."""
    hvd.shutdown()
    chosen = hvd.ProcessSet([0, 2])
    seen = []
    for job, rank in zip(jobs, ranks_in, strict=True):
        if rank is None:
            hvd.shutdown()
            continue
        job.enter(rank)
        if hvd.size() == 3:
            hvd.add_process_set(chosen)
        if not seen:
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), hvd.SyncBatchNorm(2), torch.nn.Linear(2, 1)).double()
            adam = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
            reducer = hvd.Compression.powersgd(rank=1, min_compression=0)
            optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), compression=reducer)
            schedule = torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)
            state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, steps=0)
            state._commits = 10 * (rank + 1) * (job is jobs[0])  # a new rank has none
        else:
            state.on_reset()
        state.sync()
        hvd.check_consistency(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4 + hvd.rank(), 2, dtype=torch.float64)).sum().backward()
            optimizer.step()
            schedule.step()
            state.steps += 1
        state.commit()
        hvd.check_consistency(model)
        if hvd.size() == 3 and chosen.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=chosen).item() == 2
        hvd.barrier()
        state_of = optimizer.state_dict()["state"]
        seen.append([state.steps, state._commits, len(state_of), float(state_of[0]["step"]), schedule.get_last_lr()[0]])
    return seen


@pytest.mark.slow
def test_the_state_goes_to_new_ranks_and_on_through_jobs_of_other_sizes(fresh_ranks, generations):
    pool = fresh_ranks(3)
    jobs = generations(2, 3, 3, 1, 2)
    ranks_in = [[1, 2, 1, None, None], [0, 0, 0, 0, 0], [None, 1, 2, None, 1]]
    second, first, third = pool.run_each(_grow_and_shrink, [(jobs, ranks) for ranks in ranks_in], timeout=120)
    # Rank 1 of the first job has committed most, and is the root: the learning rate is its own.
    rates = [0.02 * 0.5 ** (steps // 2) for steps in (3, 6, 9, 12, 15)]
    assert first == [[3 * n, 20 + n, 6, 3.0 * n, pytest.approx(rate)] for n, rate in enumerate(rates, start=1)]
    assert second == first[:3]
    assert third == [first[1], first[2], first[4]]


def _lost_handles(after: Generation) -> None:
    tensor = torch.ones(1000)
    freed = weakref.ref(tensor)
    handle = hvd.allreduce_async_(tensor, name="lost") if hvd.rank() == 0 else None
    hvd.barrier()
    after.enter(hvd.rank())
    if handle is not None:
        del tensor
        assert freed() is None, "what was in flight in the job before is let go"
        with pytest.raises(ValueError, match="in flight"):
            hvd.poll(handle)
        with pytest.raises(hvd.HorovodInternalError, match=f"handle {handle} is of the job before"):
            hvd.synchronize(handle)
        with pytest.raises(KeyError):
            wait_done(handle)
    assert hvd.allreduce(torch.ones(1), name="lost", op=hvd.Sum).item() == 2


def test_a_handle_of_the_job_before_is_an_error(fresh_ranks, generations):
    fresh_ranks(2).run(_lost_handles, *generations(2))


def _compiled_through_jobs(jobs: list[Generation], ranks_in: list[int | None]) -> list[list[float]]:
    @torch.compile(fullgraph=True, backend="eager")
    def total(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x, op=hvd.Sum, name="total") + 10 * hvd.size()

    results = []
    for job, rank in zip(jobs, ranks_in, strict=True):
        if rank is None:
            hvd.shutdown()
        else:
            job.enter(rank)
            results.append(total(torch.ones(2)).tolist())
    return results


@pytest.mark.slow
def test_compiled_functions_follow_the_job(fresh_ranks, generations):
    jobs = generations(1, 2, 1)
    first, second = fresh_ranks(2).run_each(_compiled_through_jobs, [(jobs, [0, 0, 0]), (jobs, [None, 1, None])])
    assert first == [[11.0, 11.0], [22.0, 22.0], [11.0, 11.0]] and second == [[22.0, 22.0]]
