"""Jobs of several hosts that hvdrun did not start: with an address that the user gives, or with MPI."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodlike._bootstrap import discovery, job_key
from horovodlike._bootstrap.bootstrap import RendezvousServer, establish
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.job_key import read_key_file, take_key
from horovodlike.config import load
from horovodlike.errors import ConfigError, RendezvousError

RunRanks = Callable[..., list[Any]]


def segment_bytes(place: RankInfo) -> int:
    return 1 << 16


@pytest.fixture
def free_port() -> int:
    """A port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def key_file(tmp_path: Path, key: bytes) -> str:
    """The job's key in a file."""
    path = tmp_path / "key"
    path.write_text(key.hex() + "\n")
    path.chmod(0o600)
    return str(path)


def of_torchrun(rank: int, nodes: str, base: dict[str, str], **more: object) -> dict[str, str]:
    """Ranks that torchrun started on nodes, a letter each."""
    names = sorted(set(nodes))
    values = {
        "RANK": rank,
        "WORLD_SIZE": len(nodes),
        "LOCAL_RANK": nodes[:rank].count(nodes[rank]),
        "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
        "GROUP_RANK": names.index(nodes[rank]),
        "GROUP_WORLD_SIZE": len(names),
        "MASTER_ADDR": "a.example.org",
        "MASTER_PORT": 29500,
    }
    ours = {f"HOROVODLIKE_{name}": value for name, value in more.items()}
    return {**base, **{name: str(value) for name, value in {**values, **ours}.items()}}


def join_again(environ: dict[str, str]) -> list[Any]:
    """Joins and leaves, and at once again: by then rank 0's first server may not have ended."""
    found = []
    for _ in range(4):
        with establish(load(environ), segment_bytes, environ) as membership:
            membership.confirm()
            found.append([membership.place.rank, membership.hosts, [each.rank for each in membership.connections]])
    return found


def own_address() -> str:
    """An address of this machine that is none of the loopback interface."""
    from horovodlike._net.interfaces import local_addresses

    found = [str(each.address) for each in local_addresses() if each.is_reachable]
    if not found:
        pytest.skip("this machine has no network")
    return found[0]


@pytest.mark.parametrize("way", ["variable", "file"])
def test_rank_0_listens_where_the_user_says(
    way: str, free_port: int, run_ranks: RunRanks, runtime: dict[str, str], key: bytes, key_file: str
) -> None:
    address = own_address()
    secret = {"SECRET_KEY": key.hex()} if way == "variable" else {"SECRET_KEY_FILE": key_file}
    given = {"RENDEZVOUS_ADDR": f"192.0.2.99, {address}", "RENDEZVOUS_PORT": free_port, **secret}
    before = set(os.listdir("/proc/self/fd"))
    results = run_ranks(3, lambda rank: join_again(of_torchrun(rank, "aab", runtime, **given)))
    hosts = [0, 0, 1]
    assert results == [[[0, hosts, [2, 2, 2]]] * 4, [[1, hosts, [2, 2]]] * 4, [[2, hosts, [0, 1, 0, 1, 0]]] * 4]
    assert set(os.listdir("/proc/self/fd")) <= before


def test_on_one_host_the_loopback_address_will_do(
    free_port: int, run_ranks: RunRanks, runtime: dict[str, str], key: bytes
) -> None:
    given = {"RENDEZVOUS_PORT": free_port, "SECRET_KEY": key.hex()}
    results = run_ranks(2, lambda rank: join_again(of_torchrun(rank, "aa", runtime, **given)))
    assert results == [[[rank, [0, 0], []]] * 4 for rank in range(2)]


def test_a_launcher_that_runs_a_server_after_all(run_ranks: RunRanks, runtime: dict[str, str], key: bytes) -> None:
    with RendezvousServer(key, 2) as server:
        given = {"RENDEZVOUS_PORT": server.port, "SECRET_KEY": key.hex()}
        results = run_ranks(2, lambda rank: join_again(of_torchrun(rank, "aa", runtime, **given)))
    assert results == [[[rank, [0, 0], []]] * 4 for rank in range(2)]


def test_a_port_that_somebody_else_has(runtime: dict[str, str], key: bytes) -> None:
    with RendezvousServer(bytes(32), 2) as foreign:
        given = {"RENDEZVOUS_PORT": foreign.port, "SECRET_KEY": key.hex()}
        with pytest.raises(RendezvousError, match=f"listen on 127.0.0.1 port {foreign.port}: Address already in use"):
            join_again(of_torchrun(0, "aa", runtime, **given))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.99", "'192.0.2.99' is no address of host"),
        ("localhost", "other hosts cannot reach that"),
        ("no-such-host.invalid", "no-such-host.invalid cannot be resolved on"),
    ],
)
def test_addresses_where_rank_0_cannot_listen(
    address: str, words: str, free_port: int, runtime: dict[str, str], key: bytes
) -> None:
    given = {"RENDEZVOUS_ADDR": address, "RENDEZVOUS_PORT": free_port, "SECRET_KEY": key.hex()}
    with pytest.raises(RendezvousError, match=words):
        join_again(of_torchrun(0, "ab", runtime, **given))


