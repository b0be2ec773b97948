"""A session of Spark for the tests of a module, and the programs that run in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("pyspark")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
import tools  # noqa: E402

_NO_JAVA = tools.missing("java")
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.sql.shuffle.partitions": "2"}
# Executors take it from the driver's environment; the Python that `PATH` has first lacks the package.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # PySpark's own; and py4j leaves sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if _NO_JAVA:
                item.add_marker(pytest.mark.skip(reason=f"no Spark: {_NO_JAVA}"))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A session of classic Spark with two slots, in this process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in QUIET.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


Program = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """`program(text, master)`: a driver in a process of its own; `session` is a name that its text can use."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, master: str, remote: bool = False) -> subprocess.Popen[str]:
        configured = "".join(f".config({name!r}, {value!r})" for name, value in QUIET.items())
        how = f"remote({master!r})" if remote else f"master({master!r}){configured}"
        head = f"""
        import os, signal, sys, time
        from pyspark.sql import SparkSession
        import horovodlike.spark
        session = SparkSession.builder.{how}.getOrCreate()
        """
        path = tmp_path / "driver.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(text) + "\nsession.stop()\n")
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
        process = subprocess.Popen(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("w"),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen[str], seconds: float = 280) -> str:
    """Return what a driver has written, once it has ended with 0."""
    said, _ = process.communicate(timeout=seconds)
    errors = Path(process.args[1]).with_name("stderr").read_text()  # type: ignore[index]
    kept = [line for line in errors.splitlines() if not re.match(r"\s+at |.*(WARN|INFO|ERROR) ", line)]
    assert process.returncode == 0, "\n".join([said, *kept[-60:]])
    return said


def ranks_left(mark: str) -> list[int]:
    """Return the processes that have this text in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SPARK_TEST_MARK") == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Look again and again whether a condition holds, for some time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
