"""Distributed training for PyTorch, TensorFlow and Keras.

Scripts use a framework's module, such as ``import horovodlike.torch as hvd``; ``hvdrun`` starts them. This package has
the parts that do not depend on a framework:

* :mod:`horovodlike.basics`: ``init``, ``rank``, ``size`` and so on; :mod:`horovodlike._engine.ops`: collectives on
  memory
* :mod:`horovodlike.config`: every setting; :mod:`horovodlike.errors`: every exception
* :mod:`horovodlike._bootstrap.bootstrap`: how ranks find each other
* :func:`metrics`, :func:`flight_recorder`: this rank's counters and last collectives, of `_engine.metrics`
* :func:`run`: runs a function in several processes, without ``hvdrun``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from horovodlike._engine.native import ffi, lib
except ModuleNotFoundError as missing:
    raise ImportError(
        "horovodlike is not built here: this is its source folder, and it hides an installed package. Start Python in "
        "another folder, or with -P, or install with 'pip install .'"
    ) from missing

from horovodlike._engine.metrics import flight_recorder, metrics

if TYPE_CHECKING:
    from horovodlike.launcher.run import run as run

__version__: str = ffi.string(lib.hvl_version()).decode()

__all__ = ["__version__", "flight_recorder", "metrics", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovodlike.launcher.run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
