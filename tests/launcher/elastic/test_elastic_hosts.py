"""Elastic jobs over several hosts, which come and go: a stand-in for ssh executes everything on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hvdrun_process import SLACK_S
from test_elastic_jobs import ElasticLaunch, elastic

__all__ = ["elastic"]  # a fixture


def path(ssh: Path) -> dict[str, str]:
    return {"PATH": f"{ssh}:{os.environ['PATH']}"}


class Hosts:
    """A script that prints the hosts, and the file in which it finds them."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "hosts.sh"
        self._file = folder / "hosts.txt"
        self.script.write_text(f"#!/bin/sh\ncat {self._file}\n")
        self.script.chmod(0o755)

    def are(self, *lines: str) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self._file)

    def fail(self) -> None:
        self._file.unlink()


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_hosts_come_and_go(elastic: Callable[..., ElasticLaunch], hosts: Hosts, ssh: Path) -> None:
    hosts.are("node1:2")
    job = elastic(
        *("-np", 2, "--min-np", 1, "--host-discovery-script", hosts.script),
        program="print('on', os.environ['HOROVODLIKE_NODE_ID'], flush=True)",
        env=path(ssh),
    )
    job.at(1, 2)
    hosts.are("node1:2", "node2:1")
    assert job.at(2, 3) == {0: 0, 1: 1, 2: 2}
    job.expect("[2]<stdout>: on node2")
    hosts.are("node2:1")
    assert job.at(3, 1) == {0: 2}
    job.expect("heard removed", 2)
    hosts.are("node2:1", "node1:1")
    assert job.at(4, 2) == {0: 2, 1: 3}
    assert job.finish().code == 0


def test_a_host_that_is_offered_again_while_its_agent_is_ending(
    elastic: Callable[..., ElasticLaunch], hosts: Hosts, ssh: Path
) -> None:
    # A daemon that ignores SIGTERM keeps the agent busy.
    hosts.are("node1:1", "node2:1")
    job = elastic(
        *("-np", 2, "--min-np", 1, "--host-discovery-script", hosts.script),
        program="""
        if os.environ["HOROVODLIKE_WORKER"] == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                os.setsid()
                print("daemon", flush=True)
                signal.pause()
        """,
        env=path(ssh),
    )
    job.at(1, 2)
    job.expect("daemon")
    hosts.are("node1:1")
    job.at(2, 1)
    hosts.are("node1:1", "node2:1")
    assert job.at(3, 2) == {0: 0, 1: 2}
    assert job.finish().code == 0


def test_places_on_several_hosts(elastic: Callable[..., ElasticLaunch], ssh: Path) -> None:
    program = """
    def before_init(worker, generation, step):
        names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        place = [os.environ["HOROVOD_" + name] for name in names]
        assert place == [os.environ["HOROVODLIKE_" + name] for name in names]
        print("place", generation, *place, "!", flush=True)
    """
    job = elastic("-H", "node1:2,node2:1", "--min-np", 1, program=program, env=path(ssh), held=3)
    job.at(1, 3)
    job.kill(0)
    job.at(2, 2)
    job.admit()
    job.at(3, 3)
    out = job.expect("place 3", 3)
    places = {(each[0], each[1]): each[2] for each in re.findall(r"\[(\d)\]<stdout>: place (\d) ([\d ]+) !", out)}
    assert [places[worker, "1"] for worker in "012"] == ["0 0 2 0 2", "1 1 2 0 1", "2 0 1 1 2"]
    # Worker 3 is the newest, so that its host has ranks 0 and 2.
    assert [places[worker, "3"] for worker in "123"] == ["0 0 2 0 2", "1 0 1 1 2", "2 1 2 0 1"]
    assert job.finish().code == 0


def agent_of(ssh: Path, host: str) -> int:
    guard = int((ssh / host).read_text())
    return int(Path(f"/proc/{guard}/task/{guard}/children").read_text())


