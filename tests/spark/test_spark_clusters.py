"""Clusters of several executors: local-cluster mode, a standalone master with workers, and Spark Connect."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from spark_programs import Program, output_of, ranks_left, wait_until

pytestmark = pytest.mark.slow
CLUSTER = "local-cluster[2,1,1024]"

SUM = """
KILLED_AT = os.path.abspath("killed")

def total(base):
    import numpy as np
    import horovodlike as hvd
    hvd.init()
    print("rank", hvd.rank(), "sums")
    return hvd.rank(), hvd.local_size(), int(hvd.allreduce(np.array([base + hvd.rank()]), op=hvd.Sum)[0])

def executor_of(pid):
    while True:
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/cmdline") as file:
            if "CoarseGrainedExecutorBackend" in file.read():
                return pid

def wait_for_executors():
    from horovodlike.spark import _driver
    _driver.wait_for_slots(_driver.find_cluster(), 2, 120, "num_proc", settle=120)

def kill_executor():
    with open(KILLED_AT, "w") as file:
        file.write(str(time.time()))
    os.kill(executor_of(os.getpid()), signal.SIGKILL)
"""

KILLED = """
def die_in_training():
    import horovodlike as hvd, numpy as np
    hvd.init()
    for step in range(1000):
        hvd.allreduce(np.array([step]), op=hvd.Sum)
        if hvd.rank() == 1 and step == 20:
            kill_executor()
        time.sleep(0.01)

def die_at_start():
    if os.environ["HOROVODLIKE_RANK"] == "0":
        kill_executor()
    import horovodlike as hvd
    hvd.init()

for fatal in (die_in_training, die_at_start):
    wait_for_executors()
    if fatal is die_at_start:
        assert horovodlike.spark.run(total, (10,), num_proc=2) == [(0, 2, 21), (1, 2, 21)]
    try:
        horovodlike.spark.run(fatal, num_proc=2, env={"SPARK_TEST_MARK": MARK}, verbose=0)
    except RuntimeError as error:
        assert "ExecutorLostFailure" in str(error), error
        print(fatal.__name__, time.time() - float(open(KILLED_AT).read()))
assert horovodlike.spark.run(total, (10,), num_proc=1) == [(0, 1, 10)], "on the executor that is left"
"""


def test_a_lost_executor_is_an_error_and_the_next_job_runs(program: Program, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    said = output_of(program(f"MARK = {mark!r}{SUM}{KILLED}", CLUSTER))
    took = dict(re.findall(r"^(die_\w+) ([\d.]+)$", said, flags=re.MULTILINE))
    assert took.keys() == {"die_in_training", "die_at_start"}
    assert all(float(seconds) < 30 for seconds in took.values()), "from the kill to the error"
    assert not ranks_left(mark)
    assert said.count("[1]<stdout>: rank 1 sums") == 1
    assert "follows only now" not in (tmp_path / "stderr").read_text(), "executors have reached the driver"


ELASTIC = """
def train(path):
    import horovodlike as hvd, numpy as np
    from horovodlike import elastic
    hvd.init()
    state = elastic.ObjectState(step=0, sizes=[])
    state.persist(path)

    @elastic.run
    def loop(state):
        begun = state.step
        while state.step < 100:
            time.sleep(0.05)
            hvd.allreduce(np.array([state.step]), op=hvd.Sum)
            if state.step == 12 and begun == 0 and hvd.rank() == 1:
                kill_executor()
            state.step += 1
            state.commit()
        return begun, hvd.size()

    return loop(state)

wait_for_executors()
print(horovodlike.spark.run_elastic(train, (os.path.abspath("train.state"),), num_proc=2, min_num_proc=1, verbose=0))
try:
    horovodlike.spark.run_elastic(lambda: os.kill(os.getpid(), 9), num_proc=1, reset_limit=1, verbose=0)
except horovodlike.launcher.errors.RankFailedError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("remote", [False, True], ids=["classic", "connect"])
def test_an_elastic_job_continues_from_its_last_commit(program: Program, remote: bool) -> None:
    said = output_of(program(SUM + ELASTIC, CLUSTER, remote=remote))
    results, limit = said.splitlines()[-2:]
    found = re.fullmatch(r"\[\((\d+), [12]\)(, \(\1, 2\))?\]", results)
    assert found is not None, results
    assert 12 <= int(found[1]) < 100, (
        "it began anew at its last commit; the rank lives a little longer than its executor"
    )
    assert "ranks were lost 2 times, and reset_limit=1" in limit


