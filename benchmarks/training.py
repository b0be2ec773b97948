"""Whole training steps: horovodlike, DistributedDataParallel, and processes that do not communicate.

The memory of all of them is allocated as under hvdrun, except for the peer `python`: processes that do not
communicate either, and are as `python train.py` starts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import driver, launch
from benchmarks.protocol import Message

# Kept here as well as in benchmarks.models, which imports PyTorch: the driver does not.
MODELS = ("mlp", "resnet18", "gpt", "tiny")
MLP_WIDTHS = (1024, 2048, 2048, 2048, 1024)
OF_TENSORFLOW = ("tensorflow", "tensorflow_mirrored", "tensorflow_alone")
TURNS = 3
"""Measurements of a model by one set of processes, of which each computes at a speed of its own."""


@dataclass(frozen=True)
class TrainingCase:
    """Steps of one model."""

    model: str

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return peer in ("horovodlike", "gloo", "alone", "python") or (peer in OF_TENSORFLOW and self.model == "mlp")

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "training", "model": self.model, "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


def launchers() -> list[launch.Launcher]:
    """Return the peers."""
    alone = launch.independent("alone")
    alike = [launch.with_memory_of_hvdrun(each) for each in (launch.horovodlike(), launch.gloo(), alone)]
    return [*alike, replace(alone, name="python")]


def tensorflow_launchers() -> list[launch.Launcher]:
    """Return the peers that make TensorFlow's step."""
    peers = (launch.tensorflow(), launch.mirrored(), launch.tensorflow_alone())
    return [launch.with_memory_of_hvdrun(each) for each in peers]


def measure(
    peers: Sequence[launch.Launcher], size: int, *, models: Sequence[str] = MODELS, rounds: int, budget: float
) -> list[dict[str, Any]]:
    """Return the rows of the results for `size` ranks. Each round is one of new processes."""
    cases = [TrainingCase(model) for model in models]
    samples: dict[tuple[str, driver.Case], list[float]] = {}
    for _ in range(rounds):
        with driver.started(peers, size) as groups:
            for key, seconds in driver.interleave(groups, cases, TURNS, budget, fewest=5).items():
                samples.setdefault(key, []).extend(seconds)
    return [
        {"peer": peer, "np": size, "model": case.model, **driver.summary(seconds), "samples": seconds, "rounds": rounds}
        for (peer, case), seconds in samples.items()
        if isinstance(case, TrainingCase)
    ]
