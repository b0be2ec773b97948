"""Process sets: every operation on some of the ranks, overlapping and disjoint sets at once, registration, joining."""

from __future__ import annotations

import itertools

import pytest
import torch

import horovodlike.torch as hvd
from horovodlike import objects
from horovodlike.process_set import ids_and_ranks

SETS = {2: ([0], [1]), 3: ([0, 2], [1], [1, 2]), 4: ([0, 1], [2, 3], [1, 2, 3], [3])}
LARGE = 300_007


def _value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def _all_operations(chosen: hvd.ProcessSet) -> None:
    ranks, place = chosen.ranks, chosen.rank()
    for shape, dtype in itertools.product(((0, 2), (1, 3), (7, 5), (LARGE, 1)), (torch.float32, torch.int64)):
        mine = _value(hvd.rank(), shape, dtype)
        everybody = [_value(rank, shape, dtype) for rank in ranks]
        summed = torch.stack(everybody).sum(0)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, process_set=chosen), summed)
        assert torch.equal(hvd.allreduce_(mine.clone(), op=hvd.Max, process_set=chosen), torch.stack(everybody).amax(0))
        first, second = hvd.grouped_allreduce([mine, 2 * mine], op=hvd.Sum, process_set=chosen)
        assert torch.equal(first, summed) and torch.equal(second, 2 * summed)
        assert torch.equal(hvd.allgather(mine, process_set=chosen), torch.cat(everybody))
        assert torch.equal(hvd.broadcast(mine, ranks[-1], process_set=chosen), everybody[-1])
        counts = [len(range(part, shape[0], len(ranks))) for part in range(len(ranks))]
        scattered = hvd.reducescatter(mine, op=hvd.Sum, process_set=chosen)
        assert torch.equal(scattered, summed.split(counts)[place])
        rows, received = hvd.alltoall(mine, counts, process_set=chosen)
        assert torch.equal(rows, torch.cat([one.split(counts)[place] for one in everybody]))
        assert received.tolist() == [counts[place]] * len(ranks)
        first, (second, _) = hvd.grouped_alltoall([torch.tensor(ranks), mine], [None, counts], process_set=chosen)
        assert first.tolist() == [ranks[place]] * len(ranks) and torch.equal(second, rows)
    average = hvd.allreduce(torch.tensor([float(hvd.rank())]), process_set=chosen)
    assert average.item() == pytest.approx(sum(ranks) / len(ranks))
    assert hvd.broadcast_object(f"from {hvd.rank()}", ranks[0], process_set=chosen) == f"from {ranks[0]}"
    assert hvd.allgather_object(hvd.rank(), process_set=chosen) == ranks
    hvd.barrier(process_set=chosen)


def _on_sets(sets: list[list[int]]) -> None:
    registered = [hvd.add_process_set(ranks) for ranks in sets]
    assert ids_and_ranks() == {
        0: list(range(hvd.size())),
        **{one.process_set_id: one.ranks for one in registered},
    }
    for chosen in registered:
        assert chosen.size() == len(chosen.ranks)
        assert chosen.included() == (hvd.rank() in chosen.ranks)
        if chosen.included():
            _all_operations(chosen)
        else:
            with pytest.raises(ValueError, match="not a member"):
                hvd.allreduce(torch.ones(1), process_set=chosen)
            with pytest.raises(ValueError, match="is not in"):
                chosen.rank()
    for chosen in registered:
        assert hvd.remove_process_set(chosen)
        assert chosen.process_set_id is None and chosen.size() is None
        assert not hvd.remove_process_set(chosen)
    _all_operations(hvd.global_process_set)


@pytest.mark.parametrize("size", SETS)
def test_all_operations_on_sets(ranks, size):
    ranks(size).run(_on_sets, SETS[size])


def _at_once() -> None:
    """Each rank has operations on all of its sets in flight, in an order of its own."""
    registered = [hvd.global_process_set, *(hvd.add_process_set(ranks) for ranks in SETS[4])]
    mine = [chosen for chosen in registered if chosen.included()]
    for turn in range(10):
        order = mine if (hvd.rank() + turn) % 2 else mine[::-1]
        handles = {}
        for chosen in order:
            for name in ("a", "b"):  # the same names on all sets
                tensor = torch.full((1009,), float(hvd.rank() + turn))
                handles[chosen, name] = hvd.allreduce_async(tensor, op=hvd.Sum, name=name, process_set=chosen)
        for (chosen, _), handle in handles.items():
            assert (hvd.synchronize(handle) == sum(rank + turn for rank in chosen.ranks)).all()
    for chosen in registered[1:]:
        assert hvd.remove_process_set(chosen)


