"""Stores of data and checkpoints, without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovodlike.spark.store import DBFSLocalStore, FilesystemStore, HDFSStore, Store


def test_stores_are_chosen_by_their_prefix(tmp_path: Path) -> None:
    assert DBFSLocalStore.matches("dbfs:/a") and HDFSStore.matches("hdfs://host/a")
    store = Store.create(str(tmp_path))
    assert type(store) is FilesystemStore
    assert store.spark_path(store.get_train_data_path("x")) == f"file://{tmp_path}/intermediate_train_data.x"
    databricks = Store.create("dbfs:/folder")
    assert databricks.get_runs_path() == "/dbfs/folder/runs"
    assert databricks.spark_path(databricks.get_runs_path()) == "dbfs:/folder/runs"
    with pytest.raises(ValueError, match="needs a folder"):
        Store.create("")
    memory = Store.create("memory://a")
    memory.write_text(memory.get_checkpoint_path("run"), "text")
    assert memory.read(memory.get_checkpoint_path("run")) == b"text"
    assert memory.get_checkpoints("run") == ["/a/runs/run/checkpoint"]
    memory.remove(memory.get_runs_path())
    assert not memory.exists(memory.get_runs_path())
