"""`hvdrun` over several hosts, which are this machine by other names: an `ssh` on PATH starts their agents."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.hvdrun_process import GRACE_S, SETTLE_S, SLACK_S

import horovodlike
from horovodlike.launcher.errors import HostsError

PYTHON = sys.executable
FOREVER = """
    print("ready", os.getpid())
    while True:
        signal.pause()
"""


def path(ssh: Path) -> dict[str, str]:
    return {"PATH": f"{ssh}:{os.environ['PATH']}"}


def test_the_ranks_of_each_host(hvdrun: Callable[..., object], script: Callable[..., Path], ssh: Path) -> None:
    program = script("""
        for name, value in sorted(os.environ.items()):
            if name.startswith("HOROVOD") or name in ("HOME", "OF_THE_TEST"):
                print(name, value)
        print("CWD", os.getcwd())
        import socket
        socket.create_connection((os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"],
                                  int(os.environ["HOROVODLIKE_RENDEZVOUS_PORT"]))).close()
    """)
    environ = {**path(ssh), "HOME": "/home/launcher", "OF_THE_TEST": "forwarded", "OMP_NUM_THREADS": None}
    job = hvdrun("-H", "node1:2,localhost:1,node2:5", "-np", 4, PYTHON, program, env=environ)
    assert job.code == 0, job.err
    ranks = [dict(line.decode().split() for line in job.lines_of(rank)) for rank in range(4)]
    for rank, (host, home, local_rank, local_size, cross_rank, cross_size) in enumerate(
        [
            ("node1", "/home/node1", 0, 2, 0, 3),
            ("node1", "/home/node1", 1, 2, 0, 1),
            ("localhost", "/home/launcher", 0, 1, 1, 3),
            ("node2", "/home/node2", 0, 1, 2, 3),
        ]
    ):
        assert (
            ranks[rank].items()
            >= {
                "CWD": str(program.parent),
                "HOME": home,
                "OF_THE_TEST": "forwarded",
                "HOROVODLIKE_NODE_ID": host,
                "HOROVOD_HOSTNAME": host,
                "HOROVODLIKE_RANK": str(rank),
                "HOROVODLIKE_SIZE": "4",
                "HOROVODLIKE_LOCAL_RANK": str(local_rank),
                "HOROVODLIKE_LOCAL_SIZE": str(local_size),
                "HOROVODLIKE_CROSS_RANK": str(cross_rank),
                "HOROVODLIKE_CROSS_SIZE": str(cross_size),
                "HOROVODLIKE_RENDEZVOUS_ADDR": "127.0.0.1",
            }.items()
        )
    for name in ("SECRET_KEY", "JOB_ID", "RENDEZVOUS_PORT"):
        assert len({environ[f"HOROVODLIKE_{name}"] for environ in ranks}) == 1
    assert re.search("^hvdrun: node1: OMP_NUM_THREADS=. for each of 2 ranks", job.err, re.M)
    assert re.search("^hvdrun: node2: OMP_NUM_THREADS=. for 1 rank ", job.err, re.M)


def test_nothing_of_the_job_is_on_a_command_line(
    launch: Callable[..., object], script: Callable[..., Path], ssh: Path
) -> None:
    program = script("print('key', os.environ['HOROVODLIKE_SECRET_KEY'], 'end')")
    job = launch("-H", "node1:1", "-p", 2222, "-i", "the key", "--ssh-options", "-o 'User me'", PYTHON, program,
                 env={**path(ssh), "OF_THE_TEST": "a secret"})  # fmt: skip
    key = re.search(b"key ([0-9a-f]{64}) end", job.expect(b" end"))
    assert key is not None
    assert job.finish().code == 0
    [words] = map(json.loads, (ssh / "ssh.log").read_text().splitlines())
    assert words[:2] == ["-o", "User me"]
    assert "BatchMode=yes" in words
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-i") + 1] == "the key"
    assert words[-2] == "node1"
    assert re.fullmatch(r"exec \S+ -I -S -X utf8 \S+/start_agent.py", words[-1])


def test_the_only_host_cannot_take_part(hvdrun: Callable[..., object], ssh: Path) -> None:
    job = hvdrun("-H", "unknown:1", "true", env=path(ssh))
    assert job.err.startswith("hvdrun: 1 of 1 host cannot take part:\n")


def test_a_hostfile(hvdrun: Callable[..., object], ssh: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\nnode1 slots=1\n\nnode2:1 # and this\n")
    job = hvdrun("--hostfile", "hosts", "sh", "-c", "echo $HOROVODLIKE_NODE_ID", env=path(ssh))
    assert (job.code, job.lines_of(0), job.lines_of(1)) == (0, [b"node1"], [b"node2"])


def test_hosts_that_cannot_take_part(hvdrun: Callable[..., object], ssh: Path) -> None:
    hosts = ["unknown", "locked", "bare", "empty", "silent", "old"]
    job = hvdrun("-H", ",".join(f"{host}:1" for host in [*hosts, "node1"]), "--start-timeout", 3, "true", env=path(ssh))
    assert job.code == 1
    assert job.out == b""
    first, *lines = job.err.splitlines()
    assert first == "hvdrun: 6 of 7 hosts cannot take part:"
    expected = {
        "unknown": "ssh says: ssh: Could not resolve hostname unknown: Name or service not known; check its spelling",
        "locked": "ssh says: root@locked: Permission denied (publickey).; set up a key",
        "bare": f"{PYTHON} cannot be executed there (bash: line 1: ",
        "empty": "horovodlike is not installed there: ",
        "silent": "it has not answered within 3 s; raise --start-timeout",
        "old": "horovodlike 0.0.1 is installed there, but ",
    }
    assert len(lines) == len(hosts)
    for line, host in zip(lines, hosts, strict=True):
        assert line.startswith(f"  {host}: {expected[host]}")
    assert job.seconds < 3 + SLACK_S


def test_there_is_no_ssh(hvdrun: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "true").symlink_to("/bin/true")
    job = hvdrun("-H", "localhost:1,node1:1", "true", env={"PATH": str(tmp_path)})
    assert job.code == 1
    assert job.err == "hvdrun: ssh is not installed here: it starts what runs on other hosts\n"


def test_what_a_login_shell_says_does_not_matter(hvdrun: Callable[..., object], ssh: Path) -> None:
    job = hvdrun("-H", "noisy:2", "sh", "-c", "echo $HOROVODLIKE_RANK", env=path(ssh))
    assert (job.code, sorted(job.out.splitlines())) == (0, [b"[0]<stdout>: 0", b"[1]<stdout>: 1"])


def test_a_failing_rank_is_named_with_its_host(
    hvdrun: Callable[..., object], script: Callable[..., Path], ssh: Path
) -> None:
    program = script("""
        if rank == 1:
            sys.exit("the cause")
        signal.pause()
    """)
    job = hvdrun("-H", "node1:1,node2:1,node3:1", PYTHON, program, env=path(ssh))
    assert job.code == 1
    assert re.search(
        r"^hvdrun: rank 1 \(pid \d+ on node2\) exited with code 1; its last lines:\n    the", job.err, re.M
    )
    assert job.seconds < SETTLE_S + SLACK_S


@pytest.mark.parametrize("which", ["ssh", "agent"])
def test_a_host_is_lost(launch: Callable[..., object], script: Callable[..., Path], ssh: Path, which: str) -> None:
    job = launch("-H", "node1:1,node2:1,localhost:1", PYTHON, script(FOREVER), env=path(ssh))
    job.expect(b"ready", 3)
    guard = psutil.Process(int((ssh / "node2").read_text()))  # which the ssh of these tests becomes
    [agent] = guard.children()
    (guard if which == "ssh" else agent).kill()
    ended = job.finish(SETTLE_S + GRACE_S + SLACK_S)
    assert ended.code == 1
    assert re.search(r"^hvdrun: .*node2.*(was killed|ended with)", ended.err, re.M)
    assert "hvdrun: rank" not in ended.err


def test_a_silent_host_is_given_up(launch: Callable[..., object], script: Callable[..., Path], ssh: Path) -> None:
    environ = {**path(ssh), "HOROVODLIKE_NETWORK_TIMEOUT": "3"}
    job = launch("-H", "node1:1,node2:1", PYTHON, script(FOREVER), env=environ)
    job.expect(b"ready", 2)
    [agent] = psutil.Process(int((ssh / "node2").read_text())).children()
    agent.suspend()
    try:
        assert job.process.wait(3 + SETTLE_S + GRACE_S + SLACK_S) == 1
    finally:
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # the kernel may have continued it, since no other process could
            agent.resume()
    job.wait_gone(GRACE_S + SLACK_S)
    assert re.search(r"^hvdrun: node2 has been silent for \d+ s; is it up, and reachable\?$", job.finish().err, re.M)


def test_hosts_give_up_a_silent_launcher(launch: Callable[..., object], script: Callable[..., Path], ssh: Path) -> None:
    environ = {**path(ssh), "HOROVODLIKE_NETWORK_TIMEOUT": "2"}
    job = launch("-H", "node1:1,node2:1", PYTHON, script(FOREVER), env=environ)
    pids = [int(pid) for pid in re.findall(rb"ready (\d+)", job.expect(b"ready", 2))]
    ranks = [os.pidfd_open(pid) for pid in pids]
    job.signal(signal.SIGSTOP)
    try:
        for rank in ranks:
            assert select.select([rank], [], [], 2 + GRACE_S + SLACK_S)[0]
            os.close(rank)
    finally:
        job.signal(signal.SIGCONT)
    ended = job.finish()
    assert ended.code == 1
    assert re.search(
        r"^hvdrun: the agent on node[12] ended .*the launcher has been silent for too long", ended.err, re.M
    )


def test_a_host_may_take_its_time_to_come(hvdrun: Callable[..., object], ssh: Path, tmp_path: Path) -> None:
    environ = {**path(ssh), "HOROVODLIKE_NETWORK_TIMEOUT": "1"}
    job = hvdrun("-H", "node1:1,late:1", "sh", "-c", "sleep 2; echo well", env=environ)
    assert (job.code, job.lines_of(0), job.lines_of(1)) == (0, [b"well"], [b"well"])


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_all_hosts(
    launch: Callable[..., object], script: Callable[..., Path], ssh: Path, signum: int, code: int
) -> None:
    program = script(f"""
        def leave(number, frame):
            print("got", number)
            sys.exit(0)
        signal.signal({int(signum)}, leave)
        print("ready")
        wait_for_signal()
    """)
    job = launch("-H", "node1:1,node2:1", PYTHON, program, env=path(ssh))
    job.expect(b"ready", 2)
    job.signal(signum)
    ended = job.finish()
    assert ended.code == code
    assert [ended.lines_of(rank)[-1] for rank in range(2)] == [b"got %d" % signum] * 2


def test_the_launcher_is_killed(launch: Callable[..., object], script: Callable[..., Path], ssh: Path) -> None:
    job = launch("-H", "node1:1,node2:2", PYTHON, script(FOREVER), env=path(ssh))
    job.expect(b"ready", 3)
    job.signal(signal.SIGKILL)
    job.wait_gone(GRACE_S + SLACK_S)


def test_a_signal_while_hosts_are_waited_for(launch: Callable[..., object], ssh: Path) -> None:
    os.mkfifo(ssh / "silent")  # the host's stand-in opens it in order to write
    job = launch("-H", "silent:1,node1:1", "true", env=path(ssh))
    assert int((ssh / "silent").read_text()) > 0
    job.signal(signal.SIGINT)
    assert job.finish(SLACK_S).code == 130


def test_functions_run_on_hosts(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path(ssh)["PATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = os.urandom(3_000_000)

    def work() -> tuple[str, bytes]:
        return os.environ["HOROVODLIKE_NODE_ID"], data[::-1]

    found = horovodlike.run(work, hosts="node1:2,node2:1")
    assert found == [("node1", data[::-1])] * 2 + [("node2", data[::-1])]
    with pytest.raises(HostsError, match="1 of 2 hosts cannot take part:\n  unknown: ssh says"):
        horovodlike.run(work, hosts="node1:1,unknown:1")
