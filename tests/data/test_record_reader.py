"""RecordReader: how far it reads ahead, when its thread ends, and what a partition has to do for it."""

import threading
from collections import Counter

import pytest
from support import record_files
from support.record_files import TOTAL, number_of

from horovodlike import basics
from horovodlike.data import DynamicPartition, RecordReader, StaticPartition, list_records
from horovodlike.errors import DamagedRecordsError


@pytest.fixture
def records(tmp_path):
    return list_records(record_files.write_folder(tmp_path, ".tfrecord"))


def one_rank(records, batch_size=4):
    return StaticPartition(records.tasks(10), batch_size, rank=0, size=1)


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name == "horovodlike-data"]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_reading_ahead_is_bounded(records, prefetch):
    taken, decoded, ahead = 0, 0, []

    def decode(record):
        nonlocal decoded
        decoded += 1
        ahead.append(decoded - taken)
        return record

    for batch in RecordReader(records, one_rank(records), decode, prefetch):
        taken += len(batch)
    most = max(ahead)
    assert decoded == taken == TOTAL
    assert most <= 4 * (prefetch + 2 if prefetch else 1)  # + 1: a batch is taken before it is counted here
    assert data_threads() == []


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_of_a_static_partition_resumes_after_the_batches_that_the_loop_has_got(records, prefetch):
    whole = list(RecordReader(records, one_rank(records), prefetch=0))
    reader = RecordReader(records, one_rank(records), prefetch=prefetch)
    batches = iter(reader)
    assert [next(batches), next(batches)] == whole[:2]
    saved = reader.partition.state_dict()
    batches.close()
    partition = one_rank(records)
    partition.load_state_dict(saved)
    resumed = RecordReader(records, partition, prefetch=prefetch)
    assert len(resumed) == len(whole) - 2 and list(resumed) == whole[2:]


def test_the_thread_ends_when_the_loop_is_left(records):
    reader = RecordReader(records, one_rank(records))
    batches = iter(reader)
    next(batches)
    assert len(data_threads()) == 1
    batches.close()
    assert data_threads() == []

    def fail(record):
        raise KeyError("a mistake in decode")

    with pytest.raises(KeyError, match="a mistake"):
        list(RecordReader(records, one_rank(records), fail))
    assert data_threads() == []


def test_a_record_that_cannot_be_decoded_is_named(records):
    def decode(record):
        if number_of(record) == 75:
            raise OSError("image file is truncated")

    with pytest.raises(DamagedRecordsError, match=r"b\.tfrecord is damaged, and record 5 is lost \(image file is"):
        list(RecordReader(records, one_rank(records), decode))


@pytest.mark.parametrize(
    ("options", "prefetch", "words"),
    [({}, -1, "prefetch must be 0 or more"), ({}, 1, 'record="manual".* or give prefetch=0')],
)
def test_bad_arguments_of_a_reader_are_named(records, options, prefetch, words):
    with pytest.raises(ValueError, match=words):
        RecordReader(records, DynamicPartition(records.tasks(), 4, rank=0, size=1, **options), prefetch=prefetch)


def test_a_path_is_no_record_set(records):
    with pytest.raises(TypeError, match="what list_records returns, got str"):
        RecordReader("out/", one_rank(records))


@pytest.mark.parametrize(("record", "prefetch"), [("manual", 3), ("auto", 0)])
def test_what_is_read_ahead_is_not_done(records, record, prefetch):
    partition = DynamicPartition(records.tasks(10), 4, record=record, rank=0, size=1)
    seen = Counter()

    def train(steps):
        for _, batch in zip(range(steps), RecordReader(records, partition, number_of, prefetch), strict=False):
            seen.update(batch.records)
            if record == "manual":
                partition.record()

    train(9)
    state = partition.state_dict()
    assert sum(end - begin for begin, end in state["done"]) == 9 * 4
    partition = DynamicPartition(records.tasks(10), 4, record=record, rank=0, size=1)  # as after a restart
    partition.load_state_dict(state)
    train(1000)
    assert seen == Counter(range(TOTAL))
    partition.set_epoch(1)
    train(1000)
    assert set(seen.values()) == {2}


def _read_epochs(folder):
    records = list_records(folder)
    partition = DynamicPartition(records.tasks(10), 4, seed=3, record="manual")

    def number(record):
        return int((record["content"] if isinstance(record, dict) else record)[:6])

    reader = RecordReader(records, partition, number)
    epochs = []
    for epoch in range(2):
        partition.set_epoch(epoch)
        steps = []
        for batch in reader:
            steps.append(batch.records)
            partition.record()
        epochs.append(steps)
    return basics.size(), epochs


@pytest.mark.parametrize("suffix", record_files.WRITERS)
def test_ranks_read_each_record_once_in_an_epoch(ranks, tmp_path, suffix):
    results = ranks(2).run(_read_epochs, str(record_files.write_folder(tmp_path, suffix)))
    assert [size for size, _ in results] == [2, 2]
    for epoch in range(2):
        steps = [epochs[epoch] for _, epochs in results]
        assert len(steps[0]) == len(steps[1]) == -(-TOTAL // 8)
        assert Counter(number for rank in steps for step in rank for number in step) == Counter(range(TOTAL))
