"""The part of `hvdrun --attach` in a rank: its requests, the hook in the steps, and the profilers."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.ranks import RankPool

LIMIT_S = 60.0


class Torch(ModuleType):
    """PyTorch with a profiler of which there is one, which must be stopped by the thread that has started it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.is_on = False
        self.text = '{"traceEvents": [{"cat": "x"}], "baseTimeNanoseconds": 5000}'
        self.calls: list[tuple[str, int]] = []
        self.errors: dict[tuple[str, int], BaseException] = {}  # raised by a call, of which this is the number
        state = SimpleNamespace(_is_profiler_enabled=False)
        self.autograd = SimpleNamespace(profiler=state, _profiler_enabled=lambda: self.is_on)
        self.profiler = SimpleNamespace(profile=type("profile", (), {"__new__": lambda cls: self}))

    def _call(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))
        error = self.errors.pop((name, self.names.count(name)), None)
        if error is not None:
            raise error

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def __enter__(self) -> None:
        assert not self.is_on
        self.is_on = True
        self._call("start")

    def __exit__(self, *exception: object) -> None:
        self._call("stop")
        self.is_on = False

    def export_chrome_trace(self, path: str) -> None:
        self._call("export")
        Path(path).write_text(self.text)


class Rank:
    """An `Attachment`, a profiler of the test, and the steps of this thread."""

    def __init__(self, torch: Torch) -> None:
        from horovodlike._engine import steps
        from horovodlike._engine.profile import Attachment

        self.torch = torch
        self.steps = steps
        self.attachment = Attachment()

    def ask(self, number: int, what: str, **more: Any) -> Rank:
        self.attachment.take({"id": number, "do": what, **more})
        return self

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer."""
        deadline = time.monotonic() + LIMIT_S
        while (found := next(self.attachment.answers(), None)) is None:
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.001)
        return found

    def arm(self, number: int, amount: int, after: int = 1) -> int:
        """Arm a profile that begins some steps later; return the number of the last step."""
        last = self.steps.counted()[0]
        self.ask(number, "profile", first=last + after, steps=amount)
        self.await_hook()
        return last

    def await_hook(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.steps.hook is None:
            assert time.monotonic() < deadline, "not armed"
            time.sleep(0.001)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.steps.mark()


@contextlib.contextmanager
def attached(has_torch: bool = True) -> Iterator[Rank]:
    """Have a profiler of the test, or none; check that nothing is left, neither a hook, nor a thread, nor a file."""
    before = sys.modules.pop("torch", None)
    torch = Torch()
    if has_torch:
        sys.modules["torch"] = torch
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            rank = Rank(torch)
            rank.step(2)
            yield rank
            rank.attachment.close()
            assert rank.steps.hook is None and not rank.torch.is_on
            assert not [each.name for each in threading.enumerate() if each.name == "horovodlike-profile"]
            assert list(Path(folder).iterdir()) == []
        finally:
            tempfile.tempdir = None
            sys.modules.pop("torch", None)
            if before is not None:
                sys.modules["torch"] = before


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.fixture
def run(ranks: Callable[[int], RankPool]) -> Callable[[Callable[[], None]], None]:
    return lambda function: ranks(1).run(function) and None


def _record() -> None:
    with attached() as rank:
        last = rank.arm(1, 2)
        rank.step(3)
        answer = rank.answer()
        recorded = answer["recorded"]
        assert (answer["id"], recorded["framework"], recorded["first_step"]) == (1, "torch", last + 2)
        assert len(recorded["marks"]) == 3 and recorded["marks"] == sorted(recorded["marks"])
        assert rank.torch.calls[:4] == [(name, threading.get_ident()) for name in ("start", "stop") * 2]
        text = base64.b64decode(rank.ask(2, "read", file="trace.json", offset=0).answer()["part"])
        assert json.loads(text) == {"epoch_us": 5, **json.loads(rank.torch.text)}
        assert len(text) == recorded["sizes"]["trace.json"]
        assert base64.b64decode(rank.ask(3, "read", file="trace.json", offset=5).answer()["part"]) == text[5:]
        assert "there is no file" in rank.ask(4, "read", file="../x", offset=0).answer()["failed"]
        rank.ask(5, "cancel").ask(6, "read", file="trace.json", offset=0)
        assert "its profile has been cancelled" in rank.answer()["failed"]


def test_the_thread_that_marks_the_steps_records_them(run: Callable[[Callable[[], None]], None]) -> None:
    run(_record)


def _record_seconds() -> None:
    with attached(has_torch=False) as rank:
        before = time.time()
        recorded = rank.ask(1, "profile", ahead=0.01, seconds=0.01).answer()["recorded"]
        assert (recorded["framework"], recorded["first_step"]) == ("stacks", None)
        began, ended = recorded["marks"]
        assert before < began < ended < time.time()
        rank.ask(2, "profile", ahead=0.0, seconds=1000).await_hook()  # ended by shutdown()


def test_some_seconds_are_recorded_without_steps(run: Callable[[Callable[[], None]], None]) -> None:
    run(_record_seconds)


def _fail() -> None:
    with attached() as rank:
        rank.ask(1, "profile", first=1, steps=5).await_hook()
        rank.step(1)
        assert "step 2 has begun before the request came: try again" in rank.answer()["failed"]
        rank.arm(2, 5)
        rank.step(3)
        in_thread(rank.steps.mark)
        rank.step(1)
        assert "several threads mark its steps: call horovodlike.step() once" in rank.answer()["failed"]
        for call in (("start", 1), ("start", 2), ("stop", 1), ("stop", 2), ("export", 1)):  # the first ones warm up
            rank.torch.calls.clear()
            rank.torch.errors[call] = ArithmeticError("broken")
            rank.arm(3, 1)
            rank.step(3)
            assert rank.answer() == {"id": 3, "failed": "ArithmeticError: broken"}
            assert not rank.torch.is_on
        rank.torch.text = '{"traceEvents": []}'
        rank.arm(4, 1)
        rank.step(2)
        assert "PyTorch's profiler has recorded nothing" in rank.answer()["failed"]
        rank.torch.is_on = True  # the script has started its own one
        rank.arm(5, 1)
        rank.step(1)
        assert "another profiler is running in this process, so the script" in rank.answer()["failed"]
        assert rank.torch.is_on
        rank.torch.is_on = False


def test_what_goes_wrong_is_answered_and_does_not_reach_the_training(
    run: Callable[[Callable[[], None]], None],
) -> None:
    run(_fail)


def _interrupt() -> None:
    with attached() as rank:
        rank.torch.errors["start", 2] = KeyboardInterrupt()
        rank.arm(1, 1)
        with pytest.raises(KeyboardInterrupt):
            rank.step(1)
        assert rank.answer()["failed"] == "RuntimeError: a signal has interrupted the profiler"


def test_a_signal_in_the_profiler_reaches_the_thread(run: Callable[[Callable[[], None]], None]) -> None:
    run(_interrupt)


def _replace() -> None:
    with attached() as rank:
        rank.arm(1, 100)
        rank.step(1)
        rank.ask(1, "cancel")
        assert rank.torch.is_on  # this thread has to stop it
        last = rank.steps.counted()[0]
        rank.ask(2, "profile", first=last + 2, steps=1)
        rank.step(1)
        assert not rank.torch.is_on
        rank.await_hook()
        rank.step(2)
        assert (cancelled := rank.answer())["id"] == 1 and "cancelled" in cancelled["failed"]  # the monitor ignores it
        assert rank.answer()["recorded"]["first_step"] == last + 3
        assert rank.torch.names[:6] == ["start", "stop"] * 3


def test_a_profile_waits_for_the_end_of_the_one_before(run: Callable[[Callable[[], None]], None]) -> None:
    run(_replace)


def _shut_down() -> None:
    with attached() as rank:
        rank.arm(1, 100)
        rank.step(1)
        in_thread(rank.attachment.close)  # by a thread that does not train
        assert rank.torch.is_on
        rank.step(1)
        assert not rank.torch.is_on
        rank.arm(2, 100)
        rank.step(1)
        assert rank.torch.is_on
        rank.attachment.close()
        assert not rank.torch.is_on


def test_shutdown_ends_a_profile(run: Callable[[Callable[[], None]], None]) -> None:
    run(_shut_down)


def _disturb() -> None:
    """Arm and cancel as it comes, while another thread marks steps."""
    ends = threading.Event()

    def train() -> None:
        while not ends.is_set():
            rank.step(1)
            time.sleep(0)  # the other thread may run
        rank.attachment.close()

    with attached() as rank:
        trainer = threading.Thread(target=train)
        trainer.start()
        choices = random.Random(1)
        deadline = time.monotonic() + LIMIT_S
        while rank.torch.names.count("start") < 100 and time.monotonic() < deadline:
            first = rank.steps.counted()[0] + choices.randrange(100)
            rank.ask(1, "profile", first=first, steps=choices.randrange(1, 50))
            for _ in range(choices.randrange(200)):
                time.sleep(0)
            if choices.random() < 0.5:
                rank.ask(1, "cancel")
        ends.set()
        trainer.join()
        running = [name for name in rank.torch.names if name != "export"]
        assert len(running) >= 200
        assert running == ["start", "stop"] * (len(running) // 2)
        assert {thread for name, thread in rank.torch.calls if name != "export"} == {trainer.ident}


def test_a_profile_that_is_cancelled_at_any_time(run: Callable[[Callable[[], None]], None]) -> None:
    run(_disturb)


def test_a_trace_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from horovodlike._engine import profilers

    def export(path: str) -> None:
        with Path(path).open("wb") as file:
            file.truncate(profilers.MOST_BYTES + 1)

    torch = Torch()
    torch.export_chrome_trace = export  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "torch", torch)
    profiler = profilers.choose(all_threads=False)
    profiler.warm_up()
    with pytest.raises(ValueError, match="its profile is larger than 256 MiB: record less"):
        profiler.export(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_a_version_of_pytorch_that_profiles_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from horovodlike._engine import profilers

    def config(**options: Any) -> None:
        raise TypeError(*options)

    inner = ModuleType("torch._C._profiler")
    inner._ExperimentalConfig = config  # type: ignore[attr-defined]
    for name, module in (("torch", Torch()), ("torch._C", ModuleType("torch._C")), (inner.__name__, inner)):
        monkeypatch.setitem(sys.modules, name, module)
    assert profilers.choose(all_threads=False).framework == "torch"
    chosen = profilers.choose(all_threads=True)
    assert chosen.framework == "stacks" and "with --steps" in chosen.note
    chosen.start()
    chosen.stop()
    chosen.export(tmp_path / "trace.json")  # the shortest profile has samples
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert any(name.startswith("test_a_version_of_pytorch_that_profiles_one_thread (") for name in names), names
