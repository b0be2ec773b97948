"""Records that are read ahead in an elastic job: each is counted once in an epoch, although ranks come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_job import ElasticJob
from support import record_files

from horovodlike.testing import Fault, FaultPlan


def _train(folder: str, size: int) -> tuple[list[int], list[int]]:
    """Train for two epochs, and on until there are `size` ranks; return the counts that occur, and the sizes."""
    import numpy as np
    from elastic_job import tell
    from support.collectives import allreduce

    from horovodlike import basics, elastic
    from horovodlike.data import DynamicPartition, RecordReader, list_records

    basics.init()
    records = list_records(folder)
    sizes = []

    @elastic.run
    def loop(state):
        while not state.is_done:
            state.data.set_epoch(state.epoch)
            for batch in RecordReader(records, state.data, decode=lambda record: int(record["number"]), prefetch=3):
                counts = np.zeros(len(records) + 1, np.int64)
                counts[list(batch.records)] += 1
                counts[-1] = len(batch)
                allreduce("step", counts)
                assert counts[-1] == batch.total
                state.counts += counts[:-1]
                state.data.record()
                sizes.append(basics.size())
                state.commit()
                tell(state._commits)
            assert set(state.counts) == {state.epoch + 1}
            state.epoch += 1
            state.is_done = state.epoch >= 2 and basics.size() == size

    partition = DynamicPartition(records.tasks(), batch_size=2, seed=1, record="manual")
    state = elastic.ObjectState(epoch=0, is_done=False, counts=np.zeros(len(records), np.int64), data=partition)
    loop(state)
    return sorted({int(count) for count in state.counts}), [*sizes, basics.size()]


def check(values: list[tuple[list[int], list[int]]], size: int) -> None:
    assert len(values) == size
    for counts, sizes in values:
        assert len(counts) == 1 and counts[0] >= 2
        assert sizes[-1] == size


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(record_files.write_folder(tmp_path, ".parquet"))


def test_workers_are_added(folder: str) -> None:
    with ElasticJob(2, _train, folder, 3) as job:
        job.wait_to_hear(0, 5)
        job.add(1)
        check(job.values(), 3)


@pytest.mark.parametrize("point", ["step", "data", "commit"])
def test_a_rank_is_lost(folder: str, point: str) -> None:
    plan = FaultPlan((Fault(1, 9, point, "SIGKILL"),))
    with ElasticJob(3, _train, folder, 2, HOROVODLIKE_FAULT_PLAN=plan.to_json()) as job:
        check(job.values(1), 2)
        assert job.sizes == [3, 2]
