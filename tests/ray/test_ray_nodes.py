"""The nodes of an elastic job without a cluster: what is asked of Ray, and what happens if that fails."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from horovodlike.launcher.errors import HostsError
from horovodlike.ray import callers, elastic_adapter
from horovodlike.ray.adapter import CLOSE_SECONDS, StartOptions
from horovodlike.ray.callers import Callers, JobHosts
from horovodlike.ray.elastic_adapter import ElasticAdapter, ElasticOptions
from horovodlike.ray.strategy import Demand

pytestmark = pytest.mark.slow


def made(**rest):
    return Callers(Demand(1, {"CPU": 2}), None, None, None, 1.0, **rest)


def test_a_part_of_a_node_is_used_when_its_room_has_stayed_the_same():
    watcher = made()
    rooms = [(4.0, 0.0), (1.0, 1.0), (2.0, 1.5), (2.0, 3.4), (2.0, 3.6), (4.0, 4.0)]
    found = [watcher._room("a", {"CPU": free}, {"CPU": 4.0}, now) for free, now in rooms]
    assert found == [(2, True), (0, False), (1, False), (1, False), (1, True), (2, True)]


def test_the_room_beside_an_actor_counts_when_it_has_stayed_the_same_since_that_runs():
    watcher = made()
    caller = callers._Caller(None, "a", "a", 1, "not yet", 0.0)
    watcher._callers["call"] = caller
    assert [watcher._room("a", {"CPU": 4.0}, {"CPU": 4.0}, now) for now in (0.0, 3.0)] == [(2, False)] * 2
    caller.started = None
    assert [watcher._room("a", {"CPU": 4.0}, {"CPU": 4.0}, now)[1] for now in (3.5, 4.9, 5.1)] == [False, False, True]


class Discovery:
    """Answers with what it is told, or raises it."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def find_available_hosts_and_slots(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("answer", [KeyError("no inventory"), None, {"1": "many"}])
def test_an_error_of_the_discovery_at_the_first_look_ends_the_job(answer):
    with pytest.raises(HostsError, match=r"the discovery Discovery cannot say which nodes may be used: \w+Error") as e:
        made(discovery=Discovery(answer))._ask_discovery()
    assert e.value.__cause__ is answer or not isinstance(answer, Exception)


def test_later_errors_of_the_discovery_are_warnings(caplog):
    watcher = made(discovery=Discovery({"1": 2}, KeyError("x"), KeyError("x"), {"1": 3}, KeyError("x")))
    with caplog.at_level(logging.WARNING):
        limits = []
        for _ in range(5):
            watcher._ask_discovery()
            limits.append(watcher._limits)
    assert limits == [{"1": 2}] * 3 + [{"1": 3}] * 2
    warning = "the discovery Discovery cannot say which nodes may be used; they stay as they are: KeyError: 'x'"
    assert [each.getMessage() for each in caplog.records] == [warning] * 2


def replace_ray(monkeypatch, **functions):
    monkeypatch.setattr(callers, "ray", SimpleNamespace(is_initialized=lambda: True, **functions))


def test_a_job_that_is_over_starts_nothing_and_says_nothing(monkeypatch, caplog):
    hosts = JobHosts("127.0.0.1")
    watcher = Callers(Demand(1, {"CPU": 1}), None, hosts, None, 1.0)
    watcher._callers["call"] = caller = callers._Caller(None, "a", "a", 1, None, 0.0)

    def wait(calls, **_):  # the actor ends because the job does
        hosts.note_end()
        return calls, []

    replace_ray(monkeypatch, wait=wait)
    watcher.stop()
    for _ in range(2):
        watcher.watch()
    hosts.close()
    assert watcher._callers == {"call": caller} and not caplog.records


def test_a_node_whose_actor_ends_rests(monkeypatch, caplog):
    def get(call):
        if isinstance(call, Exception):
            raise call
        return call

    watcher = made()
    replace_ray(monkeypatch, get=get, kill=lambda _: None)

    def end(call, node, started=None, leaves=False):
        watcher._callers[call] = callers._Caller(None, node, node, 1, started, 0.0, leaves)
        watcher._take_end(call, 100.0)
        return watcher._troubles.get(node)

    assert end((0, ""), "well") is None
    assert end((143, "drained"), "leaves", leaves=True) is None
    assert end(RayActorError(), "leaves", leaves=True) is None
    assert end((1, "wrong key"), "refuses") == callers._Trouble(1, 105.0, "wrong key")
    assert end((1, "wrong key"), "refuses") == callers._Trouble(2, 110.0, "wrong key")
    assert end(RayActorError(), "lost") == callers._Trouble(1, 105.0, "")
    assert end(RayActorError(), "never started", started="not yet").refusal
    assert end(RayTaskError("call_in", "", MemoryError()), "full").refusal == "RayTaskError: "
    assert not watcher._callers and len(caplog.records) == 5


def test_an_interrupt_does_not_keep_the_actors(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    killed = []

    def kill(handle):
        killed.append(handle)
        if handle == "b":
            raise ConnectionError

    replace_ray(monkeypatch, wait=interrupt)
    monkeypatch.setattr("ray.kill", kill)
    watcher = made()
    watcher._asked = SimpleNamespace(release=lambda: killed.append("group"))
    for name in "abc":
        watcher._callers[name] = callers._Caller(name, name, name, 1, None, 0.0)
    with pytest.raises(KeyboardInterrupt):  # not the ConnectionError
        watcher.close()
    assert sorted(killed) == ["a", "b", "c", "group"]


@pytest.fixture
def adapter(monkeypatch):
    """An adapter whose watcher fails at once, and whose end fails, too."""

    class Failing:
        def __init__(self, *_):
            pass

        def watch(self):
            raise HostsError("no node of the cluster can take part")

        def stop(self):
            pass

        def close(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(elastic_adapter, "Callers", Failing)
    monkeypatch.setattr(elastic_adapter.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return ElasticAdapter(Demand(1, {"CPU": 1}), StartOptions(5.0, 5.0), ElasticOptions())


def test_an_end_that_fails_leaves_nothing(adapter):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            adapter.run(int, (), {})
    adapter.shutdown()


def test_a_shutdown_before_the_call_has_hosts_ends_it(adapter, monkeypatch):
    class Late(JobHosts):
        def __init__(self, address):
            super().__init__(address)
            adapter.shutdown()

    monkeypatch.setattr(elastic_adapter, "JobHosts", Late)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"shutdown\(\) has ended the job"):
            adapter.run(int, (), {})
        assert time.monotonic() - began < CLOSE_SECONDS / 2, "it waited for itself"


@pytest.mark.parametrize(("share", "gpus"), [(True, 0), (False, 2)])
def test_a_variable_of_the_driver_does_not_say_who_sees_which_gpus(adapter, monkeypatch, share, gpus):
    asked = []
    monkeypatch.setattr(elastic_adapter, "run", lambda *_, gpus_per_rank, **__: asked.append(gpus_per_rank))
    adapter = ElasticAdapter(Demand(1, {"CPU": 1, "GPU": 2}), StartOptions(5.0, 5.0, None, share), ElasticOptions())
    adapter._launch(int, (), {}, None)
    assert asked == [gpus]
