"""Parameter servers of two ranks: each sends a whole buffer, receives it, or pushes many small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import driver, launch
from benchmarks.allreduce import AllreduceCase
from benchmarks.protocol import Message

NBYTES = 64 << 20
PUSH_BYTES, PUSHES = 1 << 10, 1000


@dataclass(frozen=True)
class ParametersCase:
    """One operation: ``send`` (add `nbytes`), ``receive`` (`nbytes`), or ``push`` (add `nbytes`, `PUSHES` times)."""

    operation: str
    nbytes: int

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return True

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "parameters", "operation": self.operation, "nbytes": self.nbytes, "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


@dataclass(frozen=True)
class SameBytesCase(AllreduceCase):
    """The allreduce of as many bytes, which moves all of them once in each direction, as `send` does."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return True


def launchers(mpich_python: str | None = None) -> list[launch.Launcher]:
    """Return the peers, MPI twice: with windows that it allocates, and with windows of NumPy arrays.

    MPICH comes from an environment of its own, given by its interpreter. The targets compare with the former.
    """
    peers = [launch.arrays()]
    for peer, suffix in (("mpi", ""), ("mpi_arrays", ".arrays")):
        found = [launch.openmpi(peer)] + ([launch.mpich(mpich_python, peer)] if mpich_python else [])
        peers += [replace(each, name=each.name + suffix) for each in found]
    return peers


def measure(peers: Sequence[launch.Launcher], *, rounds: int, budget: float) -> list[dict[str, Any]]:
    """Return the rows of the results, for two ranks.

    Args:
        peers: See `launchers`.
        rounds: See `driver.interleave`.
        budget: Likewise.
    """
    cases = [ParametersCase("send", NBYTES), ParametersCase("receive", NBYTES), ParametersCase("push", PUSH_BYTES)]
    with driver.started([launch.with_memory_of_hvdrun(peer) for peer in peers], 2) as groups:
        samples = driver.interleave(groups, [SameBytesCase("float32", NBYTES), *cases], rounds, budget, fewest=3)
    return [
        {
            "peer": peer,
            "np": 2,
            "operation": case.operation if isinstance(case, ParametersCase) else "allreduce",
            **driver.summary(seconds),
        }
        for (peer, case), seconds in samples.items()
    ]
