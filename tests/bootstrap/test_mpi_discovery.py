"""How ranks that MPI started find each other, with a communicator that does what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from horovodlike._bootstrap import discovery, mpi_discovery
from horovodlike._bootstrap.bootstrap import RendezvousServer
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.mpi_discovery import MpiDiscovery
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import Config
from horovodlike.errors import RendezvousError


class Request:
    def __init__(self, done: bool) -> None:
        self._done = done

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        return self._done


class Communicator:
    """A communicator of two ranks as rank 1 sees it; counts what is begun on it."""

    def __init__(self, says: list[Any], complete: bool = True) -> None:
        self._says = says
        self._complete = complete
        self.begun: list[str] = []
        self.duplicate: Communicator | None = None

    def Idup(self) -> tuple[Communicator, Request]:  # noqa: N802
        self.begun.append("dup")
        self.duplicate = Communicator(self._says, self._complete)
        return self.duplicate, Request(True)

    def Igather(self, own: bytearray, received: None, root: int) -> Request:  # noqa: N802
        assert json.loads(bytes(own)) is not None
        assert (received, root) == (None, 0)
        self.begun.append("gather")
        return Request(True)

    def Ibcast(self, message: bytearray, root: int) -> Request:  # noqa: N802
        assert root == 0
        self.begun.append("broadcast")
        if self._complete:
            message[:] = json.dumps(self._says).encode().ljust(len(message))
        return Request(self._complete)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(mpi_discovery, "_duplicate", None)
    monkeypatch.setattr(mpi_discovery, "_unfinished", [])


def test_what_rank_0_has_said_is_remembered(
    key: bytes, place_of: Callable[..., RankInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first another job's server listens there, which refuses."""
    foreign = RendezvousServer(bytes(32), 2)
    foreign.start()
    server = RendezvousServer(key, 2, port=foreign.port)
    world = Communicator([foreign.port, JobKey(key).hex(), "127.0.0.1"])
    met = MpiDiscovery(world, place_of(1, 2), Config(start_timeout=30.0))
    connect, refused = discovery._connect, threading.Event()

    def watch(*words: Any, **options: Any) -> Any:
        try:
            return connect(*words, **options)
        except RendezvousError:
            if not refused.is_set():
                foreign.close()
                server.start()
                refused.set()
            raise

    monkeypatch.setattr(discovery, "_connect", watch)
    try:
        discovery._discover(met, place_of(1, 2), Config(start_timeout=30.0)).close()
    finally:
        foreign.close()
        server.close()
    assert refused.is_set()
    assert world.begun == ["dup"]  # the communicator of all ranks is the user's
    assert world.duplicate is not None
    assert world.duplicate.begun == ["gather", "broadcast"]


def test_the_duplicate_serves_the_next_init_too(key: bytes, place_of: Callable[..., RankInfo]) -> None:
    world = Communicator([1, JobKey(key).hex(), "127.0.0.1"])
    for _ in range(2):
        MpiDiscovery(world, place_of(1, 2), Config()).read()
    assert world.begun == ["dup"]


def test_a_request_that_is_given_up_stays_with_its_memory(place_of: Callable[..., RankInfo]) -> None:
    world = Communicator([], complete=False)
    place = RankInfo(rank=1, size=2, local_rank=0, local_size=1, launcher="Open MPI", job="test job", node_id=None)
    met = MpiDiscovery(world, place, Config(start_timeout=0.05))
    with pytest.raises(RendezvousError, match=r"after 0\.05 s not all 2 ranks had come to MPI's collectives"):
        met.read()
    [(request, message)] = mpi_discovery._unfinished
    assert not request.Test()
    assert isinstance(message, bytearray)
    found = mpi_discovery.find(place, Config(), {})
    assert isinstance(found, str)
    assert "MPI cannot be used again" in found
