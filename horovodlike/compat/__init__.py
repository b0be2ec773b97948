"""Horovod's module names for horovodlike's modules, so that scripts with ``import horovod.torch`` run unchanged.

Each of these three gives a process the names::

    hvdrun --compat -np 2 python train.py         # the ranks
    python -m horovodlike.compat train.py         # one process
    import horovodlike.compat                     # two lines at the top of a script
    horovodlike.compat.install()

Child processes that run this Python have the names too, whichever way they are started: they inherit ``PYTHONPATH``,
whose first folder then has a ``sitecustomize`` that installs the names (:func:`environment`).

:data:`ALIASES` is the table of the names. Submodules of a module in it map to submodules of its counterpart, so
``horovod.torch.mpi_ops`` needs no row. An alias is the same module object: ``horovod.torch is horovodlike.torch``, and
a class imported by either name is the same class. :mod:`horovodlike.compat.horovod` has modules with the contents of
Horovod's where no module of horovodlike has them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any

__all__ = ["ADDITIONS", "ALIASES", "API_VERSION", "DEFAULTS", "Alias", "counterpart", "environment", "install"]

API_VERSION = "0.28.1"
"""The value of ``horovod.__version__``: the release of Horovod with this API, for scripts that compare versions."""


@dataclass(frozen=True)
class Alias:
    """One row of the table.

    Attributes:
        name: The name of a module of Horovod.
        module: The name of the module of horovodlike that replaces it, which may not exist.
        advice: The end of the error message if it, or a module below it, does not exist: the reason and the remedy.
    """

    name: str
    module: str
    advice: str = "it is not among the modules that Horovod documents"


_LAUNCHER = "it is a part of Horovod's launcher: start jobs with hvdrun, or with horovod.run()"
_TASKS = "it is a part of Horovod's way to start ranks on Spark: use horovod.spark.run() or an estimator"

ALIASES: tuple[Alias, ...] = (
    Alias("horovod", "horovodlike.compat.horovod"),
    Alias("horovod._keras", "horovodlike._keras", "use horovod.keras or horovod.tensorflow.keras"),
    Alias("horovod.torch", "horovodlike.torch"),
    Alias("horovod.tensorflow", "horovodlike.tensorflow"),
    Alias(
        "horovod.tensorflow.gradient_aggregation_eager",
        "horovodlike.tensorflow.gradient_aggregation_eager",
        "use DistributedOptimizer(backward_passes_per_step=...)",
    ),
    Alias("horovod.tensorflow.keras", "horovodlike.tensorflow.keras"),
    Alias("horovod.tensorflow.util", "horovodlike.compat.horovod.tensorflow_util"),
    Alias("horovod.keras", "horovodlike.keras"),
    Alias("horovod.data", "horovodlike.data"),
    Alias("horovod.data.data_loader_base", "horovodlike.data.loaders"),
    Alias("horovod.common.basics", "horovodlike.compat.horovod.common"),
    Alias("horovod.common.util", "horovodlike.compat.horovod.common"),
    Alias("horovod.common.elastic", "horovodlike.elastic"),
    Alias("horovod.common.exceptions", "horovodlike.errors"),
    Alias("horovod.common.process_sets", "horovodlike.process_set"),
    Alias("horovod.ray", "horovodlike.ray"),
    Alias("horovod.ray.elastic_v2", "horovodlike.ray.elastic"),
    Alias("horovod.ray.driver_service", "horovodlike.ray.driver_service", _LAUNCHER),
    Alias("horovod.ray.utils", "horovodlike.ray.utils", "RayExecutor and ElasticRayExecutor do what it is for"),
    Alias("horovod.runner", "horovodlike.compat.horovod.runner", _LAUNCHER),
    Alias(
        "horovod.runner.elastic",
        "horovodlike.compat.horovod.runner.elastic",
        "hosts come from --host-discovery-script, or from a horovodlike.launcher.elastic.HostDiscovery in "
        "horovodlike.run(host_discovery=...)",
    ),
    Alias("horovod.spark", "horovodlike.spark"),
    Alias(
        "horovod.spark.common",
        "horovodlike.spark",
        "the estimators of horovod.spark.torch and horovod.spark.keras do what it is for",
    ),
    Alias("horovod.spark.conf", "horovodlike.spark.conf", "set Spark's own settings of retries and exclusion"),
    Alias("horovod.spark.data_loaders", "horovodlike.spark.data_loaders", "the estimators load the data"),
    Alias("horovod.spark.driver", "horovodlike.spark.driver", _TASKS),
    Alias("horovod.spark.gloo_run", "horovodlike.spark.gloo_run", _TASKS),
    Alias("horovod.spark.keras.estimator", "horovodlike.spark.keras"),
    Alias("horovod.spark.keras", "horovodlike.spark.keras", "KerasEstimator and KerasModel are in horovod.spark.keras"),
    Alias(
        "horovod.spark.lightning",
        "horovodlike.spark.lightning",
        "use horovod.spark.torch.TorchEstimator, or Lightning's Trainer in horovod.spark.run()",
    ),
    Alias("horovod.spark.mpi_run", "horovodlike.spark.mpi_run", _TASKS),
    Alias("horovod.spark.task", "horovodlike.spark.task", _TASKS),
    Alias(
        "horovod.spark.tensorflow",
        "horovodlike.spark.tensorflow",
        "start the workers of tf.data with hvdrun: python -m horovod.tensorflow.data.compute_worker",
    ),
    Alias("horovod.spark.torch.estimator", "horovodlike.spark.torch"),
    Alias("horovod.spark.torch", "horovodlike.spark.torch", "TorchEstimator and TorchModel are in horovod.spark.torch"),
    Alias("horovod.mxnet", "horovodlike.mxnet", "MXNet has been retired and is not supported; port the script"),
)
"""Horovod's modules that have a counterpart here, and those whose absence needs an explanation."""


