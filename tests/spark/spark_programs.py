"""Drivers of Spark in processes of their own, and the processes that they leave."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

Program = Callable[..., "subprocess.Popen[str]"]


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
