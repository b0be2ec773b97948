"""The whole of the rendezvous: as hvdrun's ranks, and as ranks that find each other by themselves."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovodlike._bootstrap import bootstrap, discovery
from horovodlike._bootstrap.bootstrap import JobContext, RendezvousServer, establish
from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.file_discovery import Endpoint, FileDiscovery
from horovodlike._net.secure_channel import JobKey
from horovodlike.config import Config
from horovodlike.errors import ConfigError, RendezvousError

Serve = Callable[..., RendezvousServer]
RunRanks = Callable[..., list[Any]]
StartPython = Callable[..., "subprocess.Popen[str]"]

SEGMENT = 1 << 16


def segment_bytes(place: RankInfo) -> int:
    return SEGMENT


def environ_of(rank: int, size: int, base: dict[str, str], **more: str) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {**base, **{f"HOROVODLIKE_{name}": str(value) for name, value in names.items()}, **more}


def of_hvdrun(rank: int, server: RendezvousServer, size: int, key: bytes) -> dict[str, str]:
    base = {"HOROVODLIKE_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVODLIKE_RENDEZVOUS_PORT": str(server.port)}
    return environ_of(rank, size, base, HOROVODLIKE_SECRET_KEY=key.hex(), HOROVODLIKE_JOB_ID="j")


def check_member(membership: JobContext, rank: int, size: int) -> None:
    assert (membership.place.rank, membership.place.size) == (rank, size)
    assert membership.pids == [os.getpid()] * size
    assert os.fstat(membership.segment_fd).st_size == SEGMENT
    assert os.pread(membership.segment_fd, SEGMENT, 0) == bytes(SEGMENT)
    membership.confirm()


def test_a_job_of_one_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a job of one needs no network and no file")

    for module, name in (("socket", "socket"), ("socket", "create_server"), ("os", "open"), ("threading", "Thread")):
        monkeypatch.setattr(f"{module}.{name}", touched)
    environ = {"HOROVODLIKE_SECRET_KEY": "00" * 32}
    with establish(Config(), touched, environ) as membership:  # type: ignore[arg-type]
        membership.confirm()
        assert (membership.place, membership.pids, membership.segment_fd) == (RankInfo(), [os.getpid()], -1)
    assert environ == {}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_hvdrun_again_and_again(
    size: int, serve: Serve, run_ranks: RunRanks, key: bytes, runtime: dict[str, str]
) -> None:
    server = serve(size)

    def body(rank: int) -> list[str]:
        environ = of_hvdrun(rank, server, size, key)
        for _ in range(3):
            with establish(Config(), segment_bytes, environ) as membership:
                check_member(membership, rank, size)
        return list(environ)

    for names in run_ranks(size, body):
        assert isinstance(names, list), names
        assert "HOROVODLIKE_SECRET_KEY" not in names
        assert "HOROVODLIKE_RANK" in names


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_find_each_other_again_and_again(size: int, run_ranks: RunRanks, runtime: dict[str, str]) -> None:
    threads_before = set(threading.enumerate())

    def body(rank: int) -> None:
        for _ in range(3):
            with establish(
                Config(), segment_bytes, environ_of(rank, size, runtime, HOROVODLIKE_JOB_ID="j")
            ) as membership:
                assert os.listdir(os.path.join(runtime["XDG_RUNTIME_DIR"], "horovodlike")) == []
                check_member(membership, rank, size)

    before = set(os.listdir("/proc/self/fd"))
    assert run_ranks(size, body) == [None] * size
    assert set(os.listdir("/proc/self/fd")) <= before
    assert set(threading.enumerate()) <= threads_before


def test_a_file_of_a_crashed_job(run_ranks: RunRanks, runtime: dict[str, str], serve: Serve) -> None:
    """The file may name a closed port, or a server of another job: rank 1 looks again."""
    real = bootstrap.Rendezvous
    stranger = serve(2)
    with RendezvousServer(bytes(32), 2) as closed:
        pass
    for port in (stranger.port, closed.port):
        FileDiscovery("j", runtime).publish(Endpoint(port, JobKey.random()))
        tried = threading.Event()

        def note(*arguments: Any, port: int = port, tried: threading.Event = tried, **options: Any) -> Any:  # noqa: ANN401
            try:
                return real(*arguments, **options)
            finally:
                if arguments[1] == port:
                    tried.set()

        def body(rank: int, tried: threading.Event = tried) -> None:
            if rank == 0:
                assert tried.wait(20)
            with establish(Config(), segment_bytes, environ_of(rank, 2, runtime, HOROVODLIKE_JOB_ID="j")) as membership:
                check_member(membership, rank, 2)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(discovery, "Rendezvous", note)
            assert run_ranks(2, body) == [None, None]


def test_rank_0_never_comes(runtime: dict[str, str]) -> None:
    environ = environ_of(1, 2, runtime, HOROVODLIKE_JOB_ID="j")
    with pytest.raises(RendezvousError, match=r"after 0.2 s rank 0 of 2 had not told rank 1 .*--start-timeout"):
        establish(Config(start_timeout=0.2), segment_bytes, environ)


def test_only_rank_0_comes(runtime: dict[str, str]) -> None:
    threads_before = set(threading.enumerate())
    environ = environ_of(0, 3, runtime, HOROVODLIKE_JOB_ID="j")
    with pytest.raises(RendezvousError, match=r"after 0.2 s ranks 1, 2 of 3 had not arrived"):
        establish(Config(start_timeout=0.2), segment_bytes, environ)
    assert os.listdir(os.path.join(runtime["XDG_RUNTIME_DIR"], "horovodlike")) == []
    assert set(threading.enumerate()) <= threads_before


def test_settings_that_differ(run_ranks: RunRanks, runtime: dict[str, str]) -> None:
    def body(rank: int) -> None:
        config = Config(slot_bytes=4096 if rank == 1 else 8192, start_timeout=20.0 + rank, log_level="error")
        establish(config, segment_bytes, environ_of(rank, 3, runtime, HOROVODLIKE_JOB_ID="j"))

    for error in run_ranks(3, body):
        assert isinstance(error, RendezvousError)
        assert "HOROVODLIKE_SLOT_BYTES differs between the ranks: 8192 on ranks 0, 2, 4096 on rank 1" in str(error)


def test_data_that_only_some_ranks_seal(run_ranks: RunRanks, runtime: dict[str, str]) -> None:
    def body(rank: int) -> None:
        config = Config(seal_data=rank == 1, start_timeout=20.0, log_level="error")
        establish(config, segment_bytes, environ_of(rank, 2, runtime, HOROVODLIKE_JOB_ID="j"))

    for error in run_ranks(2, body):
        assert isinstance(error, RendezvousError)
        assert "HOROVODLIKE_SEAL_DATA differs between the ranks: False on rank 0, True on rank 1" in str(error)


def test_local_ranks_that_are_there_twice(run_ranks: RunRanks, runtime: dict[str, str]) -> None:
    def body(rank: int) -> None:
        establish(
            Config(), segment_bytes, environ_of(rank, 2, runtime, HOROVODLIKE_JOB_ID="j", HOROVODLIKE_LOCAL_RANK="0")
        )

    for error in run_ranks(2, body):
        assert "ranks 0, 1 are all local rank 0 of the same host" in str(error)
        assert "HOROVODLIKE_HOSTID" in str(error)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_engine_that_does_not_start_is_named_to_the_others(
    failing: int, run_ranks: RunRanks, runtime: dict[str, str]
) -> None:
    def body(rank: int) -> None:
        with establish(Config(), segment_bytes, environ_of(rank, 3, runtime, HOROVODLIKE_JOB_ID="j")) as membership:
            if rank == failing:
                raise MemoryError("no room for slots")
            membership.confirm()

    results = run_ranks(3, body)
    for rank, error in enumerate(results):
        if rank == failing:
            assert isinstance(error, MemoryError)
        else:
            assert f"rank {failing} failed: MemoryError: no room for slots" in str(error)


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "00" * 33])
def test_a_key_that_is_missing_or_malformed(text: str, runtime: dict[str, str]) -> None:
    environ = environ_of(1, 2, runtime, HOROVODLIKE_RENDEZVOUS_PORT="1", HOROVODLIKE_SECRET_KEY=text)
    environ["HOROVODLIKE_JOB_ID"] = "j"
    with pytest.raises(ConfigError if text else RendezvousError, match="HOROVODLIKE_SECRET_KEY") as caught:
        establish(Config(), segment_bytes, environ)
    assert not text or text not in str(caught.value)
    assert "HOROVODLIKE_SECRET_KEY" not in environ


@pytest.mark.parametrize("port", ["0", "65536", "x", "²"])
def test_a_port_that_is_none(port: str, runtime: dict[str, str]) -> None:
    environ = environ_of(1, 2, runtime, HOROVODLIKE_RENDEZVOUS_PORT=port, HOROVODLIKE_JOB_ID="j")
    with pytest.raises(ConfigError, match=f"HOROVODLIKE_RENDEZVOUS_PORT='{port}'"):
        establish(Config(), segment_bytes, environ)


RANK = """
    import json, os, subprocess, sys
    from horovodlike.config import load
    from horovodlike._bootstrap.bootstrap import establish
    found = []
    for _ in range(2):
        with establish(load(), lambda place: 1 << 16) as membership:
            membership.confirm()
            found.append([membership.place.rank, membership.place.size, membership.place.launcher, membership.pids])
    inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    result = json.dumps({"found": found, "pid": os.getpid(), "key": "SECRET_KEY" in inherited})
