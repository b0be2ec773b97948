"""Faults: workers, nodes and drivers that die, and starts that fail; and drivers that are not on the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovodlike.launcher.errors import RankFailedError
from horovodlike.ray import RayExecutor
from horovodlike.ray.adapter import _start_workers
from horovodlike.ray.strategy import Demand, reserve

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
SETTINGS = RayExecutor.create_settings(timeout_s=60)


def rank_of_job():
    import horovodlike as hvd

    hvd.init()
    try:
        return int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]), hvd.rank(), os.getpid()
    finally:
        hvd.shutdown()


def sum_until_a_rank_dies(victim, when):
    import horovodlike as hvd
    from horovodlike.ray import log

    if when == "before init" and int(os.environ["HOROVOD_RANK"]) == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.init()
    for step in range(100_000):
        if when == "training" and step == 3 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(5))
        if step == 3:
            log({"pid": os.getpid()})


def wait_until(is_so, seconds):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def all_ended(pids):
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@contextmanager
def started(**arguments) -> Iterator[RayExecutor]:
    executor = RayExecutor(SETTINGS, **arguments)
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown()


def test_a_call_that_is_shut_down_by_another_thread_is_an_error(cluster):
    logged = threading.Event()
    with started(num_workers=2) as executor, ThreadPoolExecutor(1) as pool:
        words = sum_until_a_rank_dies, [None, "never"]
        job = pool.submit(executor.run, *words, callbacks=[lambda _: logged.set()])
        assert logged.wait(60)
        executor.shutdown()
        with pytest.raises(RuntimeError, match=r"shutdown\(\) has ended the job"):
            job.result(60)


def test_a_worker_that_dies_is_named_and_the_executor_starts_again(cluster):
    with started(num_hosts=2) as executor:
        pids = []
        for victim, when in ((1, "training"), (0, "before init")):
            began = time.monotonic()
            with pytest.raises(RankFailedError, match=rf"rank {victim} is lost, process \d+ on node .*died") as raised:
                executor.run(sum_until_a_rank_dies, args=[victim, when])
            assert time.monotonic() - began < 20
            assert raised.value.rank == victim
            with pytest.raises(RuntimeError, match=rf"rank {victim} is lost.*call shutdown\(\)"):
                executor.run(rank_of_job)
            executor.shutdown()
            executor.start()
            results = executor.run(rank_of_job)
            assert [(total, rank) for total, rank, _ in results] == [(2, 0), (2, 1)]
            pids += [pid for _, _, pid in results]
    wait_until(lambda: all_ended(pids), 10)


@pytest.mark.thorough
def test_a_worker_that_dies_when_it_starts_is_an_error(cluster):
    class Dies:
        def __init__(self):
            os._exit(3)

    executor = RayExecutor(SETTINGS, num_workers=2)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank \d is lost"):
        executor.start(Dies)
    assert time.monotonic() - began < 60
    assert {each["state"] for each in ray.util.placement_group_table().values()} == {"REMOVED"}
    executor.start()
    assert len(executor.run(rank_of_job)) == 2
    executor.shutdown()


def test_a_node_that_dies_ends_the_call(cluster):
    node = cluster.add_node(**NODE)
    with started(num_hosts=3) as executor:
        began = []

        def kill_node(_):
            began.append(time.monotonic())
            cluster.remove_node(node, allow_graceful=False)

        nodes = executor.run(lambda: os.environ["HOROVOD_HOSTNAME"])
        victim = nodes.index(node.node_id)
        with pytest.raises(RankFailedError, match=rf"rank {victim} .*{node.node_id}") as raised:
            executor.run(sum_until_a_rank_dies, args=[victim, "never"], callbacks=[kill_node])
        assert time.monotonic() - began[0] < 45  # Ray takes a while to give a node up
        assert raised.value.rank == victim


@pytest.mark.thorough
def test_a_node_that_dies_during_the_start_is_no_hang(cluster):
    node = cluster.add_node(**NODE)
    demand = Demand(3, {"CPU": 1}, hosts=3)
    reservation = reserve(demand)
    reservation.wait(time.monotonic() + 60)
    cluster.remove_node(node, allow_graceful=False)
    began = time.monotonic()
    try:
        with pytest.raises((TimeoutError, RankFailedError), match=r"did not start in time; asked for: 3 x|died when"):
            _start_workers(demand, reservation, time.monotonic() + 10)
        assert time.monotonic() - began < 20
    finally:
        reservation.release()


@pytest.mark.thorough
def test_a_shutdown_after_the_connection_has_ended(cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        """
import socket, sys, ray
from horovodlike.ray import RayExecutor
executor = RayExecutor(RayExecutor.create_settings(60), num_workers=1)
for again in (False, True):
    ray.init(address=sys.argv[1], log_to_driver=False)
    executor.start()
    port = executor._adapter._adapter._job.server.port
    ray.shutdown()
    if again:
        ray.init(address=sys.argv[1], log_to_driver=False)
    executor.shutdown()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)), "the server still listens"
