from __future__ import annotations

from horovodlike.launcher.errors import counted, listed, ranges


def test_counted() -> None:
    assert [counted(number, "host") for number in range(3)] == ["0 hosts", "1 host", "2 hosts"]


def test_listed() -> None:
    assert [listed("rank", [1]), listed("rank", [0, 2])] == ["rank 1", "ranks 0, 2"]


def test_ranges() -> None:
    assert [ranges(each) for each in ([], [3], [0, 1], [0, 2, 3, 4, 5, 9])] == ["", "3", "0-1", "0,2-5,9"]
