"""The modules that stand for Horovod's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import horovodlike.compat
import horovodlike.data
import horovodlike.errors
import horovodlike.process_set
import horovodlike.torch
from horovodlike.compat import ALIASES, Alias, counterpart


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("horovod", "horovodlike.compat.horovod"),
        ("horovod.torch", "horovodlike.torch"),
        ("horovod.torch.mpi_ops", "horovodlike.torch.mpi_ops"),
        ("horovod.torch.elastic.state", "horovodlike.torch.elastic.state"),
        ("horovod.common.elastic", "horovodlike.elastic"),
        ("horovod.tensorflow.keras.elastic", "horovodlike.tensorflow.keras.elastic"),
        ("horovod.ray.runner", "horovodlike.ray.runner"),
        ("horovod.common.util", "horovodlike.compat.horovod.common"),
        ("horovod.common.exceptions", "horovodlike.errors"),
        ("horovod.tensorflow.keras.callbacks", "horovodlike.tensorflow.keras.callbacks"),
    ],
)
def test_counterparts(name: str, module: str) -> None:
    row = counterpart(name)
    assert row is not None
    assert (row.name, row.module) == (name, module)


def test_other_names_have_no_counterpart() -> None:
    assert counterpart("horovodlike.torch") is None
    assert counterpart("torch") is None
    assert counterpart("a.horovod") is None


def test_the_closest_row_decides() -> None:
    table = (Alias("a", "b"), Alias("a.x", "c.d", "because"))
    assert counterpart("a.x", table) == table[1]
    assert counterpart("a.x.y.z", table) == Alias("a.x.y.z", "c.d.y.z", "because")
    assert counterpart("a.y", table) == Alias("a.y", "b.y")
    assert len({row.name for row in ALIASES}) == len(ALIASES)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    "name",
    ["torch", "torch.mpi_ops", "torch.compression", "torch.functions", "torch.optimizer"]
    + ["torch.elastic", "torch.elastic.state", "torch.elastic.sampler", "common.elastic"]
    + ["common", "common.basics", "common.process_sets", "common.exceptions", "common.util", "runner", "data"],
)
def test_an_alias_is_the_module_itself(name: str) -> None:
    alias = importlib.import_module(f"horovod.{name}")
    row = counterpart(f"horovod.{name}")
    assert row is not None
    assert alias is sys.modules[row.module] is sys.modules[f"horovod.{name}"]
    assert alias.__name__ == row.module
    assert alias.__spec__ is not None and alias.__spec__.name == row.module, "the module must not notice"
    assert importlib.util.find_spec(f"horovod.{name}") is not None


@pytest.mark.usefixtures("names")
def test_what_scripts_import() -> None:
    namespace: dict[str, Any] = {}
    exec(
        "import horovod, horovod.torch as hvd, horovod.torch.mpi_ops\n"
        "from horovod import run\n"
        "from horovod.torch import Compression, DistributedOptimizer\n"
        "from horovod.torch.mpi_ops import allreduce_async_, synchronize\n"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\n"
        "from horovod.common.process_sets import ProcessSet, global_process_set\n"
        "from horovod.common.basics import HorovodBasics\n"
        "assert not HorovodBasics().is_initialized()\n"
        "from horovod.common.util import gpu_available, split_list\n"
        "assert gpu_available('torch') in (True, False)\n"
        "from horovod.data import AsyncDataLoaderMixin, BaseDataLoader\n"
        "import horovod.runner\n",
        namespace,
    )
    assert namespace["hvd"] is horovodlike.torch
    assert namespace["horovod"].torch is horovodlike.torch
    assert namespace["horovod"].run is namespace["horovod"].runner.run
    assert namespace["HorovodInternalError"] is horovodlike.errors.HorovodInternalError
    assert namespace["ProcessSet"] is horovodlike.process_set.ProcessSet
    assert namespace["BaseDataLoader"] is horovodlike.data.BaseDataLoader
    version = tuple(map(int, namespace["horovod"].__version__.split(".")))
    assert (0, 28, 0) <= version < (0, 29, 0)


def of_estimators(row: Alias) -> bool:
    """Whether the search for a name imports the module of an estimator, which needs Spark."""
    return row.name.rpartition(".")[0] in ("horovod.spark.keras", "horovod.spark.torch")


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if of_estimators(row) else []) for row in ALIASES],
)
def test_each_row_leads_to_a_module_or_says_why_not(row: Alias) -> None:
    try:
        exists = importlib.util.find_spec(row.module) is not None
    except ModuleNotFoundError:
        exists = False
    if exists:
        assert importlib.util.find_spec(row.name) is not None
        return
    with pytest.raises(ImportError) as caught:
        importlib.import_module(row.name)
    assert "horovodlike stands in for Horovod here" in str(caught.value)
    assert row.advice[1:] in str(caught.value) or caught.value.name != row.name


@pytest.mark.usefixtures("names")
def test_what_is_missing_is_an_import_error_that_says_what_to_do() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("horovod.mxnet")
    assert caught.value.name == "horovod.mxnet"
    assert str(caught.value) == (
        "No module named 'horovod.mxnet': horovodlike stands in for Horovod here, and has no horovodlike.mxnet. "
        "MXNet has been retired and is not supported; port the script."
    )
    with pytest.raises(ModuleNotFoundError, match="'horovod.torch.nothing'.*no horovodlike.torch.nothing. It is not"):
        importlib.import_module("horovod.torch.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from horovod.torch import nothing")


@pytest.mark.usefixtures("names")
def test_installing_again_changes_nothing() -> None:
    finders, environ = list(sys.meta_path), dict(os.environ)
    horovodlike.compat.install()
    assert sys.meta_path == finders
    assert os.environ == environ == horovodlike.compat.environment(environ)


def write_horovod(folder: Path) -> Path:
    (folder / "site" / "horovod").mkdir(parents=True)
    (folder / "site" / "horovod" / "__init__.py").write_text("__version__ = 'of another Horovod'")
    return folder / "site"


SHOW = "import horovod; print(horovod.__version__)"


def test_an_installed_horovod_is_hidden_and_rank_0_says_so(run: Any, tmp_path: Path) -> None:
    site = write_horovod(tmp_path)
    assert run("-c", SHOW, PYTHONPATH=str(site)).stdout == "of another Horovod\n"
    note = f"horovodlike.compat: the Horovod in {site / 'horovod'} is not used; horovodlike stands in for it\n"
    for rank, shown in ((None, note), ("0", note), ("1", "")):
        place = {} if rank is None else {"HOROVODLIKE_RANK": rank}
        done = run("-m", "horovodlike.compat", "-c", SHOW, PYTHONPATH=str(site), **place)
        assert (done.returncode, done.stdout, done.stderr) == (0, "0.28.1\n", shown)


def test_children_do_not_say_it_again(run: Any, tmp_path: Path) -> None:
    site = write_horovod(tmp_path)
    (tmp_path / "train.py").write_text(
        "import multiprocessing, horovod\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print, args=(horovod.__version__,))\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    done = run("-m", "horovodlike.compat", "train.py", PYTHONPATH=str(site))
    assert done.stdout == "0.28.1\n"
    assert done.stderr.count("\n") == 1


def test_nothing_is_said_about_a_folder_of_that_name(run: Any, tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    done = run("-m", "horovodlike.compat", "-c", SHOW)
    assert (done.stdout, done.stderr) == ("0.28.1\n", "")


def test_it_is_too_late_after_horovod(run: Any, tmp_path: Path) -> None:
    site = write_horovod(tmp_path)
    done = run("-c", "import horovod, horovodlike.compat as c; c.install()", PYTHONPATH=str(site))
    assert done.returncode == 1
    assert f"ImportError: Horovod has been imported already, from {site}" in done.stderr


def test_no_framework_is_imported_without_need(run: Any) -> None:
    text = "import horovod, horovod.common.util, horovod.data, sys; print({'torch', 'numpy'} & sys.modules.keys())"
    assert run("-m", "horovodlike.compat", "-c", text).stdout == "set()\n"
