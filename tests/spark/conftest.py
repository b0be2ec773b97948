"""A session of Spark for the tests of this folder, and the programs that run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
import tools  # noqa: E402
from spark_programs import Program  # noqa: E402

_NO_JAVA = tools.missing("java")
# A JVM that lives for seconds: one compiler, one thread of the garbage collector, no verification of classes.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    """The environment of drivers, from which executors take theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)  # the Python that `PATH` has first lacks the package
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("JAVA_TOOL_OPTIONS", JAVA_OPTIONS)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # PySpark's own; and py4j leaves sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if _NO_JAVA and item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason=f"no Spark: {_NO_JAVA}"))


@pytest.fixture(scope="package")
def spark(environment: None) -> Iterator[Any]:
    """A session of classic Spark with two slots, in this process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in QUIET.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """`program(text, master)`: a driver in a process of its own; `session` is a name that its text can use."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, master: str, remote: bool = False) -> subprocess.Popen[str]:
        configured = "".join(f".config({name!r}, {value!r})" for name, value in QUIET.items())
        how = f"{'remote' if remote else 'master'}({master!r}){configured}"
        head = f"""
        import os, signal, sys, time
        from pyspark.sql import SparkSession
        import horovodlike.spark
        session = SparkSession.builder.{how}.getOrCreate()
        """
        path = tmp_path / "driver.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(text) + "\nsession.stop()\n")
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
        if remote:
            environ["SPARK_TESTING"] = "1"  # the server of Spark Connect takes a free port, not always the same
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
