"""Servers with several addresses, and clients that try several."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from horovodlike._bootstrap.bootstrap import Rendezvous, RendezvousServer
from horovodlike._net.connect import dial
from horovodlike._net.interfaces import local_addresses
from horovodlike._net.secure_channel import AuthenticationError
from horovodlike.errors import RendezvousError

Serve = Callable[..., RendezvousServer]
Connect = Callable[..., Rendezvous]


def test_several_addresses_of_which_not_all_lead_to_the_server(
    serve: Serve, key: bytes, place_of: Callable[..., Any]
) -> None:
    """One refuses, one is another server's, one is another program's that says nothing."""
    server = serve(2, host="127.0.0.2,127.0.0.3")
    addresses = "127.0.0.4, 127.0.0.5,127.0.0.6,127.0.0.3"
    with (
        RendezvousServer(bytes(32), 2, host="127.0.0.5", port=server.port),
        socket.create_server(("127.0.0.6", server.port)),
        Rendezvous(addresses, server.port, key, place_of(1, 2), 2.0) as rendezvous,
    ):
        assert (rendezvous.server_address, rendezvous.local_address) == ("127.0.0.3", "127.0.0.1")
        with Rendezvous("127.0.0.2", server.port, key, place_of(0, 2)) as other:
            assert other.server_address == "127.0.0.2"


def test_an_address_that_refuses_at_first_beside_one_that_is_silent() -> None:
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.8", 0), backlog=0))
        port = silent.getsockname()[1]
        for _ in range(4):  # a full backlog answers no client
            filler = stack.enter_context(contextlib.closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.8", port))
        calls = dial("127.0.0.8,127.0.0.9", port, 20)
        answers: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=lambda: answers.put(next(calls)), daemon=True).start()
        with pytest.raises(queue.Empty):
            answers.get(timeout=0.2)
        with socket.create_server(("127.0.0.9", port)), answers.get(timeout=10) as connected:
            assert connected.getpeername()[0] == "127.0.0.9"
        calls.close()
        with pytest.raises(TimeoutError):
            list(dial("127.0.0.8", port, 0.1))


def test_an_address_of_a_family_that_the_kernel_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def resolve(host: str, *words: Any, **options: Any) -> list[Any]:
        """A name has an address of AppleTalk's family first, of which Linux makes no streams."""
        found = known(host, *words, **options)
        return [(socket.AF_APPLETALK, *found[0][1:]), *found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with next(dial("127.0.0.1", port, 10)) as connected:
            assert connected.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        list(dial("127.0.0.1", port, 10))


def test_the_first_address_that_answers_is_used_by_all(serve: Serve, key: bytes, place_of: Callable[..., Any]) -> None:
    server = serve(2, host="127.0.0.2,127.0.0.3")
    for _ in range(10):
        with Rendezvous("127.0.0.4,127.0.0.3,127.0.0.2", server.port, key, place_of(1, 2)) as rendezvous:
            assert rendezvous.server_address == "127.0.0.3"


def test_no_address_leads_to_the_server(serve: Serve, key: bytes, place_of: Callable[..., Any]) -> None:
    server = serve(1, host="127.0.0.2")
    with pytest.raises(RendezvousError, match=r"at 127.0.0.3,127.0.0.4:\d+: Connection refused"):
        Rendezvous("127.0.0.3,127.0.0.4", server.port, key, place_of(0, 1))
    with pytest.raises(RendezvousError, match=r"no\.such\.host\.invalid"):
        Rendezvous("no.such.host.invalid", server.port, key, place_of(0, 1), 1.0)
    with pytest.raises(AuthenticationError):
        Rendezvous("127.0.0.3,127.0.0.2", server.port, bytes(32), place_of(0, 1))


def test_a_port_that_is_given(key: bytes, connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            RendezvousServer(key, 1, port=port).start()
    with RendezvousServer(key, 1, port=port) as server:
        assert server.port == port
        connect(server, 0, 1).close()


def test_ipv6(key: bytes, place_of: Callable[..., Any]) -> None:
    if "::1" not in {str(each.address) for each in local_addresses()}:
        pytest.skip("this machine has no IPv6")
    with (
        RendezvousServer(key, 1, host="127.0.0.1,::1") as server,
        Rendezvous("::1", server.port, key, place_of(0, 1)) as rendezvous,
    ):
        assert (rendezvous.server_address, rendezvous.local_address) == ("::1", "::1")