def test_a_lost_host(elastic: Callable[..., ElasticLaunch], ssh: Path) -> None:
    words = ("-H", "node1:1,node2:2", "-np", 3, "--min-np", 1)
    job = elastic(*words, env=path(ssh), stderr=subprocess.STDOUT, held=3)
    job.at(1, 3)
    os.kill(agent_of(ssh, "node2"), signal.SIGKILL)
    assert job.at(2, 1) == {0: 0}
    job.expect("hvdrun: node2 cannot be used: the agent on node2 ended with code 137")
    job.admit()
    assert job.at(3, 3) == {0: 0, 1: 3, 2: 4}  # it is tried again
    assert job.finish().code == 0


def test_a_host_that_is_cut_off(elastic: Callable[..., ElasticLaunch], ssh: Path) -> None:
    words = ("-H", "node1:1,node2:1", "--min-np", 1, "--heartbeat-timeout", 5)
    job = elastic(*words, env=path(ssh), stderr=subprocess.STDOUT)
    job.at(1, 2)
    agent = agent_of(ssh, "node2")
    os.kill(agent, signal.SIGSTOP)
    try:
        job.expect("hvdrun: node2 cannot be used: it has been silent for ")
        assert job.at(2, 1) == {0: 0}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)
    assert job.finish().code == 0


def test_a_host_that_cannot_be_reached_holds_nobody_up(
    elastic: Callable[..., ElasticLaunch], hosts: Hosts, ssh: Path
) -> None:
    hosts.are("node1:1", "silent:1", "unknown:4")
    os.mkfifo(ssh / "silent")
    job = elastic(
        *("-np", 1, "--min-np", 1, "--host-discovery-script", hosts.script, "--start-timeout", 30), env=path(ssh)
    )
    with open(ssh / "silent"):
        job.at(1, 1)
        ended = job.finish()
    assert ended.code == 0
    assert "hvdrun: unknown cannot be used: ssh says: ssh: Could not resolve hostname unknown" in ended.err


def test_hosts_that_never_work(elastic: Callable[..., ElasticLaunch], ssh: Path) -> None:
    job = elastic(
        *("-H", "unknown:2", "-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 0.01, 0.02), env=path(ssh)
    )
    ended = job.job.finish()
    assert ended.code == 1
    assert "hvdrun: no host could be used; unknown: ssh says: ssh: Could not resolve hostname" in ended.err


def test_the_script_fails_at_first(elastic: Callable[..., ElasticLaunch], hosts: Hosts) -> None:
    job = elastic("-np", 1, "--min-np", 1, "--host-discovery-script", hosts.script)
    ended = job.job.finish()
    assert ended.code == 1
    assert re.search(
        r"hvdrun: the hosts cannot be found out: \S+/hosts.sh ended with 1: cat: .*No such file", ended.err
    )


def test_the_script_fails_later(elastic: Callable[..., ElasticLaunch], hosts: Hosts) -> None:
    hosts.are("localhost")
    words = ("-np", 1, "--min-np", 1, "--slots", 1, "--host-discovery-script", hosts.script)
    job = elastic(*words, stderr=subprocess.STDOUT)
    job.at(1, 1)
    hosts.fail()
    job.expect("hvdrun: the hosts cannot be found out, and stay as they are: ")
    hosts.are("localhost:2")
    job.at(2, 2)
    ended = job.finish()
    assert (ended.code, ended.out.count(b"cannot be found out")) == (0, 1)
    assert ended.seconds < SLACK_S


def test_the_script_names_no_host_at_first(elastic: Callable[..., ElasticLaunch], hosts: Hosts) -> None:
    hosts.are()
    words = ("-np", 1, "--min-np", 1, "--host-discovery-script", hosts.script)
    job = elastic(*words, stderr=subprocess.STDOUT)
    job.expect(f"hvdrun: --host-discovery-script {hosts.script} names no host: the job waits for some")
    hosts.are("localhost:1")
    job.at(1, 1)
    assert job.finish().code == 0
