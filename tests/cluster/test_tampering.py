"""Packets that are changed between two hosts: nothing that was changed is ever interpreted, and every job ends."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.hosts import Cluster, Host, environment
from cluster.jobs import HVDRUN
from cluster.namespaces import wait_until
from cluster.tamper_job import CANARY, NUMBER

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).resolve().parents[1]
LINE = Path(__file__).with_name("tamper_line.py")
PROGRAM = [
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = [{str(TESTS / 'cluster')!r}, {str(TESTS)!r}]; import tamper_job; tamper_job.main()",
]
OBJECT = f"x{CANARY[:28].encode().hex()}"
TENSOR = f"x{(2 * struct.pack('d', NUMBER)).hex()}"
BOUND_S = 30.0
# What a job may end with. Anything else, an UnpicklingError say, means that changed bytes were interpreted.
KNOWN = {"", "IntegrityError", "JobBrokenError", "ShutDownError", "RendezvousError", "AuthenticationError"}
KNOWN |= {"FrameError", "VersionError", "UnreachableError", "HorovodInternalError", "MismatchError"}
SETTINGS_OF_JOB = {
    "HOROVODLIKE_START_TIMEOUT": "5",
    "HOROVODLIKE_NETWORK_TIMEOUT": "3",
    "HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "2",
    "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "5",
    "OMP_NUM_THREADS": "1",
}


def cases(*all_of: tuple[str, str, str]) -> list[Any]:
    return [pytest.param(*case, id="-".join(case[:2]) + f"-{case[2][:8]}") for case in all_of]


def in_short(*values: str, short: bool) -> Any:
    """A place in a sweep of them; `make test-slow` has those of `short`."""
    return pytest.param(*values, marks=pytest.mark.slow if short else pytest.mark.thorough)


SHORT = cases(
    ("rendezvous0", "up", "300"),
    ("mesh", "up", "20"),
    ("control", "up", "400"),
    ("data", "down", OBJECT),
    ("data", "up", OBJECT),
    ("messages", "up", "100"),
)
SWEEP = cases(
    *(("rendezvous0", way, str(at)) for way in ("up", "down") for at in (0, 5, 20, 45, 110, 145, 150, 400)),
    *(("mesh", way, str(at)) for way in ("up", "down") for at in (0, 5, 20, 33, 41, 47, 50, 80)),
    *(("control", way, str(at)) for way in ("up", "down") for at in (81, 84, 90, 120, 150, 300, 500, 900)),
    *(("data", way, str(at)) for way in ("up", "down") for at in (81, 90, 113, 120, 150, 200, 1000, 20000, 34000)),
    *(("data", way, at) for way in ("up", "down") for at in (TENSOR, OBJECT)),
    *(("messages", way, at) for way in ("up", "down") for at in ("81", "90", "144", "210", TENSOR)),
)
SEALED = [
    pytest.param(False, id="plain"),
    pytest.param(True, id="sealed"),
]


def environments(key: Path, host: Host, *, sealed: bool) -> list[dict[str, str]]:
    """The environment of each of two ranks, as torchrun makes it."""
    common = {"HOROVODLIKE_RENDEZVOUS_ADDR": host.ipv4, "HOROVODLIKE_RENDEZVOUS_PORT": "29511"}
    common |= {"HOROVODLIKE_SECRET_KEY_FILE": str(key), "HOROVODLIKE_JOB_ID": "tampered", **SETTINGS_OF_JOB}
    common |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    common |= {"HOROVODLIKE_SEAL_DATA": "1"} if sealed else {}
    return [environment(**common, RANK=str(rank), GROUP_RANK=str(rank)) for rank in range(2)]


def check(told: list[dict[str, Any]], *, sealed: bool) -> None:
    for rank in told:
        assert rank["unexpected"] == []
        assert rank["error"] in KNOWN, rank
        assert rank["right"] or not sealed
        assert not rank["error"] or len(rank["text"]) > 20


def check_nothing_left(hosts: list[Host]) -> None:
    wait_until(lambda: not any(host.processes() for host in hosts), "the end of the ranks")
    assert [host.shm_entries() for host in hosts] == [set()] * len(hosts)


@contextmanager
def one_byte_changed(hosts: Cluster, *case: str) -> Iterator[None]:
    """Change a byte of what goes to the second host or comes from it; see `tamper_line.py`."""
    line = hosts.links[hosts.hosts[1].name, "eth0"].insert(LINE, *case)
    try:
        yield
    finally:
        line.kill()
        assert line.stdout is not None
        changes = line.stdout.read().split()
        hosts.shape(hosts.hosts[1])
    assert changes == ["changed"], case


def run(hosts: Cluster, folder: Path, case: tuple[str, str, str], *, sealed: bool = False) -> list[dict[str, Any]]:
    """Run a job of two ranks with one changed byte; what the ranks tell."""
    key = folder / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    machines = hosts.hosts
    with one_byte_changed(hosts, *case):
        since = time.monotonic()
        ranks = [
            host.popen(PROGRAM, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for host, env in zip(machines, environments(key, machines[0], sealed=sealed), strict=True)
        ]
        written = [rank.communicate(timeout=BOUND_S) for rank in ranks]
        assert time.monotonic() - since < BOUND_S
    assert [rank.returncode for rank in ranks] == [0, 0], written  # none has crashed
    check_nothing_left(machines)
    return [json.loads(out.splitlines()[-1]) for out, _ in written]


@pytest.mark.parametrize("sealed", SEALED)
@pytest.mark.parametrize("case", [pytest.param(tuple(each.values), id=each.id) for each in SHORT])
def test_a_changed_byte(
    cluster: Callable[..., Cluster], tmp_path: Path, case: tuple[str, str, str], sealed: bool
) -> None:
    """Ranks of two hosts, and a man in the middle of one connection."""
    told = run(cluster(2, ipv6=False), tmp_path, case, sealed=sealed)
    check(told, sealed=sealed)
    if case[2] == OBJECT and not sealed:
        # `down` is what rank 0 sends, since the rank with the higher number connects.
        reader = told[1 if case[1] == "down" else 0]
        assert reader["error"] == "IntegrityError"
        assert "was not unpickled" in reader["text"] and "docs/users/security.md" in reader["text"]
    if case[0] == "messages":
        assert told[0]["error"] == "JobBrokenError" and "MAC" in told[0]["text"]


@pytest.mark.thorough
@pytest.mark.parametrize("sealed", SEALED)
@pytest.mark.parametrize("case", [pytest.param(tuple(each.values), id=each.id) for each in SWEEP])
def test_a_changed_byte_anywhere(
    cluster: Callable[..., Cluster], tmp_path: Path, case: tuple[str, str, str], sealed: bool
) -> None:
    check(run(cluster(2, ipv6=False), tmp_path, case, sealed=sealed), sealed=sealed)


# The first connection of the second node is that of its hvdrun to the first one's.
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize(
    "at", [in_short(at, short=at in ("45", "170")) for at in ("0", "5", "45", "110", "145", "170", "350")]
)
def test_a_changed_byte_between_two_hvdruns(cluster: Callable[..., Cluster], tmp_path: Path, at: str, way: str) -> None:
    hosts = cluster(2, ipv6=False)
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    nodes = ["--nnodes", "2", "--rendezvous", f"{hosts.hosts[0].ipv4}:29400", "--secret-key-file", str(key), "-np", "1"]
    with one_byte_changed(hosts, "rendezvous0", way, at):
        jobs = [
            host.popen(
                [*HVDRUN, *nodes, *PROGRAM],
                env=environment(TAMPER_FOLDER=str(tmp_path), JOB_COMPLETION_INDEX=str(host.number), **SETTINGS_OF_JOB),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in hosts.hosts
        ]
        written = [job.communicate(timeout=2 * BOUND_S)[0] for job in jobs]
    check([json.loads(path.read_text()) for path in tmp_path.glob("*.told")], sealed=False)
    for job, out in zip(jobs, written, strict=True):
        assert job.returncode == 0 or "hvdrun" in out, out
        assert "Traceback" not in out, out
    check_nothing_left(hosts.hosts)


# From hvdrun's host to one with a rank: the ssh connection that the node's agent speaks over; then what the rank
# connects to, in its order: the driver's server for workers, and the generation's rendezvous.
@pytest.mark.cluster("sshd", "ssh")
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        *(
            in_short(f"rendezvous{number}", at, short=at == "145")
            for number in (0, 1)
            for at in ("3", "60", "145", "170")
        ),
        *(in_short("ssh", at, short=at == "1200") for at in ("2", "60", "1200", "2500")),
        in_short("data", OBJECT, short=True),
    ],
)
def test_a_changed_byte_of_an_elastic_job(
    cluster: Callable[..., Cluster], tmp_path: Path, kind: str, at: str, way: str
) -> None:
    hosts = cluster(2, ipv6=False, ssh=True)
    with one_byte_changed(hosts, kind, way, at):
        hvdrun = hosts.launcher.popen(
            [*HVDRUN, "--min-np", "1", "--reset-limit", "3", "-H", "h0:1,h1:1", *PROGRAM],
            env=environment(TAMPER_FOLDER=str(tmp_path), **SETTINGS_OF_JOB),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        out, _ = hvdrun.communicate(timeout=2 * BOUND_S)
    told = [json.loads(path.read_text()) for path in tmp_path.glob("*.told")]
    check(told, sealed=False)
    assert hvdrun.returncode == 0 or "hvdrun" in out
    assert "Traceback" not in out, out

    def left() -> list[str]:
        return [words for host in hosts.machines for words in host.processes().values() if "listener" not in words]

    wait_until(lambda: not left(), "the end of the job")
    assert [host.shm_entries() for host in hosts.machines] == [set()] * 3
