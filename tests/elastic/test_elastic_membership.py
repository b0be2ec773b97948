"""Workers that join, that leave in order, and that are told to end."""

from __future__ import annotations

import signal

import pytest
from counting import check, train
from elastic_job import ElasticJob


def test_a_new_worker_gets_the_state_of_the_others_and_they_lose_nothing():
    with ElasticJob(2, train, [], 10, 3) as job:
        job.wait_to_hear(0, 4)
        job.add()
        values = job.values()
        check(values, 3)
        assert job.sizes == [2, 3]
        for number in (0, 1):
            assert values[number]["executed"] == list(range(values[number]["step"]))
            assert [why for why, _ in job.workers[number].whys] == ["start", "changed"]
        ((begun_at, size),) = values[2]["begins"]
        assert begun_at > 4
        assert size == 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_sigterm_is_a_notice_after_which_nothing_is_rolled_back(leaver):
    with ElasticJob(3, train, [], 10, 2) as job:
        job.wait_to_hear(leaver, 4)
        job.kill(leaver, signal.SIGTERM)
        job.finish()
        assert [worker.process.returncode for worker in job.workers] == [0, 0, 0]
        assert [worker.is_leaving for worker in job.workers] == [number == leaver for number in range(3)]
        stayed = [worker.value for worker in job.workers if worker.number != leaver]
        check(stayed, 2)
        assert job.sizes == [3, 2]
        for value in stayed:
            assert value["executed"] == list(range(value["step"]))
            assert value["syncs"] == 1  # at the start: no rank needs the state


def test_two_leave_at_once():
    with ElasticJob(4, train, [], 10, 2) as job:
        job.wait_to_hear(3, 4)
        job.kill(3, signal.SIGTERM)
        job.kill(0, signal.SIGTERM)
        job.finish()
        assert [worker.process.returncode for worker in job.workers] == [0, 0, 0, 0]
        check([job.workers[number].value for number in (1, 2)], 2)


# horovod#3494: those who were there skipped the synchronisation, the new one waited for it.
def test_after_a_graceful_exit_survivors_synchronise_if_a_new_worker_needs_it():
    with ElasticJob(2, train, [], 10, 2, 2, generations=1) as job:
        job.wait_to_hear(1, 4)
        job.kill(1, signal.SIGTERM)
        job.wait_for(lambda: job.workers[1].is_gone and job.workers[0].is_ready, "worker 1 has not left")
        assert job.workers[0].whys[-1][0] == "changed"
        job.add()
        job.wait_for(lambda: job.workers[2].is_ready, "the new worker is not ready")
        job.release()
        job.finish()
        assert [worker.process.returncode for worker in job.workers] == [0, 0, 0]
        first, third = job.workers[0].value, job.workers[2].value
        check([first, third], 2)
        assert first["syncs"] == 2
        assert first["executed"] == list(range(first["step"]))


def _train_with_a_callback_that_communicates(size: int) -> list[float]:
    """As Horovod's example for Keras: a step before the state is made, and again when the job has restarted."""
    import os
    import signal

    import numpy as np
    from elastic_job import tell
    from support.collectives import allreduce

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client

    sums = []

    def step():
        sums.append(float(allreduce("step", np.ones(1))[0]))

    basics.init()
    step()
    state = elastic.ObjectState(step=0)
    state.register_reset_callbacks([step])

    @elastic.run
    def loop(state):
        while state.step < 6 or basics.size() < size:
            if state.step == 3 and driver_client.current().number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step()
            state.step += 1
            state.commit()
            tell(state.step)

    loop(state)
    return sums


@pytest.mark.parametrize("size", [2, 3])
def test_a_reset_callback_communicates_with_the_script_of_a_new_worker(size):
    with ElasticJob(size, _train_with_a_callback_that_communicates, size) as job:
        job.wait_to_hear(0, 4)  # after which the victim is gone
        job.add()
        *_, survivor, new = job.values(1)
        assert job.sizes == [size, size - 1, size]
        assert new == survivor[-len(new) :] and set(new) == {size}


def test_a_worker_is_killed_while_another_joins():
    with ElasticJob(3, train, [(1, 6, "commit")], 10, 3, 2, generations=0) as job:
        job.wait_for(lambda: all(worker.is_ready for worker in job.workers), "not all are ready")
        job.add()
        job.release()
        values = job.values(1)
        check(values, 3)


def _wait_for_ever(point: str) -> None:
    import threading

    from elastic_job import tell

    from horovodlike import basics, elastic

    basics.init()

    @elastic.run
    def loop(state):
        tell(point)
        threading.Event().wait()

    loop(elastic.ObjectState())


@pytest.mark.parametrize("order", ["stop first", "SIGTERM first"])
def test_sigterm_ends_a_worker_at_once_when_the_job_ends(order):
    with ElasticJob(1, _wait_for_ever, "trains") as job:
        job.wait_to_hear(0, "trains")
        if order == "SIGTERM first":
            job.kill(0, signal.SIGTERM)
        job.stop("enough")
        if order == "stop first":
            job.kill(0, signal.SIGTERM)
        job.finish()
        assert job.workers[0].process.returncode == -signal.SIGTERM


def test_many_sigterms_are_one_notice():
    """Schedulers that end a job often signal all its processes, and so does hvdrun."""
    with ElasticJob(1, _take_notices) as job:
        job.finish()
        assert job.workers[0].is_leaving
        assert job.workers[0].process.returncode == 0


def _take_notices() -> None:
    import os
    import signal

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client

    basics.init()

    @elastic.run
    def loop(state):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            assert driver_client.current().preemption.noted
        state.commit()

    loop(elastic.ObjectState())


