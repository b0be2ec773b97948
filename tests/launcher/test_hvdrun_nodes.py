"""`hvdrun --nnodes`: several launchers, each started by itself, that make one job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.hvdrun_process import GRACE_S, LIMIT_S, SETTLE_S, SLACK_S, Launch

from horovodlike._bootstrap import job_key
from horovodlike._net.secure_channel import CHALLENGE_BYTES
from horovodlike.launcher.cli import parse
from horovodlike.launcher.errors import UsageError

PYTHON = sys.executable
PORT = 29400
FOREVER = """
    print("ready")
    while True:
        signal.pause()
"""


@pytest.fixture
def where() -> str:
    """An address of this machine that no other test uses."""
    return "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))


@pytest.fixture
def node(launch: Callable[..., Launch], where: str) -> Callable[..., Launch]:
    """`node(0, "-np", 2, ...)` starts hvdrun on a node; all have the same key."""
    key = secrets.token_hex(32)

    def start(
        number: int, *words: Any, count: int = 2, env: dict[str, str | None] | None = None, **options: Any
    ) -> Launch:
        flags = ("--nnodes", count, "--node-rank", number, "--rendezvous", f"{where}:{PORT}")
        return launch(*flags, *words, env={"HOROVODLIKE_SECRET_KEY": key, **(env or {})}, **options)

    return start


SHOW = """
    import json, socket
    print(json.dumps({name.removeprefix("HOROVODLIKE_"): value for name, value in os.environ.items()
                      if name.startswith("HOROVODLIKE_")}))
    address = os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"], int(os.environ["HOROVODLIKE_RENDEZVOUS_PORT"])
    socket.create_connection(address).close()
