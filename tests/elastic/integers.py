"""A training loop of integers: its model shows, bit for bit, which samples went into which step, and in which order.

Every worker writes what it does to a file of its own, line by line as JSON, so that a test can work out afterwards what
should have come out, whatever rank was lost on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from support.collectives import allreduce

from horovodlike import basics as hvd
from horovodlike import elastic
from horovodlike.data import DynamicPartition, Task

FACTOR = 6364136223846793005
MASK = (1 << 64) - 1


def value_of(sample: int) -> int:
    """Return what a sample adds to the sum of its step."""
    return (sample + 1) * 0x9E3779B97F4A7C15 & MASK


def advanced(model: int, total: int) -> int:
    """The model after a step."""
    return (model * FACTOR + total + 1) & MASK


class Diary:
    """Tell the test what this worker does."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"worker.{os.environ.get('HOROVODLIKE_WORKER', '0')}").open("a", buffering=1)

    def write(self, event: str, **what: Any) -> None:
        entry = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **what}
        self._file.write(json.dumps(entry) + "\n")


def train(state: Any, diary: Diary, arguments: argparse.Namespace) -> None:
    place = {"generation": int(os.environ.get("HOROVODLIKE_GENERATION", "1")), "rank": hvd.rank(), "size": hvd.size()}
    diary.write("begin", **place, step=state.step, commits=state._commits)
    padding = np.ones(arguments.padding, np.float32)
    training = state.training
    while state.training == training < arguments.trainings:
        state.partition.set_epoch(state.epoch)
        for batch in state.partition:
            samples = [sample for _, sample in batch.samples()]
            diary.write("step", **place, step=state.step, epoch=state.epoch, samples=samples)
            if arguments.pace:
                time.sleep(arguments.pace)
            total = np.array([sum(map(value_of, samples)) & MASK], np.uint64).view(np.int64)
            total = int(allreduce("total", total).view(np.uint64)[0])
            if arguments.padding:  # a reduction that takes a while
                assert (allreduce("padding", padding.copy()) == hvd.size()).all()
            state.model = advanced(state.model, total)
            state.step += 1
            if state.step % arguments.commit_every == 0:
                state.commit()
                diary.write("commit", **place, step=state.step, model=state.model)
        state.epoch += 1
        is_over = state.epoch >= arguments.epochs * (training + 1) and arguments.until_size in (None, hvd.size())
        state.training += is_over
    state.commit()
    diary.write("commit", **place, step=state.step, model=state.model)


def main(words: Sequence[str] | None = None) -> None:
    """Train as the words say; those of the command line if None."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--trainings", type=int, default=1, help="calls of the function that trains")
    parser.add_argument("--commit-every", type=int, default=2)
    parser.add_argument("--padding", type=int, default=0, help="elements of a second reduction")
    parser.add_argument("--until-size", type=int, help="more epochs, until there are so many ranks")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    arguments = parser.parse_args(words)
    diary = Diary(arguments.folder)
    diary.write("start")
    hvd.init()
    tasks = [Task("data", start, min(start + 25, arguments.samples)) for start in range(0, arguments.samples, 25)]
    partition = DynamicPartition(tasks, arguments.batch_size, seed=1)
    state = elastic.ObjectState(model=1, step=0, epoch=0, training=0, partition=partition)
    while state.training < arguments.trainings:
        elastic.run(train)(state, diary, arguments)
    diary.write("end", model=state.model, step=state.step, epochs=state.epoch)


if __name__ == "__main__":
    main()
