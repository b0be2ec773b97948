"""Parts of the driver by themselves: cool-downs, places, discovery."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from horovodlike.launcher.elastic import DiscoveryError, DiscoveryThread, HostDiscovery, HostDiscoveryScript
from horovodlike.launcher.elastic.host_health import Backoff, HostHealth
from horovodlike.launcher.elastic.rank_assignment import OF_A_PLACE, place_members
from horovodlike.launcher.errors import UsageError

LIMIT_S = 60.0


def test_backoffs_grow_up_to_the_most() -> None:
    health, now, pauses = HostHealth(Backoff(10, 60, patient=False)), 0.0, []
    for _ in range(5):
        health.fail(now, 1)
        pauses.append(health.cooling_until - now)
        now = health.cooling_until
    assert pauses == [10, 20, 40, 60, 60]


def test_failures_that_come_together_count_once() -> None:
    health = HostHealth(Backoff(10, 60, patient=False))
    for _ in range(8):
        health.fail(0.0, 8)
    assert health.cooling_until == 10


# horovod#3319: hosts were left alone for ever.
def test_backoffs_begin_anew_after_a_good_time() -> None:
    health = HostHealth(Backoff(10, 60, patient=False))
    for now in (0.0, 10.0, 30.0):
        health.fail(now, 1)
    assert health.cooling_until == 70
    health.fail(200.0, 1)
    assert health.cooling_until == 210


def test_some_failures_are_tolerated_and_many_are_not() -> None:
    health = HostHealth(Backoff(1, 60))
    for _ in range(4):
        assert health.fail(0.0, 1) == "it is replaced at once"
    assert health.fail(0.0, 1) == "its host is left alone for 1 s"
    assert health.fail(1.0, 1) == "its host is left alone for 2 s"


def test_patience_comes_back_with_time() -> None:
    health = HostHealth(Backoff(1, 60))
    for _ in range(5):
        health.fail(0.0, 1)
    assert health.fail(1.0, 1) == "its host is left alone for 2 s"
    assert health.fail(3.0, 1) == "its host is left alone for 4 s"
    assert health.fail(12.0, 1) == "it is replaced at once"  # five seconds without a failure
    for _ in range(8):
        health.fail(100.0, 1)
    assert health.cooling_until == 101


def test_all_workers_of_a_host_may_fail_at_once() -> None:
    health = HostHealth(Backoff())
    assert {health.fail(0.0, 64) for _ in range(64)} == {"it is replaced at once"}


def test_a_slot_is_held_for_a_time() -> None:
    health = HostHealth(Backoff(1, 60))
    health.hold(0.0)
    health.hold(30.0)
    assert [health.held_slots(now) for now in (59.0, 60.0, 90.0)] == [2, 1, 0]


def test_places_of_interleaved_hosts() -> None:
    places = place_members(7, ["a", "b", "a", "c", "b", "a"], "10.0.0.1", 1234)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [tuple(int(place[f"HOROVOD_{name}"]) for name in names) for place in places] == [
        (0, 6, 0, 3, 0, 3),
        (1, 6, 0, 2, 1, 3),
        (2, 6, 1, 3, 0, 2),
        (3, 6, 0, 1, 2, 3),
        (4, 6, 1, 2, 1, 2),
        (5, 6, 2, 3, 0, 1),
    ]
    for place in places:
        assert place.keys() == OF_A_PLACE
        assert place["HOROVODLIKE_GENERATION"] == "7"
        assert (place["HOROVODLIKE_RENDEZVOUS_ADDR"], place["HOROVODLIKE_RENDEZVOUS_PORT"]) == ("10.0.0.1", "1234")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """`program(text)` writes a shell script."""

    def write(text: str) -> str:
        path = tmp_path / "hosts.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_what_a_script_prints(program: Callable[[str], str]) -> None:
    script = program("printf 'a:2\\n\\n b \\n[fd00::1]:3\\na:1\\n'")
    assert HostDiscoveryScript(script).find() == {"a": 3, "b": 1, "fd00::1": 3}
    assert HostDiscoveryScript(script, 4).find() == {"a": 3, "b": 4, "fd00::1": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo a b c", "hosts.sh printed 'a b c'; a line must be like: worker-0:2"),
        ("echo well; echo no route >&2; exit 3", "hosts.sh ended with 3: no route"),
        ("kill -9 $$", "hosts.sh ended with -9"),
    ],
)
def test_scripts_that_fail(program: Callable[[str], str], text: str, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        HostDiscoveryScript(program(text)).find()


def test_scripts_that_cannot_be_executed(tmp_path: Path, program: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="--host-discovery-script ./nothing: there is no such program"):
        HostDiscoveryScript("./nothing")
    path = program("true")
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match="it is not executable; chmod"):
        HostDiscoveryScript(path)
    Path(path).write_text("#!/nonexistent/sh")
    os.chmod(path, 0o755)
    message = "its interpreter /nonexistent/sh does not exist; begin it with a line such as #!/bin/sh"
    with pytest.raises(UsageError, match=f"--host-discovery-script {path}: {message}"):
        HostDiscoveryScript(path)


def test_a_script_that_hangs_is_killed_at_the_end(program: Callable[[str], str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    discovery = HostDiscoveryScript(program(f"echo > {tmp_path}/ready; sleep 1000 & wait"))
    failed = threading.Event()

    def find() -> None:
        with pytest.raises(DiscoveryError):
            discovery.find()
        failed.set()

    finding = threading.Thread(target=find)
    finding.start()
    (tmp_path / "ready").read_text()
    discovery.close()
    finding.join(LIMIT_S)
    assert failed.is_set()


class Found(HostDiscovery):
    def __init__(self, *answers: dict[str, int] | Exception) -> None:
        self.answers = list(answers)

    def find(self) -> dict[str, int]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_names_of_this_machine_are_one_host() -> None:
    thread = DiscoveryThread(Found({"localhost": 1, "127.0.0.1": 2, "elsewhere.invalid": 3}), {})
    assert thread.look() == {"localhost": 3, "elsewhere.invalid": 3}
    assert thread.here == "localhost"


def test_news_are_told_once() -> None:
    same, other = {"a.invalid": 1}, {"a.invalid": 2}
    thread = DiscoveryThread(Found(same, same, ValueError("no"), ValueError("no"), same, other), {})
    told: list[dict[str, int] | str] = []
    changed = threading.Event()

    def tell(news: dict[str, int] | str) -> None:
        told.append(news)
        if news == other:
            changed.set()

    thread.start(thread.look(), tell)
    assert changed.wait(LIMIT_S)
    thread.close()
    assert told == ["the hosts cannot be found out, and stay as they are: no", other]