"""
PRINT = """
    print(result, flush=True)
    sys.stdin.readline()
"""
WRITE = """
    with open(f"{sys.argv[1]}/{found[0][0]}", "w") as file:
        file.write(result)
"""


def test_processes_of_hvdrun(serve: Serve, start_python: StartPython, key: bytes) -> None:
    server = serve(3)
    processes = [start_python(RANK + PRINT, of_hvdrun(rank, server, 3, key)) for rank in range(3)]
    for rank, process in enumerate(processes):
        assert process.stdout is not None
        result = json.loads(process.stdout.readline())
        assert result["found"] == [[rank, 3, "hvdrun", [each.pid for each in processes]]] * 2
        assert result["key"] is False


def test_rank_0_killed_while_others_wait(start_python: StartPython, runtime: dict[str, str]) -> None:
    environ = {"HOROVODLIKE_JOB_ID": "j", **runtime}
    rank_0 = start_python(
        RANK.replace("membership.confirm()", "print('in', flush=True) or sys.stdin.readline()"),
        environ_of(0, 2, environ),
    )
    with establish(Config(), segment_bytes, environ_of(1, 2, environ)) as membership:
        assert rank_0.stdout is not None and membership.rendezvous is not None
        assert rank_0.stdout.readline() == "in\n"
        started = time.monotonic()
        rank_0.kill()
        with pytest.raises(RendezvousError, match="which rank 0 ran and which has ended"):
            membership.confirm()
        assert time.monotonic() - started < 2


LAUNCHERS = {
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
    "Open MPI": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable],
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_real_launchers(name: str, tmp_path: Path, runtime: dict[str, str]) -> None:
    script = tmp_path / "rank.py"
    # A file for each rank: what ranks print at the same time may arrive in one line.
    script.write_text(textwrap.dedent(RANK + WRITE))
    program, *options = LAUNCHERS[name]
    command = [os.path.join(os.path.dirname(sys.executable), program), *options, str(script), str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD", "OMPI", "PMI"))}
    done = subprocess.run(
        command, env={**environ, **runtime}, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    pids = [result["pid"] for result in results]
    for rank, result in enumerate(results):
        assert result["found"] == [[rank, 2, name, pids]] * 2
