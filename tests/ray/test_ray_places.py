"""The parts that need no cluster: GPUs of workers, what is asked of Ray, wrong arguments."""

from __future__ import annotations

import pytest

import horovodlike.ray
from horovodlike.ray import ElasticRayExecutor, RayExecutor, runner
from horovodlike.ray.adapter import visible_gpus
from horovodlike.ray.strategy import Demand, order_by_node, room_for
from horovodlike.ray.worker import WorkerFacts

pytestmark = pytest.mark.slow


def test_workers_of_a_node_become_neighbours():
    assert order_by_node(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    assert order_by_node([]) == []


def _worker(node, *gpus):
    return WorkerFacts(node, "10.0.0.1", 1, gpus)


def test_a_worker_sees_the_gpus_of_the_job_on_its_node():
    workers = [_worker("a", "3"), _worker("a", "1"), _worker("b", "GPU-x"), _worker("c")]
    assert visible_gpus(workers, share=True) == ["3,1", "3,1", "GPU-x", ""]
    assert visible_gpus(workers, share=False) == ["3", "1", "GPU-x", ""]
    workers = [_worker("a", "0", "1"), _worker("a", "2", "3")]  # the first GPU of each: local rank 1 takes GPU 2
    assert visible_gpus(workers, share=True) == ["0,2,1,3"] * 2
    assert visible_gpus(workers, share=False) == ["0,1", "2,3"]


def test_bundles():
    each = {"CPU": 2, "GPU": 1}
    assert Demand(3, each).bundles == [each] * 3 and Demand(3, each).strategy == "PACK"
    spread = Demand(6, each, hosts=2)
    assert spread.bundles == [{"CPU": 6, "GPU": 3}] * 2 and spread.strategy == "STRICT_SPREAD"
    assert str(spread) == "2 x {CPU: 6, GPU: 3}, each on a node of its own (STRICT_SPREAD)"


def test_the_room_of_bundles():
    assert room_for({"CPU": 2}, [{"CPU": 3}, {"CPU": 4}, {"GPU": 1}]) == 3
    assert room_for({"CPU": 0, "GPU": 1}, [{"CPU": 3, "GPU": 2}]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Either num_workers or num_hosts"),
        ({"num_workers": 2, "num_hosts": 1}, "Either num_workers or num_hosts"),
        ({"max_workers": 2}, "`max_workers` provided without any positive `min_workers`"),
        ({"num_workers": 2, "min_workers": 1}, "Both `min_workers` and `num_workers` provided"),
        ({"min_workers": 1, "num_hosts": 1}, "Both `min_workers` and `num_hosts` provided"),
        ({"min_workers": 2, "max_workers": 1}, "max_workers must be >= 2: Got 1"),
        ({"min_workers": -1}, "min_workers must be >= 1: Got -1"),
        ({"min_workers": 0}, "min_workers must be >= 1: Got 0"),
        ({"min_workers": 1, "reset_limit": -1}, "reset_limit=-1 cannot be used"),
        ({"min_workers": 1, "cooldown_range": [3]}, r"cooldown_range=\[3\] cannot be used"),
        ({"min_workers": 1, "elastic_timeout": "x"}, "elastic_timeout='x' cannot be used"),
        ({"min_workers": 1, "override_discovery": False}, "needs a RayHostDiscovery as settings.discovery: Got None"),
        ({"num_workers": 0}, "num_workers must be >= 1: Got 0"),
        ({"num_workers": 1.5}, "num_workers must be >= 1: Got 1.5"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "gpus_per_worker is set, but use_gpu is False"),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": -1}, "gpus_per_worker must be >= 1: Got -1"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, "num_workers_per_host must be >= 1"),
        ({"num_workers": 1, "cpus_per_worker": 0}, "cpus_per_worker must be >= 1 where workers have no GPU"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayExecutor(RayExecutor.create_settings(), **arguments)


def test_settings_have_horovods_names():
    settings = RayExecutor.create_settings(timeout_s=5, placement_group_timeout_s=7, nics={"eth0"}, verbose=2)
    assert (settings.timeout_s, settings.placement_group_timeout_s, settings.nics) == (5, 7, {"eth0"})
    with pytest.warns(DeprecationWarning, match="ssh_str has no effect"):
        RayExecutor.create_settings(30, ssh_str="key")


def test_settings_of_elastic_jobs_have_horovods_names():
    with pytest.warns(DeprecationWarning, match="min_np is deprecated, use min_num_proc instead"):
        settings = ElasticRayExecutor.create_settings(min_np=2, max_num_proc=3, timeout_s=5, nics="eth0", verbose=True)
    assert (settings.min_num_proc, settings.max_num_proc, settings.elastic_timeout) == (2, 3, 600)
    assert (settings.timeout_s, settings.nics, settings.placement_group_timeout_s) == (5, "eth0", 100)
    with pytest.raises(ValueError, match="gpus_per_slot is set, but use_gpu is False"):
        ElasticRayExecutor(settings, gpus_per_slot=1)
    settings.max_num_proc = 1
    with pytest.raises(ValueError, match="max_num_proc must be >= 2: Got 1"):
        ElasticRayExecutor(settings)
    with pytest.raises(ValueError, match="min_num_proc must be >= 1: Got 0"):
        ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=0))
    with pytest.raises(ValueError, match=r"cooldown_range=\[3\] cannot be used"):
        ElasticRayExecutor(ElasticRayExecutor.create_settings(cooldown_range=[3]))


@pytest.mark.parametrize("create", [RayExecutor.create_settings, ElasticRayExecutor.create_settings])
def test_settings_without_effect_are_named_where_they_are_given(create):
    with pytest.warns(DeprecationWarning, match=r"create_settings\(\): ssh_identity_file has no effect") as warnings:
        assert create(ssh_identity_file="key").ssh_identity_file == "key"
    assert [each.filename for each in warnings] == [__file__]


def test_settings_of_elastic_jobs_take_those_that_horovod_passes_on():
    with pytest.warns(DeprecationWarning, match="ssh_port has no effect"):
        ElasticRayExecutor.create_settings(ssh_port=22, prefix_output_with_timestamp=None)
    with pytest.raises(TypeError, match=r"create_settings\(\) got an unexpected keyword argument 'max_num_procs'"):
        ElasticRayExecutor.create_settings(max_num_procs=2)


def test_workers_get_horovods_names_before_an_executable(monkeypatch):
    class Adapter:
        def start(self, executable, *_):
            started.append(executable)

    started = []
    monkeypatch.setattr(runner, "named", lambda function: ("named", function))
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=1)
    executor._kind = (Adapter,)
    executor.start(dict)
    assert started == [("named", dict)]


@pytest.mark.parametrize("elastic", [False, True])
def test_a_call_without_workers_is_an_error(elastic):
    executor = RayExecutor(RayExecutor.create_settings(), **{"min_workers" if elastic else "num_workers": 1})
    for call in (executor.run, executor.run_remote, executor.execute, executor.execute_single):
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            call(print)
    executor.shutdown()


def test_exports():
    names = ["BaseHorovodWorker", "ElasticRayExecutor", "HorovodlikeConfig", "RayExecutor", "log"]
    assert horovodlike.ray.__all__ == names
    horovodlike.ray.log({"loss": 1.0})  # does nothing outside a worker
    with pytest.raises(AttributeError, match="no attribute 'ElasticExecutor'"):
        _ = horovodlike.ray.ElasticExecutor
