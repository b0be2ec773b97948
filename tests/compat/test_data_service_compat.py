"""`horovod.tensorflow.data`: workers of one job compute the input of another one, which trains."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

HVDRUN = ("-m", "horovodlike.launcher", "--compat", "-np")
WORKER = "horovod.tensorflow.data.compute_worker"
SCRIPT = Path(__file__).parent / "scripts" / "data_service.py"


@pytest.mark.parametrize(
    ("number", "options"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, (), marks=pytest.mark.thorough),
        pytest.param(2, ("--dispatchers", 2, "--dispatcher-side", "training"), marks=pytest.mark.thorough),
    ],
    ids=["one worker", "two workers", "training"],
)
def test_a_service(run: Run, number: int, options: tuple[object, ...]) -> None:
    ended: list[subprocess.CompletedProcess[str]] = []

    def work() -> None:
        ended.append(run(*HVDRUN, number, "python", "-m", WORKER, *options, "service.json"))

    workers = threading.Thread(target=work)
    workers.start()
    done = run(*HVDRUN, 2, "python", SCRIPT, "service.json")
    workers.join()
    assert done.returncode == 0, done.stderr
    assert "[0]<stdout>: served 16 elements\n" in done.stdout
    assert ended[0].returncode == 0, ended[0].stderr
