"""The driver for version 3 of SageMaker's SDK: on a host of a training job, and where the job is submitted."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

import horovodlike

PACKAGE = Path(__file__).parents[2] / "packaging/sagemaker/horovodlike_sagemaker"
DRIVER = PACKAGE / "drivers/hvdrun_driver.py"
KEY = "ab" * 32
SHOW = """
import json, os, sys
print("SHOWN", json.dumps([sys.argv[1:], os.environ["HOROVODLIKE_SIZE"], "SM_DISTRIBUTED_CONFIG" in os.environ]))
"""


def host(folder: Path, **config: Any) -> dict[str, str]:
    """The variables of the only host of a training job, in a folder of its own."""
    (folder / "output").mkdir()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SM_", "HOROVODLIKE_"))},
        "SAGEMAKER_BASE_DIR": str(folder),
        "SM_HOSTS": '["algo-1"]',
        "SM_CURRENT_HOST": "algo-1",
        "SM_NUM_GPUS": "0",
        "SM_ENTRY_SCRIPT": "train.py",
        "SM_DISTRIBUTED_CONFIG": json.dumps({"options": [], "secret_key": KEY, **config}),
        "SM_HPS": json.dumps({"lr": 0.1, "name": "a b", "nesterov": True}),
    }


def run(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DRIVER], env=environ, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_driver_becomes_hvdrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    environ = host(tmp_path, process_count_per_node=2, options=["--verbose"])
    done = run(tmp_path, environ)
    assert done.returncode == 0, done.stderr
    shown = re.findall("SHOWN (.*)", done.stdout)
    assert [json.loads(each) for each in shown] == [
        [["--lr", "0.1", "--name", "a b", "--nesterov", "true"], "2", False]
    ] * 2
    assert "hvdrun: SageMaker (SM_HOSTS=" in done.stderr
    assert KEY not in done.stdout + done.stderr


def test_a_shell_script_that_fails(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("echo the cause >&2\nexit 3\n")
    done = run(tmp_path, {**host(tmp_path), "SM_ENTRY_SCRIPT": "train.sh"})
    assert done.returncode == 3
    assert "the cause" in (tmp_path / "output/failure").read_text()


@pytest.mark.slow
def test_the_package_that_is_installed_has_the_driver(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE.parent, tmp_path / "source")  # setuptools writes beside the source
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, copy]
    subprocess.run([sys.executable, *words], check=True, timeout=60)
    [wheel] = tmp_path.glob(f"horovodlike_sagemaker-{horovodlike.__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        assert {"horovodlike_sagemaker/__init__.py", f"horovodlike_sagemaker/drivers/{DRIVER.name}"} <= {
            *files.namelist()
        }


@pytest.mark.slow
def test_the_configuration_is_the_sdks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base class with the same two abstract properties stands in for the SDK, which is not installed here."""
    from abc import ABC, abstractmethod

    import pydantic

    class DistributedConfig(pydantic.BaseModel, ABC):  # type: ignore[misc, name-defined]
        @property
        @abstractmethod
        def driver_dir(self) -> str: ...

        @property
        @abstractmethod
        def driver_script(self) -> str: ...

    for name in ("sagemaker", "sagemaker.train", "sagemaker.train.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["sagemaker.train.distributed"].DistributedConfig = DistributedConfig  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(str(PACKAGE.parent))
    monkeypatch.delitem(sys.modules, "horovodlike_sagemaker", raising=False)
    hvdrun = importlib.import_module("horovodlike_sagemaker").Hvdrun
    first, second = hvdrun(process_count_per_node=2), hvdrun()
    assert Path(first.driver_dir, first.driver_script) == DRIVER
    assert re.fullmatch("[0-9a-f]{64}", first.secret_key)
    assert first.secret_key != second.secret_key
    assert first.secret_key not in repr(first)
    assert first.model_dump() == {"process_count_per_node": 2, "options": [], "secret_key": first.secret_key}
    monkeypatch.delitem(sys.modules, "horovodlike_sagemaker")