executor.start()
print(executor.run(lambda: "done"), flush=True)
executor.shutdown()
"""
    )
    command = [sys.executable, "-P", str(script), cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "['done']" in done.stdout, done.stdout + done.stderr


def test_a_driver_that_dies_leaves_no_worker(cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        """
import os, sys, time, ray
from horovodlike.ray import RayExecutor
ray.init(address=sys.argv[1], log_to_driver=False)
executor = RayExecutor(RayExecutor.create_settings(60), num_workers=2)
executor.start()
print("workers", *executor.run(os.getpid), flush=True)
executor.run(lambda: time.sleep(600))
"""
    )
    command = [sys.executable, "-P", str(script), cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        told = next(line for line in driver.stdout if line.startswith("workers "))  # Ray prints there, too
        pids = [int(word) for word in told.split()[1:]]
        assert len(pids) == 2 and not all_ended(pids)
        driver.kill()
    wait_until(lambda: all_ended(pids), 30)


@pytest.mark.thorough
def test_the_workers_run_in_the_current_placement_group(cluster):
    @ray.remote(num_cpus=1)
    def drive():
        group = ray.util.get_current_placement_group()
        with started(num_workers=2) as executor:
            results = executor.run(rank_of_job)
            groups = executor.run(lambda: ray.util.get_current_placement_group())
        with pytest.raises(ValueError, match=r"room for 3 workers of {CPU: 1}, but num_workers is 4.*use_current"):
            RayExecutor(SETTINGS, num_workers=4).start()
        return [rank for _, rank, _ in results], all(each == group for each in groups)

    group = ray.util.placement_group([{"CPU": 1}] * 3, strategy="PACK")
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    assert ray.get(drive.options(scheduling_strategy=strategy).remote(), timeout=120) == ([0, 1], True)
    ray.util.remove_placement_group(group)


@pytest.mark.thorough
def test_a_driver_connected_through_ray_client(cluster, ray_client, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(
        """
import os, sys, time, ray
from horovodlike.ray import RayExecutor
ray.init(sys.argv[1])
pid = os.getpid()

def train(factor):
    import numpy as np
    import horovodlike as hvd
    from horovodlike.ray import log
    hvd.init()
    log(hvd.rank())
    total = hvd.allreduce(np.ones(3), op=hvd.Sum)
    hvd.shutdown()
    return float(total[0]) * factor

def callback(value):
    seen.append((value, os.getpid() == pid))

seen = []
executor = RayExecutor(RayExecutor.create_settings(60), num_workers=2)
for _ in range(2):
    executor.start()
    assert executor.run(train, args=[5]) == [10.0, 10.0]
    assert executor.run(train, args=[5], callbacks=[callback]) == [10.0, 10.0]
    assert ray.get(executor.run_remote(train, args=[1])) == [2.0, 2.0]
    try:
        executor.run(os._exit, args=[1])
    except Exception as error:
        assert "is lost" in str(error), error
    else:
        raise AssertionError
    executor.shutdown()
    end = time.monotonic() + 20
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < end, "something is left of the job"
        time.sleep(0.1)
assert seen == [(0, True)] * 2, seen
print("done", flush=True)
"""
    )
    command = [sys.executable, "-P", str(script), ray_client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr
