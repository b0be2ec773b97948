"""Every module of Horovod's tree, and the names that scripts use of it: there, or an error with advice."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from horovod_tree import MODULES, NAMES

from horovodlike.compat.horovod.common import HorovodBasics
from horovodlike.process_set import ProcessSet

Run = Callable[..., "subprocess.CompletedProcess[str]"]

LIGHT = [name for name in MODULES if name.split(".")[1:2] in ([], ["common"], ["runner"], ["mxnet"], ["data"])]

IMPORT = """
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        found[name] = str(error)
    else:
        found[name] = sorted({*dir(module), *getattr(module, "__all__", ())})
print(json.dumps(found))
"""


def look(run: Run, folder: Path, modules: list[str], **environ: str) -> dict[str, Any]:
    (folder / "look.py").write_text(IMPORT)
    done = run("-m", "horovodlike.compat", "look.py", json.dumps(modules), **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("modules", [LIGHT, pytest.param([*MODULES], marks=pytest.mark.slow)], ids=["light", "all"])
def test_each_module_is_there_or_ends_with_advice(run: Run, tmp_path: Path, modules: list[str]) -> None:
    for name, found in look(run, tmp_path, modules, TF_CPP_MIN_LOG_LEVEL="3").items():
        if isinstance(found, str):
            missing = found.removeprefix("No module named '").partition("'")[0]
            assert f"{name}.".startswith(f"{missing}."), found
            assert "horovodlike stands in for Horovod here, and has no horovodlike." in found, (name, found)
            assert "It is not among the modules that Horovod documents" not in found, (name, found)
            assert name not in NAMES, found
        else:
            assert not [each for each in NAMES.get(name, ()) if each not in found], name


def test_the_list_of_names_is_of_modules_of_the_tree() -> None:
    assert NAMES.keys() <= set(MODULES)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("horovod.runner.util.network", "start jobs with hvdrun, or with horovod.run()"),
        ("horovod.runner.common.util.env", "start jobs with hvdrun, or with horovod.run()"),
        ("horovod.runner.launch", "start jobs with hvdrun, or with horovod.run()"),
        ("horovod.runner.elastic.discovery", "hosts come from --host-discovery-script, or from a horovodlike.launcher"),
        ("horovod._keras", "Use horovod.keras or horovod.tensorflow.keras"),
        ("horovod.mxnet.mpi_ops", "MXNet has been retired"),
    ],
)
def test_the_advice(name: str, advice: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(name)
    assert advice.lower() in str(caught.value).lower()


@pytest.mark.usefixtures("names")
def test_names_that_horovods_own_tests_use() -> None:
    torch_ops = importlib.import_module("horovod.torch").mpi_ops
    process_sets = importlib.import_module("horovod.common.process_sets")
    assert isinstance(torch_ops._basics, HorovodBasics) and torch_ops._basics is process_sets._basics
    torch_ops._basics.init()
    try:
        assert torch_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}
    finally:
        torch_ops._basics.shutdown()
    assert torch_ops.gpu_available("torch") == torch_ops._basics.cuda_built()
    with pytest.raises(AttributeError, match="'MPI_LIB_CTYPES': it has the functions that horovodlike.basics lists"):
        _ = torch_ops._basics.MPI_LIB_CTYPES


def test_the_text_of_a_process_set() -> None:
    assert str(ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