def test_overlapping_and_disjoint_sets_at_once(ranks):
    ranks(4).run(_at_once)


def _changes_that_are_refused() -> None:
    chosen = hvd.add_process_set([1])
    assert chosen.process_set_id >= 1
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(chosen)
    with pytest.raises(ValueError, match="has the same ranks already"):
        hvd.add_process_set([1])
    with pytest.raises(ValueError, match="has the same ranks already"):
        hvd.add_process_set(range(hvd.size()))
    with pytest.raises(ValueError, match=r"ranks from 0 to 1, not of \[0, 2\]"):
        hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match="needs ranks"):
        hvd.add_process_set([])
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 has \[0\], rank 1 has \[0, 1\]|ranks"):
        hvd.add_process_set([0] if hvd.rank() == 0 else [0, 1])
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(TypeError, match="must be a ProcessSet"):
        hvd.allreduce(torch.ones(1), process_set=[1])
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match=r"Root rank 0 .* rank 1"):
            hvd.broadcast(torch.ones(1), 0, process_set=chosen)
    first_id, again = chosen.process_set_id, hvd.add_process_set([0])
    assert again.process_set_id > first_id
    assert hvd.remove_process_set(chosen)
    assert hvd.add_process_set(chosen).process_set_id == first_id  # the id is used again
    assert hvd.remove_process_set(again) and hvd.remove_process_set(chosen)


def test_changes_that_are_refused(ranks):
    ranks(2).run(_changes_that_are_refused)


def _removed_with_an_operation_in_flight() -> None:
    both = hvd.add_process_set([0, 1])
    set_id = both.process_set_id
    handle = hvd.allreduce_async(torch.ones(1), name="late", process_set=both) if hvd.rank() == 0 else None
    hvd.barrier()  # has rank 0 hand it over
    assert hvd.remove_process_set(both)
    if handle is not None:
        with pytest.raises(hvd.HorovodInternalError, match=f"allreduce.late.: process set {set_id} has been removed"):
            hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def test_an_operation_in_flight_fails_with_its_set(ranks):
    ranks(3).run(_removed_with_an_operation_in_flight)


def _at_init() -> None:
    hvd.shutdown()
    one, both = hvd.ProcessSet([1]), hvd.ProcessSet([0])
    hvd.init(process_sets=[one, both])
    assert (one.process_set_id, both.process_set_id) == (1, 2)
    again = hvd.ProcessSet([1])
    assert again != one and again.included() == (hvd.rank() == 1)
    hvd.init(process_sets=[again])  # does nothing the second time
    assert again.process_set_id is None and again.rank() is None and again.size() is None
    hvd.shutdown()
    assert one.process_set_id is None
    with pytest.raises(ValueError, match="entry number 1 of process_sets"):
        hvd.init(process_sets=[one, hvd.ProcessSet([1])])
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="dynamic"):
        hvd.init(process_sets="static")
    hvd.init(process_sets="dynamic")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


def test_sets_given_to_init(fresh_ranks):
    fresh_ranks(2).run(_at_init)


def _optimizer_of_a_set() -> None:
    chosen = hvd.add_process_set([0, 2])
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=chosen
    )
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
    mean = 2.0 if chosen.included() else hvd.rank() + 1.0
    assert torch.equal(model.weight.detach(), torch.full((2, 3), 1 - 3 * mean))
    assert hvd.remove_process_set(chosen)


def test_optimizer_of_a_set(ranks):
    ranks(3).run(_optimizer_of_a_set)


def _uneven_data() -> None:
    """Rank r has r + 1 batches; who has none left joins."""
    size = hvd.size()
    for batch in range(hvd.rank() + 1):
        present = range(batch, size)
        mine = torch.full((5, 2), float(hvd.rank()))
        everybody = [torch.full((5, 2), float(rank)) for rank in present]
        assert torch.equal(hvd.allreduce(mine, name="mean"), torch.full((5, 2), sum(present) / len(present)))
        assert torch.equal(hvd.allreduce(-1 - mine, op=hvd.Max, name="max"), -1 - everybody[0])
        assert torch.equal(hvd.allgather(mine, name="rows"), torch.cat(everybody))
        assert torch.equal(hvd.broadcast(mine, size - 1, name="last"), everybody[-1])
        share = mine.shape[0] // size + (hvd.rank() < mine.shape[0] % size)
        assert torch.equal(
            hvd.reducescatter(mine, op=hvd.Sum, name="share"), torch.full((share, 2), float(sum(present)))
        )
        rows, received = hvd.alltoall(mine, [1] * size, name="exchange")
        assert torch.equal(rows, torch.cat([one[:1] for one in everybody]))
        assert received.tolist() == [int(rank in present) for rank in range(size)]
        if batch > 0:
            with pytest.raises(ValueError, match="broadcast.first. needs rank.* joined"):
                hvd.broadcast(mine, 0, name="first")
        hvd.barrier()
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_join_with_uneven_data(ranks, size):
    for _ in range(2):
        ranks(size).run(_uneven_data)


