"""Connections of the mesh with an attacker on the line: both ends are the right ranks, or there is no connection."""

import socket
import threading
from collections.abc import Iterator

import pytest
from relay import Change, Impostor, Relay, Way, flip

from horovodlike._bootstrap.mesh_builder import Builder
from horovodlike._bootstrap.mesh_handshake import CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, ConnectionId
from horovodlike._net.secure_channel import JobKey

KEY = JobKey(bytes(range(32)))
WIRE = ConnectionId(1, 0, 1)
LENGTHS = {Way.TO_SERVER: HELLO_BYTES, Way.TO_CLIENT: CHALLENGE_BYTES + PROOF_BYTES}


class Pair:
    """The lower and the higher rank of one connection, with a relay between them."""

    def __init__(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.places: list[tuple[str, int]] = [listener.getsockname() for listener in self.listeners]
        self._builders: list[Builder] = []

    def connect(self, changes: dict[Way, Change], timeout: float) -> tuple[Builder, Builder, dict[Way, bytes]]:
        """Tries to connect them; returns both builders, and what went over the line."""
        with Relay(self.places[0][1], changes) as relay:
            places = [("127.0.0.1", relay.port), self.places[1]]
            pair = [Builder(rank, [WIRE], places, KEY, self.listeners[rank], timeout) for rank in range(2)]
            self._builders += pair
            lower = threading.Thread(target=pair[0].run, daemon=True)
            lower.start()
            pair[1].run()
            lower.join(60)
            assert not lower.is_alive()
            return pair[0], pair[1], relay.heard

    def close(self) -> None:
        for builder in self._builders:
            builder.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_the_relay_changes_nothing_that_it_is_not_told_to(pair: Pair) -> None:
    lower, higher, heard = pair.connect({}, timeout=30)
    assert lower.done[WIRE][1].send.hex() == higher.done[WIRE][1].receive.hex()
    assert {way: len(data) for way, data in heard.items()} == LENGTHS


@pytest.mark.parametrize("way", Way)
def test_one_changed_bit_anywhere(way: Way, pair: Pair) -> None:
    for position in range(0, LENGTHS[way], 5):
        lower, higher, _ = pair.connect({way: flip(position)}, timeout=0.2)
        assert not higher.done
        assert WIRE in higher.problems
        in_proof = way is Way.TO_CLIENT and position >= CHALLENGE_BYTES  # the lower rank has had its answer by then
        assert bool(lower.done) == in_proof
        lower.close()


def test_an_impostor_who_repeats_what_a_rank_said(pair: Pair) -> None:
    recorded = pair.connect({}, timeout=30)[2][Way.TO_CLIENT]
    with Impostor(recorded) as impostor:
        higher = Builder(1, [WIRE], [("127.0.0.1", impostor.port), pair.places[1]], KEY, pair.listeners[1], 0.3)
        higher.run()
    assert not higher.done
    assert WIRE in higher.problems


def test_a_hello_that_is_sent_again_in_another_job_of_the_same_key(pair: Pair) -> None:
    recorded = pair.connect({}, timeout=30)[2][Way.TO_SERVER]
    lower, higher, _ = pair.connect({Way.TO_SERVER: lambda _: recorded}, timeout=0.3)
    assert not lower.done
    assert not higher.done
