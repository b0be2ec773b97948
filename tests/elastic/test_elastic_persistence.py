"""Commits on disk, and jobs that resume there."""

from __future__ import annotations

import os
import stat

import pytest
from counting import oracle
from elastic_job import ElasticJob

from horovodlike import elastic
from horovodlike.elastic._state_file import StateFile
from horovodlike.errors import StateFileError


def test_a_file_has_what_was_written_last_and_is_the_users_alone(tmp_path):
    file = StateFile(str(tmp_path / "state"))
    assert file.commits() == 0
    assert file.read() == (0, b"")
    file.write(3, b"three")
    file.write(4, b"")
    file.write(5, b"five" * 1000)
    assert file.commits() == 5
    assert file.read() == (5, b"five" * 1000)
    assert os.listdir(tmp_path) == ["state"]
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


def test_a_writer_that_was_killed_leaves_the_last_commit(tmp_path):
    file = StateFile(str(tmp_path / "state"))
    file.write(3, b"three")
    (tmp_path / "state.new").write_bytes(b"half of it")
    assert file.read() == (3, b"three")
    file.write(4, b"four")
    assert file.read() == (4, b"four")
    assert os.listdir(tmp_path) == ["state"]


def test_a_write_that_fails_leaves_the_last_commit(tmp_path):
    file = StateFile(str(tmp_path / "state"))
    file.write(3, b"three")
    (tmp_path / "state.new").mkdir()
    with pytest.raises(OSError, match="the state cannot be written: Is a directory") as caught:
        file.write(4, b"four")
    assert caught.value.filename == str(tmp_path / "state")
    assert file.read() == (3, b"three")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data[:-1], "bytes where"),
        (lambda data: data + b"!", "bytes where"),
        (lambda data: data[:20], "something else than a state that horovodlike wrote"),
        (lambda data: b"", "something else than a state that horovodlike wrote"),
        (lambda data: b"\x80\x04K\x01." * 100, "something else than a state that horovodlike wrote"),
        (lambda data: data[:8] + b"\0\0\0\x02" + data[12:], "has format 2, and this release reads format 1"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its checksum is wrong"),
    ],
)
def test_a_torn_or_alien_file_is_an_error_that_names_it(tmp_path, change, complaint):
    path = tmp_path / "state"
    file = StateFile(str(path))
    file.write(3, b"three")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StateFileError, match=complaint) as caught:
        file.read()
    assert str(path) in str(caught.value)


def test_a_file_that_others_could_have_written_is_not_read(tmp_path):
    file = StateFile(str(tmp_path / "state"))
    file.write(3, b"three")
    (tmp_path / "state").chmod(0o620)
    with pytest.raises(StateFileError, match="chmod 600"):
        file.commits()
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir(0o700)
    with pytest.raises(StateFileError, match="it is a folder"):
        file.commits()
    (tmp_path / "state").rmdir()
    os.mkfifo(tmp_path / "state", 0o600)
    with pytest.raises(StateFileError, match="it is not a file"):
        file.commits()


def test_what_cannot_work_is_said_at_once(tmp_path):
    state = elastic.ObjectState()
    with pytest.raises(ValueError, match="there is no folder"):
        state.persist(str(tmp_path / "missing" / "state"))
    with pytest.raises(ValueError, match="every=0"):
        state.persist(str(tmp_path / "state"), every=0)


def train_and_persist(path: str, every: int, crash_at: int | None) -> list[object]:
    import os
    import signal

    from counting import take_step

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client

    basics.init()
    begun_at = []

    @elastic.run
    def loop(state):
        begun_at.append((state.step, state._commits))
        while state.step < 12:
            if state.step == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            take_step(state)
            state.commit()

    state = elastic.ObjectState(step=0, total=0, sums=[])
    if path and (os.path.exists(path) or driver_client.current().number == 0 or crash_at is not None):
        state.persist(path, every)
    loop(state)
    return [begun_at[0], state.step, state.total, state.sums]


@pytest.mark.parametrize(("every", "resumed"), [(1, 7), (3, 6)])
def test_a_job_all_of_whose_processes_died_resumes_from_disk(tmp_path, every, resumed):
    path = str(tmp_path / "state")
    with ElasticJob(2, train_and_persist, path, every, 7) as job:
        job.values(0, 1)
    with ElasticJob(3, train_and_persist, path, every, None) as job:
        total, sums = oracle(12)
        assert job.values() == [[(resumed, resumed), 12, total, sums]] * 3