def _join_with_optimizer() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(1 + 2 * hvd.rank()):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * (1.0 + hvd.rank())).backward()
        optimizer.step()
    assert hvd.join() == 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert torch.equal(model.weight.detach(), torch.full((1, 2), -1.5 - 2.0 - 2.0))  # one step of both, two of rank 1


def test_join_in_a_training_loop(ranks):
    ranks(2).run(_join_with_optimizer)


def _average_over_all() -> None:
    if hvd.rank() == 0:
        assert hvd.allreduce(torch.full((3,), 4.0), name="x").tolist() == [2.0] * 3
    hvd.join()


def test_average_that_counts_those_that_have_joined(fresh_ranks):
    fresh_ranks(2, {"HOROVODLIKE_JOIN_AVERAGE": "all"}).run(_average_over_all)


def _join_of_a_set() -> None:
    chosen = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        assert hvd.join(process_set=chosen) == 1
    elif hvd.rank() == 1:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=chosen).item() == 1
        assert hvd.join(process_set=chosen) == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    assert hvd.remove_process_set(chosen)


def test_join_of_a_set(ranks):
    ranks(3).run(_join_of_a_set)


def _unnamed_after_a_join() -> None:
    for step in range(hvd.rank() + 1):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() - step
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def _unnamed_on_an_id_that_is_used_again() -> None:
    for ranks in ([0, 1], [0, 2], [1, 2]):
        chosen = hvd.add_process_set(ranks)
        for _ in range(ranks[1]):
            if chosen.included():
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=chosen).item() == 2
        assert hvd.remove_process_set(chosen)


def _unnamed_objects_of_a_set() -> None:
    chosen = hvd.add_process_set([0, 1])
    if chosen.included():
        assert objects.broadcast_object(hvd.rank(), 1, process_set=chosen.process_set_id) == 1
    assert objects.broadcast_object(hvd.rank(), 2) == 2
    assert hvd.remove_process_set(chosen)


@pytest.mark.parametrize(
    "check", [_unnamed_after_a_join, _unnamed_on_an_id_that_is_used_again, _unnamed_objects_of_a_set]
)
def test_unnamed_operations(ranks, check):
    ranks(3).run(check)


def _gradients_without_a_rank() -> None:
    rank = hvd.rank()
    if rank != 1:
        sent = torch.arange(4.0, requires_grad=True)
        rows, _ = hvd.alltoall(sent, splits=[1, 1, 1], name="exchange")
        (rows * (10 + rank)).sum().backward()
        assert sent.grad.tolist() == [10.0, 0.0, 12.0, 0.0]
        mine = torch.full((rank + 1, 1), 2.0, requires_grad=True)
        everything = hvd.allgather(mine, name="rows")
        (everything * torch.arange(4.0)[:, None]).sum().backward()
        assert mine.grad.flatten().tolist() == ([0.0] if rank == 0 else [1.0, 2.0, 3.0])
        whole = torch.ones(4, requires_grad=True)
        (hvd.reducescatter(whole, op=hvd.Sum, name="share") * (1 + rank)).sum().backward()
        assert whole.grad.tolist() == [3.0, 3.0, 0.0, 9.0]
    hvd.join()


def test_gradients_while_a_rank_has_joined(ranks):
    ranks(3).run(_gradients_without_a_rank)


def _optimizer_whose_set_changes() -> None:
    first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])
    hvd.add_process_set(first)
    hvd.add_process_set(second)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), [("parameter", parameter)], process_set=first
    )

    def step() -> float:
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        return parameter.grad[0].item()

    mine = 1.5 if first.included() else 3.0
    assert [step(), step()] == [mine, mine]
    for chosen in (first, second):
        assert hvd.remove_process_set(chosen)
    with pytest.raises(ValueError, match="not registered"):
        step()
    hvd.add_process_set(second)
    hvd.add_process_set(first)  # under the id that the other had
    assert [step(), step()] == [mine, mine]
    for chosen in (first, second):
        assert hvd.remove_process_set(chosen)


def test_optimizer_whose_set_is_removed_and_registered_again(ranks):
    ranks(3).run(_optimizer_whose_set_changes)
