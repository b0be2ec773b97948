"""The profilers of a rank, with frameworks of the test."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from monitors import LIMIT_S

from horovodlike._engine import profilers


class Torch(ModuleType):
    """PyTorch with a profiler of which there is one."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.is_on = False
        self.text = '{"traceEvents": [{"cat": "x"}], "baseTimeNanoseconds": 5000}'
        self.trouble: dict[str, BaseException] = {}
        of_thread = SimpleNamespace(_is_profiler_enabled=False)
        self.autograd = SimpleNamespace(profiler=of_thread, _profiler_enabled=lambda: self.is_on)
        self.profiler = SimpleNamespace(profile=type("profile", (), {"__new__": lambda cls: self}))

    def __enter__(self) -> None:
        assert not self.is_on
        self.is_on = True
        self._fail("start")

    def __exit__(self, *exception: object) -> None:
        self._fail("stop")
        self.is_on = False

    def _fail(self, where: str) -> None:
        if where in self.trouble:
            raise self.trouble.pop(where)

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(self.text)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


class TensorFlow(ModuleType):
    """TensorFlow with a profiler of which there is one."""

    def __init__(self) -> None:
        super().__init__("tensorflow")
        self.saved: list[bool] = []
        self.is_on = False
        self.errors = SimpleNamespace(AlreadyExistsError=KeyError)
        self.profiler = SimpleNamespace(experimental=self)

    def start(self, folder: str) -> None:
        if self.is_on:
            raise self.errors.AlreadyExistsError
        self.is_on = True

    def stop(self, save: bool = True) -> None:
        assert self.is_on
        self.is_on = False
        self.saved.append(save)


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> TensorFlow:
    made = TensorFlow()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", made)
    planes = SimpleNamespace(XSpace=SimpleNamespace(FromString=lambda text: SimpleNamespace(planes=[])))
    monkeypatch.setitem(sys.modules, "tensorflow.tsl.profiler.protobuf", SimpleNamespace(xplane_pb2=planes))
    return made


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_profiler_of_the_script_goes_on(request: pytest.FixtureRequest, tmp_path: Path, framework: str) -> None:
    module = request.getfixturevalue(framework)
    profiler = profilers.choose(tmp_path, all_threads=False)
    assert profiler.framework == framework
    profiler.warm_up()
    assert not module.is_on
    module.is_on = True  # the script has started its own one
    with pytest.raises(
        RuntimeError, match="another profiler is running in this process, so the script profiles itself"
    ):
        profiler.start()
    profiler.stop(save=False)
    assert module.is_on
    module.is_on = False
    profiler.start()
    profiler.stop(save=True)
    profiler.stop(save=True)
    assert not module.is_on


def test_a_profiler_that_has_half_started_is_stopped(torch: Torch, tmp_path: Path) -> None:
    profiler = profilers.choose(tmp_path, all_threads=False)
    torch.trouble["start"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        profiler.start()
    profiler.stop(save=False)
    assert not torch.is_on


def test_a_profiler_that_fails_to_stop_can_be_stopped_again(torch: Torch, tmp_path: Path) -> None:
    profiler = profilers.choose(tmp_path, all_threads=False)
    torch.trouble["stop"] = ArithmeticError()
    with pytest.raises(ArithmeticError):
        profiler.warm_up()
    assert torch.is_on
    profiler.stop(save=False)
    assert not torch.is_on


def test_a_version_of_pytorch_that_profiles_one_thread(
    torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(**options: Any) -> None:
        raise TypeError(*options)

    monkeypatch.setitem(sys.modules, "torch._C", ModuleType("torch._C"))
    of_c = ModuleType("torch._C._profiler")
    monkeypatch.setattr(of_c, "_ExperimentalConfig", config, raising=False)
    monkeypatch.setitem(sys.modules, "torch._C._profiler", of_c)
    assert profilers.choose(tmp_path, all_threads=False).framework == "torch"
    chosen = profilers.choose(tmp_path, all_threads=True)
    assert chosen.framework == "stacks" and "with --steps" in chosen.note


@pytest.mark.parametrize("padding", [0, 1 << 20])
def test_a_trace_of_pytorch_gets_its_epoch(torch: Torch, tmp_path: Path, padding: int) -> None:
    profiler = profilers.choose(tmp_path, all_threads=False)
    profiler.warm_up()
    torch.text = torch.text.replace('"x"', f'"{"x" * padding}"')
    profiler.export(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == {"epoch_us": 5, **json.loads(torch.text)}
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    torch.text = '{"traceEvents": []}'
    with pytest.raises(RuntimeError, match="PyTorch's profiler has recorded nothing"):
        profiler.export(tmp_path / "trace.json")


def test_a_trace_of_pytorch_that_is_too_large_is_not_read(
    torch: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profilers, "MOST_BYTES", 1 << 20)
    profiler = profilers.choose(tmp_path, all_threads=False)
    profiler.warm_up()
    torch.text += " " * (1 << 20)
    with pytest.raises(ValueError, match="its profile is larger than 1 MiB: record less"):
        profiler.export(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_is_written_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "MOST_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="its profile is larger than 1 MiB"):
        profilers._write(tmp_path / "trace.json", 0, ({"number": number} for number in itertools.count()))
    assert (tmp_path / "trace.json").stat().st_size < 2 << 20


def test_what_tensorflow_records_in_vain_is_not_saved(tensorflow: TensorFlow, tmp_path: Path) -> None:
    profiler = profilers.choose(tmp_path, all_threads=False)
    profiler.warm_up()
    profiler.start()
    profiler.stop(save=False)
    profiler.start()
    profiler.stop(save=True)
    assert tensorflow.saved == [False, False, True]
    with pytest.raises(RuntimeError, match="TensorFlow's profiler has recorded nothing"):
        profiler.export(tmp_path / "trace.json")  # there is no file
    (tmp_path / "tensorflow").mkdir()
    with (tmp_path / "tensorflow" / "host.xplane.pb").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match="its profile is larger than 256 MiB"):
        profiler.export(tmp_path / "trace.json")


def test_samples_end_at_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    def turn(function: Callable[[float], None]) -> None:
        function(0.02)

    monkeypatch.setattr(profilers, "_MOST_CALLS", 5)
    sampler = profilers._StackSampler()
    sampler.start()
    assert sampler._thread is not None
    deadline = time.monotonic() + LIMIT_S
    while sampler._thread.is_alive():
        assert time.monotonic() < deadline
        turn(spin)
        spin(0.02)
    sampler.stop(save=True)
    with pytest.raises(ValueError, match="its profile has more than 5 calls: record less"):
        sampler.export(tmp_path / "trace.json")


def test_the_shortest_profile_has_samples(tmp_path: Path) -> None:
    sampler = profilers._StackSampler()
    sampler.start()
    sampler.stop(save=True)
    sampler.export(tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert any(name.startswith("test_the_shortest_profile_has_samples (") for name in names), names
