"""The plan that the tasks of a job make, and the environment of their ranks, without Spark."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from horovodlike.errors import ConfigError
from horovodlike.spark import _task
from horovodlike.spark._task import ranks_of


def test_ranks_of_one_host_are_neighbours() -> None:
    assert ranks_of(["b", "a", "b", "a", "c"]) == [0, 2, 1, 3, 4]


def test_a_retried_stage_is_recognised() -> None:
    def member(attempt: int, *earlier: int) -> _task._Member:
        return _task._Member("a", "1", attempt, earlier, {})

    assert not _task._is_retry([member(4, 5), member(5)]), "these see each other"
    assert _task._is_retry([member(6, 4), member(7)])


def test_other_releases_on_executors_are_refused() -> None:
    request = _task.Request("job", "0.2", b"", {}, None, "", 1.0, False)
    assert "0.1 is installed on executor host a, but 0.2" in str(
        _task._why_not(request, [_task._Member("a", "0.1", 0, (), {})])
    )


def test_a_member_tells_its_trouble_and_never_shows_the_key() -> None:
    request = _task.Request("job", "0.2", b"", {}, None, "", 1.0, False)
    members = [_task._Member("a", "0.2", 0, (), {"key": "abc"}), _task._Member("b", "0.2", 1, (), {"trouble": "bad"})]
    assert _task._why_not(request, members) == "bad"
    assert "abc" not in repr(members)
    assert "abc" not in repr(replace(request, secret="abc"))


def test_a_task_that_fails_early_leaves_no_thread() -> None:
    before = {*threading.enumerate()}
    with ExitStack() as stack:
        request = _task.Request("job", "0.2", b"", {"HOROVOD_CYCLE_TIME": "soon"}, None, "", 1.0, False)
        with pytest.raises(ConfigError):
            _task._Task(request, 0, [_task._Member("a", "0.2", 0, (), {"key": "00" * 32})], (), stack)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name == "hvdrun-writer"]


def test_gpus_of_the_task_and_secrets_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("PYTHON_WORKER_FACTORY_SECRET", "_SPARK_AUTH_SECRET", "SPARK_AUTH_SOCKET", "_SPARK_SSL_RPC_KEY_PASSWORD")
    for name in secret:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    made = _task._environment({"A": "b"}, ("2", "3"))
    assert not made.keys() & set(secret)
    assert (made["CUDA_VISIBLE_DEVICES"], made["A"]) == ("2,3", "b")
