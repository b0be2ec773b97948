"""Scripts of each kind that Horovod documents, as its users have them, run unchanged.

`examples/horovod` has more of them, and `test_hvdrun_compat` runs those; `test_communicators_compat` runs the one with
process sets.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from data_workers import data_workers

Run = Callable[..., "subprocess.CompletedProcess[str]"]

FOLDER = Path(__file__).parent / "scripts"
SEVERAL = FOLDER / "several.py"


def run_scripts(run: Run, *names: str, **environ: str) -> str:
    job = ("--compat", "-np", 2, "--min-np", 1, "--slots", 2, "--reset-limit", 0)
    words = (*job, "python", SEVERAL, *(FOLDER / f"{name}.py" for name in names))
    done = run("-m", "horovodlike.launcher", *words, **environ)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"[0]<stdout>: {name}: learned" in done.stdout
        assert "horovodlike" not in (FOLDER / f"{name}.py").read_text()
    return done.stdout


@pytest.mark.slow
def test_pytorch(run: Run) -> None:
    run_scripts(run, "torch_adasum", "torch_elastic")


@pytest.mark.slow
def test_tensorflow_and_keras_3(run: Run) -> None:
    with data_workers(run, 1):
        shown = run_scripts(run, "data_service", "tensorflow2", "keras_fit", "tensorflow2_elastic", "keras_elastic")
    assert shown.count("learned with keras\n") == 2


@pytest.mark.slow
def test_tensorflow_and_legacy_keras(run: Run) -> None:
    shown = run_scripts(
        run, "legacy_keras", "keras_fit", "tensorflow2_elastic", "keras_elastic", TF_USE_LEGACY_KERAS="1"
    )
    assert shown.count("learned with tf_keras\n") == 2
