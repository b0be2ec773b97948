"""The part of `hvdrun --attach` in a rank, with a profiler of the test: requests, and the hook in the steps."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovodlike._engine import profile, profilers, steps


class Fake:
    """A profiler that writes down what it does, and in which thread."""

    framework, note, is_bound = "fake", "", True

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_running = False

    def _call(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))

    def warm_up(self) -> None:
        self._call("warm_up")

    def start(self) -> None:
        self._call("start")
        self.is_running = True

    def stop(self, *, save: bool) -> None:
        if self.is_running:
            self._call("stop" if save else "discard")
        self.is_running = False

    def export(self, path: Any) -> None:
        path.write_text("{}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    made = Fake()
    engine = SimpleNamespace(
        hvl_start_profile_timeline=lambda path: Path(os.fsdecode(path)).touch(),
        hvl_stop_profile_timeline=lambda: None,
    )
    monkeypatch.setattr(profilers, "choose", lambda folder, all_threads: made)
    monkeypatch.setattr(profile, "lib", engine)
    monkeypatch.setattr(profile, "ops", SimpleNamespace(check=lambda status: None))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    steps.reset()
    yield made
    steps.reset()
    assert steps.hook is None
    assert list(tmp_path.iterdir()) == []


def answers(attachment: profile.Attachment) -> list[dict[str, Any]]:
    return [json.loads(each)["answer"] for each in attachment.answers()]


def arm(attachment: profile.Attachment, number: int, count: int) -> None:
    """Arm a profile, and begin to record in the next step."""
    attachment.take({"id": number, "do": "arm", "steps": count})
    assert answers(attachment) == []
    step = warm_up(attachment)["step"]
    attachment.take({"id": number, "do": "begin", "first": step + 1})
    assert answers(attachment) == [{"id": number, "begun": True}]


def warm_up(attachment: profile.Attachment) -> dict[str, Any]:
    """Mark steps until a profile is armed."""
    for _ in range(9):  # the first of all steps has no time
        assert steps.hook is not None
        steps.mark()
        for answer in answers(attachment):
            armed_: dict[str, Any] = answer["armed"]
            return armed_
    raise AssertionError("it is not armed")


def names(fake: Fake) -> list[str]:
    return [name for name, _ in fake.calls]


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_the_steps_are_recorded(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 2)
    count, _, _ = steps.counted()
    steps.mark()
    steps.mark()
    assert names(fake) == ["warm_up", "start"]
    steps.mark()
    assert names(fake) == ["warm_up", "start", "stop"]
    assert steps.hook is None
    [answer] = answers(attachment)
    assert answer["recorded"]["first_step"] == count + 2 and len(answer["recorded"]["marks"]) == 3
    attachment.cancel()


@pytest.mark.parametrize("before", [0, 2])
def test_steps_that_several_threads_mark_are_refused(fake: Fake, before: int) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 5)
    for _ in range(before):
        steps.mark()
    in_thread(steps.mark)
    steps.mark()
    [answer] = answers(attachment)
    assert answer["failed"].startswith("RuntimeError: several threads mark its steps: call horovodlike.step() once")
    assert names(fake) == ["warm_up", *(["start", "discard"] if before else [])]
    assert steps.hook is None


def test_the_time_of_a_step_is_the_mean_of_some(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers mark one step each in turn."""
    now = [100.0]
    monkeypatch.setattr(steps, "perf_counter", lambda: now[0])
    attachment = profile.Attachment()
    attachment.take({"id": 1, "do": "arm", "steps": 5})
    assert answers(attachment) == []
    for seconds in (0.0, *(0.005, 0.2) * 4):
        assert answers(attachment) == []
        now[0] += seconds
        steps.mark()
    [answer] = answers(attachment)
    assert answer["armed"]["seconds"] == pytest.approx(0.1025)
    attachment.take({"id": 2, "do": "arm", "steps": 5})
    assert answers(attachment) == []
    now[0] += 20.0  # one of slow steps is enough
    steps.mark()
    [answer] = answers(attachment)
    assert answer["armed"]["seconds"] == pytest.approx(20.0)
    attachment.cancel()


