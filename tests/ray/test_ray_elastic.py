"""Elastic jobs on a cluster whose nodes come, are drained and die."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
import ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2

from horovodlike.launcher.errors import HostsError, RankFailedError
from horovodlike.ray import RayExecutor, elastic_adapter, log
from horovodlike.ray.node_caller import NodeOptions

sys.path.append(str(Path(__file__).parents[1] / "elastic"))

from histories import History  # noqa: E402

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
SETTINGS = RayExecutor.create_settings(timeout_s=60)
BOUND_S = 20.0
"""For the time between the loss of a node and the next step, on a machine with much else to do."""


def wait_until(is_so, seconds=60.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


@contextmanager
def elastic(least, most, settings=SETTINGS, **arguments) -> Iterator[RayExecutor]:
    executor = RayExecutor(settings, min_workers=least, max_workers=most, **arguments)
    executor.start(extra_env_vars={"OMP_NUM_THREADS": 1})
    try:
        yield executor
    finally:
        executor.shutdown()


class Counter:
    """A stateful executable."""

    def __init__(self, start, step=1):
        self.value, self.step = start, step


def describe(counter):
    import horovodlike as hvd

    hvd.init()
    log({"rank": hvd.rank()})
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    total = hvd.allreduce(np.full(5, counter.value, dtype=np.float32), op=hvd.Sum)
    names = "HOROVOD_HOSTNAME", "CUDA_VISIBLE_DEVICES", "ANSWER", "OMP_NUM_THREADS"
    return place, total.tolist(), *map(os.environ.get, names)


def test_workers_of_a_node_share_it(cluster):
    executor = RayExecutor(SETTINGS, min_workers=4, max_workers=4, use_gpu=True)
    executor.start(Counter, [10], {"step": 5}, extra_env_vars={"ANSWER": 42})
    seen = []
    results = executor.execute(describe, callbacks=[seen.append])
    executor.shutdown()
    assert [place for place, *_ in results] == [
        *((0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2)),
        *((2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)),
    ]
    assert all(rest[0] == [40.0] * 5 for _, *rest in results)
    assert {tuple(rest[2:]) for _, *rest in results} == {("0,1", "42", "1")}
    hosts = [rest[1] for _, *rest in results]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3] and set(hosts) == {node["NodeID"] for node in alive()}
    assert seen == [{"rank": 0}]


def alive():
    return [node for node in ray.nodes() if node["Alive"]]


def train_integers(folder, *words):
    sys.path.append(str(Path(__file__).parents[1] / "elastic"))
    import integers

    integers.main([folder, *words])
    return int(os.environ["HOROVOD_RANK"])


def sizes(history):
    return [entry.size for entry in history.entries("step")]


def continued(history, began):
    """Return how long after a time each step of two ranks was, and the end, if a new generation began with it."""
    entries = [entry for entry in history.entries() if entry.event in ("step", "end") and entry.at > began]
    return [entry.at - began for entry in entries if entry.what.get("size", 2) == 2]


def drain(cluster, node):
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    client = GcsClient(address=cluster.address)
    assert client.drain_node(node.node_id, reason, "the machine is taken away", 0)[0]


def test_nodes_come_and_go(cluster, tmp_path):
    """Each node has one worker. One joins, one is drained, one is killed; the processes of the others stay."""
    history = History(tmp_path)
    killed, drained = cluster.add_node(**NODE), None
    try:
        with ThreadPoolExecutor(1) as pool, elastic(2, 4, cpus_per_worker=2) as executor:
            words = "--samples", "1200", "--pace", "0.02", "--until-size", "2"
            job = pool.submit(executor.run, train_integers, [str(tmp_path), *words])
            wait_until(lambda: 3 in sizes(history) or job.done())
            drained = cluster.add_node(**NODE)
            wait_until(lambda: 4 in sizes(history) or job.done())
            drain(cluster, drained)
            wait_until(lambda: sizes(history)[-1] == 3 or job.done())
            taken = [(entry.worker, entry.step) for entry in history.entries("step")]
            assert len(taken) == len(set(taken)), "a step was repeated although no worker was lost"

            began = time.monotonic()
            cluster.remove_node(killed, allow_graceful=False)
            wait_until(lambda: continued(history, began))
            print(f"\nnext step {continued(history, began)[0]:.2f} s after a node was killed")
            assert continued(history, began)[0] < BOUND_S
            assert job.result(120) == [0, 1]
    finally:
        for node in cluster.worker_nodes & {killed, drained}:
            cluster.remove_node(node, allow_graceful=False)
    assert len(history.entries("start")) == 4 and len(history.entries("end")) == 2
    history.check(1200)
    history.check_nothing_left()


def test_horovods_documented_programs(cluster, tmp_path):
    """The calls of its pages and examples, in their order: only `python -m horovodlike.compat` is new."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-P", "-m", "horovodlike.compat", str(script)]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^result (.*)$", done.stdout, re.M) == ["[2, 2]", "[2, 2]"], done.stdout


