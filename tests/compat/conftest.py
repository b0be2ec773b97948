"""Horovod's names in this process for the length of a test, and programs of their own processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import horovodlike.compat
from horovodlike.compat import DEFAULTS

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the test, `import horovod` finds horovodlike."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for setting in ("PYTHONPATH", *DEFAULTS):
        monkeypatch.setenv(setting, "")  # so that it is put back afterwards
        monkeypatch.delenv(setting)
    horovodlike.compat.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("-m", "horovodlike.compat", "train.py")` runs this Python in the test's folder, outside of any job."""

    def start(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
        clean["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", os.defpath)])  # "python"
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=tmp_path,
            env={**clean, "OMP_NUM_THREADS": "1", **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return start
