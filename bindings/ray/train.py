"""The backend for Ray Train V2: workers that Ray Train has started form a job.

Ray Train places, starts and restarts the workers, and stores checkpoints and metrics; the training function calls
``init()`` as under ``hvdrun``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.train.backend import Backend, BackendConfig

from horovodlike.ray.rendezvous import WorkerJob
from horovodlike.ray.worker import WorkerFacts

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup

__all__ = ["HorovodlikeConfig"]


@dataclass
class HorovodlikeConfig(BackendConfig):  # type: ignore[misc]
    """The backend of a trainer of Ray Train whose training function calls ``hvd.init()``.

    It is the argument ``torch_config`` of a ``TorchTrainer``, ``tensorflow_config`` of a ``TensorflowTrainer``, or
    ``backend_config`` of a ``DataParallelTrainer``.

    Each worker is a rank, with Ray Train's world rank and local rank. A worker sees all GPUs that the run has on its
    node, so ``torch.cuda.set_device(hvd.local_rank())`` chooses one; ``ray.train.torch.get_device()`` works, too.

    Attributes:
        timeout_s: How long ``init()`` waits for all ranks, in seconds; None for ``HOROVODLIKE_START_TIMEOUT``.
        nics: The network between the ranks: names of interfaces, or networks such as ``10.0.0.0/8``, separated by
            commas; None for ``HOROVODLIKE_NETWORK_INTERFACE``.
    """

    timeout_s: float | None = None
    nics: str | None = None

    @property
    def backend(self) -> str:
        """The name of the backend: a ``TorchTrainer`` asks whether one has been chosen."""
        return "hvd"

    @property
    def backend_cls(self) -> type[Backend]:
        """The class of the backend; Ray Train asks for it."""
        return _HorovodlikeBackend

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; Ray Train exports them."""
        return asdict(self)


class _HorovodlikeBackend(Backend):  # type: ignore[misc]
    """Runs the rendezvous server in the process of Ray Train's controller; Ray makes one object for each process."""

    share_cuda_visible_devices = True
    _job: WorkerJob | None = None

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: HorovodlikeConfig) -> None:
        """Tell each worker of a new group its rank, and how it finds the others."""
        self._close()
        nodes = worker_group.execute(_node)
        self._job = WorkerJob.open(nodes, "Ray Train", backend_config.timeout_s, backend_config.nics)
        ray.get(
            [
                worker_group.execute_single_async(rank, _set_variables, variables)
                for rank, variables in enumerate(self._job.variables)
            ]
        )

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: HorovodlikeConfig) -> None:
        """Close the server of the group's job."""
        self._close()

    def _close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None


def _node() -> str:
    return WorkerFacts.collect().node


def _set_variables(variables: dict[str, str]) -> None:
    import os

    os.environ.update(variables)
