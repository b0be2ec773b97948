"""Defaults that give other numbers than Horovod's: what `--compat` does about them, and the table that lists them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from horovodlike.compat import DEFAULTS
from horovodlike.config import SETTINGS

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "users" / "from_horovod.md").read_text()
ROWS = re.findall(r"^\| `(HOROVODLIKE_\w+)` \| (.*?) \| (.*?) \| .*? \| `(\w+)=(\w+)` \| (.*?) \|$", TEXT, re.MULTILINE)
# Horovod's defaults of the settings that both have, where they are no paths, names or sizes of the job.
HOROVODS = {
    "fusion_threshold": 134217728,
    "cycle_time": 1.0,
    "cache_capacity": 1024,
    "autotune": False,
    "autotune_warmup_samples": 3,
    "autotune_steps_per_sample": 10,
    "stall_check_disable": False,
    "stall_check_time_seconds": 60.0,
    "stall_shutdown_time_seconds": 0.0,
    "timeline_mark_cycles": False,
    "start_timeout": 30.0,
    "elastic_timeout": 600.0,
    "mpi_threads_disable": False,
    "log_level": "warning",
}

SCRIPT = """
import os
import horovod.torch as hvd
import torch
hvd.init()
if hvd.rank() == 0:
    print("average", hvd.allreduce(torch.full((1,), 4.0), name="x").item())
hvd.join()
"""


def test_the_table_has_the_defaults_of_the_settings() -> None:
    assert len(ROWS) == 5
    for variable, here, _, again, value, with_compat in ROWS:
        setting = SETTINGS[variable.removeprefix("HOROVODLIKE_").lower()]
        default = setting.default
        assert here == (str(int(default)) if isinstance(default, (bool, float)) else str(default)), variable
        assert again == variable
        assert with_compat == (f"sets {DEFAULTS[variable]}" if variable in DEFAULTS else "leaves it"), variable
        assert DEFAULTS.get(variable, value) == value
    assert set(DEFAULTS) <= {variable for variable, *_ in ROWS}


def test_a_default_that_differs_is_in_the_table() -> None:
    listed = {variable for variable, *_ in ROWS}
    for name, value in HOROVODS.items():
        assert (SETTINGS[name].default != value) == (f"HOROVODLIKE_{name.upper()}" in listed), name


def test_the_names_bring_the_defaults(names: None) -> None:
    assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.slow
def test_join_under_compat(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("-m", "horovodlike.launcher", "--compat", "-np", 2, "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert "average 2.0" in done.stdout


def test_one_process_under_compat(run: Run, tmp_path: Path) -> None:
    text = 'import os; print(os.environ["HOROVODLIKE_JOIN_AVERAGE"])'
    assert run("-m", "horovodlike.compat", "-c", text).stdout.strip() == "all"
    own = run("-m", "horovodlike.compat", "-c", text, HOROVODLIKE_JOIN_AVERAGE="present")
    assert own.stdout.strip() == "present"
    assert run("-m", "horovodlike.compat", "-c", text, HOROVODLIKE_JOIN_AVERAGE="").stdout.strip() == "all"