"""


def test_nodes_make_one_job(node: Callable[..., Launch], script: Callable[..., Path], where: str) -> None:
    program = script(SHOW)
    key = secrets.token_hex(32)
    environ: dict[str, str | None] = {"HOROVODLIKE_SECRET_KEY": key}
    last = node(2, "-np", 1, PYTHON, program, count=3, env=environ)
    middle = node(1, "-np", 2, "sh", "-c", "echo $HOROVODLIKE_RANK", count=3, env=environ)  # a command of its own
    first = node(0, "-np", 1, "--output-filename", "logs", PYTHON, program, count=3, env=environ)
    ended = [job.finish() for job in (first, middle, last)]
    assert [job.code for job in ended] == [0, 0, 0], [job.err for job in ended]
    found = [json.loads(ended[0].lines_of(0)[0]), json.loads(ended[2].lines_of(3)[0])]
    assert sorted(ended[1].out.splitlines()) == [b"[1]<stdout>: 1", b"[2]<stdout>: 2"]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [found[0][name] for name in names] == ["0", "4", "0", "1", "0", "3"]
    assert [found[1][name] for name in names] == ["3", "4", "0", "1", "2", "3"]
    host = socket.gethostname()
    assert [each["NODE_ID"] for each in found] == [f"{host}#0", f"{host}#2"]  # the nodes of this test have one name
    assert {each["RENDEZVOUS_ADDR"] for each in found} == {where}
    for name in ("SECRET_KEY", "JOB_ID", "RENDEZVOUS_PORT"):
        assert len({each[name] for each in found}) == 1
    assert re.fullmatch("[0-9a-f]{64}", found[0]["SECRET_KEY"])
    assert found[0]["SECRET_KEY"] != key  # which would be good for the next job as well
    assert (program.parent / "logs" / "rank.0" / "stdout").read_bytes() + b"\n" == ended[0].lines_of(0)[0] + b"\n\n"


def test_one_node_is_a_job_too(node: Callable[..., Launch]) -> None:
    job = node(0, "-np", 2, "sh", "-c", "echo $HOROVODLIKE_SIZE", count=1).finish()
    assert (job.code, job.lines_of(1)) == (0, [b"2"])


def test_kubernetes_numbers_the_nodes(launch: Callable[..., Launch], where: str) -> None:
    jobs = [
        launch("--nnodes", 2, "--rendezvous", f"{where}:{PORT}", "-np", 1, "sh", "-c", "echo $HOROVODLIKE_RANK",
               env={"JOB_COMPLETION_INDEX": str(index), "HOROVODLIKE_SECRET_KEY": "ab" * 32})
        for index in (1, 0)
    ]  # fmt: skip
    assert [job.finish().out for job in jobs] == [b"[1]<stdout>: 1\n", b"[0]<stdout>: 0\n"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rank_ends_all_nodes(node: Callable[..., Launch], script: Callable[..., Path], failing: int) -> None:
    program = script(f"""
        if rank == {failing}:
            sys.exit("the cause")
        signal.pause()
    """)
    jobs = [node(number, "-np", 1, PYTHON, program) for number in range(2)]
    for ended in [job.finish() for job in jobs]:
        assert ended.code == 1
        assert re.search(
            rf"^hvdrun: rank {failing} \(pid \d+.*\) exited with code 1; its last lines:\n    the cause",
            ended.err,
            re.M,
        )
        assert ended.seconds < SETTLE_S + SLACK_S


@pytest.mark.parametrize("command", ["yes", "echo"])
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_node(node: Callable[..., Launch], command: str, full: int) -> None:
    with open("/dev/full", "wb") as file, open(os.devnull, "wb") as null:
        jobs = [node(number, "-np", 1, command, stdout=file if number == full else null) for number in range(2)]
        ended = [job.finish() for job in jobs]
    assert ended[full].code == 1
    assert "standard output cannot be written: No space left on device" in ended[full].err
    if command == "yes":
        assert ended[1 - full].code == 1
        where = "hvdrun: " if full == 0 else r"hvdrun: .*#1: "
        for each in ended:
            found = re.findall(f"^{where}standard output cannot be written: No space left on device$", each.err, re.M)
            assert len(found) == 1
            assert each.seconds < SLACK_S


def test_the_one_that_lost_a_peer_is_not_to_blame(
    node: Callable[..., Launch], script: Callable[..., Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    program = script("""
        class HorovodInternalError(RuntimeError):
            pass
        if rank == 0:
            with open("go", "w"):
                raise HorovodInternalError("rank 1 has shut down")
        open("go").read()
        sys.exit(5)
    """)
    jobs = [node(number, "-np", 1, PYTHON, program) for number in range(2)]
    for ended in [job.finish() for job in jobs]:
        assert ended.code == 5
        assert re.search(r"hvdrun: rank 1 \(pid \d+ on .*\) exited with code 5; it wrote nothing", ended.err)


@pytest.mark.parametrize(("killed", "message"), [(0, "hvdrun: node 0 has gone"), (1, "hvdrun: hvdrun on .* has gone")])
def test_a_killed_launcher_ends_all_nodes(
    node: Callable[..., Launch], script: Callable[..., Path], killed: int, message: str
) -> None:
    jobs = [node(number, "-np", 1, PYTHON, script(FOREVER)) for number in range(2)]
    for job in jobs:
        job.expect(b"ready")
    jobs[killed].signal(signal.SIGKILL)
    ended = jobs[1 - killed].finish(SETTLE_S + GRACE_S + SLACK_S)
    assert ended.code == 1
    assert re.search(message, ended.err)
    jobs[killed].wait_gone(GRACE_S + SLACK_S)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_agent_ends_all_nodes(node: Callable[..., Launch], script: Callable[..., Path], killed: int) -> None:
    jobs = [node(number, "-np", 1, PYTHON, script(FOREVER)) for number in range(2)]
    for job in jobs:
        job.expect(b"ready")
    [guard] = psutil.Process(jobs[killed].process.pid).children()
    guard.kill()
    for ended in [job.finish(SETTLE_S + GRACE_S + SLACK_S) for job in jobs]:
        assert ended.code == 1
        assert re.search(r"hvdrun: .*the agent .*(killed|ended)", ended.err)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_node_ends_the_job(node: Callable[..., Launch], script: Callable[..., Path], stopped: int) -> None:
    environ = {"HOROVODLIKE_NETWORK_TIMEOUT": "2"}
    jobs = [node(number, "-np", 1, PYTHON, script(FOREVER), env=environ) for number in range(2)]
    for job in jobs:
        job.expect(b"ready")
    jobs[stopped].signal(signal.SIGSTOP)
    try:
        ended = jobs[1 - stopped].finish(2 + SETTLE_S + GRACE_S + SLACK_S)
    finally:
        jobs[stopped].signal(signal.SIGCONT)
    assert ended.code == 1
    assert "silent" in ended.err
    assert jobs[stopped].finish().code == 1


def test_sigterm_to_all_launchers_is_one_signal(node: Callable[..., Launch], script: Callable[..., Path]) -> None:
    """Platforms send it to all nodes at once. A second one kills, but another node's is no second one."""
    program = script("""
        signal.signal(signal.SIGTERM, lambda *_: None)
        print("ready")
        wait_for_signal()
        print("heard")
        while not os.path.exists("leave"):
            time.sleep(0.01)
        print("left")
    """)
    jobs = [node(number, "-np", 1, "--grace-period", LIMIT_S, PYTHON, program) for number in range(2)]
    for job in jobs:
        job.expect(b"ready")
    for job in (*jobs[1:], jobs[0]):
        job.signal(signal.SIGTERM)
        job.expect(b"heard")
    Path(program).with_name("leave").touch()
    for rank, ended in enumerate([job.finish() for job in jobs]):
        assert (ended.code, ended.lines_of(rank)[-1]) == (143, b"left")