def counterpart(name: str, table: Sequence[Alias] = ALIASES) -> Alias | None:
    """Return the row of a module; if it has none, make one from the row of the closest package above it.

    Args:
        name: The full name of a module.
        table: The rows.

    Returns:
        The row, whose module may not exist; None if neither the module nor a package above it has a row.
    """
    rows = {row.name: row for row in table}
    above, below = name, ""
    while above not in rows:
        above, dot, last = above.rpartition(".")
        if not dot:
            return None
        below = f".{last}{below}"
    row = rows[above]
    return row if not below else Alias(name, row.module + below, row.advice)


_COMMON = "horovodlike.compat.horovod.common"
_UTIL = "horovodlike.compat.horovod.tensorflow_util"
_CHECKS = {name: f"{_COMMON}:{name}" for name in ("check_extension", "gpu_available")}
_BASICS = {"_basics": f"{_COMMON}:shared_basics"}
ADDITIONS: dict[str, dict[str, str]] = {
    "horovodlike.process_set": _BASICS,
    "horovodlike.tensorflow": {
        **_CHECKS,
        "util": _UTIL,
        **{
            name: f"{_UTIL}:{name}"
            for name in ("_cache", "_executing_eagerly", "_make_subgraph", "refs_to_vars", "vars_to_refs")
        },
    },
    "horovodlike.tensorflow.mpi_ops": {**_CHECKS, **_BASICS},
    "horovodlike.torch": _CHECKS,
    "horovodlike.torch.mpi_ops": {**_CHECKS, **_BASICS},
}
"""Names that scripts and tests use of Horovod's modules, that horovodlike's modules lack, and their meaning.

They become attributes of the modules once the process imports ``horovod``.
"""


DEFAULTS = {"HOROVODLIKE_JOIN_AVERAGE": "all"}
"""Settings whose defaults change results compared with Horovod, with the values that give Horovod's results."""


# The folder of a `sitecustomize`, a module that Python imports when it starts.
_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
# The variable that is set once the note about an installed Horovod has been written: children do not repeat it.
_NOTED = "_HOROVODLIKE_COMPAT_NOTED"


