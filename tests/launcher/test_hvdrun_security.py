"""Jobs of `hvdrun` among strangers and beside other jobs, and where their keys may not be seen."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PYTHON = sys.executable
TESTS = Path(__file__).parents[1]

TRAIN = """
    import numpy as np
    from support.collectives import allreduce
    from horovodlike import basics
    basics.init()
    for step in range(10):
        array = np.full(1000, rank + 1.0, np.float32)
        allreduce("gradient", array)
        assert (array == sum(range(1, basics.size() + 1))).all()
    print("trained as rank", rank, "of", basics.size(), flush=True)
"""


@pytest.fixture
def environ() -> dict[str, str]:
    """The variables by which ranks that train find the tests' collectives."""
    return {"PYTHONPATH": str(TESTS)}


def trained(size: int) -> list[bytes]:
    return sorted(f"[{rank}]<stdout>: trained as rank {rank} of {size}".encode() for rank in range(size))


def test_strangers_at_the_start(
    hvdrun: Callable[..., object], script: Callable[..., Path], environ: dict[str, str]
) -> None:
    """They come before the ranks, and stay."""
    program = script(
        """
    import socket
    address = os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"].split(",")[0], int(os.environ["HOROVODLIKE_RENDEZVOUS_PORT"])
    strangers = []
    for greeting in (b"", b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n", os.urandom(50), os.urandom(5000)):
        strangers += [socket.create_connection(address) for _ in range(5)]
        for stranger in strangers[-5:]:
            stranger.sendall(greeting)
    """
        + TRAIN
    )
    job = hvdrun("-np", 2, PYTHON, program, env=environ)
    assert job.code == 0, job.err
    assert sorted(job.out.splitlines()) == trained(2)


def test_ranks_of_another_job(
    launch: Callable[..., object], script: Callable[..., Path], environ: dict[str, str], tmp_path: Path
) -> None:
    """The second job's ranks have the address of the first one's rendezvous: they fail, and the first goes on."""
    os.mkfifo(tmp_path / "go")
    waiting = script(
        """
    with open(f"address{rank}", "w") as file:
        print(*(os.environ[f"HOROVODLIKE_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT")), file=file)
    print("waiting", flush=True)
    os.read(os.open("go", os.O_RDONLY), 1)
    """
        + TRAIN,
        "first.py",
    )
    go = os.open(tmp_path / "go", os.O_RDWR)
    try:
        first = launch("-np", 2, PYTHON, waiting, env=environ)
        first.expect(b"waiting", times=2)
        address, port = (tmp_path / "address0").read_text().split()
        lost = script(
            f"""
        os.environ["HOROVODLIKE_RENDEZVOUS_ADDR"] = "{address}"
        os.environ["HOROVODLIKE_RENDEZVOUS_PORT"] = "{port}"
        from horovodlike import basics
        basics.init()
        """,
            "second.py",
        )
        second = launch("-np", 2, "--start-timeout", 5, PYTHON, lost, env=environ).finish()
        assert second.code == 1
        assert re.search("AuthenticationError: authentication failed between rank [01] and the rendezvous", second.err)
        assert "was this process started in the environment of another job?" in second.err
        os.write(go, b"oo")
        job = first.finish()
    finally:
        os.close(go)
    assert job.code == 0, job.err
    assert set(trained(2)) <= set(job.out.splitlines())


def test_the_key_is_in_no_log(
    hvdrun: Callable[..., object], script: Callable[..., Path], environ: dict[str, str], tmp_path: Path
) -> None:
    """Not where everything is logged, not after a failure, and not in what is written for later."""
    program = script(
        """
    print("key", os.environ["HOROVODLIKE_SECRET_KEY"][::-1], "backwards", flush=True)
    """
        + TRAIN
        + """
    if rank == 1:
        os._exit(7)
    allreduce("never", array)
    """
    )
    words = ["--verbose", "--log-level", "TRACE", "--timeline-filename", tmp_path / "timeline.json"]
    environ["HOROVODLIKE_FLIGHT_RECORDER"] = str(tmp_path)
    job = hvdrun("-np", 2, *words, PYTHON, program, env=environ)
    assert job.code == 7
    assert "HorovodInternalError" in job.err
    backwards = re.search(b"key ([0-9a-f]{64}) backwards", job.out)
    assert backwards is not None
    key = backwards[1][::-1]
    raw = bytes.fromhex(key.decode())
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in written} >= {"timeline.json", "rank0.json"}
    for name, text in {"stdout": job.out, "stderr": job.err.encode(), **written}.items():
        for shape in (key, key.upper(), raw, repr(raw)[2:-1].encode()):
            assert shape not in text, name
