"""The start of workers on a running Ray cluster: `python -m benchmarks.ray_start`.

The time from the call until the function runs on every worker and `init()` has returned, where there is one:

* Ray Train alone: a trainer without a backend, which connects nothing;
* Ray Train with `HorovodlikeConfig`, and `hvd.init()`;
* `RayExecutor.start()`, `run()` and `hvd.init()`.

The ways take turns. Printed are the medians, and their ratios to Ray Train alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.backend import BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from horovodlike.ray import HorovodlikeConfig, RayExecutor


def _arrive(config: dict[str, object]) -> float:
    if config["connects"]:
        import horovodlike as hvd

        hvd.init()
    now = time.time()
    if config["folder"]:
        (Path(str(config["folder"])) / str(os.getpid())).write_text(str(now))
    if config["connects"]:
        hvd.shutdown()
    return now


def by_train(workers: int, config: BackendConfig, connects: bool) -> float:
    """Return the seconds that Ray Train takes."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as storage:
        trainer = DataParallelTrainer(
            _arrive,
            train_loop_config={"connects": connects, "folder": folder},
            backend_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(storage_path=storage),
        )
        began = time.time()
        trainer.fit()
        arrivals = [float(path.read_text()) for path in Path(folder).iterdir()]
    assert len(arrivals) == workers
    return max(arrivals) - began


def by_executor(workers: int) -> float:
    """Return the seconds that `RayExecutor` takes."""
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=workers)
    began = time.time()
    executor.start()
    arrivals = executor.run(_arrive, args=[{"connects": True, "folder": ""}])
    executor.shutdown()
    return max(arrivals) - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: 5)")
    args = parser.parse_args()
    node = {"num_cpus": args.workers + 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster()
    ways: dict[str, Callable[[], float]] = {
        "Ray Train alone": lambda: by_train(args.workers, BackendConfig(), connects=False),
        "Ray Train with HorovodlikeConfig": lambda: by_train(args.workers, HorovodlikeConfig(), connects=True),
        "RayExecutor": lambda: by_executor(args.workers),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        for turn in range(args.rounds + 1):
            for name, measure in ways.items():
                seconds = measure()
                if turn:  # the first one fills caches
                    times[name].append(seconds)
    finally:
        ray.shutdown()
        cluster.shutdown()
    alone = statistics.median(times["Ray Train alone"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"{name:34} {median:6.2f} s ({spread}), {median / alone:.2f} x Ray Train alone")


if __name__ == "__main__":
    main()
