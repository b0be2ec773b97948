"""Servers of parameters that `hvdrun --servers` starts beside the ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import Ended, Launch, marked

HEAD = """\
import os, signal, sys, threading
import numpy as np
import horovodlike as hvd
from horovodlike.parameter_server import ParameterServer, register_rule
hvd.init()
rank, size = hvd.rank(), hvd.size()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """`launch(options, text)` starts hvdrun with a program for its ranks."""
    launches: list[Launch] = []

    def start(options: str, text: str) -> Launch:
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(text))
        words = [*options.split(), sys.executable, tmp_path / "train.py"]
        launches.append(Launch(words, cwd=tmp_path))
        return launches[-1]

    yield start
    for started in launches:
        started.close()


@pytest.fixture
def run(launch: Callable[..., Launch]) -> Callable[..., Ended]:
    """Return a function that starts hvdrun, and waits for its end."""
    return lambda *arguments: launch(*arguments).finish()


def servers_of(job: Launch) -> list[int]:
    return sorted(pid for pid, line in marked(job.mark).items() if "-m horovodlike.parameter_server" in line)


@pytest.mark.parametrize("servers", [1, 3])
def test_dedicated_servers_are_no_ranks(run: Callable[..., Ended], servers: int) -> None:
    job = run(
        f"-np 2 --servers {servers}",
        f"""
        from horovodlike.parameter_server._servers import number_of_dedicated
        assert size == 2 and number_of_dedicated() == {servers}
        assert "HOROVODLIKE_SECRET_KEY" not in os.environ
        with ParameterServer([np.full(1000, 5.0 + rank), np.zeros((3, 3), np.int32)]) as server:
            server.send([np.ones(1000), np.ones((3, 3), np.int32)]).wait()
            hvd.barrier()
            first, second = server.receive().wait()
            assert (first == 7).all() and (second == 2).all()
            hvd.barrier()
        with ParameterServer(np.zeros(5), servers="dedicated") as server:
            assert not server.receive().wait().any()
        with ParameterServer(np.full(5, rank), servers="ranks", init="own") as server:
            assert set(server.receive().wait()) == {{0, 1}}
        try:
            ParameterServer(np.zeros(5), init="own")
        except ValueError as error:
            print(error)
        hvd.shutdown()
        hvd.init()
        with ParameterServer(np.zeros(5)) as server:
            server.send(np.ones(5)).wait()
            server.save(os.path.join(os.path.dirname(__file__), f"saved.{{rank}}"))
            server.load(os.path.join(os.path.dirname(__file__), f"saved.{{rank}}"))
    """,
    )
    assert job.code == 0, job.err
    assert all(b"init='own' needs ranks that serve" in job.out for _ in range(2))
    assert "dropped" not in job.err, job.err


def test_the_users_rules_at_dedicated_servers(run: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").write_text(
        textwrap.dedent("""
        from horovodlike.parameter_server import register_rule

        def halve(values, pushed, by):
            values /= by

        register_rule("halve", halve)
    """)
    )
    job = run(
        "-np 2 --servers 2 --server-module my_rules",
        """
        with ParameterServer(np.full(100, 8.0)) as server:
            if rank == 0:
                server.send(np.zeros(100), "halve", by=2).wait()
                try:
                    server.send(np.zeros(100), "none")
                except ValueError as error:
                    print(error)
                register_rule("mine", lambda values, pushed: None)
                try:
                    server.send(np.zeros(100), "mine").wait()
                except ValueError as error:
                    print(error)
            hvd.barrier()
            assert (server.receive().wait() == 4).all()
    """,
    )
    assert job.code == 0, job.err
    known = "adam, add, copy, halve, max, min, momentum, scale_add, sgd, zero"
    assert f"there is no update rule 'none'; there are {known}".encode() in job.out
    assert f"the server has no rule 'mine'; it has {known}".encode() in job.out


def test_a_killed_server_fails_the_ranks_and_the_job(launch: Callable[..., Launch]) -> None:
    job = launch(
        "-np 2 --servers 2",
        """
        import time
        server = ParameterServer(np.zeros(1 << 20))
        hvd.barrier()
        print("ready", flush=True)
        try:
            while True:
                server.send(np.ones(1 << 20)).wait()
        except hvd.HorovodInternalError as error:
            print(f"failed at {time.monotonic()}: {error}", flush=True)
            raise
    """,
    )
    job.expect(b"ready", 2)
    victim = servers_of(job)[0]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    ended = job.finish()
    assert ended.code == 1
    found = re.search(
        rf"hvdrun: server (\d) \(pid {victim}\) was killed by signal 9 \(SIGKILL\), and the ranks need it", ended.err
    )
    assert found, ended.err
    for line in re.findall(rb"failed at .*", ended.out):
        assert float(line.split()[2].rstrip(b":")) - killed < 1.0
        assert b"parameter server " + found[1].encode() in line
    assert ended.out.count(b"failed at") == 2


