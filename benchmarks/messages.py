"""Messages between two ranks: one sends a buffer, and the other sends it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import driver, launch
from benchmarks.protocol import Message

SIZES = (4, 64 << 10, 1 << 20, 16 << 20)


@dataclass(frozen=True)
class RoundTripCase:
    """One buffer of `nbytes`, there and back."""

    nbytes: int

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return True

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "round_trip", "nbytes": self.nbytes, "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


def launchers(mpich_python: str | None = None) -> list[launch.Launcher]:
    """Return the peers; MPICH comes from an environment of its own, given by its interpreter."""
    peers = [launch.arrays(), launch.hvd_backend(), launch.gloo(), launch.openmpi()]
    return peers + ([launch.mpich(mpich_python)] if mpich_python else [])


def measure(peers: Sequence[launch.Launcher], *, large_pages: bool, rounds: int, budget: float) -> list[dict[str, Any]]:
    """Return the rows of the results, for two ranks.

    Args:
        peers: See `launchers`.
        large_pages: True if all peers have memory allocated as hvdrun has it, False: in ordinary pages.
        rounds: See `driver.interleave`.
        budget: Likewise.
    """
    if large_pages:
        peers = [launch.with_memory_of_hvdrun(peer) for peer in peers]
    with driver.started(peers, 2) as groups:
        samples = driver.interleave(groups, [RoundTripCase(nbytes) for nbytes in SIZES], rounds, budget, fewest=3)
    return [
        {"peer": peer, "np": 2, "nbytes": case.nbytes, "large_pages": large_pages, **driver.summary(seconds)}
        for (peer, case), seconds in samples.items()
        if isinstance(case, RoundTripCase)
    ]
