"""Keras: a training step of `fit` with and without communication; and TensorFlow's smallest eager allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import driver, launch
from benchmarks.protocol import Message

BACKENDS = ("tensorflow", "torch")


def communicating(backend: str) -> str:
    """Return the name of the peer that trains with a `DistributedOptimizer`."""
    return f"keras.{backend}"


def alone(backend: str) -> str:
    """Return the name of the peer whose processes train by themselves."""
    return f"keras.{backend}.alone"


@dataclass(frozen=True)
class FitCase:
    """Steps of `Model.fit`."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return peer.startswith("keras.")

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "fit", "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


@dataclass(frozen=True)
class SmallCase:
    """A named, synchronous allreduce of one float32, to a new tensor: in TensorFlow and in PyTorch."""

    def supports(self, peer: str) -> bool:
        """See driver.Case."""
        return peer in ("horovodlike", communicating("tensorflow"))

    def command(self, iterations: int) -> Message:
        """See driver.Case."""
        return {"do": "small", "iterations": iterations}

    def seconds(self, answers: Sequence[Message]) -> float:
        """See driver.Case."""
        return driver.slowest(answers)


def launchers() -> list[launch.Launcher]:
    """Return the peers."""
    peers = [launch.horovodlike()]
    for backend in BACKENDS:
        peers += [launch.keras(communicating(backend), backend), launch.keras_alone(alone(backend), backend)]
    return peers


def measure(
    peers: Sequence[launch.Launcher], size: int, *, rounds: int, budget: float
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the results for `size` ranks: "fit" and "small"."""
    with driver.started(peers, size) as groups:
        fit = driver.interleave(groups, [FitCase()], rounds, budget, fewest=5)
        small = driver.interleave(groups, [SmallCase()], rounds, budget / 4, fewest=100)
    return {
        name: [{"peer": peer, "np": size, **driver.summary(seconds)} for (peer, _), seconds in samples.items()]
        for name, samples in (("fit", fit), ("small", small))
    }