@pytest.mark.thorough
def test_no_rank_is_left_when_the_driver_is_killed(program: Program, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    text = f"""
    import pathlib
    def wait(folder):
        import horovodlike as hvd
        hvd.init()
        pathlib.Path(folder, f"rank{{hvd.rank()}}").touch()
        time.sleep(600)
    horovodlike.spark.run(wait, ({str(tmp_path)!r},), num_proc=2, env={{"SPARK_TEST_MARK": {mark!r}}})
    """
    process = program(text, CLUSTER)
    assert wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)), 120)
    assert len(ranks_left(mark)) == 2
    process.kill()
    assert wait_until(lambda: not ranks_left(mark), 30)


def test_spark_connect(program: Program) -> None:
    text = """
    assert horovodlike.spark.run(total, (10,), num_proc=2) == [(0, 2, 21), (1, 2, 21)]
    def fail():
        raise LookupError("on the rank")
    try:
        horovodlike.spark.run(fail, num_proc=2, verbose=0)
    except LookupError as error:
        print(error)
    begin = time.monotonic()
    try:
        horovodlike.spark.run(total, num_proc=4, start_timeout=1)
    except RuntimeError as error:
        print(error, time.monotonic() - begin)
    try:
        horovodlike.spark.run(total)
    except ValueError as error:
        print(error)
    """
    text += """
    import horovodlike.compat
    horovodlike.compat.install()
    import horovod.spark
    from horovod.spark.common.store import Store

    def under_horovods_names(size):
        import horovod.torch as hvd
        hvd.init()
        return hvd.size() == size

    assert horovod.spark.run(under_horovods_names, (2,), num_proc=2, verbose=0) == [True, True]
    """
    head = SUM.replace("\n", "\n    ")
    raised, few, unknown = output_of(program(head + text, "local[2]", remote=True)).splitlines()[-3:]
    assert raised == "on the rank"
    assert "num_proc=4 needs 4 slots of Spark at the same time, and the cluster has 2 " in few
    assert "num_proc is missing" in unknown


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """The URL of a standalone master with two workers of one core."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environ = {**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    started = []

    def start(name: str, module: str, *words: str) -> Path:
        log = tmp_path / f"{name}.log"
        with log.open("w") as file:
            # Not even a pytest that is killed leaves them behind.
            command = [
                "setpriv",
                "--pdeathsig",
                "KILL",
                home / "bin" / "spark-class",
                f"org.apache.spark.deploy.{module}",
            ]
            process = subprocess.Popen(
                [*command, *words], env=environ, stdout=file, stderr=file, start_new_session=True
            )
            started.append(process)
        return log

    log = start("master", "master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    found: list[str] = []

    def listens() -> bool:
        found[:] = re.findall(r"Starting Spark master at (spark://\S+)", log.read_text())
        return bool(found)

    try:
        assert wait_until(listens, 60), log.read_text()
        sized = ["--cores", "1", "--memory", "1g", "--webui-port", "0", "--host", "127.0.0.1"]
        workers = [
            start(name, "worker.Worker", *sized, "--work-dir", str(tmp_path / f"{name}.work"), found[0])
            for name in ("worker0", "worker1")
        ]
        assert wait_until(lambda: all("registered with master" in each.read_text() for each in workers), 60)
        yield found[0]
    finally:
        for process in started:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.thorough
def test_a_standalone_cluster(program: Program, standalone: str) -> None:
    text = """
    print(horovodlike.spark.run(total, (10,), num_proc=2))
    try:
        horovodlike.spark.run(total, num_proc=3)
    except ValueError as error:
        print(error)
    """
    head = SUM.replace("\n", "\n    ")
    results, few = output_of(program(head + text, standalone)).splitlines()[-2:]
    assert results == "[(0, 2, 21), (1, 2, 21)]"
    assert "num_proc=3 needs 3 slots of Spark at the same time, and the cluster has 2 " in few


@pytest.mark.thorough
def test_a_missing_package_on_the_executors_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    other = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if other is None or subprocess.run([other, "-c", "import horovodlike"], capture_output=True).returncode == 0:
        pytest.skip("there is no other Python")
    monkeypatch.setenv("PYSPARK_PYTHON", other)
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", sys.executable)
    text = """
    try:
        horovodlike.spark.run(print, num_proc=2)
    except Exception as error:
        print("No module named" in str(error) or "PYTHON_VERSION_MISMATCH" in str(error))
    """
    assert output_of(program(text, CLUSTER)).splitlines()[-1] == "True"


@pytest.mark.thorough
def test_the_programs_of_the_page_run(program: Program) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "users" / "spark.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    said = output_of(program("\n".join(blocks), "local[2]"))
    assert "[1]<stdout>: rank 1 of 2 trains 3 epochs" in said
