"""A real Ray cluster of two nodes on this machine, which the tests of this folder share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "120"
# On a disk that is 95 % full Ray would make no objects, and wait.
os.environ["RAY_local_fs_capacity_threshold"] = "1"  # noqa: SIM112 (its name)
# Its workers are nice by 15: beside other tests, which are not, they would hardly ever run.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

import pytest

if TYPE_CHECKING:  # `make test` has no Ray
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
def shared_cluster() -> Iterator[Cluster]:
    """The cluster, for as long as a process runs tests."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Two nodes with two CPUs each; this process is a driver on the first.

    Ray takes a while to give up a node that an earlier test has killed, and until then places workers there.
    """
    import ray

    end = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) != 2:
        assert time.monotonic() < end, "nodes of an earlier test are left"
        time.sleep(0.1)
    return shared_cluster


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