def test_a_time_without_steps_has_the_begin_and_the_end_of_the_recording(fake: Fake) -> None:
    attachment = profile.Attachment()
    attachment.take({"id": 1, "do": "arm", "seconds": 0.001})
    assert "armed" in answers(attachment)[0]
    before = time.time()
    attachment.take({"id": 1, "do": "begin", "first": before + 0.001})
    found = answers(attachment)
    while not any("recorded" in each for each in found):
        assert time.time() < before + 60
        found += answers(attachment)
    recorded = found[-1]["recorded"]
    begun, ended = recorded["marks"]
    assert recorded["first_step"] is None and before < begun <= ended <= time.time()
    attachment.cancel()


def test_a_begin_that_is_past_is_not_taken(fake: Fake) -> None:
    attachment = profile.Attachment()
    attachment.take({"id": 1, "do": "arm", "steps": 1})
    assert answers(attachment) == []
    step = warm_up(attachment)["step"]
    steps.mark()
    attachment.take({"id": 1, "do": "begin", "first": step})
    assert answers(attachment) == [{"id": 1, "begun": False}]
    attachment.take({"id": 7, "do": "begin", "first": 100})  # of another session
    attachment.take({"id": 7, "do": "cancel"})
    assert answers(attachment) == []
    attachment.cancel()
    assert names(fake) == ["warm_up"]


