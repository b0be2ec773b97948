"""`horovod.tensorflow.data`: workers of one job compute the input of another one, which trains."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from data_workers import data_workers

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = Path(__file__).parent / "scripts" / "data_service.py"


@pytest.mark.thorough  # test_scripts has one worker, with a dispatcher there
@pytest.mark.parametrize(
    "options", [(), ("--dispatchers", 2, "--dispatcher-side", "training")], ids=["two workers", "training"]
)
def test_a_service(run: Run, options: tuple[object, ...]) -> None:
    with data_workers(run, 2, *options):
        done = run("-m", "horovodlike.launcher", "--compat", "-np", 2, "python", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "[0]<stdout>: data_service: learned from" in done.stdout
