"""`hvdrun --monitor` for ranks on several hosts: each rank reports, over the network, to the launcher of the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.hosts import Cluster, Host, environment
from cluster.namespaces import wait_until

pytestmark = [pytest.mark.cluster("sshd", "ssh"), pytest.mark.slow]

HVDRUN = (sys.executable, "-m", "horovodlike.launcher", "--monitor")
LIMIT_S = 60.0
READ = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
TRAIN = """
import os, time
import numpy as np
import horovodlike as hvd

hvd.init()
print("begun", hvd.rank(), flush=True)
while not hvd.allreduce(np.array([os.path.exists("stop")], np.float32), op=hvd.Max, name="step")[0]:
    time.sleep(0.3 * hvd.rank())
print("done", hvd.rank(), flush=True)
hvd.shutdown()
"""


TRAFFIC = """
import contextlib, os, time
with contextlib.suppress(OSError):  # as if nothing else ran here
    with open("/proc/self/autogroup", "w") as file:
        file.write("-20")
import numpy as np
import horovodlike as hvd

hvd.init()
gradients = np.ones(1 << 20, np.float32)
while not hvd.allreduce(np.array([os.path.exists("stop")], np.float32), op=hvd.Max, name="stop")[0]:
    begin = time.process_time()
    while time.process_time() < begin + 0.01:
        pass
    hvd.allreduce_(gradients, name="gradients")
    hvd.step()
"""


def start(host: Host, folder: Path, *words: object, program: str = TRAIN, **settings: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(program)
    return host.popen(
        [*HVDRUN, *map(str, words), sys.executable, "train.py"],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", **settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def url_of(job: subprocess.Popen[str]) -> str:
    assert job.stderr is not None
    for line in job.stderr:
        if (found := re.search(r"can be watched at (\S+)", line)) is not None:
            return found[1]
    raise AssertionError(job.communicate())


def read(host: Host, url: str, path: str) -> str:
    """Return what a reader on a host gets."""
    separator = "&" if "?" in path else "?"
    return host.run([sys.executable, "-I", "-c", READ, url.replace("/?", path + separator)]).stdout


def wait_for_ranks(host: Host, url: str) -> dict[str, Any]:
    """Return the state of the job when both ranks report, and rank 1 is found to be late."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        state: dict[str, Any] = json.loads(read(host, url, "/api/state"))
        if len(state["ranks"]) == 2 and state["straggler"] and state["straggler"]["rank"] == 1:
            return state
        assert time.monotonic() < deadline, state


@pytest.mark.parametrize("words", [(), ("-np", 2, "--min-np", 2, "--max-np", 2)], ids=["static", "elastic"])
def test_ranks_that_ssh_has_started(cluster: Callable[..., Cluster], tmp_path: Path, words: tuple[object, ...]) -> None:
    hosts = cluster(2, ssh=True)
    job = start(hosts.launcher, tmp_path, "-H", "h0:1,h1:1", *words)
    url = url_of(job)
    state = wait_for_ranks(hosts.launcher, url)
    assert [each["host"] for each in state["ranks"]] == ["h0", "h1"]
    assert {each["state"] for each in state["ranks"]} == {"running"}
    assert [read(hosts.launcher, url, f"/api/output?of={rank}").strip() for rank in range(2)] == ["begun 0", "begun 1"]
    (tmp_path / "stop").touch()
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, err
    assert sorted(re.findall(r"done \d", out)) == ["done 0", "done 1"]


def test_ranks_of_two_launchers(fresh_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    hosts = fresh_cluster(2)
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("c0ffee00" * 8)
    words = ("--nnodes", 2, "--rendezvous", "h0:29400", "--secret-key-file", key, "-np", 1)
    jobs = [start(host, tmp_path, *words, JOB_COMPLETION_INDEX=str(host.number)) for host in hosts.hosts]
    url = url_of(jobs[0])
    state = wait_for_ranks(hosts.hosts[0], url)
    assert len({each["host"] for each in state["ranks"]}) == 2
    assert {each["state"] for each in state["ranks"]} == {"running"}
    assert read(hosts.hosts[0], url, "/api/output?of=0").strip() == "begun 0"
    (tmp_path / "stop").touch()
    for rank, job in enumerate(jobs):
        out, err = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, err
        assert f"done {rank}" in out
        assert "watched" not in err
    wait_until(lambda: hosts.processes() == {}, "the end of everything")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_a_slow_network_is_named_with_its_host(
    fresh_cluster: Callable[..., Cluster], tmp_path: Path, seed: int
) -> None:
    hosts = fresh_cluster(3, ssh=True)
    slow = seed % 3
    for host in hosts.hosts:
        hosts.shape(host, rate=2e8 if host is hosts.hosts[slow] else 2e9)
    job = start(hosts.launcher, tmp_path, "-H", "h0:1,h1:1,h2:1", program=TRAFFIC)
    url, deadline = url_of(job), time.monotonic() + LIMIT_S
    while not (state := json.loads(read(hosts.launcher, url, "/api/state")))["slow"]:
        assert time.monotonic() < deadline, state
    assert [(each["kind"], each["ranks"]) for each in state["slow"]] == [("network", [slow])], state["slow"]
    (tmp_path / "stop").touch()
    _, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, err
    assert f"hvdrun: host h{slow} (rank {slow}) has a slow network since step " in err


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_networks_that_are_alike_are_not_named(
    fresh_cluster: Callable[..., Cluster], tmp_path: Path, seed: int
) -> None:
    hosts = fresh_cluster(3, ssh=True)
    for host in hosts.hosts:
        hosts.shape(host, rate=(2e8, 2e9, 0)[seed])
    job = start(hosts.launcher, tmp_path, "-H", "h0:1,h1:1,h2:1", program=TRAFFIC)
    url, deadline = url_of(job), time.monotonic() + LIMIT_S / 2
    while time.monotonic() < deadline:
        state = json.loads(read(hosts.launcher, url, "/api/state"))
        assert state["event_counts"]["slow"] == 0, state["events"]
        time.sleep(1.0)
    assert state["ranks"][0]["counters"]["steps"] > 10
    (tmp_path / "stop").touch()
    assert job.wait(LIMIT_S) == 0
