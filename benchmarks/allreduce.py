"""In-place allreduce over sizes, and many small tensors in flight together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import driver, launch
from benchmarks.protocol import Message

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
DTYPES = ("float32", "bfloat16")
MANY_COUNT, MANY_BYTES = 400, 1 * KIB

# Not measured because it does not exist: MPI has no bfloat16. memcpy does not care about the type.
ABILITIES = {"float32": ("horovodlike", "gloo", "openmpi", "mpich", "memcpy"), "bfloat16": ("horovodlike", "gloo")}


@dataclass(frozen=True)
class AllreduceCase:
    """One buffer of `nbytes`, named, synchronous, in place."""

    dtype: str
    nbytes: int

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        if peer == "numpy":  # the engine and the memory are the same as horovodlike's: only the way there differs
            return self.dtype == "float32" and self.nbytes == min(SIZES)
        return peer in ABILITIES[self.dtype]

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "allreduce", "dtype": self.dtype, "nbytes": self.nbytes, "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


@dataclass(frozen=True)
class ManyCase:
    """`count` float32 tensors of `nbytes`: all started, then all waited for. MPI does one after the other."""

    count: int
    nbytes: int

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return peer not in ("memcpy", "numpy")

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "many", "count": self.count, "nbytes": self.nbytes, "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


def busbw(algbw: float, size: int) -> float:
    """Return the bus bandwidth of an allreduce, as nccl-tests define it."""
    return algbw * 2 * (size - 1) / size


def launchers(mpich_python: str | None = None) -> list[launch.Launcher]:
    """Return the peers; MPICH comes from an environment of its own, given by its interpreter."""
    peers = [launch.horovodlike(), launch.arrays(), launch.gloo(), launch.openmpi(), launch.independent("memcpy")]
    return peers + ([launch.mpich(mpich_python)] if mpich_python else [])


def measure(
    peers: Sequence[launch.Launcher],
    size: int,
    *,
    nbytes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = DTYPES,
    rounds: int,
    budget: float,
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the results for `size` ranks: "allreduce" and "many"."""
    cases: list[driver.Case] = [AllreduceCase(dtype, count) for dtype in dtypes for count in nbytes]
    cases.append(ManyCase(MANY_COUNT, MANY_BYTES))
    with driver.started(peers, size) as groups:
        samples = driver.interleave(groups, cases, rounds, budget, fewest=3)
    rows: dict[str, list[dict[str, Any]]] = {"allreduce": [], "many": []}
    for (peer, case), seconds in samples.items():
        row: dict[str, Any] = {"peer": peer, "np": size, **driver.summary(seconds)}
        if isinstance(case, AllreduceCase):
            algbw = case.nbytes / row["seconds"]
            bus = None if peer == "memcpy" else busbw(algbw, size)
            rows["allreduce"].append(row | {"dtype": case.dtype, "nbytes": case.nbytes, "algbw": algbw, "busbw": bus})
        elif isinstance(case, ManyCase):
            rows["many"].append(row | {"count": case.count, "nbytes": case.nbytes})
    return rows
