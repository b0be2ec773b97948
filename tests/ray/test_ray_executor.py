"""`RayExecutor` on a cluster of two nodes: results, environment, callbacks, errors of functions, restart."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from horovodlike.ray import RayExecutor
from horovodlike.ray.adapter import ends_with

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SETTINGS = RayExecutor.create_settings(timeout_s=60, placement_group_timeout_s=100)
SIZE = 4


class Counter:
    """A stateful executable."""

    def __init__(self, start, step=1):
        self.value, self.step = start, step

    def add(self):
        self.value += self.step
        return self.value


@pytest.fixture(scope="module")
def executor(shared_cluster):
    made = RayExecutor(SETTINGS, num_workers=SIZE, use_gpu=True)
    made.start(Counter, [10], {"step": 5}, extra_env_vars={"HOROVODLIKE_LOG_LEVEL": "error", "ANSWER": 42})
    yield made
    made.shutdown()


def describe(*names):
    import horovodlike as hvd

    hvd.init()
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    total = hvd.allreduce(np.full(5, hvd.rank(), dtype=np.float32), op=hvd.Sum)
    hvd.shutdown()
    return place, total.tolist(), {name: os.environ.get(name) for name in names}


def test_each_rank_has_its_place_and_its_result(executor):
    for _ in range(2):  # init() may be repeated in later calls
        results = executor.run(describe, args=["HOROVOD_RANK", "HOROVOD_HOSTNAME", "CUDA_VISIBLE_DEVICES", "ANSWER"])
        assert [place for place, _, _ in results] == [
            *((0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2)),
            *((2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)),
        ]
        assert all(total == [6.0] * 5 for _, total, _ in results)
    variables = [each for _, _, each in results]
    assert [each["HOROVOD_RANK"] for each in variables] == ["0", "1", "2", "3"]
    assert len({each["HOROVOD_HOSTNAME"] for each in variables}) == 2
    assert all(sorted(each["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"] for each in variables)
    assert {each["ANSWER"] for each in variables} == {"42"}


def test_the_gpu_of_the_local_rank_is_the_workers_own(executor):
    def own():
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return gpus, os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ["HOROVOD_LOCAL_RANK"])]

    assert all(gpus == [seen] for gpus, seen in executor.run(own))


def test_functions_run_on_the_main_thread(executor):
    assert executor.run(lambda: threading.current_thread() is threading.main_thread()) == [True] * SIZE


def test_arguments(executor):
    assert executor.run(lambda a, b: (a, b), args=[1], kwargs={"b": 2}) == [(1, 2)] * SIZE
    references = executor.run_remote(lambda a: a, args=["x"])
    assert ray.get(references) == ["x"] * SIZE


def test_the_executable_keeps_its_state(executor):
    before = executor.execute(lambda counter: counter.value)
    assert executor.execute(lambda counter: counter.add()) == [value + 5 for value in before]
    assert executor.execute_single(lambda counter: counter.value) == before[0] + 5


def test_callbacks_get_what_rank_0_logs(executor):
    def train(steps):
        from horovodlike.ray import log

        for step in range(steps):
            log({"step": step, "rank": int(os.environ["HOROVOD_RANK"])})

    seen: list[dict[str, int]] = []
    executor.run(train, args=[3], callbacks=[seen.append])
    assert seen == [{"step": step, "rank": 0} for step in range(3)]
    executor.run(train, args=[3])  # without callbacks nothing is sent
    executor.execute(lambda _: train(1), callbacks=[seen.append, seen.append])
    assert len(seen) == 5


def test_an_error_on_one_rank_ends_the_call_of_all(executor):
    def fail():
        import horovodlike as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("no such thing")
        hvd.allreduce(np.ones(3))  # would wait for rank 1

    began = time.monotonic()
    with pytest.raises(KeyError, match="no such thing") as raised:
        executor.run(fail)
    assert time.monotonic() - began < 10
    assert "rank 1 of 4" in str(raised.value)
    assert [total for _, total, _ in executor.run(describe)] == [[6.0] * 5] * SIZE


def test_a_call_that_was_given_up_is_named(executor, tmp_path):
    def wait_for_a_file():
        from horovodlike.ray import log

        log({"begun": True})
        while not (tmp_path / "end").exists():
            time.sleep(0.01)

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        executor.run(wait_for_a_file, callbacks=[fail])
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"still runs on ranks 0, 1, 2, 3: wait until it ends, or call shutdown"):
        executor.run(describe)
    assert time.monotonic() - began < 5
    (tmp_path / "end").touch()
    references = executor._adapter._adapter._pending  # when they have ended, the next call is taken
    ray.wait(list(references), num_returns=len(references))
    assert executor.run(lambda: 1) == [1] * SIZE


def test_a_lost_queue_hides_no_error():
    def poll():
        raise RayActorError

    with pytest.raises(KeyError), ends_with(poll):
        raise KeyError
    with pytest.raises(RayActorError), ends_with(poll):
        pass


def test_an_unpicklable_result_is_an_error(executor):
    with pytest.raises(TypeError, match="cannot pickle"):
        executor.run(lambda: threading.Lock())
    assert executor.run(lambda: 1) == [1] * SIZE


def test_an_unpicklable_function_is_an_error(executor):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        executor.run(lambda: lock.acquire())


def test_a_second_start_is_an_error(executor):
    with pytest.raises(RuntimeError, match="started already"):
        executor.start()


def test_too_few_resources_are_an_error(executor):
    groups = set(ray.util.placement_group_table())
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"Asked for: 3 x {CPU: 1}, each on a node.* the cluster has 2 nodes"):
        RayExecutor(settings, num_hosts=3).start()
    assert time.monotonic() - began < 10
    left = {name: each["state"] for name, each in ray.util.placement_group_table().items() if name not in groups}
    assert set(left.values()) == {"REMOVED"}
