"""Jobs of several hosts, which are hosts in name, on one machine. What flows where, and what remains."""

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horovodlike._bootstrap import mesh, shared_memory, wakeup_pipes
from horovodlike._bootstrap.bootstrap import JobContext, RendezvousServer, establish
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.mesh import CONTROL, DATA, MESSAGES
from horovodlike._bootstrap.mesh_builder import Builder
from horovodlike._bootstrap.topology import HostFacts
from horovodlike._engine import options as engine_options
from horovodlike._engine.native import ffi
from horovodlike._net.interfaces import local_addresses
from horovodlike.config import load
from horovodlike.errors import ConfigError, RendezvousError

RunRanks = Callable[..., list[Any]]
StartHosts = Callable[..., list[Any]]
StartPython = Callable[..., "subprocess.Popen[str]"]

SEGMENT = 1 << 16


def segment_bytes(place: RankInfo) -> int:
    return SEGMENT * place.local_size


def environ_of(rank: int, nodes: Sequence[str], server: RendezvousServer, key: bytes, **more: str) -> dict[str, str]:
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    across = list(dict.fromkeys(nodes))
    variables = {
        "RANK": rank,
        "SIZE": len(nodes),
        "LOCAL_RANK": beside.index(rank),
        "LOCAL_SIZE": len(beside),
        "CROSS_RANK": across.index(nodes[rank]),
        "CROSS_SIZE": len(across),
        "NODE_ID": nodes[rank],
        "RENDEZVOUS_ADDR": "127.0.0.1",
        "RENDEZVOUS_PORT": server.port,
        "SECRET_KEY": key.hex(),
        "JOB_ID": "j",
        **more,
    }
    return {f"HOROVODLIKE_{name}": str(value) for name, value in variables.items()}