def test_a_job_restarts_from_the_last_save_before_a_server_was_lost(launch: Callable[..., Launch]) -> None:
    program = """
        path = os.path.join(os.path.dirname(__file__), "parameters.npz")
        with ParameterServer(np.zeros(1000)) as server:
            if rank == 0 and os.path.exists(path):
                server.load(path)
            hvd.barrier()
            [restored] = set(server.receive().wait())
            hvd.barrier()
            server.send(np.ones(1000)).wait()
            hvd.barrier()
            if rank == 0:
                server.save(path)
            hvd.barrier()
            print(f"began with {restored}", flush=True)
            while restored == 0:
                server.send(np.ones(1000)).wait()
    """
    job = launch("-np 2 --servers 2", program)
    job.expect(b"began with 0.0", 2)
    os.kill(servers_of(job)[0], signal.SIGKILL)
    assert job.finish().code == 1
    ended = launch("-np 2 --servers 2", program).finish()
    assert ended.code == 0, ended.err
    assert ended.out.count(b"began with 2.0") == 2


def test_a_module_that_cannot_be_imported_ends_the_job(run: Callable[..., Ended]) -> None:
    job = run("-np 1 --servers 1 --server-module no_such_rules", "signal.pause()")
    assert job.code == 1
    assert "ModuleNotFoundError: No module named 'no_such_rules'" in job.err
    assert re.search(r"hvdrun: server 0 \(pid \d+\) exited with code 1, and the ranks need it", job.err)


@pytest.mark.parametrize("how", ["fails", "is interrupted"])
def test_servers_end_with_the_ranks(launch: Callable[..., Launch], how: str) -> None:
    job = launch(
        "-np 2 --servers 2",
        f"""
        server = ParameterServer(np.zeros(1000))
        handles = [server.send(np.ones(1000)) for _ in range(100)]
        print("ready", flush=True)
        if rank == 1 and {how == "fails"}:
            sys.exit(3)
        signal.pause()
    """,
    )
    job.expect(b"ready", 2)
    if how == "is interrupted":
        job.signal(signal.SIGINT)
    ended = job.finish()
    assert ended.code == (3 if how == "fails" else 130)


def test_ranks_use_the_servers_after_sigterm(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """As on preemption: the servers are there until the last rank has ended."""
    job = launch(
        "-np 2 --servers 2 --verbose",
        """
        server = ParameterServer(np.zeros(1000))

        def end(signum, frame):
            server.send(np.ones(1000)).wait()
            server.close()
            with ParameterServer(np.ones(5)) as other:
                if rank == 0:
                    other.save(os.path.join(os.path.dirname(__file__), "saved"))
                hvd.barrier()
            print("saved", flush=True)
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        hvd.barrier()
        print("ready", flush=True)
        while True:
            signal.pause()
    """,
    )
    job.expect(b"ready", 2)
    job.signal(signal.SIGTERM)
    ended = job.finish()
    assert ended.code == 128 + signal.SIGTERM
    assert ended.out.count(b"saved") == 2, ended.err
    assert (tmp_path / "saved").exists()
    assert "all ranks have ended: ending the servers" in ended.err


def test_output_of_servers(run: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import sys\nprint('hello', {'torch', 'tensorflow', 'keras'} & {*sys.modules})")
    job = run("-np 1 --servers 2 --server-module loud --output-filename logs", "ParameterServer(np.zeros(5))")
    assert job.code == 0, job.err
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank.0", "server.0", "server.1"]
    assert (tmp_path / "logs" / "server.1" / "stdout").read_text() == "hello set()\n"
    assert b"[server 0]<stdout>: hello set()\n" in job.out and b"[server 1]<stdout>: hello set()\n" in job.out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--servers 0", "--servers 0 cannot be used: it must be an integer >= 1, and at most 65536"),
        ("--server-module rules", "--server-module needs --servers N"),
        ("--servers 2 --server-module rules.py/", "give the name of a module, such as my_rules, not that of a file"),
        ("--servers 2 --min-np 1", "--servers cannot be used with elastic jobs"),
        ("--servers 2 --mpi", "--servers cannot be used with --mpi"),
    ],
)
def test_options_that_do_not_fit(run: Callable[..., Ended], options: str, text: str) -> None:
    job = run(f"-np 2 {options}", "")
    assert job.code == 2
    assert text in job.err


def test_a_server_that_no_launcher_has_started(launch: Callable[..., Any], tmp_path: Path) -> None:
    job = Launch([], program=(sys.executable, "-P", "-m", "horovodlike.parameter_server"), cwd=tmp_path)
    ended = job.finish()
    job.close()
    assert ended.code == 2
    assert "hvdrun starts servers of parameters: hvdrun -np 4 --servers 2" in ended.err
