"""Elastic jobs on this machine, with workers that train nothing: what `hvdrun` does when they come, go and die."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import GRACE_S, LIMIT_S, SLACK_S, Launch

PYTHON = sys.executable


class ElasticLaunch:
    """A running elastic job, whose workers are followed by what they print."""

    def __init__(self, job: Launch) -> None:
        self.job = job

    def expect(self, text: str, times: int = 1) -> str:
        return self.job.expect(text.encode(), times).decode()

    def at(self, generation: int, size: int) -> dict[int, int]:
        """Waits until a generation has come together; returns the worker of each rank."""
        out = self.expect(f"at {generation}: rank ", size)
        found = re.findall(rf"\[(\d+)\]<stdout>: at {generation}: rank (\d+) of (\d+)\n", out + "\n")
        assert [int(each[2]) for each in found] == [size] * size
        return {int(rank): int(worker) for worker, rank, _ in found}

    def next_of(self, generation: int, size: int) -> tuple[int, dict[int, int]]:
        """Waits for a later generation of this size, since two deaths may be seen one by one; returns as `at`."""
        found = self.job.expect_match(rf"at (\d+): rank \d+ of {size}\n".encode(), lambda it: int(it[1]) > generation)
        return int(found[1]), self.at(int(found[1]), size)

    def pid(self, worker: int) -> int:
        return int(re.findall(rf"\[{worker}\]<stdout>: pid (\d+)", self.expect(f"[{worker}]<stdout>: pid "))[0])

    def kill(self, *workers: int, signum: int = signal.SIGKILL) -> None:
        for pid in [self.pid(worker) for worker in workers]:
            os.kill(pid, signum)

    def admit(self) -> None:
        """Lets workers that are held back ask for a place."""
        (self.folder / "admitted").touch()

    def finish(self) -> Any:
        """Lets the workers end, and waits for that; nothing may be left."""
        self.admit()
        (self.folder / "finish").touch()
        return self.job.finish()

    folder: Path


@pytest.fixture
def elastic(launch: Callable[..., Launch], worker: Callable[..., Path], tmp_path: Path) -> Callable[..., ElasticLaunch]:
    """`elastic("-np", 2, ..., program=text)` starts an elastic job; see `worker` for the text.

    `held`: workers from this number on, which take the places of others, are held back until `admit()`: else it would
    depend on the load of the machine whether they come before the survivors have a generation of their own.
    """

    def start(*words: Any, program: str = "", held: int | None = None, **options: Any) -> ElasticLaunch:
        head = "" if held is None else f"worker_program.hold_back({held})\n"
        path = worker(head + "print('pid', os.getpid(), flush=True)\n" + textwrap.dedent(program))
        started = ElasticLaunch(launch(*words, PYTHON, path, **options))
        started.folder = tmp_path
        return started

    return start


def test_start_and_finish(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 3, "--min-np", 2)
    assert job.at(1, 3) == {0: 0, 1: 1, 2: 2}
    ended = job.finish()
    assert ended.code == 0
    assert "hvdrun: worker" not in ended.err


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_worker_is_replaced(elastic: Callable[..., ElasticLaunch], victim: int) -> None:
    job = elastic("-np", 3, "--min-np", 2, held=3)
    job.at(1, 3)
    job.kill(victim)
    survivors = [number for number in range(3) if number != victim]
    assert job.at(2, 2) == dict(enumerate(survivors))
    job.admit()
    assert job.at(3, 3) == dict(enumerate([*survivors, 3]))
    ended = job.finish()
    assert ended.code == 0
    assert f"hvdrun: worker {victim} (pid " in ended.err
    assert "was killed by signal 9 (SIGKILL)" in ended.err
    assert "hvdrun: worker 3 has joined: the job has 3 workers\n" in ended.err


def test_two_killed_at_once(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 4, "--min-np", 2, held=4)
    job.at(1, 4)
    job.kill(1, 2)
    generation, workers = job.next_of(1, 2)
    assert workers == {0: 0, 1: 3}
    job.admit()
    assert sorted(job.at(generation + 1, 4).values()) == [0, 3, 4, 5]
    assert job.finish().code == 0


def test_all_killed(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 2, "--max-np", 2)
    job.at(1, 2)
    job.kill(0, 1)
    assert sorted(job.next_of(1, 2)[1].values()) == [2, 3]
    assert job.finish().code == 0


def test_all_but_the_least_killed(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 3, "--min-np", 1, held=3)
    job.at(1, 3)
    job.kill(0, 1)
    generation, workers = job.next_of(1, 1)
    assert workers == {0: 2}
    job.admit()
    assert job.at(generation + 1, 3)[0] == 2
    assert job.finish().code == 0


def test_killed_while_a_generation_is_being_formed(elastic: Callable[..., ElasticLaunch]) -> None:
    # Worker 1 dies before it comes to the second generation's rendezvous, where the others wait for it.
    job = elastic(
        *("-np", 4, "--min-np", 2),
        program="""
        def before_init(worker, generation, step):
            if worker == 1 and generation == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        """,
        held=4,
    )
    job.at(1, 4)
    job.kill(3)
    assert job.at(3, 2) == {0: 0, 1: 2}
    job.admit()
    job.at(4, 4)
    assert job.finish().code == 0


def test_stopped(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 2, "--min-np", 1, "--heartbeat-timeout", 1, held=2)
    job.at(1, 2)
    job.kill(1, signum=signal.SIGSTOP)
    assert job.at(2, 1) == {0: 0}
    ended = job.finish()
    assert ended.code == 0
    assert "hvdrun: worker 1 is killed: it has been stopped for 1 s\n" in ended.err


def test_stopped_for_a_moment(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 2, "--min-np", 1, "--verbose", stderr=subprocess.STDOUT)
    job.at(1, 2)
    job.kill(1, signum=signal.SIGSTOP)
    job.expect("hvdrun: worker 1 has been stopped\n")
    job.kill(1, signum=signal.SIGCONT)
    job.expect("hvdrun: worker 1 goes on\n")
    assert job.finish().code == 0


def test_a_worker_leaves(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 3, "--min-np", 2)
    job.at(1, 3)
    job.kill(0, signum=signal.SIGTERM)
    assert job.at(2, 2) == {0: 1, 1: 2}
    ended = job.finish()
    assert (ended.code, ended.err.count("hvdrun: worker")) == (0, 0)
    assert b"[3]" not in ended.out


def test_too_few_in_time(elastic: Callable[..., ElasticLaunch]) -> None:
    # The replacement can never start.
    job = elastic(
        *("-np", 2, "--min-np", 2, "--elastic-timeout", 5),
        program="""
        if int(os.environ["HOROVODLIKE_WORKER"]) >= 2:
            signal.pause()
        """,
    )
    job.at(1, 2)
    job.kill(1)
    ended = job.job.finish()
    assert ended.code == 1
    assert "hvdrun: Timed out after 5 s with 1 worker. Please check that you have enough resources" in ended.err
    assert b"[0]<stdout>: heard stop" in ended.out


def test_the_reset_limit_ends_the_job(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 3, "--min-np", 1, "--reset-limit", 1, held=3)
    job.at(1, 3)
    job.kill(0)
    job.at(2, 2)
    job.kill(1)
    ended = job.job.finish()
    assert ended.code == 137
    assert "number of resets during elastic job exceeded limit: 1\n" in ended.err


def test_a_host_that_fails_is_left_alone(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 1, 2, "--verbose", held=2)
    job.at(1, 2)
    job.kill(1)
    assert job.at(2, 1) == {0: 0}
    job.admit()
    assert job.at(3, 2) == {0: 0, 1: 2}
    ended = job.finish()
    assert ended.code == 0
    assert "hvdrun: worker 1 has failed: its host is left alone for 1 s\n" in ended.err


def test_a_program_that_fails_at_once(elastic: Callable[..., ElasticLaunch]) -> None:
    program = "sys.exit(f'there is no data {os.getpid()}')"  # if all made one error, the job would end at once
    job = elastic("-np", 2, "--min-np", 1, program=program)
    ended = job.job.finish()
    assert ended.code == 1
    reason = ended.err.index("hvdrun: 3 workers in a row on one slot have failed before they asked for a place")
    report = r"hvdrun: worker (\d) \(pid \d+\) exited with code 1; its last lines:\n    there is no data \d+\n"
    reports = [*re.finditer(report, ended.err)]
    assert reports[-1].start() > reason
    assert reports[-1].end() == len(ended.err)
    assert len({each[1] for each in reports}) == len(reports)  # each is described once
    assert ended.seconds < SLACK_S


@pytest.mark.parametrize("number", [2, 3])
def test_an_error_that_all_make_alike_ends_the_job_at_once(elastic: Callable[..., ElasticLaunch], number: int) -> None:
    program = """
    def before_init(worker, generation, step):
        sys.exit('there is no data')
    """
    ended = elastic("-np", number, "--min-np", 1, program=program).job.finish()
    assert ended.code == 1
    assert "hvdrun: all members have failed alike before anything was committed\n" in ended.err
    assert ended.err.count("<stderr>: there is no data") == number
    assert ended.err.count("its last lines:\n    there is no data") == number  # each is described once


# What real workers do, at the second of four steps; `once` makes a worker do it that has not been replaced.
LEAVES = """
import os, sys
import numpy, horovodlike as hvd
from horovodlike import elastic

