"""`horovodlike.run`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster.namespaces import wait_until
from support.collectives import allreduce
from support.hvdrun_process import MARK, marked

import horovodlike
from horovodlike import basics
from horovodlike.launcher.errors import RankFailedError, UsageError
from horovodlike.launcher.run import RemoteTraceback


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    mark = f"run-{os.urandom(8).hex()}"
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    assert marked(mark) == {}


class OddError(Exception):
    """Can be pickled, but not be read again: its constructor wants another argument."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


def rank() -> int:
    return int(os.environ["HOROVODLIKE_RANK"])


def add(first: int, second: int = 0) -> tuple[int, int]:
    return rank(), first + second


def test_results_come_by_rank() -> None:
    assert horovodlike.run(add, (1,), {"second": 2}, np=3) == [(0, 3), (1, 3), (2, 3)]
    assert horovodlike.run(add, args=(1,), num_proc=1) == [(0, 1)]
    assert horovodlike.run(add, (1,)) == [(0, 1)]
    assert horovodlike.run(add, (1,), None, 2) == [(0, 1), (1, 1)]


def test_lambdas_and_what_they_hold() -> None:
    held = {"text": "x" * 1000}
    assert horovodlike.run(lambda: held["text"], np=2) == [held["text"]] * 2


def test_large_functions_and_results() -> None:
    data = os.urandom(5_000_000)
    assert horovodlike.run(lambda: data[::-1], np=2) == [data[::-1]] * 2


def test_results_that_are_functions() -> None:
    [function] = horovodlike.run(lambda: lambda value: value + 1)
    assert function(1) == 2


def test_output_goes_to_ours(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    horovodlike.run(lambda: print("hello"), np=2, output_filename=str(tmp_path))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>: hello", "[1]<stdout>: hello"]
    assert (tmp_path / "rank.1" / "stdout").read_bytes() == b"hello\n"


def test_the_environment() -> None:
    given = {**os.environ, "OF_THE_TEST": "1"}
    names = ("OF_THE_TEST", "HOROVODLIKE_SIZE", "HOROVODLIKE_START_TIMEOUT", "HOROVODLIKE_TASK_FD")
    assert horovodlike.run(lambda: [os.environ.get(name) for name in names], env=given, start_timeout=7) == [
        ["1", "1", "7", None]
    ]


def test_an_exception_comes_with_its_rank_and_traceback() -> None:
    def fail() -> None:
        if rank() == 1:
            raise KeyError("the key")
        signal.pause()

    with pytest.raises(KeyError, match="the key") as caught:
        horovodlike.run(fail, np=2)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.rank == 1
    assert "[rank 1]" in str(cause)
    assert "in fail" in cause.text


def test_the_cause_is_raised_though_another_rank_is_faster(tmp_path: Path) -> None:
    def fail() -> None:
        pid = tmp_path / "pid"
        basics.init()
        if basics.rank() == 0:
            pid.with_suffix(".new").write_text(f"{os.getpid()}")
            pid.with_suffix(".new").rename(pid)
            allreduce("x", np.ones(3))  # raises ShutDownError
        wait_until(pid.exists, "rank 0")
        basics.shutdown()
        wait_until(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the end of rank 0")
        raise KeyError("the key")

    with pytest.raises(KeyError, match="the key"):
        horovodlike.run(fail, np=2)


@pytest.mark.filterwarnings("ignore")
def test_an_exception_that_cannot_be_sent() -> None:
    def fail() -> None:
        raise OddError(1, 2)

    with pytest.raises(RankFailedError, match=r"rank 0 raised OddError\('odd'\)") as caught:
        horovodlike.run(fail)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "OddError: odd" in caught.value.__cause__.text


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="what the function has returned on rank 1 cannot be sent: .* 'frame'"):
        horovodlike.run(lambda: sys._getframe() if rank() == 1 else None, np=2)


def test_arguments_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match=r"run\(\): func, or something in args or kwargs, cannot be pickled: .*'frame'"):
        horovodlike.run(print, (sys._getframe(),))


