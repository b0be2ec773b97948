"""Messages between ranks of several hosts: a ring of them, and a rank that is killed while others wait for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.hosts import Cluster, environment

pytestmark = pytest.mark.cluster

SIZE = 3  # two ranks on the first host, one on the second
PROGRAM = """
import sys
import numpy as np
from horovodlike import basics
from horovodlike._engine import messages, ops
from horovodlike._engine.types import DType

basics.init()
rank, size = basics.rank(), basics.size()
for count in (1, 3000, 3_000_000):
    sent, received = np.full(count, float(rank)), np.zeros(count)
    handle = messages.receive(received.ctypes.data, received.nbytes, DType.float64, peer=(rank - 1) % size, tag=count)
    ops.wait(messages.send(sent.ctypes.data, sent.nbytes, DType.float64, peer=(rank + 1) % size, tag=count))
    assert messages.wait_message(handle) == ((rank - 1) % size, sent.nbytes)
    assert (received == (rank - 1) % size).all()
print("received", flush=True)
if sys.argv[1] == "waits":
    handle = messages.receive(received.ctypes.data, received.nbytes, DType.float64, peer=messages.ANY_SOURCE, tag=0)
    try:
        messages.wait_message(handle)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
if sys.argv[1] == "ends":
    ops.carry_out(ops.Request(ops.Kind.BARRIER, "end", []))  # a rank that shuts down ends the messages of all others
basics.shutdown()
"""


def start(hosts: Cluster, folder: Path, action: str, **settings: str) -> list[subprocess.Popen[str]]:
    key = folder / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    processes = []
    for rank, (host, local_rank, local_size) in enumerate([(0, 0, 2), (0, 1, 2), (1, 0, 1)]):
        given = {"RENDEZVOUS_ADDR": hosts.hosts[0].name, "RENDEZVOUS_PORT": "29513"}
        given |= {"SECRET_KEY_FILE": str(key), "JOB_ID": "m"}
        env = environment(**{f"HOROVODLIKE_{name}": value for name, value in (given | settings).items()})
        env |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(local_rank)}
        env |= {
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "job",
        }
        words = [sys.executable, "-c", PROGRAM, action]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(hosts.hosts[host].popen(words, env=env, cwd=folder, **pipes))
    return processes


@pytest.mark.parametrize("seals", ["0", "1"])
def test_a_ring_of_messages(cluster: Callable[..., Cluster], tmp_path: Path, seals: str) -> None:
    written = [each.communicate(timeout=60) for each in start(cluster(2), tmp_path, "ends", SEAL_DATA=seals)]
    assert [out for out, _ in written] == ["received\n"] * SIZE, written


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_is_killed(cluster: Callable[..., Cluster], tmp_path: Path, victim: int) -> None:
    processes = start(cluster(2), tmp_path, "waits")
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "received\n", process.communicate()
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for rank in {*range(SIZE)} - {victim}:
        out = processes[rank].stdout.readline()
        assert time.monotonic() - killed < 1.5
        assert out.startswith("JobBrokenError: ") and f"rank {victim} " in out, out
    for process in processes:
        process.communicate(timeout=20)
