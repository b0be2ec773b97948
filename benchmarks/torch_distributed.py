"""torch.distributed over the backend `hvd`, over Gloo, and the same by horovodlike's own API, in the same run.

Beside them trains DDP without communication: the limit that any backend can reach. The memory of all of them is
allocated as hvdrun has it, in large pages. Gloo is measured a second time in the memory that it has under torchrun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import driver, launch
from benchmarks.allreduce import AllreduceCase
from benchmarks.protocol import Message
from benchmarks.training import MODELS, TURNS

SHARDED = "fsdp"
"""The GPT, with each block and the rest sharded by `fully_shard`."""


GLOO_OF_TORCHRUN = "gloo_of_torchrun"
"""Gloo in the memory that it has under torchrun."""


@dataclass(frozen=True)
class StepCase:
    """Steps of one model; `views`: by DDP with `gradient_as_bucket_view`."""

    model: str
    views: bool = False

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return peer in ("hvd_backend", "gloo", GLOO_OF_TORCHRUN) or (
            self.model != SHARDED and (peer == "ddp_alone" or not self.views)
        )

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "training", "model": self.name, "iterations": iterations}

    @property
    def name(self) -> str:
        """Return its name for the ranks and in the results."""
        return f"{self.model}.views" if self.views else self.model

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


@dataclass(frozen=True)
class SmallCase(AllreduceCase):
    """The smallest allreduce, by each peer's own function."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return peer != "ddp_alone"


def launchers() -> list[launch.Launcher]:
    """Return the peers."""
    peers = (launch.horovodlike(), launch.hvd_backend(), launch.gloo(), launch.gloo("ddp_alone"))
    of_torchrun = replace(launch.gloo(), name=GLOO_OF_TORCHRUN)
    return [*(launch.with_memory_of_hvdrun(each) for each in peers), of_torchrun]


def measure(
    peers: Sequence[launch.Launcher], size: int, *, models: Sequence[str] = MODELS, rounds: int, budget: float
) -> list[dict[str, Any]]:
    """Return the rows of the results for `size` ranks. Each round is one of new processes."""
    cases = [
        SmallCase("float32", 4),
        *(StepCase(model, views) for views in (False, True) for model in models),
        StepCase(SHARDED),
    ]
    samples: dict[tuple[str, driver.Case], list[float]] = {}
    for _ in range(rounds):
        with driver.started(peers, size) as groups:
            for key, seconds in driver.interleave(groups, cases, TURNS, budget, fewest=5).items():
                samples.setdefault(key, []).extend(seconds)
    return [
        {
            "peer": peer,
            "np": size,
            "what": case.name if isinstance(case, StepCase) else "4 B",
            **driver.summary(seconds),
            "samples": seconds,
            "rounds": rounds,
        }
        for (peer, case), seconds in samples.items()
    ]
