"""The registry and the configuration of a tf.data service; tests/compat runs a whole one."""

from __future__ import annotations

import dataclasses
import stat
import threading

import pytest
import tensorflow as tf

from horovodlike.errors import RendezvousError
from horovodlike.tensorflow.data._registry import ComputeClient, ComputeService
from horovodlike.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service


@pytest.fixture
def service():
    service = ComputeService()
    yield service
    service.close()


@pytest.fixture
def config(service):
    return TfDataServiceConfig(2, 2, "compute", service.addresses(), service.key, timeout=30)


def test_a_value_comes_to_those_who_wait_for_it(config):
    client, found = config.compute_client(), []

    def wait():
        found.append(config.compute_client().wait_for_dispatcher_registration(1, 30))
        config.compute_client().wait_for_dispatcher_worker_registration(1, 30)
        config.compute_client().wait_for_shutdown()

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for each in waiting:
        each.start()
    client.register_dispatcher(0, "grpc://another:1")
    client.register_dispatcher(1, "grpc://here:2")
    client.register_worker_for_dispatcher(1, 3)
    client.register_worker_for_dispatcher(1, 2)
    client.shutdown()
    for each in waiting:
        each.join(30)
    assert found == ["grpc://here:2"] * 3
    assert client.wait_for_dispatcher_registration(0, 30) == "grpc://another:1"


def test_a_wait_ends_in_time_and_says_for_what(config):
    config.compute_client().register_worker_for_dispatcher(0, 0)
    with pytest.raises(TimeoutError, match=r"^Timed out waiting for dispatcher 1 to register within 0.1 s: look at"):
        config.compute_client().wait_for_dispatcher_registration(1, 0.1)
    with pytest.raises(TimeoutError, match="worker 1 of dispatcher 0 to start"):
        config.compute_client().wait_for_dispatcher_worker_registration(0, 0.3)


def test_without_the_key_nothing_is_answered(service, config):
    stranger = ComputeClient(service.addresses(), b"\1" * 32)
    with pytest.raises(RendezvousError, match=r"the registry of the tf.data service at .* cannot be reached"):
        stranger.shutdown()
    with pytest.raises(TimeoutError):
        config.compute_client()._ask({"name": "shutdown"}, 0.1)


@pytest.mark.parametrize("value", [1, "\u00e4", ["a"], {"a": 1}, False])
def test_a_value_that_is_none_ends_its_own_connection(config, value):
    client = config.compute_client()
    with pytest.raises(RendezvousError, match="cannot be reached"):
        client._ask({"name": "dispatcher 0", "value": value}, 30)
    client.register_dispatcher(0, "grpc://here:1")
    assert client.wait_for_dispatcher_registration(0, 30) == "grpc://here:1"


def test_the_key_is_not_shown(config):
    assert config.key.hex() not in repr(config) and repr(config.key) not in repr(config)


def test_the_address_is_that_which_leads_to_the_registry(service, config):
    known = {host for of_interface in service.addresses().values() for host, _ in of_interface}
    assert config.compute_client().own_address() in known


def test_a_registry_that_has_ended(service, config):
    service.close()
    with pytest.raises(RendezvousError, match="cannot be reached: .*refused.*Do the processes of compute_worker still"):
        config.compute_client().register_dispatcher(0, "grpc://here:1")


def test_the_file(config, tmp_path):
    path = tmp_path / "service.json"
    found = []
    reading = threading.Thread(target=lambda: found.append(TfDataServiceConfig.read(str(path), True)))
    reading.start()
    config.write(str(path))
    reading.join(30)
    assert found == [config]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(str(tmp_path / "another"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dispatchers": 0}, "The number of dispatchers must be larger than 0: 0"),
        ({"workers_per_dispatcher": 0}, "The number of workers per dispatcher must be larger than 0: 0"),
        ({"dispatcher_side": "here"}, "dispatcher_side must be one of compute, training, got 'here'"),
    ],
)
def test_what_cannot_be_used(config, wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **wrong)


def test_a_dispatcher_that_ends_too_early_is_refused(config):
    config = dataclasses.replace(config, dispatcher_side="training")
    dataset = tf.data.Dataset.range(3)
    with pytest.raises(RuntimeError, match="use the dataset inside of `with tf_data_service"):
        dataset.send_to_data_service(config, 0)
    assert tf.data.Dataset.send_to_data_service is send_to_data_service
