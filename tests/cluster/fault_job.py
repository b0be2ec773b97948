"""Program of the ranks of the fault tests, without a framework: `fault_job.py FOLDER ACTION [ARGUMENT ...]`.

Each rank writes its events into a file of its own in the folder, which all hosts share, so that the file of one that is
cut off can be read as well. All hosts have the machine's clock, unless a test gives them others.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.collectives import allreduce, enqueue  # noqa: E402

from cluster.namespaces import wait_until  # noqa: E402
from horovodlike import basics, testing  # noqa: E402
from horovodlike._engine import metrics, ops  # noqa: E402
from horovodlike._engine.ops import Kind  # noqa: E402


class Diary:
    """A rank's file: one JSON object a line."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank{rank}.jsonl").open("a")

    def note(self, event: str, **more: Any) -> None:
        print(json.dumps({"event": event, "at": time.monotonic(), **more}), file=self._file, flush=True)


def reduce(diary: Diary, folder: Path, length: str) -> None:
    """Reduce for ever. Each time is a step of a fault plan."""
    array = np.ones(int(length), np.float32)
    for step in itertools.count():
        testing.reach("step", step)
        array.fill(1.0)
        allreduce("big", array)
        assert (array == basics.size()).all()
        diary.note("reduced")


def broadcast(diary: Diary, folder: Path, length: str) -> None:
    """Broadcast for ever from rank 0, which sends as much as the others' kernels take."""
    array = np.ones(int(length), np.float32)
    while True:
        ops.wait(enqueue(Kind.BROADCAST, "sent", [array], root_rank=0))
        diary.note("received")


def wait(diary: Diary, folder: Path, absent: str) -> None:
    """Wait in a collective for a rank that does not come."""
    if basics.rank() == int(absent):
        signal.pause()
    allreduce("awaited", np.ones(10))


def idle(diary: Diary, folder: Path) -> None:
    """Do nothing until told to reduce."""
    wait_until((folder / "go").exists, "the word")
    allreduce("later", np.ones(10))


def _outlive() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()


def idle_with_child(diary: Diary, folder: Path, parent: str) -> None:
    """The same, but one rank has a child that inherits all that it has open, as a loader of data does."""
    if basics.rank() == int(parent):
        child = multiprocessing.get_context("fork").Process(target=_outlive, daemon=True)
        child.start()
        diary.note("child", pid=child.pid)
    idle(diary, folder)


def check(diary: Diary, folder: Path, length: str, seconds: str) -> None:
    """Reduce for some seconds, and check what comes."""
    end = time.monotonic() + float(seconds)
    rounds = 0
    goes_on = np.ones(1)
    while goes_on[0]:
        array = np.arange(int(length), dtype=np.float32) % 1000 + basics.rank() + rounds
        allreduce("checked", array)
        ranks = basics.size()
        expected = ranks * (np.arange(int(length)) % 1000 + rounds) + ranks * (ranks - 1) / 2
        assert np.array_equal(array, expected), rounds
        rounds += 1
        goes_on = np.full(1, float(basics.rank() == 0 and time.monotonic() < end))
        allreduce("goes on", goes_on)
    stragglers = metrics.metrics()["stragglers"]
    diary.note("right", rounds=rounds, waited_for=[each["seconds_waited_for"] for each in stragglers])


def leave(diary: Diary, folder: Path, victim: str, how: str) -> None:
    """One rank leaves while the others wait for it."""
    if basics.rank() == int(victim):
        if how == "raise":
            raise ValueError("a mistake in the script")
        if how == "return":
            return
        os._exit(int(how))
    allreduce("after", np.ones(10))


ACTIONS = {action.__name__: action for action in (reduce, broadcast, wait, idle, idle_with_child, check, leave)}


def main() -> None:
    folder, name, *arguments = sys.argv[1:]
    diary = Diary(Path(folder), int(os.environ["HOROVODLIKE_RANK"]))
    try:
        basics.init()
        allreduce("first", np.ones(1))
        diary.note("up", pid=os.getpid(), host=os.uname().nodename)
        ACTIONS[name](diary, Path(folder), *arguments)
    except Exception as error:
        diary.note("failed", error=str(error), kind=type(error).__name__)
        raise
    basics.shutdown()
    diary.note("done")


if __name__ == "__main__":
    main()
