"""Every exported name of the package has the parameters that `public_api.txt` lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LISTED = (FOLDER / "public_api.txt").read_text().splitlines()
# Modules of one process, by what they import; those of the last need packages that only `make test-slow` installs.
GROUPS = {
    "torch": ("torch", "torch.distributed", "torch.elastic", "torch.nn", "torch.parameter_server"),
    "tensorflow": (
        *("tensorflow", "tensorflow.data", "tensorflow.data.compute_service", "tensorflow.elastic"),
        *("keras", "keras.callbacks", "keras.elastic", "keras.layers"),
    ),
    "neutral": (
        "",
        "data",
        "elastic",
        "launcher.elastic",
        "monitor",
        "parameter_server",
        "testing",
        "errors",
        "config",
    ),
    "ecosystem": ("compat", "ray", "spark", "spark.keras", "spark.store", "spark.torch", "torch.lightning"),
}


def _of(modules: list[str]) -> list[str]:
    """Return the listed lines of these modules."""
    return [line for line in LISTED if line.partition(" ")[0] in modules]


@pytest.mark.parametrize("group", [*list(GROUPS)[:-1], pytest.param("ecosystem", marks=pytest.mark.slow)])
def test_exported_names_and_their_parameters(group: str) -> None:
    modules = [".".join(filter(None, ("horovodlike", name))) for name in GROUPS[group]]
    command = [sys.executable, str(FOLDER / "public_api.py"), *modules]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(_of(modules))


def test_every_listed_module_is_compared() -> None:
    compared = {".".join(filter(None, ("horovodlike", name))) for names in GROUPS.values() for name in names}
    assert {line.partition(" ")[0] for line in LISTED} == compared
