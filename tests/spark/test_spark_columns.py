"""Columns as arrays, and the batches of each rank, without Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovodlike.spark._columns import Batches, Shards, to_numpy
from horovodlike.spark.store import Store


def test_columns_become_arrays() -> None:
    assert to_numpy(pa.array([1.0, 2.0]), "a").dtype == np.float32
    assert to_numpy(pa.array([[1, 2], [3, 4]]), "a").tolist() == [[1, 2], [3, 4]]
    assert to_numpy(pa.array([[[1], [2]], [[3], [4]]]).slice(1), "a").tolist() == [[3, 4]]
    vectors = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
        {"type": 0, "size": 2, "indices": [1], "values": [5.0]},
    ]
    assert to_numpy(pa.array(vectors), "a").tolist() == [[1, 2], [0, 5]]
    with pytest.raises(ValueError, match="column 'a' has 1 nulls in 2 rows"):
        to_numpy(pa.array([1.0, None]), "a")
    with pytest.raises(ValueError, match="different lengths"):
        to_numpy(pa.array([[1, 2, 3], [4]]), "a")
    with pytest.raises(TypeError, match="only numbers"):
        to_numpy(pa.array(["x"]), "a")


@pytest.mark.parametrize("seed", [None, 3])
def test_each_row_comes_once_in_an_epoch(tmp_path: Path, seed: int | None) -> None:
    store = Store.create(str(tmp_path))
    for number, rows in enumerate((7, 1, 30)):
        first = [7, 1, 30][:number]
        table = pa.table({"n": list(range(sum(first), sum(first) + rows))})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=11)
    shards = Shards.scan(store, str(tmp_path))
    assert len(shards) == 38
    for epoch in range(2):
        seen = []
        for rank in range(3):
            batches = Batches(shards, ["n"], 4, rank, 3, seed=seed, pad=False)
            batches.set_epoch(epoch)
            seen += [int(value) for batch in batches for value in batch["n"]]
        assert sorted(seen) == list(range(38))
    steps = {len(list(Batches(shards, ["n"], 4, rank, 3, seed=seed))) for rank in range(3)}
    assert len(steps) == 1, "all ranks take the same number of steps"
    assert len(list(Batches(shards, ["n"], 4, 0, 3, seed=seed, steps=9))) == 9
    few = Shards(store, {str(tmp_path / "1.parquet"): (1,)})
    taken = [len(list(Batches(few, ["n"], 4, rank, 3, seed=seed, steps=2, pad=False))) for rank in range(3)]
    assert sorted(taken) == [0, 0, 2], "a rank without rows ends"
    with pytest.raises(ValueError, match="no rows"):
        Shards.scan(store, str(tmp_path / "nothing"))