hvd.init()
state = elastic.ObjectState(step=0)

@elastic.run
def train(state):
    while state.step < 4:
        hvd.allreduce(numpy.ones(8, "float32"), name="x")
        state.step += 1
        if state.step == 2 and os.environ["HOROVODLIKE_WORKER"] == "1":
            {way}
        state.commit()

train(state)
print("finished, of", hvd.size(), flush=True)
"""


@pytest.mark.parametrize(("way", "number"), [("os._exit(0)", 2), ("sys.exit(256)", 3)])
def test_a_worker_that_exits_with_code_0_in_the_middle_is_replaced(
    launch: Callable[..., Launch], way: str, number: int
) -> None:
    job = launch("-np", number, "--min-np", number, PYTHON, "-c", LEAVES.format(way=way)).finish()
    assert job.code == 0, job.err
    assert job.out.count(b"finished, of %d\n" % number) == number
    assert re.search(
        r"^hvdrun: worker 1 \(pid \d+\) exited with code 0 before its training function had returned, and without a "
        r"call of shutdown\(\); it wrote nothing to stderr$",
        job.err,
        re.M,
    )


PLAIN = "import numpy, os, horovodlike as hvd; hvd.init(); hvd.allreduce(numpy.ones(8, 'float32')); "


@pytest.mark.parametrize("way", ["hvd.shutdown()", "hvd.shutdown(); os._exit(0)"])
def test_a_script_that_shuts_down_has_finished(launch: Callable[..., Launch], way: str) -> None:
    job = launch("-np", 2, "--min-np", 2, PYTHON, "-c", PLAIN + way).finish()
    assert (job.code, job.err) == (0, "")


def test_a_script_that_neither_trains_nor_shuts_down_has_not_finished(launch: Callable[..., Launch]) -> None:
    job = launch("-np", 2, "--min-np", 2, PYTHON, "-c", PLAIN).finish()
    assert job.code == 1
    assert "exited with code 0 before its training function had returned, and without a call of shutdown()" in job.err


def test_a_program_that_does_not_know_of_elastic_jobs(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("-np", 2, "--max-np", 2, "sh", "-c", "echo $HOROVODLIKE_WORKER,$HOROVOD_ELASTIC,$HOROVOD_RANK.")
    assert (job.code, sorted(job.out.splitlines())) == (0, [b"[0]<stdout>: 0,1,.", b"[1]<stdout>: 1,1,."])


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_job(elastic: Callable[..., ElasticLaunch], signum: int, code: int) -> None:
    job = elastic("-np", 2, "--min-np", 1)
    job.at(1, 2)
    job.job.signal(signum)
    ended = job.job.finish()
    assert ended.code == code
    assert "ending 2 workers" in ended.err


def test_a_second_signal_kills(elastic: Callable[..., ElasticLaunch]) -> None:
    program = "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))"
    job = elastic("-np", 2, "--min-np", 2, program=program)
    job.at(1, 2)
    job.job.signal(signal.SIGINT)
    job.expect("no", 2)
    job.job.signal(signal.SIGINT)
    ended = job.job.finish()
    assert (ended.code, ended.seconds < LIMIT_S) == (130, True)


def test_the_driver_is_killed(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic("-np", 2, "--min-np", 1)
    job.at(1, 2)
    job.job.signal(signal.SIGKILL)
    job.job.wait_gone(GRACE_S + SLACK_S)


def test_helpers_of_a_dead_worker_are_ended(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic(
        *("-np", 2, "--min-np", 1),
        program="""
        if os.fork() == 0:
            line = f"helper of {os.environ['HOROVODLIKE_WORKER']} is {os.getpid()} !\\n"
            os.write(1, line.encode())  # at once: the worker writes to the same pipe
            signal.pause()
        """,
        held=2,
    )
    job.at(1, 2)
    helper = re.search(r"helper of 1 is (\d+) !", job.expect("helper of ", 2))
    assert helper is not None
    watched = os.pidfd_open(int(helper[1]))
    job.kill(1)
    assert select.select([watched], [], [], SLACK_S)[0]
    os.close(watched)
    job.at(2, 1)
    assert job.finish().code == 0


def test_output_goes_to_files_as_well(elastic: Callable[..., ElasticLaunch], tmp_path: Path) -> None:
    job = elastic("-np", 1, "--max-np", 1, "--output-filename", tmp_path / "out")
    job.at(1, 1)
    job.kill(0)
    job.at(2, 1)
    assert job.finish().code == 0
    assert "at 1: rank 0 of 1\n" in (tmp_path / "out/rank.0/stdout").read_text()
    assert "at 2: rank 0 of 1\n" in (tmp_path / "out/rank.1/stdout").read_text()


def test_a_new_worker_goes_on_without_its_files(elastic: Callable[..., ElasticLaunch], tmp_path: Path) -> None:
    job = elastic("-np", 1, "--max-np", 1, "--output-filename", "out")
    job.at(1, 1)
    (tmp_path / "out" / "rank.1").touch()
    job.kill(0)
    job.at(2, 1)
    ended = job.finish()
    assert ended.code == 0
    assert "hvdrun: --output-filename out: out/rank.1: File exists; worker 1 goes on without\n" in ended.err
