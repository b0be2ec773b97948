"""Every module of Horovod's tree, and the names that scripts use of it: there, or an error with advice."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from horovod_tree import MODULES, NAMES

from horovodlike.compat.horovod.common import HorovodBasics
from horovodlike.process_set import ProcessSet

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "users" / "from_horovod.md").read_text()


def listed() -> dict[str, str]:
    """Return the verdict of the page on each module."""
    rows = re.findall(r"^\| `(horovod[\w.]*)`(?:: (`[^|]*`))? \| (.*) \|$", PAGE, re.MULTILINE)
    said: dict[str, str] = {}
    for package, below, verdict in rows:
        names = [f"{package}.{name}" for name in re.findall(r"`(\w+)`", below)]
        fresh = names if package in said else [package, *names]
        assert not said.keys() & set(fresh), package
        said |= dict.fromkeys(fresh, verdict)
    return said


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
            assert listed()[name].startswith("no: "), name
        else:
            assert listed()[name].startswith("yes"), name
            assert not [each for each in NAMES.get(name, ()) if each not in found], name


def test_the_page_lists_all_modules_with_the_reason_of_those_that_are_missing() -> None:
    said = listed()
    assert said.keys() == set(MODULES)
    reasons = {verdict for verdict in said.values() if not verdict.startswith("yes")}
    assert all(re.match("no: .{8}", reason) for reason in reasons)


def test_each_default_that_differs_has_its_reason_and_a_way_back() -> None:
    tables = PAGE.partition("## Defaults that differ")[2].partition("\n## ")[0]
    rows = [
        line.strip("|").split("|") for line in tables.splitlines() if line.startswith("| ") and "Horovod |" not in line
    ]
    assert len(rows) == 20
    assert not [row for row in rows if not all(cell.strip() for cell in row)]


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
