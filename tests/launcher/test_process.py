"""Processes that end: the order in which they are reported, and each of them once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horovodlike.launcher.agent.process import ExitQueue, oom_kills


def _child(code: int) -> int:
    process = subprocess.Popen([sys.executable, "-c", f"import os; os._exit({code})"])
    process.returncode = 0  # the queue reaps it, Popen needs not
    return process.pid


def _has_exited(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _run_with_own_children(body: str) -> str:
    """In a process of its own: the queue reaps whatever child there is."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_process as t; t.{body}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def in_order() -> None:
    exits, pids = ExitQueue(), []
    for code in (3, 4, 5):
        pids.append(_child(code))
        exits.watch(pids[-1])
        _has_exited(pids[-1])
    print(exits.reap() == ([(pid, code) for pid, code in zip(pids, (3, 4, 5), strict=True)], False))


def exits_between_two_looks() -> None:
    exits, pid = ExitQueue(), _child(7)
    exits.watch(pid)
    look, looks = exits._ready, []

    def ready() -> list[int]:
        looks.append(1)
        if len(looks) > 1:
            return look()
        _has_exited(pid)  # after the first look, before the next step
        return []

    exits._ready = ready  # type: ignore[method-assign]
    print(exits.reap() == ([(pid, 7)], False))


def without_pidfds() -> None:
    def pidfd_open(_: int) -> int:
        raise OSError

    os.pidfd_open = pidfd_open  # type: ignore[assignment]
    exits, pids = ExitQueue(), [_child(1), _child(2)]
    unwatched = _child(9)
    for pid in pids:
        exits.watch(pid)
    for pid in (*pids, unwatched):
        _has_exited(pid)
    reaped, alive = exits.reap()
    print(sorted(reaped) == sorted(zip(pids, (1, 2), strict=True)) and not alive)


@pytest.mark.parametrize("body", ["in_order", "exits_between_two_looks", "without_pidfds"])
def test_every_exit_is_reported_once(body: str) -> None:
    assert _run_with_own_children(body) == "True\n"


@pytest.mark.parametrize(
    ("groups", "name", "text"),
    [
        ("0::/a/b\n", "a/b/memory.events", "oom 7\noom_kill 5\noom_group_kill 0\n"),
        ("4:memory:/job\n1:cpu:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 5\n"),
    ],
)
def test_the_kernel_says_how_many_processes_it_has_killed_for_lack_of_memory(
    tmp_path: Path, groups: str, name: str, text: str
) -> None:
    assert oom_kills(str(tmp_path)) == 0
    for path, content in (("proc/self/cgroup", groups), (f"sys/fs/cgroup/{name}", text)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert oom_kills(str(tmp_path)) == 5
