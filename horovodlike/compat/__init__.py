"""Scripts that say ``import horovod.torch as hvd`` run unchanged: Horovod's module names for horovodlike's modules.

Either of these gives a process the names::

    hvdrun --compat -np 2 python train.py         # the ranks
    python -m horovodlike.compat train.py         # one process
    import horovodlike.compat                     # a line at the top of a script
    horovodlike.compat.install()

Child processes have the names too, whichever way :mod:`multiprocessing` starts them. Other programs that a script
starts do not.

:data:`ALIASES` is the table. What lies below a module of the table lies below its counterpart as well, so
``horovod.torch.mpi_ops`` needs no row. An alias is the very same module: ``horovod.torch is horovodlike.torch``, and
so are the classes in it, whichever name they were imported by. :mod:`horovodlike.compat.horovod` has modules in the
shape of Horovod's where horovodlike has none of that shape, and :mod:`horovodlike.compat.program` runs a script as
Python itself would.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["ALIASES", "API_VERSION", "DEFAULTS", "Alias", "counterpart", "install"]

API_VERSION = "0.28.1"
"""What ``horovod.__version__`` says: the release of Horovod whose API this is, for scripts that compare versions."""


@dataclass(frozen=True)
class Alias:
    """One row of the table.

    Attributes:
        name: A module of Horovod.
        module: The module of horovodlike that stands for it. It may not exist yet.
        advice: The message if it does not exist: why, and the remedy.
    """

    name: str
    module: str
    advice: str = "it is not among the modules that Horovod documents"


_NO_PLATFORM = "it is not supported yet; start the ranks with hvdrun, or from Python with horovod.run()"

ALIASES: tuple[Alias, ...] = (
    Alias("horovod", "horovodlike.compat.horovod"),
    Alias("horovod.torch", "horovodlike.torch"),
    Alias("horovod.tensorflow", "horovodlike.tensorflow"),
    Alias("horovod.tensorflow.keras", "horovodlike.tensorflow.keras"),
    Alias("horovod.keras", "horovodlike.keras"),
    Alias("horovod.data", "horovodlike.data"),
    Alias("horovod.data.data_loader_base", "horovodlike.data.loaders"),
    Alias("horovod.common.basics", "horovodlike.compat.horovod.common"),
    Alias("horovod.common.util", "horovodlike.compat.horovod.common"),
    Alias("horovod.common.elastic", "horovodlike.elastic"),
    Alias("horovod.common.exceptions", "horovodlike.errors"),
    Alias("horovod.common.process_sets", "horovodlike.process_set"),
    Alias("horovod.ray", "horovodlike.ray", _NO_PLATFORM),
    Alias("horovod.spark", "horovodlike.spark", _NO_PLATFORM),
    Alias("horovod.mxnet", "horovodlike.mxnet", "MXNet has been retired and is not supported; port the script"),
)
"""Every module of Horovod that has a counterpart, or whose lack has a reason worth a message."""


def counterpart(name: str, table: Sequence[Alias] = ALIASES) -> Alias | None:
    """Return the row that decides about a module: its own, or one made from the closest package above it that has one.

    Args:
        name: The full name of a module.
        table: The rows.

    Returns:
        The row, whose module may not exist; None if the name has nothing to do with Horovod.
    """
    rows = {row.name: row for row in table}
    above, below = name, ""
    while above not in rows:
        above, dot, last = above.rpartition(".")
        if not dot:
            return None
        below = f".{last}{below}"
    return rows[above] if not below else Alias(name, rows[above].module + below)


DEFAULTS = {"HOROVODLIKE_JOIN_AVERAGE": "all"}
"""Settings whose defaults give other numbers than Horovod's, with the values that give Horovod's."""


class _Loader(Loader):
    """A loader that ends an import with a module of another name."""

    def __init__(self, module: str) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> None:
        """Have an empty module made, the default; it is never seen."""

    def exec_module(self, module: ModuleType) -> None:
        # What stands in sys.modules after this is what the import returns; that is a documented use. Handing out the
        # real module in create_module() instead would have its __spec__ overwritten.
        sys.modules[module.__name__] = importlib.import_module(self._module)


class _Finder(MetaPathFinder):
    """A finder of ``horovod`` and everything below it, so that no copy is loaded through a package's folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        row = counterpart(fullname)
        if row is None:
            return None
        real = importlib.util.find_spec(row.module)
        if real is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: horovodlike stands in for Horovod here, and has no {row.module}. "
                f"{row.advice[0].upper()}{row.advice[1:]}.",
                name=fullname,
            )
        spec = ModuleSpec(fullname, _Loader(row.module), origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec


def install(*, quiet: bool = False) -> None:
    """Give this process and its children Horovod's module names and `DEFAULTS`. A second call does nothing.

    A setting that the environment has stays as it is. To take effect, it has to be called before ``init()``.

    An installed Horovod is hidden by this, and a line on standard error (of rank 0) says so.

    Args:
        quiet: Leaves that line out.

    Raises:
        ImportError: Horovod itself has been imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "horovod" in sys.modules:
        raise ImportError(
            f"Horovod has been imported already, from {sys.modules['horovod'].__file__}: call "
            "horovodlike.compat.install() before that",
            name="horovod",
        )
    if not quiet and os.environ.get("HOROVODLIKE_RANK", os.environ.get("HOROVOD_RANK", "0")) == "0":
        _mention_what_is_hidden()
    for name, value in DEFAULTS.items():
        if not os.environ.get(name):  # an empty one stands for the default, here as in `config`
            os.environ[name] = value
    sys.meta_path.insert(0, _Finder())
    _install_in_children()


def _mention_what_is_hidden() -> None:
    real = PathFinder.find_spec("horovod")
    # A folder that merely has this name, such as one of examples, has no origin.
    if real is not None and real.origin is not None:
        folder = os.path.dirname(real.origin)
        note = f"horovodlike.compat: the Horovod in {folder} is not used; horovodlike stands in for it"
        print(note, file=sys.stderr)


# The child's search path is a part of the same dictionary, but comes into force only later.
_INSTALL = "import sys\nsys.path[:] = {path!r}\nimport horovodlike.compat\nhorovodlike.compat.install(quiet=True)"


class _InstallWhereRead:
    """An object whose unpickling installs the names."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
        return exec, (_INSTALL.format(path=[str(entry) for entry in sys.path]), {})


def _install_in_children() -> None:
    """Have every child that :mod:`multiprocessing` starts from now on install the names.

    A forked child has them from its parent. One that is spawned, or forked from a server, is a new interpreter: the
    names must be installed before :mod:`multiprocessing` imports the script there. It sends each child a dictionary of
    preparations, as a pickle; an entry that is added to it installs the names while it is unpickled.
    """
    original = multiprocessing.spawn.get_preparation_data

    def with_names(name: str) -> dict[str, Any]:
        return {"horovodlike.compat": _InstallWhereRead(), **original(name)}

    multiprocessing.spawn.get_preparation_data = with_names