PROGRAM = """
import torch
import horovod.torch as hvd
from horovod.ray.elastic import RayHostDiscovery
from horovod.torch.elastic.sampler import ElasticSampler

class TwoSlots(RayHostDiscovery):
    def find_available_hosts_and_slots(self):
        return {host: 2 for host in super().find_available_hosts_and_slots()}

def training_fn():
    import horovod.torch as hvd
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = ElasticSampler(torch.utils.data.TensorDataset(torch.ones(8, 2)))

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 2):
            sampler.set_epoch(state.epoch)
            for state.batch, index in enumerate(sampler):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                sampler.record_batch(state.batch, 1)
                state.commit()

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    return hvd.size()

if __name__ == "__main__":
    import ray
    from horovod.ray import ElasticRayExecutor, RayExecutor

    ray.init(address="auto")
    settings = RayExecutor.create_settings(verbose=True)
    executor = RayExecutor(settings, min_workers=2, max_workers=2, use_gpu=True, cpus_per_worker=1)
    executor.start()
    print("result", executor.run(training_fn))

    settings = ElasticRayExecutor.create_settings(verbose=2, min_num_proc=2)
    settings.discovery = TwoSlots(use_gpu=True, cpus_per_slot=1)
    settings.max_num_proc = 2
    executor = ElasticRayExecutor(settings, use_gpu=True, cpus_per_slot=1, override_discovery=False)
    executor.start()
    print("result", executor.run(lambda: training_fn()))
"""


def test_no_resources_are_an_error(cluster):
    groups = set(ray.util.placement_group_table())
    executor = RayExecutor(SETTINGS, min_workers=5, elastic_timeout=1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"Asked for: 5 x {CPU: 1}, on as few .* the cluster has 2 nodes.*elastic_t"):
        executor.start()
    assert time.monotonic() - began < 10
    left = {name: each["state"] for name, each in ray.util.placement_group_table().items() if name not in groups}
    assert set(left.values()) == {"REMOVED"}


@pytest.mark.parametrize("kind", [{"min_workers": 5}, {"num_workers": 5}])
def test_a_start_that_is_shut_down_is_an_error_soon(cluster, kind):
    executor = RayExecutor(SETTINGS, **kind)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(executor.start)
        wait_until(lambda: executor._adapter is not None and executor._adapter._adapter._reservation is not None)
        executor.shutdown()
        with pytest.raises(RuntimeError, match=r"shutdown\(\) has ended the start"):
            job.result(BOUND_S)
    wait_until(lambda: {each["state"] for each in ray.util.placement_group_table().values()} == {"REMOVED"})


def test_a_node_that_joined_with_few_slots_gets_more(cluster):
    """The job cannot begin as long as something else has a part of a node."""

    @ray.remote(num_cpus=1)
    class Other:
        def is_here(self):
            return True

    with ThreadPoolExecutor(1) as pool, elastic(4, 4) as executor:
        other = Other.remote()
        assert ray.get(other.is_here.remote())
        job = pool.submit(executor.run, host_and_local_rank)
        adapter = executor._adapter._adapter
        wait_until(lambda: (adapter._hosts and len(adapter._hosts._callers) == 2) or job.done())
        ray.kill(other)
        results = job.result(60)
    nodes = {host.partition("#")[0] for host, _ in results}
    assert len(results) == 4 and nodes == {node["NodeID"] for node in alive()}
    assert [rank for host, rank in results if "#2" in host] == [0]


def host_and_local_rank():
    import horovodlike as hvd

    hvd.init()
    return os.environ["HOROVOD_HOSTNAME"], hvd.local_rank()


@pytest.mark.thorough
def test_nodes_that_all_refuse_are_an_error(cluster, monkeypatch):
    def with_another_key(key, *rest):
        return NodeOptions(key[::-1], *rest)

    monkeypatch.setattr(elastic_adapter, "NodeOptions", with_another_key)
    with elastic(1, None) as executor:
        began = time.monotonic()
        with pytest.raises(HostsError, match=r"no node of the cluster can take part; (\w{56}: .*){2}"):
            executor.run(int)
        assert time.monotonic() - began < BOUND_S


@pytest.mark.thorough
def test_errors_of_the_function(cluster):
    def fail():
        import horovodlike as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such thing")
        hvd.allreduce(np.ones(3))

    with elastic(2, 2, reset_limit=0) as executor:
        with pytest.raises(KeyError, match="no such thing"):
            executor.run(fail)
        with pytest.raises(TypeError, match=r"what the function has returned .*cannot be sent: .*lock"):
            executor.run(threading.Lock)
        lock = threading.Lock()
        with pytest.raises(TypeError, match=r"func, or something .*cannot be pickled: .*lock"):
            executor.run(lambda: lock.acquire())
        with pytest.raises(RankFailedError, match=r"was killed by signal 9 \(SIGKILL\)"):
            executor.run(lambda: os.kill(os.getpid(), 9))
        for call in (executor.run_remote, executor.execute_single):
            with pytest.raises(NotImplementedError, match="is not for elastic jobs: call"):
                call(print)


