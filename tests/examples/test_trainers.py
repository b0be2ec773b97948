"""Trainers on two ranks, over horovodlike and over Gloo: on the same data the losses are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "trainers"
HVDRUN = Path(sys.executable).parent / "hvdrun"
# A sum of two numbers does not depend on their order, so the results are the same to the bit where one trainer uses two
# process groups. `fit()` of Keras and a loop of one's own round differently.
TOLERANCE = 1e-5
# Runs a script over Gloo and then over horovodlike, in processes that import its framework once, and ends without
# Python's clean-up: DDP keeps Gloo's threads alive after the group is destroyed, and one that frees a tensor during the
# clean-up aborts the process, though all has been trained and written.
BOTH = """
import json, os, runpy, sys
script, *runs = sys.argv[1:]
for options in runs:
    sys.argv = [script, *json.loads(options)]
    runpy.run_path(script, run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""

EPOCHS, STEPS = ("--epochs", "2"), ("--steps", "20")
HVD = ("--backend", "hvd")
OWN: tuple[str, ...] = ()  # by horovodlike's own optimizer or strategy


@pytest.mark.parametrize(
    ("name", "options", "ours"),
    [
        ("lightning", EPOCHS, OWN),
        ("accelerate", EPOCHS, HVD),
        ("transformers", STEPS, HVD),
        ("keras", EPOCHS, HVD),
    ],
)
def test_the_losses_are_those_of_gloo(tmp_path, name, options, ours):
    _compare(tmp_path, name, options, ours)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ours"), [("lightning", HVD), ("keras", OWN)])
def test_so_they_are_the_other_way(tmp_path, name, ours):
    _compare(tmp_path, name, EPOCHS, ours)


@pytest.mark.thorough
def test_so_they_are_with_accumulation_and_clipping(tmp_path):
    _compare(tmp_path, "lightning", (*EPOCHS, "--accumulate", "3", "--clip", "0.5"), OWN)


def _compare(tmp_path: Path, name: str, options: Sequence[str], ours: Sequence[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD")}
    environment |= {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1"}
    backends = {"gloo": ("--backend", "gloo"), "ours": ours}
    runs = [json.dumps([*backend, *options, "--report", f"{tmp_path / key}.json"]) for key, backend in backends.items()]
    command = [HVDRUN, "-np", "2", sys.executable, "-c", BOTH, FOLDER / f"with_{name}.py", *runs]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("losses:") == 2, "only rank 0 prints"
    reports = {key: json.loads((tmp_path / f"{key}.json").read_text()) for key in backends}
    assert [report["size"] for report in reports.values()] == [2, 2]
    wanted = reports["gloo"]["losses"]
    assert len(wanted) >= 2 and wanted[-1] < 0.95 * wanted[0], "it learns nothing"
    assert reports["ours"]["losses"] == pytest.approx(wanted, rel=TOLERANCE)
