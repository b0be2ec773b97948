"""`horovodlike.spark.run` on classic Spark, in local mode."""

from __future__ import annotations

import io
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from spark_programs import ranks_left, wait_until

import horovodlike.spark as hvd_spark
from horovodlike.errors import ConfigError
from horovodlike.launcher.errors import RankFailedError, UsageError
from horovodlike.launcher.run import RemoteTraceback

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def collective(base: int, *, factor: int) -> tuple[Any, ...]:
    import numpy as np

    import horovodlike as hvd

    hvd.init()
    print(f"rank {hvd.rank()} runs")
    first = hvd.allreduce(np.array([base + hvd.rank()]), op=hvd.Sum)
    hvd.shutdown()
    hvd.init()
    second = hvd.allreduce(np.array([factor]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), int(first[0]), int(second[0]), os.getppid()


def test_results_by_rank_and_output(spark: Any) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    found = hvd_spark.run(collective, (10,), {"factor": 3}, num_proc=2, stdout=stdout, stderr=stderr)
    assert [each[:6] for each in found] == [(0, 2, 0, 2, 21, 6), (1, 2, 1, 2, 21, 6)]
    assert found[0][6] != found[1][6], "each rank has an agent of its own"
    assert sorted(stdout.getvalue().splitlines()) == ["[0]<stdout>: rank 0 runs", "[1]<stdout>: rank 1 runs"]
    assert stderr.getvalue() == ""


def test_output_arrives_while_the_job_runs(spark: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if self.getvalue().count("waits") == 2:
                seen.touch()
            return written

    def wait(path: Path) -> bool:
        print("waits", flush=True)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        print("ends without a newline", end="")
        return path.exists()

    stdout = Stream()
    assert hvd_spark.run(wait, (seen,), num_proc=2, stdout=stdout, prefix_output_with_timestamp=True) == [True, True]
    for rank in (0, 1):
        mine = [line[24:] for line in stdout.getvalue().splitlines() if f"[{rank}]<stdout>: " in line]
        assert mine == [f"[{rank}]<stdout>: waits", f"[{rank}]<stdout>: ends without a newline"]


def test_notes_of_earlier_jobs_are_removed(spark: Any) -> None:
    from pyspark import SparkFiles

    for _ in range(3):
        hvd_spark.run(print, num_proc=1, verbose=0)
    notes = [name for name in os.listdir(SparkFiles.getRootDirectory()) if name.startswith(".horovodlike-")]
    assert len(notes) == 1, "of the last job"


def test_an_exception_is_raised_as_itself(spark: Any) -> None:
    def fail() -> None:
        import numpy as np

        import horovodlike as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("of rank 1")
        hvd.allreduce(np.zeros(3))

    with pytest.raises(LookupError, match="of rank 1") as caught:
        hvd_spark.run(fail, num_proc=2, verbose=0)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert caught.value.__cause__.rank == 1


def test_a_rank_that_is_killed_ends_the_job(spark: Any) -> None:
    mark = secrets.token_hex(8)

    def die() -> None:
        import time

        if os.environ["HOROVODLIKE_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 0 .*killed by signal 9"):
        hvd_spark.run(die, num_proc=2, env={"SPARK_TEST_MARK": mark}, verbose=0)
    assert time.monotonic() - begin < 20
    assert wait_until(lambda: not ranks_left(mark), 10)


def test_what_cannot_be_sent_is_named(spark: Any) -> None:
    def returns_a_generator() -> Any:
        return (number for number in range(3))

    with pytest.raises(TypeError, match="what the function has returned on rank 0 cannot be sent"):
        hvd_spark.run(returns_a_generator, num_proc=1, verbose=0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        hvd_spark.run(print, (open(os.devnull, "wb"),), num_proc=1)  # noqa: SIM115


def test_too_few_slots_is_an_error_with_both_numbers(spark: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError, match="num_proc=3 needs 3 slots .* the cluster has 2 "):
        hvd_spark.run(print, num_proc=3)
    assert time.monotonic() - begin < 2


def test_arguments_are_checked(spark: Any) -> None:
    with pytest.raises(UsageError, match="only allow one set True"):
        hvd_spark.run(print, num_proc=1, use_mpi=True, use_gloo=True)
    with pytest.raises(UsageError, match="num_proc=0"):
        hvd_spark.run(print, num_proc=0)
    with pytest.raises(UsageError, match="start_timeout=-1"):
        hvd_spark.run(print, num_proc=1, start_timeout=-1)
    with pytest.raises(UsageError, match="min_num_proc=3 <= num_proc=2"):
        hvd_spark.run_elastic(print, num_proc=2, min_num_proc=3)


def test_a_bad_environment_is_an_error_at_once(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (hvd_spark.run, hvd_spark.run_elastic):
        with pytest.raises(ConfigError, match="HOROVOD_CYCLE_TIME"):
            call(print, num_proc=1, env={"HOROVOD_CYCLE_TIME": "soon"})
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="HOROVOD_SPARK_START_TIMEOUT=soon"):
        hvd_spark.run(print, num_proc=1)
