"""Ranks that Slurm started without MPI, with credentials of a real munged."""

import contextlib
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horovodlike._bootstrap import slurm_discovery
from horovodlike._bootstrap.bootstrap import establish
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.file_discovery import Endpoint
from horovodlike._bootstrap.slurm_discovery import SlurmDiscovery, make_credential, open_credential
from horovodlike._net.listen import listen
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import Config, load
from horovodlike.errors import RendezvousError

RunRanks = Callable[..., list[Any]]

PLACE = RankInfo(1, 4, 1, 2, 0, 2, "Slurm", "Slurm/4711/0/", "gpu01")


@pytest.fixture
def place() -> RankInfo:
    """A place in a job of its own, and so with ports of its own."""
    return replace(PLACE, job=f"Slurm/{secrets.token_hex(8)}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A munged with a key of its own, and a folder of programs that use it."""
    munged = shutil.which("munged", path=os.environ["PATH"] + ":/usr/sbin")
    if munged is None:
        pytest.skip("there is no munged here")
    folder = tmp_path_factory.mktemp("munge")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    reachable = Path(tempfile.mkdtemp(prefix="munge-"))  # by every user, as a socket of munged has to be
    reachable.chmod(0o755)
    paths = {"key-file": folder / "key", "socket": reachable / "socket"}
    paths |= {f"{name}-file": folder / name for name in ("pid", "log", "seed")}
    files = [f"--{name}={path}" for name, path in paths.items()]
    daemon = subprocess.Popen(
        [munged, "--force", "--foreground", *files], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert daemon.stderr is not None
    for line in daemon.stderr:
        if "work thread" in line:
            break
    else:
        pytest.fail("munged has ended")
    reader = threading.Thread(target=daemon.stderr.read, daemon=True)
    reader.start()
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for program in ("munge", "unmunge"):
        script = bin_folder / program
        script.write_text(f'#!/bin/sh\nexec {shutil.which(program)} --socket={reachable / "socket"} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    yield str(bin_folder)
    daemon.terminate()
    daemon.wait(10)
    reader.join(10)
    daemon.stderr.close()
    shutil.rmtree(reachable)


@pytest.fixture
def munge(programs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That munged is the cluster's."""
    monkeypatch.setenv("PATH", programs + ":" + os.environ["PATH"])


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of the cluster are here."""
    monkeypatch.setattr(slurm_discovery, "find_addresses", lambda host: ["127.0.0.1"])


@pytest.mark.usefixtures("munge")
def test_credentials() -> None:
    credential = make_credential(b'["content"]\n\n')
    assert b"content" not in credential
    assert [open_credential(credential) for _ in range(3)] == [b'["content"]\n\n'] * 3  # each rank of a host opens it
    assert open_credential(credential[:-10] + b"AAAAAAAAA:") is None
    assert open_credential(b"SSH-2.0-OpenSSH_9.2p1\r\n") is None
    assert open_credential(b"MUNGE:" + b"A" * 10000) is None


@pytest.mark.usefixtures("munge")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's credential")
def test_a_credential_of_another_user() -> None:
    command = ["munge", f"--restrict-uid={os.geteuid()}", "--uid=65534", "--string=content"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert open_credential(done.stdout.strip()) is None


def test_munge_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "munge"
    script.write_text("#!/bin/sh\necho munge: Error: no daemon >&2\nexit 6\n")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(RendezvousError, match="munge failed: munge: Error: no daemon"):
        make_credential(b"x")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RendezvousError, match="munge cannot be run"):
        make_credential(b"x")
    assert "no program munge and no program unmunge" in str(slurm_discovery.find(PLACE, Config(), {}))


def test_it_is_for_slurm_only() -> None:
    assert slurm_discovery.find(RankInfo(launcher="torchrun"), Config(), {}) == ""


@pytest.mark.usefixtures("munge")
def test_which_host_is_rank_0s() -> None:
    found = slurm_discovery.find(
        PLACE, Config(), {"SLURM_STEP_NODELIST": "gpu[02-03]", "SLURM_JOB_NODELIST": "gpu[01-03]"}
    )
    assert isinstance(found, SlurmDiscovery)
    assert found.where.endswith(" of gpu02")
    assert "SLURM_STEP_NODELIST: '' is not a list of hosts" in str(slurm_discovery.find(PLACE, Config(), {}))


@pytest.mark.usefixtures("munge", "one_machine")
def test_publish_read_withdraw(place: RankInfo) -> None:
    rank_0, rank_1 = SlurmDiscovery(place, "gpu01"), SlurmDiscovery(place, "gpu01")
    assert rank_1.read() is None
    before = set(threading.enumerate())
    key = JobKey.random()
    rank_0.publish(Endpoint(4711, key, "127.0.0.1,127.0.0.2"))
    for _ in range(2):
        found = rank_1.read()
        assert found is not None
        assert (found.port, found.key.hex(), found.hosts) == (4711, key.hex(), "127.0.0.1,127.0.0.2")
    rank_0.unpublish()
    rank_0.unpublish()
    assert rank_1.read() is None
    assert set(threading.enumerate()) == before


@pytest.mark.usefixtures("munge", "one_machine")
def test_ports_that_others_have(place: RankInfo) -> None:
    """Of one a silent program has taken hold, of another a job that is not ours."""
    rank_0, rank_1 = SlurmDiscovery(place, "gpu01"), SlurmDiscovery(place, "gpu01")
    foreign = SlurmDiscovery(replace(place, job="other"), "gpu01")
    foreign._ports = rank_0._ports[1:2]
    with socket.create_server(("127.0.0.1", rank_0._ports[0])) as taken, contextlib.ExitStack() as stack:
        threading.Thread(target=_say_something_else, args=(taken,), daemon=True).start()
        foreign.publish(Endpoint(1, JobKey.random()))
        stack.callback(foreign.unpublish)
        rank_0.publish(Endpoint(4711, JobKey.random()))
        stack.callback(rank_0.unpublish)
        found = rank_1.read()
        assert found is not None
        assert found.port == 4711
        with pytest.raises(RendezvousError, match="cannot listen on 127.0.0.1 at any of the ports"):
            listen("rank 0", ["127.0.0.1"], rank_0._ports[:2])


def _say_something_else(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")


@pytest.mark.usefixtures("munge", "one_machine")
def test_a_credential_is_renewed(place: RankInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_discovery, "_RENEWAL_SECONDS", 0.0)
    rank_0 = SlurmDiscovery(place, "gpu01")
    rank_0.publish(Endpoint(4711, JobKey.random()))
    with contextlib.ExitStack() as stack:
        stack.callback(rank_0.unpublish)
        assert rank_0._credential_server is not None
        where = rank_0._credential_server._listeners[0].getsockname()
        seen = set()
        for _ in range(2):
            seen.add(slurm_discovery._ask(*where))
    assert len(seen) == 2


def test_the_address_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stands for a loopback address, or for nothing, is looked up with Slurm."""
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "NodeName=$4 Arch=x86_64 NodeAddr=10.9.8.7 NodeHostName=$4"\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for name in ("localhost", "no-such-host.invalid"):
        assert slurm_discovery.find_addresses(name) == ["10.9.8.7"]
    assert slurm_discovery.find_addresses("10.1.1.1") == ["10.1.1.1"]
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RendezvousError, match="no-such-host.invalid, the first node of the step, cannot be resolved"):
        slurm_discovery.find_addresses("no-such-host.invalid")


def environ_of(rank: int, job: int, base: dict[str, str]) -> dict[str, str]:
    """Two nodes with two and one tasks."""
    values = {
        "JOB_ID": job,
        "STEP_ID": 0,
        "PROCID": rank,
        "LOCALID": [0, 1, 0][rank],
        "NODEID": [0, 0, 1][rank],
        "STEP_NUM_TASKS": 3,
        "STEP_NUM_NODES": 2,
        "STEP_TASKS_PER_NODE": "2,1",
        "STEP_NODELIST": "gpu[01-02]",
    }
    return {
        **base,
        "SLURMD_NODENAME": f"gpu0{1 + rank // 2}",
        **{f"SLURM_{name}": str(values[name]) for name in values},
    }


@pytest.mark.usefixtures("munge", "one_machine")
def test_a_job_of_slurm(run_ranks: RunRanks, runtime: dict[str, str]) -> None:
    job = secrets.randbelow(1 << 30)

    def body(rank: int) -> Any:  # noqa: ANN401
        environ = environ_of(rank, job, runtime)
        found = []
        for _ in range(2):
            with establish(load(environ), lambda place: 1 << 16, environ) as membership:
                membership.confirm()
                place = membership.place
                found.append((place.rank, place.local_rank, place.cross_size, membership.hosts, membership.host_names))
        return found

    before = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    table = ([0, 0, 1], ["gpu01", "gpu02"])
    assert run_ranks(3, body) == [[(0, 0, 2, *table)] * 2, [(1, 1, 1, *table)] * 2, [(2, 0, 2, *table)] * 2]
    assert set(os.listdir("/proc/self/fd")) <= before[0]
    assert set(threading.enumerate()) <= before[1]
