"""DynamicPartition: every sample of an epoch is committed once, whatever becomes of the ranks."""

import copy
import json
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovodlike import basics
from horovodlike.data import DynamicPartition, StaticPartition, Task, cut_into_tasks

TASKS = cut_into_tasks({"a": 70, "b": 33}, 20)


def everything(tasks):
    return Counter((source, index) for source, start, end in tasks for index in range(start, end))


def steps(partitions):
    """Iterates on all ranks at once; yields the batches of each step by rank. All ranks end together."""
    return zip(*partitions, strict=True)


def partitions_of(size, tasks=TASKS, batch_size=4, **options):
    return [DynamicPartition(tasks, batch_size, rank=rank, size=size, **options) for rank in range(size)]


def partition(**options):
    return DynamicPartition(TASKS, **{"batch_size": 4, "rank": 0, "size": 2, **options})


class Job:
    """The ranks of an elastic job, each with a partition of its own, and what has been trained with.

    Everything that ranks hand to each other goes through JSON, and so does what they save.
    """

    def __init__(self, tasks, batch_size, size, record):
        self.tasks, self.batch_size, self.record = tasks, batch_size, record
        self.ranks = self.new_ranks(size)
        self.trained = Counter()
        self.commit()

    def new_ranks(self, size, first=0):
        make = DynamicPartition
        return [
            make(self.tasks, self.batch_size, 5, True, self.record, rank=rank, size=size) for rank in range(first, size)
        ]

    def commit(self):
        states = [json.dumps(rank.state_dict()) for rank in self.ranks]
        assert len(set(states)) == 1
        self.saved = states[0], self.trained.copy()

    def train(self, most, ahead):
        """At most so many steps; asks for batches `ahead` of the training. True: the epoch has ended."""
        iterators = [iter(rank) for rank in self.ranks]
        (expected,) = {len(rank) for rank in self.ranks}
        prefetched = []
        batches = []
        for number in range(most):
            while len(prefetched) <= ahead and batches is not None:
                batches = next(zip(*iterators, strict=True), None)
                prefetched += [] if batches is None else [batches]
            if not prefetched:
                assert number == expected
                return True
            self.train_with(prefetched.pop(0))
        return batches is None and not prefetched

    def train_with(self, batches):
        lengths = [len(batch) for batch in batches]
        assert all(batch.total == sum(lengths) > 0 for batch in batches)
        assert max(lengths) - min(lengths) <= 1
        assert max(lengths) <= self.batch_size
        self.trained.update(sample for batch in batches for sample in batch.samples())
        for rank in self.ranks:
            if self.record == "manual":
                rank.record()

    def change(self, size, survivors):
        """Other ranks, some of whom were there before; the state comes from one that was."""
        del self.ranks[survivors:]
        for number, rank in enumerate(self.ranks):
            rank.reset(number, size)
        self.ranks += self.new_ranks(size, first=len(self.ranks))
        state = self.ranks[0].state_dict() if survivors else json.loads(self.saved[0])
        for rank in self.ranks[1:] if survivors else self.ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))

    def roll_back(self, size, survivors):
        for rank in self.ranks[:survivors]:
            rank.load_state_dict(json.loads(self.saved[0]))
        self.trained = self.saved[1].copy()
        self.change(size, survivors)


def a_history():
    """An event after a number of steps: the new size, and how many of the old ranks are still there."""
    event = st.sampled_from(["commit", "lose", "join", "resume", "set_epoch"])
    return st.lists(st.tuples(st.integers(0, 6), event, st.integers(1, 5), st.integers(1, 5)), max_size=12)


def lengths_of_tasks():
    return st.lists(st.integers(0, 40), max_size=7)