def test_an_address_without_a_key(free_port: int, runtime: dict[str, str]) -> None:
    with pytest.raises(RendezvousError, match=r"HOROVODLIKE_SECRET_KEY \(64 hex.*HOROVODLIKE_SECRET_KEY_FILE"):
        join_again(of_torchrun(0, "ab", runtime, RENDEZVOUS_PORT=free_port))


@pytest.mark.parametrize("owner", ["hvdrun", "RayExecutor"])
def test_a_process_without_the_key_of_what_started_it(owner: str) -> None:
    environ = {"HOROVODLIKE_RENDEZVOUS_PORT": "1", "HOROVODLIKE_RENDEZVOUS_OWNER": owner}
    place = RankInfo(rank=0, size=2, launcher="hvdrun")
    with pytest.raises(RendezvousError, match=f"only the processes that {owner} starts itself can be ranks"):
        discovery._GivenAddress(environ, None, place)


def test_another_key_on_one_rank(free_port: int, run_ranks: RunRanks, runtime: dict[str, str], tmp_path: Path) -> None:
    def body(rank: int) -> None:
        path = tmp_path / str(rank)
        path.write_text(f"{rank:064x}")
        path.chmod(0o600)
        given = {"RENDEZVOUS_PORT": free_port, "SECRET_KEY_FILE": path, "START_TIMEOUT": 1}
        join_again(of_torchrun(rank, "aa", runtime, **given))

    errors = run_ranks(2, body)
    assert "rank 1 of 2 had not arrived" in str(errors[0])
    assert "do not hold the same key" in str(errors[1])


def test_nothing_leads_to_the_others(runtime: dict[str, str]) -> None:
    environ = of_torchrun(1, "ab", runtime)
    with pytest.raises(RendezvousError) as caught:
        establish(load(environ), segment_bytes, environ)
    for words in (
        "torchrun started 2 ranks, 1 of them on this host",
        "how to find the others. Start the job with hvdrun",
        "HOROVODLIKE_RENDEZVOUS_ADDR",
        "HOROVODLIKE_RENDEZVOUS_PORT",
        "HOROVODLIKE_SECRET_KEY_FILE",
    ):
        assert words in str(caught.value)


def test_names_and_addresses() -> None:
    assert "127.0.0.1" in discovery.resolve("localhost")
    assert discovery.resolve("10.0.0.1, ::1") == ["10.0.0.1", "::1"]


def test_a_key_that_others_can_read(key_file: str, key: bytes) -> None:
    assert read_key_file(key_file, "here").hex() == key.hex()
    os.chmod(key_file, 0o640)
    with pytest.raises(ConfigError, match=r"here: .* has mode 0640, .* chmod 600"):
        read_key_file(key_file, "here")


@pytest.mark.parametrize("content", ["", "00" * 31, "x" * 64, "00" * 33, "00" * 1000])
def test_a_file_that_holds_no_key(content: str, key_file: str) -> None:
    Path(key_file).write_text(content)
    with pytest.raises(ConfigError, match=r"64 hexadecimal digits") as caught:
        read_key_file(key_file, "here")
    assert not content or content not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        read_key_file(str(tmp_path / "missing"), "here")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        read_key_file(str(tmp_path / "pipe"), "here")


def test_the_variable_comes_before_the_file(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_key, "_kept_key", None)
    environ = {"HOROVODLIKE_SECRET_KEY": "11" * 32, "HOROVODLIKE_SECRET_KEY_FILE": key_file}
    for _ in range(2):
        found = take_key(environ)
        assert found is not None
        assert found.hex() == "11" * 32
    assert list(environ) == ["HOROVODLIKE_SECRET_KEY_FILE"]


MPI_RANK = """
    import json, os, sys
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    # As if every rank were on a host of its own.
    hosts = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_HOSTNAME": f"node{rank}"}
    environ = {**os.environ, **hosts}
    if sys.argv[2] == "imported":
        from mpi4py import MPI
        before = MPI.COMM_WORLD.allreduce(rank)
    from horovodlike.config import load
    from horovodlike._bootstrap.bootstrap import establish
    found = []
    for _ in range(2):
        with establish(load(environ), lambda place: 1 << 16, environ) as membership:
            membership.confirm()
            found.append([membership.place.rank, membership.hosts, [each.rank for each in membership.connections]])
    from mpi4py import MPI
    with open(f"{sys.argv[1]}/{rank}", "w") as file:
        json.dump({"found": found, "sum": MPI.COMM_WORLD.allreduce(rank + 1)}, file)
"""


@pytest.mark.parametrize("first", ["imported", "not imported"])
def test_ranks_of_mpi(first: str, tmp_path: Path, runtime: dict[str, str]) -> None:
    own_address()
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(MPI_RANK))
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]
    command = [os.path.join(os.path.dirname(sys.executable), "mpirun"), *options, sys.executable, str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD", "OMPI", "PMI"))}
    done = subprocess.run(
        [*command, str(tmp_path), first],
        env={**environ, **runtime},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    connections = [[1, 2, 1, 2, 1, 2], [0, 2, 0, 2, 0], [0, 1, 0, 1, 0]]
    for rank, result in enumerate(results):
        assert result == {"found": [[rank, [0, 1, 2], connections[rank]]] * 2, "sum": 6}