@pytest.fixture
def on_hosts(run_ranks: RunRanks, key: bytes, runtime: dict[str, str]) -> StartHosts:
    """Has the ranks of some nodes join, and calls ``body(membership)``; gives what it returns or raises, by rank."""

    def run(
        nodes: Sequence[str],
        body: Callable[[JobContext], Any] = lambda membership: None,
        each: Callable[[int], dict[str, str]] = lambda rank: {},
        **settings: str,
    ) -> list[Any]:
        def rank_body(rank: int) -> Any:  # noqa: ANN401
            environ = environ_of(rank, nodes, server, key, **settings, **each(rank))
            with establish(load(environ), segment_bytes, environ) as membership:
                result = body(membership)
                membership.confirm()
                return result

        with RendezvousServer(key, len(nodes)) as server:
            return run_ranks(len(nodes), rank_body)

    return run


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No descriptor, thread or file in /dev/shm remains."""
    before = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert set(os.listdir("/proc/self/fd")) <= before[0]
    assert set(threading.enumerate()) <= before[1]


def raise_errors(results: Sequence[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def greet_over(membership: JobContext) -> list[tuple[int, int, bool]]:
    """Sends over each connection who this is and what for; gives use, rank, and whether the right thing came."""
    rank = membership.place.rank
    for connection in membership.connections:
        assert not connection.socket.getblocking()
        assert not connection.socket.get_inheritable()
        text = f"{rank} to {connection.rank} use {connection.use} keys {connection.keys.send.hex()[:8]}"
        connection.socket.send(text.ljust(64).encode())
    found = []
    for connection in membership.connections:
        connection.socket.settimeout(10)
        data = b""
        while len(data) < 64:
            data += connection.socket.recv(64 - len(data))
        expected = f"{connection.rank} to {rank} use {connection.use} keys {connection.keys.receive.hex()[:8]}"
        found.append((connection.use, connection.rank, data.decode().strip() == expected))
    return found


def control_partners(rank: int, hosts: Sequence[int], fan_out: int) -> list[int]:
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    if rank not in leaders:
        return []
    host = hosts[rank]
    pairs = [(other, (other - 1) // fan_out) for other in range(1, len(leaders))]
    return [leaders[parent] for child, parent in pairs if child == host] + [
        leaders[child] for child, parent in pairs if parent == host
    ]


SHAPES = [("a", "b"), ("a", "a", "b", "b"), ("a", "a", "b", "c"), ("a", "b", "a", "b", "b"), tuple("abcdefgh")]


@pytest.mark.parametrize("nodes", SHAPES, ids=lambda nodes: "".join(nodes))
@pytest.mark.parametrize(("streams", "fan_out"), [(1, 16), (2, 2)])
def test_who_is_at_the_other_end(nodes: tuple[str, ...], streams: int, fan_out: int, on_hosts: StartHosts) -> None:
    with nothing_left():
        results = raise_errors(on_hosts(nodes, greet_over, TCP_STREAMS=str(streams), FAN_OUT=str(fan_out)))
    hosts = [list(dict.fromkeys(nodes)).index(node) for node in nodes]
    for rank, found in enumerate(results):
        data = [(DATA, other, True) for other in range(len(nodes)) if hosts[other] != hosts[rank]]
        control = [(CONTROL, other, True) for other in control_partners(rank, hosts, fan_out)]
        messages = [(MESSAGES, other, right) for _, other, right in data]
        assert found == [each for each in data for _ in range(streams)] + messages + control


def describe(membership: JobContext) -> dict[str, Any]:
    place = membership.place
    return {
        "local": (place.local_rank, place.local_size),
        "cross": (place.cross_rank, place.cross_size),
        "homogeneous": place.is_homogeneous,
        "hosts": membership.hosts,
        "names": membership.host_names,
        "bytes": os.fstat(membership.segment_fd).st_size if membership.segment_fd >= 0 else 0,
        "memory": os.fstat(membership.segment_fd).st_ino if membership.segment_fd >= 0 else 0,
        "wakeup_pipes": None if membership.wakeup_pipes is None else len(membership.wakeup_pipes.ends),
        "pids": membership.pids == [os.getpid()] * place.local_size,
        "processors": membership.processors == len(os.sched_getaffinity(0)),
    }


def test_the_hosts_that_are_found(on_hosts: StartHosts) -> None:
    results = raise_errors(on_hosts("abbacb", describe))
    memories = [result.pop("memory") for result in results]
    assert memories[0] == memories[3] != memories[1] == memories[2] == memories[5]
    common = {"hosts": [0, 1, 1, 0, 2, 1], "names": ["a", "b", "c"], "homogeneous": False} | {
        "pids": True,
        "processors": True,
    }
    two = {**common, "bytes": 2 * SEGMENT, "wakeup_pipes": 2}
    three = {**common, "bytes": 3 * SEGMENT, "wakeup_pipes": 3}
    assert results == [
        {**two, "local": (0, 2), "cross": (0, 3)},
        {**three, "local": (0, 3), "cross": (1, 3)},
        {**three, "local": (1, 3), "cross": (1, 2)},
        {**two, "local": (1, 2), "cross": (0, 2)},
        {**common, "bytes": 0, "wakeup_pipes": 1, "local": (0, 1), "cross": (2, 3)},
        {**three, "local": (2, 3), "cross": (0, 1)},
    ]


def test_host_ids_in_place_of_nodes(on_hosts: StartHosts) -> None:
    results = raise_errors(on_hosts("aabb", describe, lambda rank: {"HOSTID": "xyxx"[rank]}))
    assert [result["hosts"] for result in results] == [[0, 1, 0, 0]] * 4
    assert [result["local"] for result in results] == [(0, 3), (0, 1), (1, 3), (2, 3)]
    one = raise_errors(on_hosts("aabb", describe, HOSTID="x"))
    assert [result["hosts"] for result in one] == [[0] * 4] * 4
    assert [result["wakeup_pipes"] for result in one] == [None] * 4


def test_containers_of_one_node(
    on_hosts: StartHosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = HostFacts.collect

    def collect(place: RankInfo, *, chosen: bool) -> HostFacts:
        found = real(place, chosen=chosen)
        return replace(found, pid_namespace="pid:1") if place.rank == 1 else found

    monkeypatch.setattr(HostFacts, "collect", collect)
    results = raise_errors(on_hosts("aaa", greet_over))
    assert results == [
        [(DATA, 1, True), (MESSAGES, 1, True), (CONTROL, 1, True)],
        [(use, other, True) for use in (DATA, MESSAGES) for other in (0, 2)] + [(CONTROL, 0, True)],
        [(DATA, 1, True), (MESSAGES, 1, True)],
    ]
    said = capsys.readouterr().err
    assert said.count("horovodlike warning") == 1
    assert "ranks 0, 1, 2 of node 'a' do not share a host: they are in different process namespaces" in said
    assert "They communicate through the network" in said
    raise_errors(on_hosts("aaa", LOG_LEVEL="error"))
    assert capsys.readouterr().err == ""


def test_memory_that_cannot_be_shared(
    on_hosts: StartHosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shared_memory, "write_token", lambda fd: b"x" * shared_memory.TOKEN_BYTES)
    results = raise_errors(on_hosts("aa", describe))
    assert [result["hosts"] for result in results] == [[0, 1]] * 2
    said = capsys.readouterr().err
    assert said.count("horovodlike warning") == 1
    assert "does not hold what local rank 0 wrote there" in said


def test_what_the_engine_is_told(on_hosts: StartHosts) -> None:
    def fill(membership: JobContext) -> dict[str, Any]:
        native = ffi.new("hvl_config *")
        kept = engine_options._describe_hosts(load({}), native, membership)
        assert kept
        place = membership.place
        connections = [native.connections[index] for index in range(native.num_connections)]
        assert membership.wakeup_pipes is not None
        assert native.wakeup_fd == membership.wakeup_pipes.own
        assert list(native.wakeup_fds[0 : place.local_size]) == membership.wakeup_pipes.ends
        assert [each.fd for each in connections] == [each.socket.fileno() for each in membership.connections]
        return {
            "hosts": list(native.hosts[0 : place.size]),
            "names": [ffi.string(native.host_names[host]).decode() for host in range(2)],
            "ends": [(each.use, each.rank) for each in connections],
            "sends": {(place.rank, each.rank, each.use): bytes(each.send_key) for each in connections},
            "receives": {(each.rank, place.rank, each.use): bytes(each.receive_key) for each in connections},
        }

    results = raise_errors(on_hosts("aba", fill))
    assert [result["hosts"] for result in results] == [[0, 1, 0]] * 3
    assert [result["names"] for result in results] == [["a", "b"]] * 3
    assert [result["ends"] for result in results] == [
        [(DATA, 1), (MESSAGES, 1), (CONTROL, 1)],
        [(DATA, 0), (DATA, 2), (MESSAGES, 0), (MESSAGES, 2), (CONTROL, 0)],
        [(DATA, 1), (MESSAGES, 1)],
    ]
    sends, receives = ({k: v for result in results for k, v in result[name].items()} for name in ("sends", "receives"))
    assert sends == receives
    assert len(set(sends.values())) == 10


def test_settings_of_the_sockets(on_hosts: StartHosts) -> None:
    def options(membership: JobContext) -> list[list[int]]:
        names = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        tcp = socket.IPPROTO_TCP
        return [
            [each.socket.getsockopt(tcp, name) for name in (*names, socket.TCP_USER_TIMEOUT)]
            + [each.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
            for each in membership.connections
        ]

    for found in raise_errors(on_hosts("ab", options, NETWORK_TIMEOUT="9")):
        assert found == [[1, 3, 1, 6, 0, 1], [1, 3, 1, 6, 0, 1], [1, 3, 1, 6, 9000, 1]]


@pytest.mark.parametrize(("wanted", "address"), [("lo", "127.0.0.1"), ("::1/128", "::1"), ("", "127.0.0.1")])
def test_which_network_is_used(wanted: str, address: str, on_hosts: StartHosts) -> None:
    if address not in {str(each.address) for each in local_addresses()}:
        pytest.skip("this machine has no IPv6")

    def ends(membership: JobContext) -> list[str]:
        return [each.socket.getsockname()[0] for each in membership.connections]

    assert raise_errors(on_hosts("ab", ends, NETWORK_INTERFACE=wanted)) == [[address] * 3] * 2


def test_a_network_that_a_rank_does_not_have(on_hosts: StartHosts) -> None:
    errors = on_hosts("ab", each=lambda rank: {"NETWORK_INTERFACE": "lo" if rank == 0 else "nowhere0"})
    assert isinstance(errors[1], ConfigError)
    assert isinstance(errors[0], RendezvousError)
    assert "rank 1 failed: ConfigError: HOROVODLIKE_NETWORK_INTERFACE='nowhere0' names no network" in str(errors[0])


class Misled(Builder):
    """Rank 2 gets an address of rank 0 at which no process listens."""

    def __init__(self, rank: int, connection_ids: Any, places: Any, *rest: Any) -> None:  # noqa: ANN401
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = closed.getsockname()
        super().__init__(rank, connection_ids, [nobody, *places[1:]] if rank == 2 else places, *rest)


def test_ranks_that_cannot_connect_are_named_on_all(on_hosts: StartHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "Builder", Misled)
    with nothing_left():
        errors = on_hosts("abb", START_TIMEOUT="3")
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], RendezvousError)
    found = str(errors[0])
    assert "could not connect: rank 2 (b) to rank 0 (a): 127.0.0.1 port " in found
    assert ": Connection refused. " in found
    assert "rank 1" not in found
    assert "--network-interface" in found
    assert "firewall" in found


def test_a_report_has_room_for_some_problems() -> None:
    connection_ids = mesh.plan_connections(0, table_of("ab" * 100), 2, 16)
    report = mesh._report(dict.fromkeys(connection_ids, "x" * 300), 4000)
    assert len(json.dumps(report)) <= 4000
    assert len(report["problems"]) > 10
    assert report["more"] + len(report["problems"]) == 100


def table_of(nodes: str) -> Any:  # noqa: ANN401
    from horovodlike._bootstrap.topology import HostTable

    return HostTable.of([HostFacts(node, True, node, "", "", "", 0, 1) for node in nodes])


def ring(membership: JobContext) -> list[int]:
    """Writes this rank's number into the pipe of each rank beside it; gives what arrives in its own."""
    assert membership.wakeup_pipes is not None and membership.rendezvous is not None
    for end in membership.wakeup_pipes.ends:
        assert not os.get_blocking(end)
        os.write(end, bytes([membership.place.rank]))
    membership.rendezvous.barrier("rung")
    assert not os.get_blocking(membership.wakeup_pipes.own)
    found = sorted(os.read(membership.wakeup_pipes.own, 100))
    with pytest.raises(BlockingIOError):
        os.read(membership.wakeup_pipes.own, 1)
    return found


