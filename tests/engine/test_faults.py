"""Ranks that die, stop or leave: the others get the right error within a bound, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

BIG = 64 << 20  # elements: a reduction that takes a good part of a second


def _reduce_for_ever(length: int) -> float:
    """Reduces until it fails; the time of that."""
    import numpy as np
    from support.collectives import allreduce

    array = np.ones(length, np.float32)
    while True:
        try:
            allreduce("big", array)
        except Exception:
            print(f"failed at {time.monotonic()}", flush=True)
            raise
        print("reduced once", flush=True)


def _survivors(pool, victim: int, timeout: float = 30.0):
    outcomes = pool.collect(timeout)
    return [outcome for rank, outcome in enumerate(outcomes) if rank != victim]


def _wait_for_output(pool, rank: int, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in pool.output(rank):
        assert time.monotonic() < deadline, pool.output(rank)
        os.sched_yield()


def _seconds_to_failure(pool, rank: int, since: float) -> float:
    (line,) = [line for line in pool.output(rank).splitlines() if line.startswith("failed at ")]
    return float(line.removeprefix("failed at ")) - since


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("length", [BIG, 100])
def test_sigkill_fails_the_survivors_within_a_second(fresh_ranks, victim, length):
    pool = fresh_ranks(3)
    pool.start(_reduce_for_ever, [(length,)] * 3)
    _wait_for_output(pool, victim, "reduced once")
    pool.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    for outcome in _survivors(pool, victim):
        assert "JobBrokenError" in outcome.error
        assert f"rank {victim} (pid {pool.processes[victim].pid})" in outcome.error
    for rank in {0, 1, 2} - {victim}:
        assert _seconds_to_failure(pool, rank, killed) < 1.0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("length", [BIG, 100])
def test_sigstop_fails_the_survivors_after_the_stall_limit(fresh_ranks, victim, length):
    # So long that ranks which are slow to begin, on a machine that is busy with other tests, are not stalled ones.
    pool = fresh_ranks(3, {"HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "5"})
    pool.start(_reduce_for_ever, [(length,)] * 3)
    _wait_for_output(pool, victim, "reduced once")
    pool.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    deadline = time.monotonic() + 30
    others = sorted({0, 1, 2} - {victim})
    while not all("failed at" in pool.output(rank) for rank in others):
        assert time.monotonic() < deadline, [pool.output(rank) for rank in others]
        os.sched_yield()
    for rank in others:
        assert 4.5 < _seconds_to_failure(pool, rank, stopped) < 12.0
    pool.kill(victim, signal.SIGCONT)
    for outcome in _survivors(pool, victim):
        assert "JobBrokenError" in outcome.error
        assert "stalled" in outcome.error
    pool.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("busy", [0, 4])
def test_the_rank_that_is_stopped_is_blamed_where_the_limit_follows_a_warning(fresh_ranks, busy, victim):
    settings = {"HOROVODLIKE_STALL_CHECK_TIME_SECONDS": "4", "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    pool = fresh_ranks(3, settings)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        pool.start(_reduce_for_ever, [(100,)] * 3)
        _wait_for_output(pool, victim, "reduced once")
        pool.kill(victim, signal.SIGSTOP)
        others = sorted({0, 1, 2} - {victim})
        for rank in others:
            _wait_for_output(pool, rank, "failed at")
    finally:
        pool.kill(victim, signal.SIGCONT)
        for loop in loops:
            loop.kill()
            loop.wait()
    for outcome in _survivors(pool, victim):
        assert "big" in outcome.error and f"rank {victim}" in outcome.error, outcome.error
        assert "the coordinator, rank 0" not in outcome.error, outcome.error
    pool.terminate()


def _leave(victim: int, how: str) -> None:
    import sys

    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    array = np.ones(10, np.float32)
    allreduce("before", array)
    if basics.rank() != victim:
        allreduce("after", array)
    elif how == "os._exit":
        os._exit(0)
    elif how == "sys.exit":
        sys.exit(0)
    else:
        basics.shutdown()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("how", "error"), [("os._exit", "JobBrokenError"), ("sys.exit", "ShutDownError"), ("shutdown", "ShutDownError")]
)
def test_a_rank_that_leaves_early_fails_the_others(fresh_ranks, victim, how, error):
    pool = fresh_ranks(3)
    pool.start(_leave, [(victim, how)] * 3)
    for outcome in _survivors(pool, victim):
        assert error in outcome.error
        assert f"rank {victim}" in outcome.error
        assert outcome.seconds < 10.0


def _what_has_ended() -> None:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics, errors
    from horovodlike._engine import ops

    array = np.ones(10, np.float32)
    with pytest.raises(errors.MismatchError):
        allreduce("differs", np.ones(1 + basics.rank(), np.float32))
    assert ops.has_ended() is None, "the job goes on"
    allreduce("before", array)
    if basics.rank() == 0:
        basics.shutdown()
        assert ops.has_ended() is None
        return
    with pytest.raises(errors.ShutDownError) as caught:
        allreduce("after", array)
    ended = ops.has_ended()
    assert type(ended) is errors.ShutDownError and str(ended) == str(caught.value)


def test_bindings_can_ask_whether_the_job_has_ended(fresh_ranks):
    fresh_ranks(2).run(_what_has_ended)


def _leave_with(error: Exception) -> str:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics, errors

    if basics.rank() == 1:
        basics.shutdown(error)
        return ""
    with pytest.raises(errors.ShutDownError) as caught:
        allreduce("after", np.ones(10, np.float32))
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("the disk\n\n is gone"), "ValueError: the disk is gone"),
        (OSError("\0\udc80 ä"), "OSError: ? ä"),
        (KeyError("x" * 5000), "KeyError: '" + "x" * 989),
    ],
    ids=("lines", "not text", "long"),
)
def test_the_others_get_the_exception_in_one_line(fresh_ranks, error, text):
    got = fresh_ranks(2).run(_leave_with, error)[0]
    assert got.split(". In flight here: ")[0] == f"rank 1 has shut the job down: {text}"


def _again(rounds: int) -> list[float]:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    results = []
    for _ in range(rounds):
        basics.shutdown()
        basics.init()
        results.append(float(allreduce("again", np.full(5, basics.rank() + 1.0))[0]))
    return results


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_shutdown_and_init_again_many_times_without_a_leak(fresh_ranks):
    pool = fresh_ranks(3)
    pool.run(_again, 2)
    before = pool.run(_resources)
    assert pool.run(_again, 10) == [[6.0] * 10] * 3
    assert pool.run(_resources) == before


def _fork() -> list[str]:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics

    said = []
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            allreduce("child", np.ones(3))
        except Exception as error:
            os.write(write, str(error).encode())
        basics.shutdown()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said.append(answer.read())
    os.waitpid(child, 0)
    said.append(str(allreduce("parent", np.ones(3))[0]))
    return said


def test_a_forked_child_gets_an_explanation_and_the_parent_goes_on(fresh_ranks):
    for explanation, result in fresh_ranks(2).run(_fork):
        assert "fork" in explanation
        assert result == "2.0"


def _mismatch() -> list[str]:
    import numpy as np
    from support.collectives import allreduce, enqueue

    from horovodlike import basics
    from horovodlike._engine import ops
    from horovodlike._engine.ops import Kind, ReduceOp
    from horovodlike.errors import MismatchError

    rank = basics.rank()
    cases = [
        lambda: enqueue(Kind.ALLREDUCE, "m.shape", [np.ones(3 + rank, np.float32)]),
        lambda: enqueue(Kind.ALLREDUCE, "m.dtype", [np.ones(3, np.float32 if rank else np.float64)]),
        lambda: enqueue(Kind.ALLREDUCE, "m.op", [np.ones(3)], op=ReduceOp.MIN if rank else ReduceOp.SUM),
        lambda: enqueue(Kind.BROADCAST, "m.root", [np.ones(3)], root_rank=rank),
        lambda: enqueue(Kind.BROADCAST if rank else Kind.ALLREDUCE, "m.kind", [np.ones(3)], root_rank=0),
        lambda: enqueue(Kind.ALLREDUCE, "m.scale", [np.ones(3)], prescale=float(rank)),
        lambda: enqueue(Kind.ALLGATHER, "m.rows", [np.ones((2, 3 + rank))]),
        lambda: enqueue(Kind.ALLREDUCE, "m.group", [np.ones(2)] * (1 + rank)),
    ]
    errors = []
    for case in cases:
        try:
            ops.wait(case())
        except MismatchError as error:
            errors.append(str(error))
    assert allreduce("still.works", np.ones(2))[0] == basics.size()
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_mismatches_name_the_tensor_and_the_ranks_and_the_job_goes_on(ranks, size):
    per_rank = ranks(size).run(_mismatch)
    names = ["m.shape", "m.dtype", "m.op", "m.root", "m.kind", "m.scale", "m.rows", "m.group"]
    for errors in per_rank:
        assert errors == per_rank[0]
        assert len(errors) == len(names)
        for error, name in zip(errors, names, strict=True):
            assert f"'{name}'" in error
            assert "rank 0" in error
            assert "1" in error