def test_a_rank_that_dies() -> None:
    def die() -> None:
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(RankFailedError, match=r"rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\)") as caught:
        horovodlike.run(die, np=2)
    assert (caught.value.rank, caught.value.exit_code) == (0, 137)


@pytest.mark.parametrize(("code", "message"), [(0, "exited with code 0 before"), (5, "exited with code 5")])
def test_a_rank_that_exits(code: int, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as caught:
        horovodlike.run(lambda: os._exit(code))
    assert (caught.value.rank, caught.value.exit_code) == (0, code)


def test_an_interrupt_ends_the_ranks() -> None:
    def interrupt(parent: int) -> None:
        os.kill(parent, signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        horovodlike.run(interrupt, (os.getpid(),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"np": 0}, r"run\(\): np=0 cannot be used: it must be an integer >= 1"),
        ({"np": "2"}, r"run\(\): np='2' cannot be used: it must be an integer"),
        ({"np": 2.5}, r"run\(\): np=2.5 cannot be used"),
        ({"min_num_proc": "1"}, r"run\(\): min_num_proc='1' cannot be used"),
        ({"func": None}, r"run\(\): func=None cannot be used: it must be a function"),
        ({"args": 3}, r"run\(\): args=3 cannot be used: it must be a sequence, such as \(1, 2\)"),
        ({"args": "text"}, r"run\(\): args='text' cannot be used"),
        ({"kwargs": [1]}, r"run\(\): kwargs=\[1\] cannot be used: it must be a mapping"),
        ({"env": {"A": 1}}, r"run\(\): env has 'A': 1; names and values must be texts"),
        ({"hosts": ["a:1"]}, r"run\(\): hosts=\['a:1'\] cannot be used: it must be a text such as 'node-1:4"),
        ({"output_filename": 3}, r"run\(\): output_filename=3 cannot be used: it must be the name of a folder"),
        ({"output_filename": "/dev/null/x"}, "^output_filename=/dev/null/x: /dev/null/x/rank.0: Not a directory"),
        ({"ssh_port": "22"}, r"run\(\): ssh_port='22' cannot be used: it must be an integer"),
        ({"host_discovery": "./hosts.sh"}, r"run\(\): host_discovery='./hosts.sh' cannot be used: it must be a"),
        ({"gpus_per_rank": "x"}, r"run\(\): gpus_per_rank='x' cannot be used: it must be an integer of at least 0"),
        ({"gpus_per_rank": 1}, r"^gpus_per_rank=1: 1 rank needs 1 GPU, .*; leave gpus_per_rank out: then"),
        ({"np": 2, "min_np": 3}, "^min_np=3 is more than np=2, for which the job waits before it starts"),
        ({"num_proc": 2, "max_np": 1}, "^max_np=1 is less than num_proc=2, for which the job waits before it starts"),
        ({"np": 2, "num_proc": 3}, "num_proc=3 and np=2 contradict each other"),
        ({"hosts": "elsewhere"}, "Invalid host input 'elsewhere'"),
        ({"hostfile": "no such file"}, "--hostfile no such file: No such file"),
        ({"hosts": "a:1", "hostfile": "hosts"}, "Argument hosts and hostfile only allow one provided"),
        ({"use_gloo": True, "use_mpi": True}, "Argument use_gloo and use_mpi only allow one set True"),
        ({"min_np": 0}, "min_np=0 cannot be used: it must be an integer >= 1"),
        ({"reset_limit": 1}, "reset_limit is for elastic jobs; give min_np, max_np or host_discovery_script"),
        ({"start_timeout": 0}, r"run\(\): start_timeout='0' cannot be used: it must be a number greater than 0"),
        ({"min_np": 1, "elastic_timeout": 0}, r"run\(\): elastic_timeout='0' cannot be used"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match=message):
        horovodlike.run(**{"func": rank, **arguments})


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nps'"):
        horovodlike.run(rank, nps=2)


def test_arguments_without_effect() -> None:
    with pytest.warns(DeprecationWarning, match="use_gloo has no effect"):
        assert horovodlike.run(rank, hosts="localhost:1", use_gloo=True, disable_cache=None) == [0]
