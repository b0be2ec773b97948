"""The decisions of the driver, without Spark; and that only jobs on Spark import Spark."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

import horovodlike.spark as hvd_spark
from horovodlike.errors import ConfigError
from horovodlike.launcher.errors import HostsError, UsageError
from horovodlike.launcher.supervisor.job import Outcome
from horovodlike.spark import _driver, runner


def test_only_lost_executors_and_workers_count_as_lost() -> None:
    for reason in ("ExecutorLostFailure (executor 1 exited)", "SparkException: Python worker exited unexpectedly"):
        assert isinstance(_driver.failure_of(f"Stage failed\n{reason}"), _driver.TasksLostError)
    other = _driver.failure_of("Stage failed\nModuleNotFoundError: No module named 'horovodlike'")
    assert type(other) is HostsError and "No module named" in str(other)


class _Counted(_driver.Cluster):
    """A cluster that does not tell its slots, as Spark Connect: each count finds the next of these numbers."""

    def __init__(self, *counts: int) -> None:
        super().__init__(None)
        self.counts = list(counts)

    @property
    def default_parallelism(self) -> int | None:
        return None

    def slots(self) -> int | None:
        return None

    def count(self, most: int) -> int:
        return min(most, self.counts.pop(0) if len(self.counts) > 1 else self.counts[0])

    def watch(self, name: str) -> _driver.Watch:
        raise NotImplementedError


def test_an_elastic_job_waits_for_slots_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = [_driver.TasksLostError("gone"), _driver.NotStartedError("late"), None]
    sizes: list[int] = []

    def submit(cluster: Any, size: int, *_: Any) -> Outcome:
        sizes.append(size)
        error = given.pop(0)
        if error is not None:
            raise error
        return Outcome(0)

    monkeypatch.setattr(runner, "_submit", submit)
    monkeypatch.setattr(runner, "unpack_results", lambda outcome, ranks: list(ranks))
    monkeypatch.setattr(_driver, "find_cluster", lambda: _Counted(0, 1, 2, 3))
    assert hvd_spark.run_elastic(print, num_proc=4, min_num_proc=2, stderr=io.StringIO()) == [0, 1, 2]
    assert sizes == [4, 2, 3], "nothing is begun with fewer slots than the least, and a late start is tried again"

    given[:] = [_driver.NotStartedError("never")]
    with pytest.raises(_driver.NotStartedError, match="never"):
        hvd_spark.run_elastic(print, num_proc=2)
    given[:] = [_driver.TasksLostError("gone")]
    monkeypatch.setattr(_driver, "find_cluster", lambda: _Counted(1))
    with pytest.raises(UsageError, match="min_num_proc=2 needs 2 slots .* the cluster has 1 "):
        hvd_spark.run_elastic(print, num_proc=2, elastic_timeout=0.3, stderr=io.StringIO())


def test_old_releases_are_named() -> None:
    with pytest.raises(ConfigError, match=r"PySpark 3\.5\.1 .* at least 4\.0"):
        _driver.check_version("3.5.1")
    _driver.check_version("4.0.0")
    _driver.check_version("4.1.0.dev1")


def test_horovods_names_lead_here() -> None:
    from horovodlike.compat import counterpart

    for name, module in {"": "", ".torch": ".torch", ".common.store": ".store", ".common.backend": ".backend"}.items():
        row = counterpart(f"horovod.spark{name}")
        assert row is not None and row.module == f"horovodlike.spark{module}"


def test_nothing_of_spark_is_imported_by_the_package() -> None:
    text = "import sys, horovodlike, horovodlike.launcher.cli; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)