def test_a_profile_waits_for_the_end_of_the_one_before(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    attachment.take({"id": 2, "do": "arm", "steps": 1})
    assert answers(attachment) == []  # this thread has not marked a step, so the first profiler runs
    assert names(fake) == ["warm_up", "start"]
    steps.mark()
    assert names(fake) == ["warm_up", "start", "discard"]
    assert answers(attachment) == []
    warm_up(attachment)
    attachment.cancel()


def test_many_clients_while_a_profile_cannot_end(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    for number in range(2, 2 + sys.getrecursionlimit()):
        attachment.take({"id": number, "do": "arm", "seconds": 1})
        assert answers(attachment) == []
    attachment.cancel()
    steps.mark()
    assert names(fake) == ["warm_up", "start", "discard"]


def test_a_profile_does_not_wait_for_ever(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(profile, "monotonic", lambda: now[0])
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    for number, amount, remedy in (
        (2, "steps", "call horovodlike.step() once in each step"),
        (3, "seconds", "its former profile ends at the next one"),
    ):  # the first one would be ended by the next step, which does not come
        attachment.take({"id": number, "do": "arm", amount: 1})
        assert answers(attachment) == []
        now[0] += 11.0
        [answer] = answers(attachment)
        assert answer["failed"].startswith(f"TimeoutError: it has marked no step within 10 s: {remedy}")
        assert answers(attachment) == []
    steps.mark()
    assert names(fake) == ["warm_up", "start", "discard"]


@pytest.mark.parametrize("is_recording", [False, True])
def test_steps_that_end_after_the_begin(fake: Fake, monkeypatch: pytest.MonkeyPatch, is_recording: bool) -> None:
    now = [1000.0]
    monkeypatch.setattr(profile, "monotonic", lambda: now[0])
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    if is_recording:
        steps.mark()
    now[0] += 59.0  # a validation
    assert answers(attachment) == []
    now[0] += 2.0
    [answer] = answers(attachment)
    assert answer["failed"].startswith(
        "TimeoutError: it has marked no step within 60 s: call horovodlike.step() once in each step"
    )
    if is_recording:
        steps.mark()
    assert names(fake) == ["warm_up", *(["start", "discard"] if is_recording else [])]
    assert steps.hook is None


def test_shutdown_stops_the_profiler_that_its_thread_has_started(fake: Fake) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    in_thread(attachment.cancel)
    assert names(fake) == ["warm_up", "start"]
    attachment.close()
    assert names(fake) == ["warm_up", "start", "discard"]


def test_shutdown_by_a_thread_that_does_not_train(fake: Fake, tmp_path: Path) -> None:
    """The next generation waits until the profiler has been stopped."""
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()
    in_thread(attachment.close)
    assert list(tmp_path.iterdir()) == []
    steps.reset()
    following = profile.Attachment()
    following.take({"id": 1, "do": "arm", "steps": 1})
    assert answers(following) == []
    steps.mark()
    assert names(fake) == ["warm_up", "start", "discard"]
    assert answers(following) == []
    warm_up(following)
    following.close()


def test_a_signal_in_the_profiler_reaches_the_thread(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    start = fake.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        steps.mark()
    assert answers(attachment) == [{"id": 1, "failed": "a signal has interrupted the profiler"}]
    assert names(fake) == ["warm_up", "start", "discard"]
    steps.mark()


def test_a_signal_handler_may_shut_down_while_the_state_changes(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    steps.mark()

    def handler() -> float:
        attachment.close()
        return 0.0

    monkeypatch.setattr(profile, "monotonic", handler)  # called under the lock
    steps.mark()
    assert names(fake) == ["warm_up", "start", "discard"]
    assert steps.hook is None


class Mute(Exception):
    """An error of a framework that cannot even be shown."""

    def __str__(self) -> str:
        raise ArithmeticError


def test_nothing_of_a_profiler_reaches_the_training(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise Mute

    attachment = profile.Attachment()
    arm(attachment, 1, 100)
    monkeypatch.setattr(fake, "start", broken)
    steps.mark()
    assert answers(attachment) == [{"id": 1, "failed": "Mute: it has no text"}]


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_what_was_recorded_is_dropped(fake: Fake, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    made: list[weakref.ref[Fake]] = []

    def choose(folder: Path, all_threads: bool) -> Fake:
        chosen = Fake()
        made.append(weakref.ref(chosen))
        return chosen

    monkeypatch.setattr(profilers, "choose", choose)
    attachment = profile.Attachment()
    arm(attachment, 1, 1)
    steps.mark()
    if ends == "failed":
        in_thread(steps.mark)
    steps.mark()
    [answer] = answers(attachment)
    assert answer.keys() == {"id", "recorded" if ends == "cancelled" else "failed"}
    if ends == "cancelled":
        attachment.take({"id": 1, "do": "cancel"})
    gc.collect()
    assert [each() for each in made] == [None]


def test_threads_that_arm_cancel_and_mark_as_they_like(fake: Fake) -> None:
    """The profiler is started and stopped in turn, by the thread that marks."""
    ends = threading.Event()

    def train() -> None:
        while not ends.is_set():
            steps.mark()
            time.sleep(0)  # the other thread may run
        attachment.close()

    attachment = profile.Attachment()
    trainer = threading.Thread(target=train)
    trainer.start()
    choices = random.Random(1)
    while names(fake).count("start") < 50:
        number = choices.randrange(10**6)
        attachment.take({"id": number, "do": "arm", "steps": choices.randrange(1, 100)})
        for _ in range(choices.randrange(200)):
            time.sleep(0)
            for answer in answers(attachment):
                if "armed" in answer:
                    first = answer["armed"]["step"] + choices.randrange(20)
                    attachment.take({"id": number, "do": "begin", "first": first})
        if choices.random() < 0.5:
            attachment.take({"id": number, "do": "cancel"})
    attachment.cancel()
    ends.set()
    trainer.join()
    running = [name for name in names(fake) if name != "warm_up"]
    assert ["stop" if name == "discard" else name for name in running] == ["start", "stop"] * (len(running) // 2)
    assert {thread for _, thread in fake.calls} == {trainer.ident}


def test_a_profile_that_is_too_large(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "MOST_BYTES", 1)
    attachment = profile.Attachment()
    arm(attachment, 1, 1)
    steps.mark()
    steps.mark()
    assert answers(attachment) == [{"id": 1, "failed": "ValueError: its profile is larger than 0 MiB: record less"}]
    attachment.cancel()
