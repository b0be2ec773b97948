"""The engine's many lives in one process: what is pending when it breaks, kills while ranks meet, and leaks."""

from __future__ import annotations

import pytest
from counting import check, train
from elastic_job import ElasticJob


# horovod#2484, horovod#3264: an error in the engine's thread ended the process, or survivors aborted.
def _with_requests_in_flight() -> list[str]:
    import os
    import signal

    import numpy as np
    from support.collectives import enqueue

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client
    from horovodlike._engine import ops
    from horovodlike._engine.ops import Kind
    from horovodlike.errors import HorovodInternalError

    basics.init()
    said = []

    @elastic.run
    def loop(state):
        number = driver_client.current().number
        arrays = [np.ones(200_000) for _ in range(6)]
        if basics.size() == 3 and number == 1:
            ops.wait(enqueue(Kind.ALLREDUCE, "0", [arrays[0]]))
            os.kill(os.getpid(), signal.SIGKILL)
        handles = [enqueue(Kind.ALLREDUCE, str(index), [array]) for index, array in enumerate(arrays)]
        broken = None
        for handle in handles:
            try:
                ops.wait(handle)
            except HorovodInternalError as error:
                broken = error
        if broken is not None:
            said.append(str(broken))
            raise broken
        return [float(array[0]) for array in arrays]

    assert loop(elastic.ObjectState()) == [2.0] * 6
    return said


def test_requests_in_flight_fail_where_the_script_waits_and_the_survivors_begin_again():
    with ElasticJob(3, _with_requests_in_flight) as job:
        for (said,) in job.values(1):
            assert "rank 1 (pid" in said
        assert [worker.process.returncode for worker in job.workers if worker.number != 1] == [0, 0]


def _die_while_they_meet(victim: int, at: str) -> int:
    import os
    import signal

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client
    from horovodlike._bootstrap.bootstrap import JobContext
    from horovodlike._engine import options

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    basics.init()
    worker = driver_client.current()

    @elastic.run
    def loop(state):
        if basics.generation() == 1:
            if worker.number == victim:
                if at == "before":
                    worker.take_place = die
                elif at == "there":
                    options.segment_bytes = die
                else:
                    JobContext.confirm = die
            state.on_hosts_updated(0, 1)
            state.commit()
        return basics.size()

    return loop(elastic.ObjectState())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("at", ["before", "there", "confirm"])
def test_a_worker_is_killed_while_the_ranks_meet(victim, at):
    with ElasticJob(3, _die_while_they_meet, victim, at) as job:
        assert job.values(victim) == [2, 2]
        whys = [[why for why, _ in worker.whys] for worker in job.workers if worker.number != victim]
        assert whys == [["start", "changed", *([] if at == "before" else ["failed"])]] * 2


def _break_often(lives: int) -> dict[str, object]:
    """Worker n dies in the n-th generation, all but two. What the first of these has before and after."""
    import ctypes
    import gc
    import os
    import signal

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client
    from horovodlike.objects import highest

    class Mallinfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")]
        _fields_ += [(name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo

    def resources() -> dict[str, int]:
        gc.collect()
        with open("/proc/self/maps") as file:
            segments = [line for line in file if "horovodlike" in line.split("/")[-1] or "memfd" in line]
        heap = libc.mallinfo2()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")) - (basics.size() - 1),  # one to watch each other rank
            "threads": len(os.listdir("/proc/self/task")),
            "segments": len([line for line in segments if ".so" not in line]),
            "heap": heap.uordblks + heap.hblkhd,
        }

    found = []
    basics.init()
    number = driver_client.current().number

    @elastic.run
    def loop(state):
        while True:
            state.step += 1
            state.commit()
            if state.step % 5:
                continue
            if basics.size() == 2:
                return
            if basics.size() % 5 == 0 or basics.size() == 3:
                found.append(resources())
            highest("all have looked", [0])
            if number == lives + 2 - basics.size():
                os.kill(os.getpid(), signal.SIGKILL)
            highest("wait", [0])

    loop(elastic.ObjectState(step=0))
    return {"found": found, "generation": basics.generation()}


@pytest.mark.timeout(300)
def test_many_broken_jobs_leave_nothing_in_the_survivors():
    lives = 20
    with ElasticJob(lives + 2, _break_often, lives) as job:
        values = job.values(*range(lives))
        assert job.sizes == list(range(lives + 2, 1, -1))
        for value in values:
            assert value["generation"] == lives + 1
            first, *_, last = value["found"]
            assert first["segments"] > 0
            assert last["segments"] == first["segments"]
            assert last["descriptors"] == first["descriptors"]
            assert last["threads"] == first["threads"]
            assert last["heap"] < first["heap"] + (1 << 18)


def test_a_long_run_in_which_half_of_the_workers_die_at_random_times():
    faults = [(0, 10, "after 0.003"), (2, 25, "commit"), (3, 25, "after 0.001")]
    with ElasticJob(5, train, faults, 60) as job:
        check(job.values(0, 2, 3), 2)
