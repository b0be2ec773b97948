"""The interface of a peer that is measured. Runs in the ranks; each module imports its library only when created."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from benchmarks.buffers import Buffer

Step = Callable[[], None]


class Peer(Protocol):
    """One rank of one peer."""

    rank: int
    size: int

    def expected(self, total: int) -> int:
        """Return the content, after one step, of a buffer that held rank + 1, if the sum over the ranks is `total`."""

    def barrier(self) -> None:
        """Return when all ranks have called it; by the peer's own means."""

    def allreduce(self, buffer: Buffer, dtype: str) -> Step:
        """Return a function that sums `buffer` over the ranks, in place, and returns when that is done."""

    def many(self, buffers: list[Buffer]) -> Step:
        """Return a function that sums all float32 buffers in place, all of them in flight together where possible."""

    def training_step(self, model: str) -> Step:
        """Return a function that makes one whole training step of a model of `benchmarks.models`."""

    def close(self) -> None:
        """Leaves the job."""


class MessagePeer(Peer, Protocol):
    """A peer that sends from one rank to another."""

    def round_trip(self, buffer: Buffer) -> Step:
        """Return a function with which rank 1 of two receives the float32 buffer of rank 0, and sends it back."""


class ParameterPeer(Peer, Protocol):
    """A peer with a buffer that is split among the ranks, and that all ranks update."""

    def parameters(self, buffer: Buffer) -> AbstractContextManager[Callable[[str], Step]]:
        """Make such a buffer, of zeros; return functions by operation, see `benchmarks.parameters.ParametersCase`."""


class EagerPeer(Peer, Protocol):
    """A peer whose framework executes single operations."""

    def small(self) -> Step:
        """Return a function that sums one named float32 over the ranks, into a new tensor."""


class FitPeer(Peer, Protocol):
    """A peer whose framework has the training loop."""

    def fit(self, steps: int) -> float:
        """Train for this number of steps, after as many to warm up; return the seconds of a step."""


def create(name: str) -> Peer:
    """Return this rank's peer, ready to measure."""
    if name == "horovodlike":
        from benchmarks.peers.horovodlike_peer import HorovodlikePeer

        return HorovodlikePeer()
    if name == "numpy":
        from benchmarks.peers.numpy_peer import NumpyPeer

        return NumpyPeer()
    if name == "gloo":
        from benchmarks.peers.gloo import GlooPeer

        return GlooPeer()
    if name == "hvd_backend":
        from benchmarks.peers.gloo import HvdBackendPeer

        return HvdBackendPeer()
    if name == "ddp_alone":
        from benchmarks.peers.gloo import DdpAlonePeer

        return DdpAlonePeer()
    if name == "mpi":
        from benchmarks.peers.mpi import MpiPeer

        return MpiPeer()
    if name == "mpi_arrays":
        from benchmarks.peers.mpi import MpiArraysPeer

        return MpiArraysPeer()
    if name == "memcpy":
        from benchmarks.peers.memcpy import MemcpyPeer

        return MemcpyPeer()
    if name == "alone":
        from benchmarks.peers.alone import AlonePeer

        return AlonePeer()
    if name in ("keras", "keras_alone"):
        from benchmarks.peers.keras_peer import KerasPeer

        return KerasPeer(communicates=name == "keras")
    if name in ("tensorflow", "tensorflow_mirrored", "tensorflow_alone"):
        from benchmarks.peers import tensorflow_peer

        if name == "tensorflow":
            return tensorflow_peer.TapePeer()
        return tensorflow_peer.MirroredPeer() if name == "tensorflow_mirrored" else tensorflow_peer.AlonePeer()
    raise ValueError(f"no such peer: {name}")
