from __future__ import annotations

import pytest

from horovodlike.launcher.supervisor.failure_attribution import Failure, choose, describe, exit_code, is_consequence
from horovodlike.launcher.supervisor.output import last_lines

CRASH = Failure(2, 22, 3, (b"Traceback", b"ZeroDivisionError: division by zero"))
VICTIM = Failure(0, 20, 1, (b"Traceback", b"horovodlike.errors.JobBrokenError: rank 2 is lost"))
OTHER_VICTIM = Failure(1, 21, 1, (b"HorovodInternalError: rank 2 has shut down",))
KILLED = Failure(1, 21, -9)
DISAGREES = Failure(0, 20, 1, (b"horovodlike.errors.MismatchError: ranks disagree",))


@pytest.mark.parametrize(
    ("failures", "over", "chosen"),
    [
        ([], False, None),
        ([], True, None),
        ([CRASH], False, CRASH),
        ([KILLED, CRASH], False, KILLED),
        ([CRASH, KILLED], True, CRASH),
        ([VICTIM], False, None),
        ([VICTIM], True, VICTIM),
        ([VICTIM, CRASH], False, CRASH),
        ([OTHER_VICTIM, VICTIM], True, OTHER_VICTIM),
        ([DISAGREES, CRASH], False, DISAGREES),
    ],
)
def test_the_culprit(failures: list[Failure], over: bool, chosen: Failure | None) -> None:
    failure, reason = choose(failures, over)
    assert failure is chosen
    assert reason


def test_only_lost_peers_are_consequences() -> None:
    assert is_consequence(VICTIM)
    assert not is_consequence(DISAGREES)
    assert not is_consequence(KILLED)
    lost = (b"    raise error", b"horovodlike.errors.ShutDownError: rank 1 has shut the job down")
    own = (b"    raise TrainingFailed", b"train.TrainingFailed")
    farewell = (b"tracker: run finished", b"  loss 0.3", b"see the page")
    for lines, expected in ((lost, True), ((*own, *lost), True), (own, False), ((*lost, *own), False)):
        assert is_consequence(Failure(0, 20, 1, lines)) is expected
        assert is_consequence(Failure(0, 20, 1, (*lines, *farewell))) is expected
    assert is_consequence(Failure(0, 20, 1, (b"tracker: run finished",), raised="ShutDownError"))
    assert not is_consequence(Failure(0, 20, 1, VICTIM.last_lines, raised="ValueError"))


def test_exit_codes() -> None:
    assert [exit_code(status) for status in (0, 3, 255, -9, -15)] == [0, 3, 255, 137, 143]


def test_descriptions() -> None:
    assert describe(CRASH) == [
        b"hvdrun: rank 2 (pid 22) exited with code 3; its last lines:",
        b"    Traceback",
        b"    ZeroDivisionError: division by zero",
    ]
    assert describe(KILLED) == [b"hvdrun: rank 1 (pid 21) was killed by signal 9 (SIGKILL); it wrote nothing to stderr"]
    assert describe(CRASH, is_above=True) == [b"hvdrun: rank 2 (pid 22) exited with code 3; its traceback is above"]
    assert describe(KILLED, is_above=True) == describe(KILLED)
    assert b"was killed by signal 40;" in describe(Failure(1, 21, -40))[0]


def test_last_lines_show_what_remained_visible() -> None:
    assert last_lines(b"one\ntwo\r\n 1%\r 2%\r 3%\nlast") == (b"one", b"two", b" 3%", b"last")
    assert last_lines(b"".join(b"%d\n" % number for number in range(50)))[0] == b"30"
    assert last_lines(b"\n\n") == last_lines(b"") == ()