def _with_a_handler_of_its_own() -> list[str]:
    import os
    import signal

    from horovodlike import basics, elastic

    basics.init()
    before = signal.getsignal(signal.SIGTERM)
    heard = []

    @elastic.run
    def expecting(state):
        heard.append("ours" if signal.getsignal(signal.SIGTERM) != before else "default")

    expecting(elastic.ObjectState())
    heard.append("default" if signal.getsignal(signal.SIGTERM) == before else "ours")
    signal.signal(signal.SIGTERM, lambda *_: heard.append("the script's"))

    @elastic.run
    def with_handler(state):
        os.kill(os.getpid(), signal.SIGTERM)
        state.commit()

    with_handler(elastic.ObjectState())
    return heard


def test_a_handler_of_the_scripts_is_left_alone_and_ours_is_taken_back():
    with ElasticJob(1, _with_a_handler_of_its_own) as job:
        assert job.values() == [["ours", "default", "the script's"]]


def test_a_worker_that_waits_for_a_place_leaves_when_asked_to():
    with ElasticJob(2, train, [(1, 3, "commit")], 10, generations=1) as job:
        job.wait_for(lambda: len(job.workers[0].whys) == 2, "worker 0 does not want another place")
        job.kill(0, signal.SIGTERM)
        job.finish()
        assert job.workers[0].process.returncode == 0
        assert job.workers[0].is_leaving


@pytest.mark.parametrize(
    ("answer", "exit_code", "text"),
    [
        ({"stop": "too many resets"}, 1, "worker 0 ends with the job: too many resets"),
        ({"removed": "its host is gone"}, 0, "worker 0 is not needed any more: its host is gone"),
    ],
)
def test_a_worker_that_gets_no_place_says_why_and_ends(answer, exit_code, text):
    with ElasticJob(2, train, [(1, 3, "commit")], 10, generations=1) as job:
        job.wait_for(lambda: len(job.workers[0].whys) == 2, "worker 0 does not want another place")
        job.answer(0, answer)
        job.finish()
        assert job.workers[0].process.returncode == exit_code
        assert text in job.workers[0].output()


def test_a_worker_that_loses_the_driver_says_so():
    with ElasticJob(2, train, [(1, 3, "commit")], 10, generations=1) as job:
        job.wait_for(lambda: len(job.workers[0].whys) == 2, "worker 0 does not want another place")
        job.hang_up(0)
        job.finish()
        assert job.workers[0].process.returncode == 1
        assert "RendezvousError: worker 0 has lost the driver in hvdrun at 127.0.0.1:" in job.workers[0].error


def _raise_on(victim: int) -> object:
    from counting import take_step

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client

    basics.init()

    @elastic.run
    def loop(state, extra):
        while state.step < 10:
            if state.step == 4 and driver_client.current().number == victim:
                raise ValueError("a mistake")
            take_step(state)
            state.commit()
        return extra, basics.size()

    return loop(elastic.ObjectState(step=0, total=0, sums=[]), extra="passed on")


def test_an_exception_passes_through_and_the_others_go_on_without_that_rank():
    with ElasticJob(3, _raise_on, 1) as job:
        assert job.values(1) == [("passed on", 2)] * 2
        assert job.workers[1].process.returncode == 1
        assert "ValueError: a mistake" in job.workers[1].error
        assert not job.workers[1].has_finished
        assert job.sizes == [3, 2]


def _disagree(for_ever: bool) -> int:
    import numpy as np
    from support.collectives import allreduce

    from horovodlike import basics, elastic

    basics.init()

    @elastic.run
    def loop(state):
        differs = basics.rank() if for_ever or basics.generation() == 1 else 0
        allreduce("x", np.ones(3 + differs))
        return basics.generation()

    return loop(elastic.ObjectState())


def test_a_disagreement_that_comes_again_is_raised():
    with ElasticJob(2, _disagree, True) as job:
        job.values(0, 1)
        assert any("MismatchError" in worker.error for worker in job.workers)
        assert job.sizes[:2] == [2, 2]
    with ElasticJob(2, _disagree, False) as job:
        assert job.values() == [2, 2]


def _with_process_sets() -> list[tuple[object, object]]:
    import os
    import signal

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client
    from horovodlike.objects import highest
    from horovodlike.process_set import ProcessSet

    sets = [ProcessSet([1]), ProcessSet([1, 2]), ProcessSet([0, 1])]
    basics.init(process_sets=sets)
    seen = []

    @elastic.run
    def loop(state):
        seen.append([each.process_set_id for each in sets])
        if basics.size() == 3:
            if driver_client.current().number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            highest("wait", [0])

    loop(elastic.ObjectState())
    return seen


def test_process_sets_are_registered_again_where_their_ranks_exist():
    with ElasticJob(3, _with_process_sets) as job:
        assert job.values(2) == [[[1, 2, 3], [1, None, 0]]] * 2


def _fork() -> str:
    import os

    from horovodlike import basics
    from horovodlike.objects import highest

    basics.init()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            basics.init()
        except Exception as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    basics.restart()
    highest("still.works", [1])
    return said


def _fork_and_terminate() -> int:
    import os
    import signal
    import threading

    from horovodlike import basics, elastic

    basics.init()

    @elastic.run
    def loop(state):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os.write(write, b"!")
            threading.Event().wait()
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
        state.commit()  # the parent has not been asked to leave
        return os.WTERMSIG(status)

    return loop(elastic.ObjectState())


def test_sigterm_ends_a_forked_child():
    with ElasticJob(1, _fork_and_terminate) as job:
        assert job.values() == [signal.SIGTERM]  # and not SIGALRM


def test_a_forked_child_is_no_worker_and_the_parent_goes_on():
    with ElasticJob(2, _fork) as job:
        for number, said in enumerate(job.values()):
            assert f"RendezvousError: this process was forked from worker {number}" in said
        assert job.sizes == [2, 2]
