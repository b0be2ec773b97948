"""The profilers of a rank: PyTorch's, or samples of Python's stacks.

Each writes a trace in Chrome's format with one more key, ``epoch_us``: the microseconds from the Unix epoch to the time
0 of the events, by the clock of this host.
"""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

__all__ = ["CHUNK_BYTES", "MOST_BYTES", "MOST_MARKS", "Profiler", "check_size", "choose"]

MOST_BYTES = 256 << 20
"""The size of the files of a rank's profile, at most."""
MOST_MARKS = 100_000
"""The number of marks of steps in a profile, at most."""
CHUNK_BYTES = 1 << 18
"""The size of a part of a file that is sent, at most."""
_MOST_CALLS = 500_000
_SAMPLE_S = 0.01
_MOST_FRAMES = 128
_HEAD_BYTES = 1 << 16


class Profiler(Protocol):
    """A profiler of this process. Any method may raise whatever the framework's profiler raises.

    Attributes:
        framework: ``torch`` or ``stacks``.
        note: A remark for the user, or an empty text.
    """

    framework: str
    note: str

    def warm_up(self) -> None:
        """Load what the first start needs, which may take seconds."""

    def start(self) -> None:
        """Begin to record. PyTorch demands that the same thread calls :meth:`stop`."""

    def stop(self) -> None:
        """End the recording of this object if there is one."""

    def export(self, path: Path) -> None:
        """Write the trace of the recording that was stopped last."""


def check_size(num_bytes: int) -> None:
    """Refuse a profile that is too large to be sent.

    Raises:
        ValueError: It is.
    """
    if num_bytes > MOST_BYTES:
        raise ValueError(f"its profile is larger than {MOST_BYTES >> 20} MiB: record less")


def choose(*, all_threads: bool) -> Profiler:
    """Return PyTorch's profiler if this process has imported PyTorch, else one that samples stacks.

    Args:
        all_threads: Whether it must record threads other than the one that starts it.
    """
    if "torch" not in sys.modules:
        return _StackSampler()
    import torch

    if not all_threads:
        return _TorchProfiler(lambda: torch.profiler.profile())
    from torch._C._profiler import _ExperimentalConfig  # type: ignore[import-not-found, unused-ignore]

    try:
        config = _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return _StackSampler("this version of PyTorch profiles the thread of the steps only, with --steps")
    device = "cuda" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    # The class below torch.profiler.profile: that one imports modules, and the main thread may just import them, too.
    return _TorchProfiler(
        lambda: torch.autograd.profiler.profile(use_device=device, use_kineto=True, experimental_config=config)
    )


class _TorchProfiler:
    framework, note = "torch", ""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._profile: Any = None
        self._is_running = False

    def warm_up(self) -> None:
        self.start()
        self.stop()

    def start(self) -> None:
        import torch

        is_on = torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        if is_on or _is_warming_up(torch.profiler.profile):
            raise RuntimeError(
                "another profiler is running in this process, so the script profiles itself: try again when that has "
                "ended"
            )
        self._profile = self._make()
        self._is_running = True  # an error or a signal may leave it half started
        self._profile.__enter__()

    def stop(self) -> None:
        if self._is_running:
            self._profile.__exit__(None, None, None)
            self._is_running = False

    def export(self, path: Path) -> None:
        exported = path.with_name(f"{path.name}.torch")
        self._profile.export_chrome_trace(str(exported))
        check_size(exported.stat().st_size)
        # Mapped, since it may be large: this is the memory of the rank.
        with exported.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(b'"cat":') < 0:
                raise RuntimeError("PyTorch's profiler has recorded nothing: has the script started one of its own?")
            # Versions of PyTorch before 2.4 lack it: their times are since the epoch.
            base = re.search(rb'"baseTimeNanoseconds":\s*(\d+)', text[:_HEAD_BYTES] + text[-_HEAD_BYTES:])
            text.seek(text.find(b"{") + 1)
            with path.open("wb") as trace:
                trace.write(b'{"epoch_us": %d,' % (int(base[1]) // 1000 if base else 0))
                shutil.copyfileobj(text, trace)
        exported.unlink()


def _is_warming_up(profile: Any) -> bool:
    """Return whether the script has a profiler that waits for its first step: it could not start beside another one."""
    found = (each for each in gc.get_objects() if issubclass(type(each), profile))
    return any(getattr(getattr(each, "current_action", None), "name", "") == "WARMUP" for each in found)


class _StackSampler:
    """Samples of the stacks of Python's threads, a hundred in a second, by a thread.

    Calls that were seen in samples that follow each other are one event.
    """

    framework = "stacks"

    def __init__(self, note: str = "") -> None:
        self.note = note
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._open: dict[int, list[tuple[str, float]]] = {}  # by thread: the calls, and when they were seen first
        self._names: dict[int, str] = {}
        self._events: list[dict[str, Any]] = []
        self._began = 0.0

    def warm_up(self) -> None:
        pass  # it needs nothing

    def start(self) -> None:
        self._began = time.time()
        self._thread = threading.Thread(target=self._sample_on, name="horovodlike-samples", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def export(self, path: Path) -> None:
        if len(self._events) >= _MOST_CALLS:
            raise ValueError(f"its profile has more than {_MOST_CALLS} calls: record less")
        names = (_named("thread_name", 0, ident, name) for ident, name in self._names.items())
        _write(path, int(self._began * 1e6), itertools.chain(names, self._events))

    def _sample_on(self) -> None:
        while not self._ends.wait(_SAMPLE_S) and len(self._events) < _MOST_CALLS:
            self._sample(self._now())
        if not self._open:  # the end came before the first sample
            self._sample(self._now())
        for ident in self._open:
            self._close(ident, 0, self._now())

    def _now(self) -> float:
        """Return the seconds since the start, which the trace has in whole microseconds."""
        return time.time() - int(self._began * 1e6) / 1e6

    def _sample(self, now: float) -> None:
        from horovodlike._engine.stack_dump import OWN_THREADS

        names = {each.ident or 0: each.name for each in threading.enumerate() if each.name not in OWN_THREADS}
        frames = sys._current_frames()
        self._names |= {ident: names[ident] for ident in frames.keys() & names.keys()}
        for ident in self._open.keys() | (frames.keys() & names.keys()):
            calls = _calls_of(frames.get(ident)) if ident in names else []
            before = self._open.setdefault(ident, [])
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1][0], zip(calls, before)))  # noqa: B905
            self._close(ident, same, now)
            before += [(call, now) for call in calls[same:]]

    def _close(self, ident: int, depth: int, now: float) -> None:
        """End the calls of a thread from a depth on."""
        calls = self._open[ident]
        for call, began in calls[depth:]:
            self._events.append(
                {"ph": "X", "name": call, "pid": 0, "tid": ident, "ts": began * 1e6, "dur": (now - began) * 1e6}
            )
        del calls[depth:]


def _calls_of(innermost: FrameType | None) -> list[str]:
    """Return the calls of a stack, the outermost first."""
    calls: list[str] = []
    frame = innermost
    while frame is not None and len(calls) < _MOST_FRAMES:
        code = frame.f_code
        calls.append(f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})")
        frame = frame.f_back
    return calls[::-1]


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _write(path: Path, epoch_us: int, events: Iterator[dict[str, Any]]) -> None:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"epoch_us": {epoch_us}, "traceEvents": [\n')
        for number, event in enumerate(events):
            size += file.write((",\n" if number else "") + json.dumps(event))
            check_size(size)
        file.write("\n]}\n")