@settings(deadline=None)
@given(lengths_of_tasks(), st.integers(1, 5), st.integers(1, 7), a_history(), st.integers(0, 2))
def test_every_sample_is_committed_once_whatever_happens(lengths, size, batch_size, history, ahead):
    tasks = [Task(i, i, i + length) for i, length in enumerate(lengths)]
    job = Job(tasks, batch_size, size, "manual" if ahead else "auto")
    for epoch in range(2):
        for rank in job.ranks:
            rank.set_epoch(epoch)
        job.trained.clear()
        job.commit()
        for most, event, new_size, survivors in history:
            if job.train(most, ahead):
                break
            survivors = min(survivors, len(job.ranks), new_size)
            if event == "commit":
                job.commit()
            elif event == "lose":
                job.roll_back(new_size, survivors)
            elif event == "join":
                job.commit()
                job.change(new_size, survivors)
            elif event == "resume":
                job.roll_back(new_size, 0)
            else:
                for rank in job.ranks:
                    rank.set_epoch(epoch)
        else:
            while not job.train(1000, ahead):
                pass
        job.commit()
        assert job.trained == everything(tasks)
        assert json.loads(job.saved[0])["epoch"] == epoch


@settings(deadline=None)
@given(lengths_of_tasks(), st.integers(1, 6), st.integers(1, 9))
def test_no_way_takes_fewer_steps(lengths, size, batch_size):
    tasks = cut_into_tasks(enumerate(lengths), 13)
    partitions = partitions_of(size, tasks, batch_size)
    expected = -(-sum(lengths) // (size * batch_size))
    assert {len(each) for each in partitions} == {expected}
    assert sum(1 for _ in steps(partitions)) == expected


def test_a_rank_reads_a_task_from_start_to_end_before_it_takes_the_next():
    tasks = cut_into_tasks({"a": 40, "b": 40, "c": 40}, 20)
    read = [[], [], []]
    for batches in steps(partitions_of(3, tasks, 5, shuffle=False)):
        for mine, batch in zip(read, batches, strict=True):
            mine.extend(batch.ranges)
    assert [[each.source for each in mine[::4]] for mine in read] == [["a", "b"], ["a", "c"], ["b", "c"]]
    assert [mine[0].start for mine in read] == [0, 20, 0]
    assert all(len(batch) == 8 for batch in read)


def test_what_is_left_of_the_longest_task_is_shared():
    assert [[batch.ranges for batch in batches] for batches in steps(partitions_of(2, [("a", 0, 20)], 5))] == [
        [(("a", 0, 5),), (("a", 12, 17),)],
        [(("a", 5, 10),), (("a", 17, 20), ("a", 11, 12), ("a", 10, 11))],
    ]


def test_ranks_with_nothing_to_read_take_the_last_step_too():
    (batches,) = steps(partitions_of(4, [("a", 0, 3)], 2))
    assert [len(batch) for batch in batches] == [1, 1, 1, 0]
    assert [batch.total for batch in batches] == [3] * 4
    assert [bool(batch) for batch in batches] == [True, True, True, False]


def test_it_has_the_iterator_of_a_static_partition():
    static = StaticPartition(TASKS, 4, seed=3, rank=0, size=1)
    dynamic = DynamicPartition(TASKS, 4, seed=3, rank=0, size=1)
    for epoch in (0, 1):
        static.set_epoch(epoch)
        dynamic.set_epoch(epoch)
        assert len(static) == len(dynamic)
        assert list(static) == list(dynamic)


def test_the_state_stays_small():
    tasks = cut_into_tasks({f"file {i}": 1000 for i in range(200)}, 50)
    partitions = partitions_of(4, tasks, 8)
    for _, batches in zip(range(5000), steps(partitions), strict=False):
        del batches
        assert len(partitions[0].state_dict()["done"]) <= 6
    assert partitions[0].state_dict()["done"][0][1] > 150_000


def test_a_batch_is_done_when_the_next_one_is_asked_for_or_the_state_is_taken():
    mine = partition()
    assert mine.state_dict()["done"] == []
    batches = iter(mine)
    next(batches)
    next(batches)
    assert len(mine) == 13 - 2
    mine.load_state_dict(mine.state_dict())  # as a commit in the body, and a restoration of it
    assert len(mine) == 13 - 2


def test_what_was_done_since_the_state_was_taken_is_dealt_again():
    mine = partition()
    batches = iter(mine)
    next(batches)
    saved = mine.state_dict()
    lost = [next(batches), next(batches)]
    mine.load_state_dict(saved)
    again = iter(mine)
    samples = [
        sorted(sample for batch in each for sample in batch.samples()) for each in (lost, [next(again), next(again)])
    ]
    assert len(samples[0]) == 8
    assert samples[0] == samples[1]


def test_recorded_by_hand_a_batch_is_done_when_its_step_is():
    mine = partition(record="manual")
    batches = iter(mine)
    next(batches)
    next(batches)
    assert mine.state_dict()["done"] == []
    mine.record()
    assert sum(end - begin for begin, end in mine.state_dict()["done"]) == 8
    mine.record()
    with pytest.raises(RuntimeError, match="all batches that were yielded are recorded"):
        mine.record()
    with pytest.raises(RuntimeError, match='record="manual"'):
        partition().record()


@pytest.mark.parametrize("end", ["reset", "load_state_dict", "set_epoch", "iter"])
def test_an_iteration_from_before_a_reset_says_so(end):
    mine = partition()
    batches = iter(mine)
    next(batches)
    {
        "reset": mine.reset,
        "load_state_dict": lambda: mine.load_state_dict(mine.state_dict()),
        "set_epoch": lambda: mine.set_epoch(0),
        "iter": mine.__iter__,
    }[end]()
    with pytest.raises(RuntimeError, match="begin a new one"):
        next(batches)


def test_an_epoch_is_not_iterated_twice_by_mistake():
    mine = partition()
    assert sum(1 for _ in mine) == 13
    with pytest.raises(RuntimeError, match=r"set_epoch\(1\)"):
        iter(mine)
    mine.set_epoch(1)
    assert sum(1 for _ in mine) == 13
    mine.load_state_dict(mine.state_dict())  # a job that resumes after the end of an epoch
    assert list(mine) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_goes_on_from_the_same_state_by_itself(copied):
    mine = partition()
    mine.set_epoch(2)
    next(iter(mine))
    other = copied(mine)
    assert other.state_dict() == mine.state_dict()
    mine.reset()
    assert list(other) == list(mine)
    other.set_epoch(3)
    assert (other.epoch, mine.epoch) == (3, 2)
    assert next(iter(other)) is not None


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "no state of a DynamicPartition: KeyError"),
        ([], "no state of a DynamicPartition"),
        ({"epoch": "1"}, "no state of a DynamicPartition"),
        ({"epoch": -1}, "epoch must be 0 or more"),
        ({"done": [[1]]}, "no state of a DynamicPartition"),
        ({"done": [[0, 104]]}, "within 0 to 103"),
        ({"done": [[5, 9], [8, 10]]}, "in ascending order"),
        ({"data": ""}, "other tasks, seed or shuffle"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state, words):
    mine = partition()
    mine.set_epoch(1)
    before = mine.state_dict()
    with pytest.raises(ValueError, match=words):
        mine.load_state_dict({**before, **state} if state else state)
    assert mine.state_dict() == before


@pytest.mark.parametrize("other", [{"seed": 1}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused(other):
    with pytest.raises(ValueError, match="other tasks, seed or shuffle"):
        partition(**other).load_state_dict(partition().state_dict())


def test_the_batch_size_may_change():
    mine, other = partition(), partition(batch_size=9)
    next(iter(mine))
    other.load_state_dict(mine.state_dict())
    assert len(other) == -(-(103 - 8) // 18)


@pytest.mark.parametrize(
    ("options", "words"), [({"record": "never"}, "auto, manual"), ({"batch_size": 0}, "batch_size")]
)
def test_bad_arguments_of_a_dynamic_partition_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        partition(**options)


def _of_the_job():
    mine = DynamicPartition(TASKS, 4)
    return basics.rank(), [len(mine), *mine]


def test_rank_and_size_of_a_dynamic_partition_are_those_of_the_job(ranks):
    expected = list(zip(*steps(partitions_of(3)), strict=True))
    for rank, (length, *batches) in ranks(3).run(_of_the_job):
        assert length == len(batches)
        assert tuple(batches) == expected[rank]
