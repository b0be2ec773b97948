"""The rendezvous with an attacker on the line: ranks get what the server has sent, or an error."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
from relay import Change, Impostor, Relay, Way, by_frame, flip

from horovodlike._bootstrap import rendezvous_client
from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
from horovodlike._net.secure_channel import CHALLENGE_BYTES, HELLO_BYTES, AuthenticationError
from horovodlike.errors import RendezvousError

Serve = Callable[..., RendezvousServer]
Connect = Callable[..., Rendezvous]
GatherAll = Callable[[RendezvousServer, int], None]
PAYLOAD = {"text": "some words", "number": 7}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that has grown makes a side wait for bytes that never come."""
    monkeypatch.setattr(rendezvous_client, "_SERVER_GRACE", 0.2)


def talk(connect: Connect, relay: Relay, start_timeout: float = 0.2) -> dict[Way, bytes]:
    """A job of one rank, through the relay; returns what went over the line until the rank leaves."""
    with connect(relay, 0, 1, start_timeout=start_timeout, attempts=1) as client:
        assert client.begin("payload") == ["payload"]
        assert client.exchange("topic", PAYLOAD) == [PAYLOAD]
        return dict(relay.heard)


def overheard(server: RendezvousServer, connect: Connect) -> dict[Way, bytes]:
    with Relay(server.port) as relay:
        return talk(connect, relay, start_timeout=10)


@pytest.mark.parametrize("way", Way)
def test_one_changed_bit_anywhere(way: Way, serve: Serve, connect: Connect, gather_all: GatherAll, key: bytes) -> None:
    server = serve(1)
    length = len(overheard(server, connect)[way])
    assert length > 200
    for position in range(0, length, 3):
        with Relay(server.port, {way: flip(position)}) as relay:
            with pytest.raises(RendezvousError) as caught:
                talk(connect, relay)
            assert key.hex() not in str(caught.value)
    gather_all(server, 1)


def test_a_session_that_is_sent_again(serve: Serve, connect: Connect, gather_all: GatherAll) -> None:
    server = serve(1)
    recorded = overheard(server, connect)[Way.TO_SERVER]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(recorded)
        answer = b""
        try:
            while data := connection.recv(4096):
                answer += data
        except ConnectionResetError:  # it has closed without reading the rest
            pass
    assert len(answer) <= CHALLENGE_BYTES
    gather_all(server, 1)


def test_an_impostor_who_repeats_what_the_server_said(serve: Serve, connect: Connect) -> None:
    server = serve(1)
    recorded = overheard(server, connect)[Way.TO_CLIENT]
    with Impostor(recorded) as impostor, pytest.raises(AuthenticationError, match="the MAC of a frame is wrong"):
        connect(impostor, 0, 1, attempts=1)


def replay() -> dict[Way, Change]:
    """The answer to the first question comes as that to the second, too."""
    frames: list[bytes] = []

    def replace(number: int, frame: bytes) -> bytes:
        frames.append(frame)
        return frames[1] if number == 2 else frame

    return {Way.TO_CLIENT: by_frame(CHALLENGE_BYTES, replace)}


def reflect() -> dict[Way, Change]:
    """The rank's question comes back as the answer."""
    questions: list[bytes] = []

    def hear(_: int, frame: bytes) -> bytes:
        questions.append(frame)
        return frame

    def replace(number: int, frame: bytes) -> bytes:
        return questions[0] if number == 1 else frame

    return {Way.TO_SERVER: by_frame(HELLO_BYTES, hear), Way.TO_CLIENT: by_frame(CHALLENGE_BYTES, replace)}


def drop() -> dict[Way, Change]:
    """The answer to the first question never comes."""
    return {Way.TO_CLIENT: by_frame(CHALLENGE_BYTES, lambda number, frame: b"" if number == 1 else frame)}


def repeat_question() -> dict[Way, Change]:
    """The rank's first question comes twice."""
    return {Way.TO_SERVER: by_frame(HELLO_BYTES, lambda number, frame: frame if number else frame + frame)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (replay, "the MAC of a frame is wrong"),
        (reflect, "the MAC of a frame is wrong"),
        (repeat_question, "closed the connection|has ended"),
        (drop, "did not answer"),
    ],
)
def test_frames_that_are_replayed_reflected_or_dropped(
    changes: Callable[[], dict[Way, Change]], words: str, serve: Serve, connect: Connect, gather_all: GatherAll
) -> None:
    server = serve(1)
    with Relay(server.port, changes()) as relay, pytest.raises(RendezvousError, match=words):
        talk(connect, relay, start_timeout=0.5)
    gather_all(server, 1)


def test_the_relay_changes_nothing_that_it_is_not_told_to(serve: Serve, connect: Connect) -> None:
    """So what the other tests see is due to what they change."""
    server = serve(1)
    frames: dict[Way, list[Any]] = {way: [] for way in Way}

    def listen(way: Way, skipped: int) -> Change:
        return by_frame(skipped, lambda number, frame: frames[way].append(number) or frame)

    changes = {Way.TO_SERVER: listen(Way.TO_SERVER, HELLO_BYTES), Way.TO_CLIENT: listen(Way.TO_CLIENT, CHALLENGE_BYTES)}
    with Relay(server.port, changes) as relay:
        talk(connect, relay, start_timeout=10)
    assert frames[Way.TO_SERVER][:2] == [0, 1]
    assert frames[Way.TO_CLIENT] == [0, 1, 2]
