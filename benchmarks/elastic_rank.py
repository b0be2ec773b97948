"""One worker of the elastic measurement: `elastic_rank.py FOLDER PARAMETERS`, started by hvdrun.

Trains until FOLDER/stop exists: finds the minimum of a quadratic, so a step is a gradient, an allreduce of it, an
update and a commit. Writes FOLDER/<worker>.jsonl: what happened, and when on CLOCK_MONOTONIC, which all processes of a
host share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from horovodlike import basics, elastic
from horovodlike._engine import ops
from horovodlike._engine.ops import DType, Kind, ReduceOp
from horovodlike.errors import HorovodInternalError, HostsUpdatedInterrupt

LEARNING_RATE = 0.1


class Diary:
    """A worker's file: one JSON object a line."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.environ['HOROVODLIKE_WORKER']}.jsonl").open("a")

    def note(self, event: str, **more: Any) -> None:
        print(json.dumps({"event": event, "at": time.monotonic(), **more}), file=self._file, flush=True)


def add_up(array: np.ndarray) -> None:
    """Replace the array by the sum over all ranks."""
    request = ops.Request(Kind.ALLREDUCE, "gradient", [(DType["float32"], array.shape)], op=ReduceOp.SUM)
    address = array.ctypes.data
    ops.wait(request.enqueue([address], [address]))


def step(state: Any, target: np.ndarray, stop: Path) -> bool:
    """One step, without the commit. False: some rank has seen that it is time to stop."""
    # One element more: how many ranks want to stop.
    gradient = np.append(state.parameters - target, np.float32(stop.exists()))
    add_up(gradient)
    state.parameters -= LEARNING_RATE / basics.size() * gradient[:-1]
    state.step += 1
    return bool(gradient[-1] == 0)


def main() -> None:
    """Trains."""
    folder, num_parameters = Path(sys.argv[1]), int(sys.argv[2])
    diary = Diary(folder)
    diary.note("up", pid=os.getpid())
    basics.on_init(lambda place: diary.note("joined", size=place.size))
    basics.init()
    target = np.arange(num_parameters, dtype=np.float32) % 97

    @elastic.run
    def train(state: Any) -> None:
        diary.note("begun", step=state.step)
        goes_on = True
        while goes_on:
            try:
                goes_on = step(state, target, folder / "stop")
                state.commit()
            except HorovodInternalError:
                diary.note("broken")
                raise
            except HostsUpdatedInterrupt:
                diary.note("changed")
                raise
            diary.note("step", step=state.step, size=basics.size())

    state = elastic.ObjectState(parameters=np.zeros(num_parameters, np.float32), step=0)
    train(state)
    diary.note("end", step=state.step, error=float(np.abs(state.parameters - target).max()))


if __name__ == "__main__":
    main()
