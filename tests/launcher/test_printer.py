from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from horovodlike.launcher.supervisor.printer import LONGEST_PARTIAL, Printer

A, B = b"[0]: ", b"[1]: "
ERASE = b"\r\x1b[K"


def in_file(*writes: tuple[int, bytes]) -> bytes:
    printer = Printer()
    out = b"".join(printer.add(rank, b"[%d]: " % rank, data) for rank, data in writes)
    ranks = dict.fromkeys(rank for rank, _ in writes)
    return out + b"".join(printer.finish(rank, b"[%d]: " % rank) for rank in ranks)


def test_lines_wait_until_they_are_whole() -> None:
    printer = Printer()
    assert printer.add(0, A, b"hal") == b""
    assert printer.add(1, B, b"other\n") == b"[1]: other\n"
    assert printer.add(0, A, b"f\nnext\nlast") == b"[0]: half\n[0]: next\n"
    assert printer.finish(0, A) == b"[0]: last\n"
    assert printer.finish(0, A) == printer.finish(1, B) == b""


def test_empty_lines_are_lines() -> None:
    assert in_file((0, b"\n\na\n")) == b"[0]: \n[0]: \n[0]: a\n"


def test_bytes_that_are_no_text_pass() -> None:
    assert in_file((0, b"\xff\x00\xfe\n")) == b"[0]: \xff\x00\xfe\n"


def test_a_carriage_return_ends_a_line() -> None:
    assert in_file((0, b"\r 1%"), (0, b"\r 2%"), (0, b"\n")) == b"[0]:  1%\r[0]:  2%\n"
    assert (
        in_file((0, b"1%\r"), (0, b"2%\r"), (1, b"x\n"), (0, b"3%\r\n")) == b"[0]: 1%\r\n[1]: x\n[0]: 2%\r[0]: 3%\r\n"
    )
    assert in_file((0, b"dos\r"), (0, b"\n")) == b"[0]: dos\r\n"
    assert in_file((0, b"1%\r2%\r")) == b"[0]: 1%\r[0]: 2%\n"


def test_a_very_long_line_is_not_held_back() -> None:
    long = b"x" * (LONGEST_PARTIAL + 1)
    printer = Printer()
    assert printer.add(0, A, long) == A + long
    assert printer.add(0, A, b"y\nz\n") == b"y\n[0]: z\n"
    assert printer.add(0, A, long) == A + long
    assert printer.add(1, B, b"other\n") == b"\n[1]: other\n"
    assert printer.add(0, A, b"rest\n") == b"[0]: rest\n"


CHUNKS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n"])).map(b"".join)),
    max_size=20,
)


@given(CHUNKS)
def test_no_line_holds_bytes_of_two_ranks_and_nothing_is_lost(chunks: list[tuple[int, bytes]]) -> None:
    out = in_file(*chunks)
    for line in out.split(b"\n"):
        assert len(set(re.findall(rb"\[(\d)\]", line))) <= 1
    for rank in range(3):
        written = b"".join(data for owner, data in chunks if owner == rank)
        printed = b"".join(re.findall(rb"\[%d\]: ([^\r\n]*)" % rank, out))
        assert printed == re.sub(rb"[\r\n]", b"", written)


@given(CHUNKS)
def test_every_line_end_of_a_rank_stays(chunks: list[tuple[int, bytes]]) -> None:
    out = in_file(*chunks)
    for rank in range(3):
        written = b"".join(data for owner, data in chunks if owner == rank)
        assert sum(line.startswith(b"[%d]" % rank) for line in out.split(b"\n")) >= written.count(b"\n")


def test_a_progress_bar_on_a_terminal_stays_at_the_bottom() -> None:
    printer = Printer(terminal=True)
    assert printer.add(0, A, b"\r 1%") == b"[0]:  1%"
    assert printer.add(0, A, b"\r 2%") == ERASE + b"[0]:  2%"
    assert printer.add(1, B, b"hello\n") == ERASE + b"[1]: hello\n[0]:  2%"
    assert printer.add(0, A, b"\r100%\n") == ERASE + b"[0]: 100%\n"
    assert printer.add(1, B, b"x\n") == b"[1]: x\n"


def test_only_the_last_state_of_a_bar_is_drawn() -> None:
    printer = Printer(terminal=True)
    assert printer.add(0, A, b"1%\r2%\r3%\r") == b"[0]: 3%"
    assert printer.add(0, A, b"4%") == ERASE + b"[0]: 4%"
    assert printer.finish(0, A) == ERASE + b"[0]: 4%\n"
    assert printer.add(1, B, b"5%\r") == b"[1]: 5%"
    assert printer.finish(1, B) == ERASE + b"[1]: 5%\n"


def test_a_bar_fits_the_terminal() -> None:
    printer = Printer(terminal=True, columns=lambda: 12)
    assert printer.add(0, b"\x1b[36m[0]: \x1b[0m", b"\r0123456789") == b"\x1b[36m[0]: \x1b[0m012345"


def test_dos_line_ends_on_a_terminal() -> None:
    printer = Printer(terminal=True)
    assert printer.add(0, A, b"a\r\nb\r\n") == b"[0]: a\n[0]: b\n"
