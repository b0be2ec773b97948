"""``hvdrun -np 4 python -m horovodlike.tensorflow.data.compute_worker FILE``: the processes of a tf.data service.

Rank 0 writes the file that the script which trains reads; see :mod:`horovodlike.tensorflow.data.compute_service`.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import horovodlike.tensorflow as hvd
from horovodlike.tensorflow.data._registry import ComputeService
from horovodlike.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn

__all__ = ["main"]


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: int) -> None:
    """Run this rank's part of the service, until it is shut down.

    Args:
        dispatchers: The number of dispatchers, among which the ranks are divided.
        dispatcher_side: Where they run: ``"compute"`` or ``"training"``.
        configfile: The file that rank 0 writes.
        timeout: How many seconds dispatchers and workers may take to start.

    Raises:
        ValueError: The number of ranks is no multiple of the number of dispatchers, or an argument cannot be used.
        OSError: The file cannot be written.
    """
    file = Path(configfile)
    file.unlink(missing_ok=True)  # a file of an earlier service; all ranks have removed it when init() returns
    hvd.init()
    if dispatchers < 1 or hvd.size() % dispatchers:
        raise ValueError(
            f"Number of processes ({hvd.size()}) must be a multiple of number of dispatchers ({dispatchers})."
        )
    with contextlib.ExitStack() as stack:
        config = None
        if hvd.rank() == 0:
            service = ComputeService()
            stack.callback(service.close)
            workers = hvd.size() // dispatchers
            config = TfDataServiceConfig(
                dispatchers, workers, dispatcher_side, service.addresses(), service.key, timeout
            )
            config.write(configfile)
            stack.callback(file.unlink, missing_ok=True)
        config = hvd.broadcast_object(config, 0, name="horovodlike.tensorflow.data.config")
        compute_worker_fn(config)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="compute_worker", description=__doc__.partition(":")[2].strip())
    parser.add_argument("configfile", help="the file that rank 0 writes, and the script that trains reads")
    parser.add_argument("--dispatchers", type=int, default=1, help="the number of dispatchers (default: 1)")
    parser.add_argument(
        "--dispatcher-side",
        choices=("compute", "training"),
        default="compute",
        help="where the dispatchers run (default: compute)",
    )
    parser.add_argument(
        "--timeout", type=int, default=60, help="seconds that dispatchers and workers may take to start (default: 60)"
    )
    asked = parser.parse_args()
    main(asked.dispatchers, asked.dispatcher_side, asked.configfile, asked.timeout)
