"""torch.distributed over the backend `hvd`, over Gloo, and what it does by horovodlike's own API, in the same run.

The memory of all of them is allocated as hvdrun has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import driver, launch
from benchmarks.allreduce import AllreduceCase
from benchmarks.protocol import Message
from benchmarks.training import MODELS, TURNS

SHARDED = "fsdp"
"""The GPT, with each block and the rest sharded by `fully_shard`."""


@dataclass(frozen=True)
class StepCase:
    """Steps of one model."""

    model: str

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return self.model != SHARDED or peer != "horovodlike"

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "training", "model": self.model, "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


@dataclass(frozen=True)
class SmallCase(AllreduceCase):
    """The smallest allreduce, by each peer's own function."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return True


def launchers() -> list[launch.Launcher]:
    """Return the peers."""
    return [launch.with_malloc_of_hvdrun(each) for each in (launch.horovodlike(), launch.hvd_backend(), launch.gloo())]


def measure(
    peers: Sequence[launch.Launcher], size: int, *, models: Sequence[str] = MODELS, rounds: int, budget: float
) -> list[dict[str, Any]]:
    """Return the rows of the results for `size` ranks. Each round is one of new processes."""
    cases = [SmallCase("float32", 4), *(StepCase(model) for model in (*models, SHARDED))]
    samples: dict[tuple[str, driver.Case], list[float]] = {}
    for _ in range(rounds):
        with driver.started(peers, size) as groups:
            for key, seconds in driver.interleave(groups, cases, TURNS, budget, fewest=5).items():
                samples.setdefault(key, []).extend(seconds)
    return [
        {
            "peer": peer,
            "np": size,
            "what": case.model if isinstance(case, StepCase) else "4 B",
            **driver.summary(seconds),
            "samples": seconds,
            "rounds": rounds,
        }
        for (peer, case), seconds in samples.items()
    ]