WRITERS = [[0, 3], [1, 2, 5], [1, 2, 5], [0, 3], [4], [1, 2, 5]]


def test_wakeup_pipes_reach_the_ranks_of_a_host(on_hosts: StartHosts) -> None:
    with nothing_left():
        assert on_hosts("abbacb", ring) == WRITERS


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm."""
    found = tmp_path / "shm"
    found.mkdir()
    monkeypatch.setattr(shared_memory, "DIRECTORY", str(found))
    return found


def test_wakeup_pipes_where_proc_is_closed(on_hosts: StartHosts, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = wakeup_pipes._open

    def closed(path: str, offer: Sequence[Any]) -> int:
        if path.startswith("/proc"):
            raise PermissionError(13, "closed", path)
        return real(path, offer)

    monkeypatch.setattr(wakeup_pipes, "_open", closed)
    with nothing_left():
        assert on_hosts("abbacb", ring) == WRITERS
    assert os.listdir(shm) == []


def test_wakeup_pipes_that_cannot_be_opened(on_hosts: StartHosts, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: str, offer: Sequence[Any]) -> int:
        raise PermissionError(13, "closed")

    monkeypatch.setattr(wakeup_pipes, "_open", closed)
    with nothing_left():
        errors = on_hosts("aab", ring)
    assert os.listdir(shm) == []
    assert len({str(error) for error in errors}) == 1
    assert "through /proc: rank 0: [Errno 13] closed; in /dev/shm: rank 0: [Errno 13] closed" in str(errors[0])


def test_a_pipe_that_is_another_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("pipe", "file"):
        with pytest.raises(RendezvousError, match="not the pipe of a rank of this host"):
            wakeup_pipes._open(str(tmp_path / name), [name, 1, 2])


RANK = """
    import os, sys
    from horovodlike.config import load
    from horovodlike._bootstrap.bootstrap import establish
    for _ in range(2):
        with establish(load(), lambda place: 1 << 16) as membership:
            others = sorted(connection.rank for connection in membership.connections)
            membership.confirm()
    print(membership.place.rank, others, "horovodlike._bootstrap.mesh" in sys.modules, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ("aab", ["0 [2, 2, 2] True", "1 [2, 2] True", "2 [0, 0, 0, 1, 1] True"]),
        ("aa", ["0 [] False", "1 [] False"]),
    ],
)
def test_processes(
    nodes: str, found: list[str], serve: Callable[..., RendezvousServer], start_python: StartPython, key: bytes
) -> None:
    """On one host nothing is imported that only several hosts need."""
    server = serve(len(nodes))
    processes = [start_python(RANK, environ_of(rank, nodes, server, key)) for rank in range(len(nodes))]
    for process, line in zip(processes, found, strict=True):
        assert process.stdout is not None
        assert process.stdout.readline() == f"{line}\n"


LIMIT = """
    import resource, sys
    from horovodlike._net.socket_options import ensure_descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
    for count in (10, 1000):
        ensure_descriptors(count, "connections")
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    try:
        ensure_descriptors(3000, "3000 connections")
    except RuntimeError as error:
        print(error, flush=True)
    sys.stdin.readline()
"""


def test_limits_of_open_files(start_python: StartPython) -> None:
    process = start_python(LIMIT)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["300\n", "2000\n"]
    refusal = process.stdout.readline()
    assert "may have 2000 open files, but 3000 connections and its other files need 30" in refusal
    assert "ulimit -Hn" in refusal
