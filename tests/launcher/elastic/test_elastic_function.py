"""`horovodlike.run` of elastic jobs, and who may speak with their driver."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hvdrun_process import Ended
from test_elastic_jobs import PYTHON, ElasticLaunch, elastic

import horovodlike
from horovodlike.launcher.elastic import HostDiscovery

__all__ = ["elastic"]  # a fixture


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trained(folder: str, victim: int | None = None) -> tuple[int, int]:
    """Trains nothing until a generation of two is together after all the deaths that there are to be."""
    sys.path.append(str(Path(__file__).parent))
    import worker_program

    last = (0, 0)

    def at_step(worker: int, generation: int, step: int) -> None:
        nonlocal last
        last = worker, int(os.environ["HOROVOD_RANK"])
        if worker == victim and step == 3:
            os._exit(9)
        if os.environ["HOROVOD_SIZE"] == "2" and (victim is None or generation > 1):
            Path("finish").touch()

    os.chdir(folder)
    worker_program.work(at_step=at_step)
    return last


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function of this module, which ranks cannot import, pickled by value."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return function


def test_a_function_returns(tmp_path: Path) -> None:
    assert horovodlike.run(by_value(trained), (str(tmp_path),), num_proc=2, min_np=1) == [(0, 0), (1, 1)]


def test_a_worker_of_a_function_is_replaced(tmp_path: Path) -> None:
    found = horovodlike.run(by_value(trained), (str(tmp_path), 0), num_proc=2, min_num_proc=2, max_num_proc=2)
    assert found == [(1, 0), (2, 1)]


def test_a_function_that_raises(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        horovodlike.run(fail, num_proc=2, min_np=1)


def test_hosts_from_python(tmp_path: Path) -> None:
    class Mine(HostDiscovery):
        closed = False

        def find(self) -> dict[str, int]:
            return {"localhost": 2}

        def close(self) -> None:
            self.closed = True

    mine = Mine()
    assert horovodlike.run(by_value(trained), (str(tmp_path),), num_proc=2, host_discovery=mine) == [(0, 0), (1, 1)]
    assert mine.closed


def test_strangers_do_no_harm(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic(
        "-np", 2, "--min-np", 1, program="print('port', os.environ['HOROVODLIKE_DRIVER_PORT'], flush=True)", held=2
    )
    job.at(1, 2)
    port = re.search(r"port (\d+)\n", job.expect("port "))
    assert port is not None
    strangers = [socket.create_connection(("127.0.0.1", int(port[1]))) for _ in range(40)]
    for stranger in strangers:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
    job.kill(1)
    job.at(2, 1)
    assert job.finish().code == 0
    for stranger in strangers:
        stranger.close()


def test_who_has_no_number_of_a_worker_is_refused(elastic: Callable[..., ElasticLaunch]) -> None:
    # A second process with the environment of worker 0, and one with a number that does not exist.
    job = elastic(
        *("-np", 2, "--min-np", 1),
        program="""
        from horovodlike._net.secure_channel import Identity, JobKey, ClientChannel, job_digest
        import socket, time
        def at_step(worker, generation, step):
            if worker == 0 and step == 1:
                for number in (0, 77):
                    connected = socket.create_connection(("127.0.0.1", int(os.environ["HOROVODLIKE_DRIVER_PORT"])))
                    identity = Identity(number, 0, job_digest("elastic/" + os.environ["HOROVODLIKE_JOB_ID"]))
                    link = ClientChannel(connected, key, identity, time.monotonic() + 30)
                    print(link.receive(time.monotonic() + 30).decode(), flush=True)
        key = JobKey(bytes.fromhex(os.environ["HOROVODLIKE_SECRET_KEY"]))
        """,
    )
    job.expect('{"refused":"worker 0 is connected already; HOROVODLIKE_WORKER must not be inherited')
    job.expect('{"refused":"there is no worker 77, or none any more"}')
    assert job.finish().code == 0


def test_a_worker_that_makes_no_sense_is_cut_off_and_killed(elastic: Callable[..., ElasticLaunch]) -> None:
    job = elastic(
        *("-np", 2, "--min-np", 1, "--heartbeat-timeout", 1),
        program="""
        def before_init(worker, generation, step):
            if worker == 1:
                import gc
                [driver] = [each for each in gc.get_objects() if isinstance(each, worker_program.Driver)]
                driver.say(do="dance")
                signal.pause()
        """,
        held=2,
    )
    assert job.at(2, 1) == {0: 0}
    ended = job.finish()
    assert ended.code == 0
    assert "hvdrun: worker 1 is killed: it has closed its connection to the driver" in ended.err


JOB = "import os\nfrom horovodlike import basics\nbasics.init()\nos.write(1, f'one of {basics.size()}\\n'.encode())\n"


def test_a_worker_starts_a_job_of_its_own(hvdrun: Callable[..., Ended], tmp_path: Path) -> None:
    """The inner job has a fixed number of ranks, and no connection to the elastic job around it."""
    program = tmp_path / "inner.py"
    program.write_text(JOB)
    inner = [PYTHON, "-m", "horovodlike.launcher", "-np", 2, PYTHON, program]
    ended = hvdrun("-np", 1, "--min-np", 1, *inner)
    assert (ended.code, ended.out.count(b"one of 2")) == (0, 2), ended