@pytest.mark.parametrize("to", [0, 1])
def test_a_signal_to_one_launcher_reaches_all_ranks(
    node: Callable[..., Launch], script: Callable[..., Path], to: int
) -> None:
    program = script("""
        def leave(number, frame):
            print("got", number)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready")
        wait_for_signal()
    """)
    jobs = [node(number, "-np", 1, PYTHON, program) for number in range(2)]
    for job in jobs:
        job.expect(b"ready")
    jobs[to].signal(signal.SIGTERM)
    for rank, ended in enumerate([job.finish() for job in jobs]):
        assert (ended.code, ended.lines_of(rank)[-1]) == (143, b"got 15")


def test_a_node_that_does_not_come(node: Callable[..., Launch]) -> None:
    jobs = [node(number, "-np", 1, "--start-timeout", 2, "true", count=4) for number in (0, 2)]
    first, other = (job.finish() for job in jobs)
    assert (first.code, other.code) == (1, 1)
    message = "after 2 s 2 of 4 nodes had not come: --node-rank 1, 3; does hvdrun run there"
    assert first.err.startswith(f"hvdrun: {message}")
    assert other.err.startswith(f"hvdrun: node 0 says: {message}")


def test_node_0_does_not_come(node: Callable[..., Launch]) -> None:
    ended = node(1, "-np", 1, "--start-timeout", 1, "true").finish()
    assert ended.code == 1
    assert re.match(
        r"hvdrun: node 0 at 127\S+ port 29400 cannot be reached \(Connection refused\): does hvd", ended.err
    )


def test_the_number_of_nodes_differs(node: Callable[..., Launch]) -> None:
    first = node(0, "-np", 1, "--start-timeout", 3, "true", count=3)
    other = node(1, "-np", 1, "true", count=2).finish()
    assert (other.code, other.err) == (
        1,
        "hvdrun: node 0 says: --nnodes is 2 on node 1 but 3 on node 0; give the same everywhere\n",
    )
    assert first.finish().code == 1


def test_two_nodes_with_one_number(node: Callable[..., Launch]) -> None:
    jobs = [node(number, "-np", 1, "--start-timeout", 10, "true", count=3) for number in (0, 1, 1)]
    refused, waiting = jobs[1].process, jobs[2].process
    ended, _, _ = select.select([os.pidfd_open(refused.pid), os.pidfd_open(waiting.pid)], [], [], SLACK_S)
    assert len(ended) == 1
    which = 1 if refused.poll() is not None else 2
    assert "two nodes claim to be --node-rank 1; give each its own" in jobs[which].finish().err
    third = node(2, "-np", 1, "true", count=3)  # those that are right can go on
    leader = jobs[0].finish()
    assert [leader.code, *(job.finish().code for job in (jobs[3 - which], third))] == [0, 0, 0]
    host = socket.gethostname()
    assert f"hvdrun: a launcher on {host}: two nodes claim to be --node-rank 1; give each its own\n" in leader.err


@pytest.mark.parametrize("count", [2, "2:2"], ids=["fixed", "elastic"])
def test_another_key(node: Callable[..., Launch], count: int | str) -> None:
    waits = ("--start-timeout", 8, *(("--elastic-timeout", 8) if count != 2 else ()))
    first = node(0, "-np", 1, *waits, "sleep", 60, count=count)
    other = node(1, "-np", 1, "true", count=count, env={"HOROVODLIKE_SECRET_KEY": "cd" * 32}).finish()
    assert other.code == 1
    assert "give all nodes the same --nnodes and the same key (--secret-key-file)" in other.err
    ended = first.finish()
    assert ended.code == 1
    assert "a caller at 127.0.0.1 was refused, as it has another key (--secret-key-file)" in ended.err


