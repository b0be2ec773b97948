"""TensorFlow's tf.data service for distributed training: other processes run the input pipeline.

Processes of one job compute, and processes of another job train::

    hvdrun -np 4 python -m horovodlike.tensorflow.data.compute_worker service.json &
    hvdrun -np 2 python train.py service.json

In the script::

    config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size())
    ...
    hvd.join()  # until all ranks have read their elements
    if hvd.rank() == 0:
        config.compute_client().shutdown()

Each group of ``workers_per_dispatcher`` workers has a dispatcher, which gives them their work. Either one dispatcher
serves all ranks that train, or each rank has one of its own. Dispatchers run where the workers do, or
(``dispatcher_side="training"``) in the processes that train, see :func:`tf_data_service`. TensorFlow neither encrypts
nor authenticates the data that its dispatchers and workers send.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tensorflow as tf

from horovodlike.elastic._state_file import replacing
from horovodlike.tensorflow.data._registry import ComputeClient

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

_SIDES = ("compute", "training")
_LOOK_AGAIN_S = 0.1
_HEARTBEAT_MS = 1000


@dataclass(frozen=True)
class TfDataServiceConfig:
    """How to reach a tf.data service.

    Attributes:
        dispatchers: The number of dispatchers: 1 for all ranks that train, or one for each.
        workers_per_dispatcher: The number of workers of each.
        dispatcher_side: Where the dispatchers run: ``"compute"`` or ``"training"``.
        addresses: The addresses and ports of the registry, by interface.
        key: The key of the registry.
        timeout: How many seconds dispatchers and workers may take to start.

    Raises:
        ValueError: A number is less than 1, or the side is another word.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes = field(repr=False)
    timeout: int = 60

    def __post_init__(self) -> None:
        """Check the values."""
        if self.dispatchers < 1:
            raise ValueError(f"The number of dispatchers must be larger than 0: {self.dispatchers}")
        if self.workers_per_dispatcher < 1:
            raise ValueError(
                f"The number of workers per dispatcher must be larger than 0: {self.workers_per_dispatcher}"
            )
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side must be one of {', '.join(_SIDES)}, got {self.dispatcher_side!r}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client of the registry; ``verbose`` is not used."""
        return ComputeClient(self.addresses, self.key, self.workers_per_dispatcher)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON has them; the key in hexadecimal."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Return the configuration that :meth:`to_dict` has turned into a dictionary."""
        addresses = {name: [(host, port) for host, port in of_name] for name, of_name in config["addresses"].items()}
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"]), "addresses": addresses})

    def write(self, filename: str) -> None:
        """Write a file that only this user may read, since it has the key.

        Raises:
            OSError: It cannot be written.
        """
        with replacing(filename, "the configuration of the tf.data service") as file:
            file.write(json.dumps(self.to_dict()).encode())

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read a file that :meth:`write` has written.

        Args:
            filename: The file.
            wait_for_file_creation: Wait until there is one, for as long as it takes.

        Raises:
            OSError: It cannot be read.
        """
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_LOOK_AGAIN_S)
        with open(filename, encoding="utf-8") as file:
            return TfDataServiceConfig.from_dict(json.load(file))


def _start_dispatcher(client: ComputeClient) -> tuple[Any, str]:
    """Start a dispatcher; return it and the address at which other hosts reach it."""
    server = tf.data.experimental.service.DispatchServer()
    port = server.target.rpartition(":")[2]
    return server, f"grpc://{_bracketed(client.own_address())}:{port}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Provide the dispatcher of a rank that trains while a ``with`` block runs.

    Args:
        compute_config: The service.
        rank: The rank.

    Yields:
        The address for ``tf.data.experimental.service.distribute(service=...)``. All workers are ready. With
        ``dispatcher_side="training"`` the dispatcher runs in this process (of rank 0, if there is one for all) until
        the block ends, so datasets must be read inside.

    Raises:
        TimeoutError: The dispatcher or a worker did not start in time.
        RendezvousError: The registry cannot be reached.
    """
    client = compute_config.compute_client()
    number = rank if compute_config.dispatchers > 1 else 0
    server = None
    try:
        if compute_config.dispatcher_side == "training" and number == rank:
            server, address = _start_dispatcher(client)
            client.register_dispatcher(number, address)
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
    finally:
        if server is not None:
            server._stop()  # there is no public way


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a dataset whose elements the service computes; also a method of ``tf.data.Dataset``.

    Args:
        dataset: The dataset, the same on all ranks.
        compute_config: A service whose dispatchers run where its workers do.
        rank: This rank of the job that trains.
        size: The number of its ranks, for ``round_robin``.
        processing_mode: As for ``tf.data.experimental.service.distribute``.
        reuse_dataset: With one dispatcher: the ranks share the elements of one dataset, first come, first served. Else
            each rank receives all of them.
        round_robin: With ``reuse_dataset``: the ranks receive elements in turn; the dataset must be infinite.

    Raises:
        RuntimeError: The dispatchers run in the processes that train: use :func:`tf_data_service`.
        TimeoutError: The dispatcher or a worker did not start in time.
        RendezvousError: The registry cannot be reached.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service() needs dispatchers that outlive it, unlike those of dispatcher_side='training': use "
            "the dataset inside of `with tf_data_service(config, rank) as address`"
        )
    in_turn = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turn else None,
                num_consumers=size if in_turn else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run a worker, and a dispatcher where there has to be one, until the service is shut down.

    Called by each rank of the job that computes; it calls `init()`.

    Args:
        compute_config: The service; the job has ``dispatchers * workers_per_dispatcher`` ranks.

    Raises:
        TimeoutError: The dispatcher did not start in time.
        RendezvousError: The registry cannot be reached.
    """
    import horovodlike.tensorflow as hvd

    hvd.init()
    rank, workers = hvd.rank(), compute_config.workers_per_dispatcher
    client = compute_config.compute_client()
    dispatcher = None
    if compute_config.dispatcher_side == "compute" and rank % workers == 0:
        dispatcher, address = _start_dispatcher(client)
        client.register_dispatcher(rank // workers, address)
    address = client.wait_for_dispatcher_registration(rank // workers, compute_config.timeout)
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.partition("://")[2],
            worker_address=f"{_bracketed(client.own_address())}:%port%",
            heartbeat_interval_ms=_HEARTBEAT_MS,
            dispatcher_timeout_ms=compute_config.timeout * 1000,
        )
    )
    client.register_worker_for_dispatcher(rank // workers, rank)
    client.wait_for_shutdown()
    hvd.barrier()  # the registry on rank 0 has answered all
    worker._stop()
    if dispatcher is not None:
        dispatcher._stop()
