"""Jobs on a Ray cluster: the executors of ``horovod.ray``, and ``HorovodlikeConfig`` for Ray Train.

The modules have the names of Horovod's where scripts import them:

* :mod:`horovodlike.ray.runner`: ``RayExecutor``, for drivers in the cluster and for those connected by Ray Client;
* :mod:`horovodlike.ray.proxies`: the adapter of a job, in this process or in an actor;
* :mod:`horovodlike.ray.elastic`: ``ElasticRayExecutor``, and which nodes it uses;
* :mod:`horovodlike.ray.adapter`: a static job: its placement, its start, its calls;
* :mod:`horovodlike.ray.failures`: the errors of its ranks;
* :mod:`horovodlike.ray.elastic_adapter`: an elastic job: its calls;
* :mod:`horovodlike.ray.callers`: the nodes of an elastic job, which a thread watches;
* :mod:`horovodlike.ray.node_choice`: pure: which of them run workers, and which must leave;
* :mod:`horovodlike.ray.node_caller`: the actor on each;
* :mod:`horovodlike.ray.strategy`: placement groups;
* :mod:`horovodlike.ray.worker`: the actor that is a rank;
* :mod:`horovodlike.ray.rendezvous`: the variables by which workers find each other, for both;
* :mod:`horovodlike.ray.ray_logger`: values that rank 0 sends to the driver's callbacks;
* :mod:`horovodlike.ray.train`: the backend of Ray Train.
"""

import importlib
import re
from typing import TYPE_CHECKING, Any

OLDEST_RAY = (2, 51)
"""The oldest release of Ray that can be used: the first in which Ray Train V2 is the default."""


def check_version(version: str) -> None:
    """Raise ImportError if a release of Ray is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise ImportError(
            f"horovodlike.ray needs Ray {oldest} or later, but {version} is installed: pip install 'horovodlike[ray]'"
        )


_missing: ImportError | None = None
"""The reason why there is no Ray. The modules that are pure do without it."""
try:
    from ray import __version__ as _version
except ImportError as error:
    _missing = error
else:
    check_version(_version)

if TYPE_CHECKING:
    from horovodlike.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
    from horovodlike.ray.ray_logger import log as log
    from horovodlike.ray.runner import RayExecutor as RayExecutor
    from horovodlike.ray.train import HorovodlikeConfig as HorovodlikeConfig
    from horovodlike.ray.worker import BaseHorovodWorker as BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "HorovodlikeConfig", "RayExecutor", "log"]
_MODULES = {
    "BaseHorovodWorker": "worker",
    "ElasticRayExecutor": "elastic",
    "HorovodlikeConfig": "train",
    "RayExecutor": "runner",
    "log": "ray_logger",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _missing is not None:
        raise ImportError("horovodlike.ray needs Ray: pip install 'horovodlike[ray]'") from _missing
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