def connect(where: str) -> socket.socket:
    deadline = time.monotonic() + SLACK_S
    while True:
        try:
            return socket.create_connection((where, PORT), SLACK_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline


@pytest.fixture
def strangers() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_strangers_do_no_harm(node: Callable[..., Launch], where: str, strangers: contextlib.ExitStack) -> None:
    first = node(0, "-np", 1, "sh", "-c", "echo $HOROVODLIKE_SIZE", count=2)
    silent = [strangers.enter_context(connect(where)) for _ in range(200)]
    for text in (b"GET / HTTP/1.1\r\n\r\n" * 20, os.urandom(4096), b"\0" * 4096):
        with connect(where) as other:
            assert len(other.recv(CHALLENGE_BYTES)) == CHALLENGE_BYTES
            with contextlib.suppress(ConnectionError):
                other.sendall(text)
                assert other.recv(1) == b""  # nothing that comes is answered
    silent[-1].send(b"x")
    second = node(1, "-np", 1, "sh", "-c", "echo $HOROVODLIKE_SIZE")
    assert [job.finish().lines_of(rank) for rank, job in enumerate((first, second))] == [[b"2"], [b"2"]]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where, PORT), SLACK_S)


def test_a_port_that_is_taken(node: Callable[..., Launch], where: str) -> None:
    with socket.create_server((where, PORT)):
        ended = node(0, "-np", 1, "true").finish()
    assert ended.code == 1
    assert ended.err.startswith(f"hvdrun: node 0 cannot listen on {where} port {PORT}: Address already in use; choose")


def test_node_0_runs_elsewhere(launch: Callable[..., Launch]) -> None:
    words = ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "192.0.2.1:29400", "-np", 1, "--start-timeout", 1, "true")
    ended = launch(*words, env={"HOROVODLIKE_SECRET_KEY": "ab" * 32}).finish()
    assert ended.code == 1
    assert "192.0.2.1:29400 is none of this host's addresses (it is 192.0.2.1), but node 0 runs here" in ended.err


def test_what_does_not_fit_on_one_node_ends_all(node: Callable[..., Launch]) -> None:
    jobs = [node(0, "-np", 1, "true"), node(1, "-np", 9999, "--bind-to", "core", "true")]
    first, other = (job.finish() for job in jobs)
    assert (first.code, other.code) == (1, 2)
    assert "--bind-to core: 9999 ranks" in first.err
    assert "--bind-to core: 9999 ranks" in other.err


def test_a_key_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32 + "\n")
    file.chmod(0o600)
    words = ["--nnodes", "3", "--node-rank", "2", "--rendezvous", "[fd00::1]:29400", "--secret-key-file", str(file)]
    nodes = parse([*words, "-np", "2", "true"], {}).nodes
    assert nodes is not None
    assert (nodes.count, nodes.number, nodes.host, nodes.port, nodes.key.hex()) == (3, 2, "fd00::1", 29400, "ab" * 32)
    assert "ab" * 32 not in repr(nodes)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="--secret-key-file: .* mode 0640.*chmod 600"):
        parse([*words, "-np", "2", "true"], {})


KEY = {"HOROVODLIKE_SECRET_KEY": "ab" * 32}


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["--node-rank", "1"], KEY, "--node-rank needs --nnodes"),
        (["--rendezvous", "a:1"], KEY, "--rendezvous needs --nnodes"),
        (["--nnodes", "2", "--node-rank", "0"], KEY, "--nnodes needs --rendezvous HOST:PORT"),
        (["--nnodes", "2", "--rendezvous", "a:1"], KEY, "--nnodes needs --node-rank N.*JOB_COMPLETION_INDEX"),
        (["--nnodes", "2", "--node-rank", "2", "--rendezvous", "a:1"], KEY, "--node-rank 2: of 2 nodes, .* last one 1"),
        (["--nnodes", "0", "--node-rank", "0", "--rendezvous", "a:1"], KEY, "--nnodes 0: there must be at least one"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a"], KEY, "--rendezvous a cannot be used; write it"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:99999"], KEY, "--rendezvous a:99999 cannot be used"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1"], {}, "needs a key .*openssl rand -hex 32"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1"],
            {"HOROVODLIKE_SECRET_KEY": "ab"},
            "HOROVODLIKE_SECRET_KEY must be 64 hexadecimal digits",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "-H", "a:1"],
            KEY,
            "--nnodes and -H contradict each other",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--mpi"],
            KEY,
            "--nnodes and --mpi contradict each other",
        ),
    ],
)
def test_bad_words_about_nodes(
    words: list[str], environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_key, "_kept_key", None)  # another test's
    with pytest.raises(UsageError, match=message):
        parse([*words, "-np", "1", "true"], environ)
