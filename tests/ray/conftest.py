"""A real Ray cluster of two nodes on this machine, which the tests of this folder share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "120"

import pytest
import ray
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
"""Ray believes what it is told: the GPUs need not be there."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/ray/" in item.nodeid:  # Ray's own modules give warnings of these kinds
            for kind in ("ResourceWarning", "DeprecationWarning", "FutureWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes with two CPUs each; this process is a driver on the first."""
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def ray_client(cluster: Cluster) -> Iterator[str]:
    """The address of a Ray Client server of the cluster."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "ray.util.client.server", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([*command, "--address", cluster.address, "--mode", "specific-server"]) as server:
        try:
            yield f"ray://127.0.0.1:{port}"
        finally:
            server.terminate()