@pytest.mark.thorough
def test_too_few_nodes_while_a_job_runs_are_an_error(cluster, tmp_path):
    node = cluster.add_node(**NODE)
    with ThreadPoolExecutor(1) as pool, elastic(3, 3, cpus_per_worker=2, elastic_timeout=10) as executor:
        history = History(tmp_path)
        job = pool.submit(executor.run, train_integers, [str(tmp_path), "--pace", "0.1"])
        wait_until(lambda: sizes(history) or job.done())
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(RankFailedError, match=r"Timed out after 10 s with 2 workers.*Asked for: at least 3 x {CPU"):
            job.result(60)
    history.check_nothing_left()
    wait_until(lambda: {each["state"] for each in ray.util.placement_group_table().values()} == {"REMOVED"})


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["shutdown", "callback"])
def test_a_job_that_is_given_up_leaves_nothing(cluster, tmp_path, way):
    history = History(tmp_path)
    with ThreadPoolExecutor(1) as pool, elastic(2, 4) as executor:
        callbacks = [lambda _: 1 / 0] if way == "callback" else []
        job = pool.submit(executor.run, log_and_train, [str(tmp_path)], callbacks=callbacks)
        if way == "shutdown":
            wait_until(lambda: sizes(history) or job.done())
            executor.shutdown()
        with pytest.raises(ZeroDivisionError if way == "callback" else RuntimeError) as raised:
            job.result(60)
        assert way == "callback" or "shutdown() has ended the job" in str(raised.value)
    history.check_nothing_left()
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def log_and_train(folder):
    import horovodlike as hvd

    hvd.init()
    log(os.getpid())
    train_integers(folder, "--pace", "0.1")


@pytest.mark.thorough
def test_a_driver_that_dies_leaves_no_worker(cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        """
import os, sys, time, ray
from pathlib import Path
from horovodlike.ray import RayExecutor
ray.init(address=sys.argv[1], log_to_driver=False)
executor = RayExecutor(RayExecutor.create_settings(60), min_workers=2, max_workers=2)
executor.start()
def wait(folder):
    Path(folder, f"pid.{os.getpid()}").touch()
    time.sleep(600)
executor.run(wait, [sys.argv[2]])
"""
    )
    command = [sys.executable, "-P", str(script), cluster.address, str(tmp_path)]
    with subprocess.Popen(command) as driver:
        wait_until(lambda: len(list(tmp_path.glob("pid.*"))) == 2)
        driver.kill()
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 30)


@pytest.mark.thorough
def test_a_job_through_ray_client(cluster, ray_client, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(
        """
import os, sys, ray
from horovodlike.ray import ElasticRayExecutor
ray.init(sys.argv[1])
seen = []

def train():
    import horovodlike as hvd
    from horovodlike.ray import log
    hvd.init()
    log(hvd.rank())
    return hvd.size(), os.environ["ANSWER"]

settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2)
executor = ElasticRayExecutor(settings, env_vars={"ANSWER": 42})
executor.start()
for _ in range(2):
    assert executor.run(train, callbacks=[seen.append]) == [(2, "42")] * 2
assert seen == [0, 0]
executor.shutdown()
print("done", flush=True)
"""
    )
    command = [sys.executable, "-P", str(script), ray_client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr


@pytest.mark.thorough
def test_an_interrupt_through_ray_client_ends_what_runs(cluster, ray_client, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(
        """
import _thread, sys, threading, time, ray
from pathlib import Path
from horovodlike.ray import RayExecutor
ray.init(sys.argv[1])
folder = sys.argv[2]

def wait():
    Path(folder, "begun").touch()
    time.sleep(600)

def interrupt_when(is_so):
    def watch():
        while not is_so():
            time.sleep(0.1)
        _thread.interrupt_main()
    threading.Thread(target=watch, daemon=True).start()

def states():
    return [each["state"] for each in ray.util.placement_group_table().values()]

executor = RayExecutor(RayExecutor.create_settings(60), min_workers=1, max_workers=1)
executor.start()
for callbacks in ([], [print]):
    interrupt_when(Path(folder, "begun").exists)
    try:
        executor.run(wait, callbacks=callbacks)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    Path(folder, "begun").unlink()
    assert executor.run(lambda: "next") == ["next"]
executor.shutdown()
executor = RayExecutor(RayExecutor.create_settings(60), min_workers=100)
interrupt_when(lambda: "PENDING" in states())
try:
    executor.start()
except KeyboardInterrupt:
    print("interrupted", flush=True)
end = time.monotonic() + 20
while set(states()) != {"REMOVED"} or ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
    assert time.monotonic() < end, "something is left"
    time.sleep(0.1)
"""
    )
    command = [sys.executable, "-P", str(script), ray_client, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.count("interrupted") == 3, done.stdout + done.stderr
