"""`RankOutput` with a fold: which streams are folded, and what is last on the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from horovodlike.launcher.agent.protocol import FrameKind
from horovodlike.launcher.supervisor.fold import Fold
from horovodlike.launcher.supervisor.output import OutputFiles, RankOutput, Screen, last_lines
from horovodlike.launcher.supervisor.printer import Printer
from horovodlike.launcher.supervisor.writer import Writer

OUT, ERR = FrameKind.STDOUT, FrameKind.STDERR
TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: no such batch\n'
LOST_PEER = TRACEBACK.replace(b"ValueError: no such batch", b"JobBrokenError: rank 1 has gone")

Make = Callable[..., tuple[RankOutput, bytearray, bytearray]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make an output of two ranks, and of a server if asked for; and what standard output and error have got."""
    writers = []

    def opened(
        *, terminals: tuple[bool, bool] = (True, True), servers: bool = False, files: OutputFiles | None = None
    ) -> object:
        got = bytearray(), bytearray()
        screens = {
            stream: Screen(to.extend, Printer(terminal=is_terminal), coloured=False, is_terminal=is_terminal)
            for stream, to, is_terminal in zip((OUT, ERR), got, terminals, strict=True)
        }
        writers.append(Writer(lambda: None))
        fold = Fold(2)
        output = RankOutput(screens, writers[-1], files, num_ranks=2 if servers else None, fold=fold)
        return output, *got

    yield opened  # type: ignore[misc]
    for writer in writers:
        writer.close()


def test_a_line_that_has_waited_has_the_time_at_which_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("horovodlike.launcher.supervisor.output.time.monotonic", lambda: now)
    got = bytearray()
    screen = Screen(got.extend, Printer(terminal=True), coloured=False, is_terminal=True)
    writer = Writer(lambda: None)
    fold = Fold(2, window=100.0)
    output = RankOutput({OUT: screen, ERR: screen}, writer, timestamps=True, clock=lambda: 1e9 + now, fold=fold)
    output.add(0, OUT, b"early\n")
    now += 30.0
    output.add(1, OUT, b"late\n")
    now += 100.0
    output.show_due()
    output.flush()
    writer.close()
    times = [time.ctime(1e9 + 1000.0), time.ctime(1e9 + 1030.0)]
    assert got.decode().splitlines() == [f"{times[0]}[0]<stdout>: early", f"{times[1]}[1]<stdout>: late"]


def test_only_terminals_are_folded(make: Make) -> None:
    output, out, err = make(terminals=(False, True))
    for rank in (0, 1):
        output.add(rank, OUT, b"a\n")
        output.add(rank, ERR, b"b\n")
        output.add(rank, OUT, b"unfinished")
        output.add(rank, ERR, b"unfinished")
        output.finish(rank)
    output.drain(lambda: False)
    assert out == b"[0]<stdout>: a\n[0]<stdout>: unfinished\n[1]<stdout>: a\n[1]<stdout>: unfinished\n"
    assert err == b"[0-1]<stderr>: b\n[0-1]<stderr>: unfinished\n"


def test_lines_of_servers_do_not_wait(make: Make) -> None:
    output, out, _ = make(servers=True)
    output.add(0, OUT, b"a\n")
    output.add(2, OUT, b"a\n")
    assert output.deadline is not None
    output.add(1, OUT, b"a\n")
    output.finish(2)
    output.drain(lambda: False)
    assert out == b"[server 0]<stdout>: a\n[0-1]<stdout>: a\n"
    assert output.deadline is None


def test_what_the_launcher_says_comes_after_what_waits(make: Make) -> None:
    output, out, err = make()
    output.add(0, ERR, b"a\n")
    output.say("hvdrun: b")
    output.drain(lambda: False)
    assert err == b"[0]<stderr>: a\nhvdrun: b\n"


def test_a_progress_bar_below_lines_of_several_ranks(make: Make) -> None:
    output, _, err = make()
    output.add(0, ERR, b"\r 5%")
    for rank in (0, 1):
        output.add(rank, OUT, b"a\n")
    output.add(0, ERR, b"\r 6%")
    output.add(1, ERR, b"b\n")
    output.flush()
    output.add(0, ERR, b"\n")
    output.drain(lambda: False)
    assert err == (
        b"[0]<stderr>:  5%\r\x1b[K[0]<stderr>:  6%\r\x1b[K[1]<stderr>: b\n[0]<stderr>:  6%\r\x1b[K[0]<stderr>:  6%\n"
    )


def test_the_traceback_on_the_lowest_lines(make: Make) -> None:
    output, *_ = make()
    assert not output.ends_with_traceback_of(1)
    output.add(1, ERR, TRACEBACK)
    assert output.ends_with_traceback_of(1)
    assert not output.ends_with_traceback_of(0)
    output.add(0, ERR, LOST_PEER)  # of which a line is shown
    assert not output.ends_with_traceback_of(0)
    assert not output.ends_with_traceback_of(1)
    output.add(1, OUT, TRACEBACK)
    assert not output.ends_with_traceback_of(1)
    output.add(1, ERR, TRACEBACK)
    output.say("hvdrun: b")
    assert not output.ends_with_traceback_of(1)


def test_last_lines_hold_a_whole_traceback() -> None:
    long = TRACEBACK.replace(b"ValueError", b"    step()\n" * 30 + b"ValueError")
    assert last_lines(b"before\n" + long) == tuple(long.splitlines())
    chained = TRACEBACK + b"\nDuring handling of the above exception, another exception occurred:\n\n" + long
    assert last_lines(b"before\n" * 30 + chained) == tuple(chained.splitlines())
    assert last_lines(TRACEBACK + b"x\n" * 20 + TRACEBACK)[0] == b"x"