class _Loader(Loader):
    """A loader that makes an import return a module of another name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python makes an empty module; :meth:`exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        # The import returns the module that is in sys.modules after this call, which is a documented use. If instead
        # create_module() returned the real module, Python would overwrite its __spec__.
        name = module.__name__
        sys.modules[name] = real = importlib.import_module(self._module)
        if not hasattr(real, "__path__") and name in _PACKAGES:
            real.__path__ = []  # without this, Python would not ask the finder for its modules
        _add_names()

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the module, for ``python -m``."""
        spec = importlib.util.find_spec(self._module)
        code: CodeType | None = getattr(spec and spec.loader, "get_code", lambda name: None)(self._module)
        return code


# Packages of Horovod's that may have a plain module as their counterpart.
_PACKAGES = {row.name for row in ALIASES if row.advice != Alias.advice} | {
    row.name.rpartition(".")[0] for row in ALIASES
}


def _add_names() -> None:
    """Give those modules their additional names that have been imported so far."""
    for module, names in ADDITIONS.items():
        if (real := sys.modules.get(module)) is not None:
            for name, meaning in names.items():
                if not hasattr(real, name):
                    setattr(real, name, pkgutil.resolve_name(meaning))


def _find(name: str) -> ModuleSpec | None:
    """Find a module of horovodlike; None if there is none of this name."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None  # a package above it is missing, or is no package
        raise


class _Finder(MetaPathFinder):
    """A finder of ``horovod`` and its submodules, so that no copy of one is loaded through its package's folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        row = counterpart(fullname)
        if row is None:
            return None
        real = _find(row.module)
        if real is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: horovodlike stands in for Horovod here, and has no {row.module}. "
                f"{row.advice[0].upper()}{row.advice[1:]}.",
                name=fullname,
            )
        spec = ModuleSpec(fullname, _Loader(row.module), origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec


def _is_installed() -> bool:
    """Return whether this process has Horovod's module names."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install(*, quiet: bool = False) -> None:
    """Give this process and its children Horovod's module names and `DEFAULTS`. A second call does nothing.

    A setting that is in the environment keeps its value. Call this before ``init()``, which reads the settings.

    This hides an installed Horovod; rank 0 then writes a note to standard error.

    Args:
        quiet: Leave the note out.

    Raises:
        ImportError: Horovod itself has been imported already.
    """
    if _is_installed():
        return
    if "horovod" in sys.modules:
        raise ImportError(
            f"Horovod has been imported already, from {sys.modules['horovod'].__file__}: call "
            "horovodlike.compat.install() before that",
            name="horovod",
        )
    if not quiet and _NOTED not in os.environ and _is_rank_0():
        _mention_what_is_hidden()
    for name, value in DEFAULTS.items():
        if not os.environ.get(name):  # an empty variable counts as not set, as in `config`
            os.environ[name] = value
    sys.meta_path.insert(0, _Finder())
    os.environ.update(environment(os.environ))


def _is_rank_0() -> bool:
    return os.environ.get("HOROVODLIKE_RANK", os.environ.get("HOROVOD_RANK", "0")) == "0"


def _mention_what_is_hidden() -> None:
    real = PathFinder.find_spec("horovod")
    # A folder of this name that is no package, such as a folder of examples, has no origin.
    if real is not None and real.origin is not None:
        folder = os.path.dirname(real.origin)
        note = f"horovodlike.compat: the Horovod in {folder} is not used; horovodlike stands in for it"
        print(note, file=sys.stderr)
        os.environ[_NOTED] = "1"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which each Python that starts has Horovod's module names.

    Options of Python that ignore the environment (``-E``, ``-I``) or the ``site`` module (``-S``) prevent that.

    Args:
        environ: The environment without the names.
    """
    path = environ.get("PYTHONPATH", "")
    if _STARTUP not in path.split(os.pathsep):
        path = f"{_STARTUP}{os.pathsep}{path}" if path else _STARTUP  # an empty entry means the current folder
    return {**environ, "PYTHONPATH": path}


class NeedsNames:
    """A function that is pickled in an inner pickle, so that Horovod's names are installed before it is unpickled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        from horovodlike._net.object_seal import dumps

        return _restore, (dumps(self._function),)


def _restore(data: bytes) -> Any:
    install(quiet=True)  # the process that pickled `data` has reported a hidden Horovod
    return pickle.loads(data)


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that other processes unpickle with Horovod's names, if this process has them."""
    return NeedsNames(function) if _is_installed() else function
