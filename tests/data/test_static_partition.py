"""Tasks, and StaticPartition: who reads what, with each policy for uneven tails."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovodlike import basics
from horovodlike.data import Batch, StaticPartition, Task, cut_into_tasks

TASKS = [Task("a", 0, 7), Task("b", 3, 5), Task("a", 7, 10), Task("c", 0, 4), Task("d", 0, 1)]


def tasks():
    """Some tasks, none of which has a sample in common with another."""
    return st.lists(st.integers(0, 30), max_size=8).map(
        lambda lengths: [Task(f"file {i}", 2 * i, 2 * i + length) for i, length in enumerate(lengths)]
    )


def samples(batches):
    return [sample for batch in batches for sample in batch.samples()]


def on_all(size, tail, tasks=TASKS, batch_size=3, epoch=0, **options):
    """The batches of all ranks, by rank."""
    partitions = [
        StaticPartition(tasks, batch_size, tail=tail, rank=rank, size=size, **options) for rank in range(size)
    ]
    for partition in partitions:
        partition.set_epoch(epoch)
    batches = [list(partition) for partition in partitions]
    assert [len(partition) for partition in partitions] == [len(each) for each in batches]
    return batches


def test_sources_are_cut_into_tasks():
    assert cut_into_tasks({"a": 5, "b": 0, "c": 2}, 2) == [("a", 0, 2), ("a", 2, 4), ("a", 4, 5), ("c", 0, 2)]
    assert cut_into_tasks([(1, 3), (0, 1)], 3) == [Task(1, 0, 3), Task(0, 0, 1)]


@pytest.mark.parametrize(("sources", "length", "words"), [({"a": 1}, 0, "samples_per_task"), ({"a": -1}, 2, "'a'")])
def test_bad_sources_are_named(sources, length, words):
    with pytest.raises(ValueError, match=words):
        cut_into_tasks(sources, length)


def test_a_batch_has_its_samples_in_order():
    batch = Batch((Task("a", 1, 3), Task("b", 0, 1)), total=8)
    assert list(batch.samples()) == [("a", 1), ("a", 2), ("b", 0)]
    assert (len(batch), batch.total, bool(batch), bool(Batch((), total=1))) == (3, 8, True, False)


def test_ranks_take_tasks_in_turn_and_read_each_from_start_to_end():
    first, second = on_all(2, "join", shuffle=False)
    assert samples(first) == [("a", i) for i in range(10)] + [("d", 0)]
    assert first[2].ranges == (("a", 6, 9),)  # tasks that follow one another are one range
    assert first[3].ranges == (("a", 9, 10), ("d", 0, 1))
    assert samples(second) == [("b", 3), ("b", 4), *(("c", i) for i in range(4))]


def test_the_order_changes_with_the_epoch_and_the_seed_only():
    many = cut_into_tasks({"a": 100}, 1)

    def order(epoch, seed):
        return samples(on_all(1, "join", many, epoch=epoch, seed=seed)[0])

    orders = [order(epoch, seed) for epoch in (0, 1) for seed in (0, 1)]
    assert all(sorted(each) == [("a", i) for i in range(100)] for each in orders)
    assert len({tuple(each) for each in orders}) == 4
    assert order(0, 1) == orders[1]


@settings(deadline=None)
@given(tasks(), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_join_yields_every_sample_once(tasks, size, batch_size, epoch):
    batches = on_all(size, "join", tasks, batch_size, epoch)
    everything = Counter(samples(batch for rank in batches for batch in rank))
    assert everything == Counter(samples([Batch(tuple(tasks), 0)]))
    for rank in batches:
        assert all(len(batch) == batch_size for batch in rank[:-1])
        assert not rank or len(rank[-1]) > 0
        for step, batch in enumerate(rank):
            assert batch.total == sum(len(other[step]) for other in batches if step < len(other))


@settings(deadline=None)
@given(tasks(), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_drop_yields_full_batches_only_and_as_many_on_all_ranks(tasks, size, batch_size, epoch):
    batches = on_all(size, "drop", tasks, batch_size, epoch)
    everything = on_all(size, "join", tasks, batch_size, epoch)
    fewest = min(len(samples(rank)) for rank in everything)
    for rank, before in zip(batches, everything, strict=True):
        assert samples(rank) == samples(before)[: fewest // batch_size * batch_size]
        assert all((len(batch), batch.total) == (batch_size, batch_size * size) for batch in rank)


@settings(deadline=None)
@given(tasks(), st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_pad_yields_full_batches_only_and_reads_again_from_the_beginning(tasks, size, batch_size, epoch):
    batches = on_all(size, "pad", tasks, batch_size, epoch)
    everything = on_all(size, "join", tasks, batch_size, epoch)
    whole = samples(on_all(1, "join", tasks, batch_size, epoch)[0])
    for rank, before in zip(batches, everything, strict=True):
        again = samples(before) or whole
        assert len(rank) == max(len(other) for other in everything)
        assert all((len(batch), batch.total) == (batch_size, batch_size * size) for batch in rank)
        assert samples(rank) == (again * (len(rank) * batch_size))[: len(rank) * batch_size]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": [("a", 0, 1), ("a", 3, 2)]}, r"task 1 is \('a', 3, 2\)"),
        ({"tasks": [("a", 0)]}, "task 0"),
        ({"tasks": [("a", 0, 1.5)]}, "task 0"),
        ({"tasks": [(None, 0, 1)]}, "source None"),
        ({"batch_size": 0}, "batch_size"),
        ({"tail": "leave"}, "join, drop, pad"),
        ({"rank": 1}, "both rank and size"),
        ({"rank": 2, "size": 2}, "no rank 2 among 2"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        StaticPartition(**{"tasks": TASKS, "batch_size": 2, **arguments})


def test_a_negative_epoch_is_refused():
    with pytest.raises(ValueError, match="epoch"):
        StaticPartition(TASKS, 2).set_epoch(-1)


def test_the_place_is_asked_for_when_iteration_begins():
    partition = StaticPartition(TASKS, 3)
    with pytest.raises(ValueError, match=r"hvd\.init"):
        iter(partition)


def _of_the_job():
    partition = StaticPartition(TASKS, 3, shuffle=False)
    return basics.rank(), basics.size(), list(partition)


def test_rank_and_size_are_those_of_the_job(ranks):
    for rank, size, batches in ranks(3).run(_of_the_job):
        assert batches == on_all(size, "join", shuffle=False)[rank]


@settings(deadline=None)
@given(tasks(), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["join", "drop", "pad"]), st.data())
def test_an_epoch_resumes_after_the_batches_that_are_done(tasks, size, batch_size, tail, data):
    for rank, whole in enumerate(on_all(size, tail, tasks, batch_size, epoch=2)):
        first, second = (StaticPartition(tasks, batch_size, tail=tail, rank=rank, size=size) for _ in range(2))
        first.set_epoch(2)
        batches = iter(first)
        done = data.draw(st.integers(0, len(whole)))
        assert [next(batches) for _ in range(done)] == whole[:done]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        second.set_epoch(2)  # as a resumed script does
        assert (second.epoch, len(second), list(second)) == (2, len(whole) - done, whole[done:])
        assert second.state_dict()["done"] == len(whole) and list(second) == whole, "the next iteration is a whole one"
        second.load_state_dict(first.state_dict())
        second.set_epoch(3)
        assert second.state_dict()["done"] == 0 and len(second) == len(list(second))


def test_a_state_of_another_partition_or_number_of_ranks_is_refused():
    partition = StaticPartition(TASKS, 2, rank=0, size=1)
    partition.load_state_dict(partition.state_dict())
    next(iter(partition))
    saved = partition.state_dict()
    for other in ({"batch_size": 3}, {"seed": 1}, {"shuffle": False}, {"tail": "pad"}, {"tasks": TASKS[1:]}):
        with pytest.raises(ValueError, match="no StaticPartition with these tasks, batch_size, seed, shuffle and tail"):
            StaticPartition(**{"tasks": TASKS, "batch_size": 2, **other}).load_state_dict(saved)
    with pytest.raises(ValueError, match="no StaticPartition"):
        partition.load_state_dict({})
    shared = StaticPartition(TASKS, 2, rank=0, size=2)
    shared.load_state_dict(saved)
    for use in (iter, len):
        with pytest.raises(ValueError, match="1 ranks have begun epoch 0, and 2 cannot continue it.*DynamicPartition"):
            use(shared)
    shared.set_epoch(1)
    assert len(list(shared)) == len(shared)