def commit_while_the_disk_is_full(path: str) -> tuple[list[int], str]:
    """A folder in the place of the file that is written first has the same effect, on rank 0 alone."""
    import contextlib
    import io
    import os

    import numpy as np
    from support.collectives import allreduce

    import horovodlike
    from horovodlike import basics, elastic

    counts, before = [], horovodlike.metrics()["failed_writes"]
    state = elastic.ObjectState(step=0)
    state.persist(path)

    @elastic.run
    def train(state):
        while state.step < 5:
            if basics.rank() == 0 and state.step == 1:
                os.mkdir(f"{path}.new")
            if basics.rank() == 0 and state.step == 3:
                os.rmdir(f"{path}.new")
            allreduce("step", np.ones(1))
            state.step += 1
            state.commit()
            counts.append(horovodlike.metrics()["failed_writes"] - before)

    with contextlib.redirect_stderr(io.StringIO()) as printed:
        train(state)
    return counts, printed.getvalue()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_commit_that_cannot_be_written_is_counted_on_all_ranks_and_the_training_continues(ranks, tmp_path, size):
    path = tmp_path / "state"
    (counts, warnings), *others = ranks(size).run(commit_while_the_disk_is_full, str(path))
    assert counts == [0, 1, 2, 2, 2] and others == [(counts, "")] * (size - 1)
    for commit, line in zip((2, 3), warnings.splitlines(), strict=True):
        assert line.startswith(f"horovodlike warning: commit {commit} is in memory only: ") and str(path) in line
    assert StateFile(str(path)).commits() == 5


def leave_while_the_disk_is_full(path: str) -> None:
    import os
    import signal

    from horovodlike import basics, elastic

    state = elastic.ObjectState(step=0)
    state.persist(path, every=1000)

    @elastic.run
    def train(state):
        if basics.rank() == 0:
            os.mkdir(f"{path}.new")
        os.kill(os.getpid(), signal.SIGTERM)
        state.commit()

    try:
        train(state)
    except SystemExit as error:
        raise RuntimeError(f"status {error.code}") from error


def test_ranks_leave_together_although_the_last_commit_cannot_be_written(fresh_ranks, tmp_path):
    pool = fresh_ranks(2)
    pool.start(leave_while_the_disk_is_full, [(str(tmp_path / "state"),)] * 2)
    first, other = (outcome.error for outcome in pool.collect())
    assert "status 75" in first  # rank 0 knows that the commit is lost
    assert "status 143" in other


def resume_as_another_script(path: str) -> str:
    from horovodlike import elastic
    from horovodlike.errors import HorovodInternalError, StateFileError

    class Weights(elastic.ObjectState):
        def _saved_from_bytes(self, saved: bytes) -> None:
            raise ValueError("it has no weights")

    state = Weights(step=0)
    state.persist(path)
    try:
        elastic.run(lambda state: None)(state)
    except (StateFileError, HorovodInternalError) as error:
        return f"{type(error).__name__}: {error}"
    return "it resumed"


def test_a_file_of_another_script_is_refused_by_its_name(fresh_ranks, tmp_path):
    path = str(tmp_path / "state")
    StateFile(path).write(3, b"")
    errors = fresh_ranks(2).run(resume_as_another_script, path)
    for name, error in zip(("StateFileError", "ShutDownError"), errors, strict=True):
        assert (
            error.startswith(name)
            and f"the state in {path} does not fit this script: it has no weights. Resume with" in error
        )
    assert StateFile(path).read() == (3, b"")


def train_and_look_at_the_file(path: str) -> list[tuple[int, int]]:
    import os
    import signal

    from counting import take_step

    from horovodlike import basics, elastic
    from horovodlike._bootstrap import driver_client
    from horovodlike.elastic._state_file import StateFile

    basics.init()
    begun_at = []

    @elastic.run
    def loop(state):
        if basics.rank() == 0:
            begun_at.append((state._commits, StateFile(path).commits()))
        while state.step < 6:
            if state.step == 4 and driver_client.current().number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            take_step(state)
            state.commit()

    state = elastic.ObjectState(step=0, total=0, sums=[])
    state.persist(path, every=1000)
    loop(state)
    return begun_at


def test_the_commit_with_which_a_generation_begins_is_on_disk(tmp_path):
    with ElasticJob(3, train_and_look_at_the_file, str(tmp_path / "state")) as job:
        assert job.values(0) == [[(4, 4)], []]


def train_until_asked_to_leave(path: str) -> None:
    import os
    import signal

    from counting import take_step

    from horovodlike import basics, elastic

    basics.init()

    @elastic.run
    def loop(state):
        while True:
            take_step(state)
            if state.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            state.commit()

    state = elastic.ObjectState(step=0, total=0, sums=[])
    state.persist(path, every=1000)
    loop(state)


def test_the_last_commit_is_on_disk_when_all_have_been_asked_to_leave(tmp_path):
    path = str(tmp_path / "state")
    with ElasticJob(2, train_until_asked_to_leave, path) as job:
        job.finish()
        assert [worker.process.returncode for worker in job.workers] == [0, 0]
    assert StateFile(path).commits() == 5


def read_damaged(path: str) -> None:
    from horovodlike import basics, elastic

    basics.init()
    state = elastic.ObjectState(step=0)
    state.persist(path)
    elastic.run(lambda state: None)(state)


def test_a_job_does_not_begin_anew_where_its_file_is_damaged(tmp_path):
    path = tmp_path / "state"
    StateFile(str(path)).write(3, b"this is no pickle")
    path.write_bytes(path.read_bytes()[:-1])
    with ElasticJob(1, read_damaged, str(path)) as job:
        job.values(0)
        assert "StateFileError" in job.workers[0].error
        assert str(path) in job.workers[0].error
