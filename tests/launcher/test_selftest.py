from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from horovodlike.launcher.cli import parse
from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.tools import selftest
from horovodlike.launcher.tools.selftest_report import Coverage, Link, differences, pair_up, render


@pytest.mark.parametrize("number", range(10))
def test_everybody_meets_everybody_once(number: int) -> None:
    rounds = pair_up(number)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == list(itertools.combinations(range(number), 2))
    assert len(rounds) <= number
    for each in rounds:
        members = [member for pair in each for member in pair]
        assert len(members) == len(set(members))


FACTS = [
    {"host": "a", "processors": "8", "kernel": "6.1", "horovodlike": "1.0", "python": "3.11.7", "torch": "2.1"},
    {"host": "a", "processors": "8", "kernel": "6.1", "horovodlike": "1.0", "python": "3.11.7", "torch": "2.1"},
    {"host": "bb", "processors": "16", "kernel": "6.2", "horovodlike": "1.0", "python": "3.11.7", "torch": "2.2"},
]


def test_differences() -> None:
    assert differences(FACTS[:2]) == []  # kernels may differ
    assert differences(FACTS) == ["torch is 2.1 on a and 2.2 on bb"]
    assert differences([*FACTS[:2], {**FACTS[2], "torch": "2.1", "keras": "3.5"}]) == [
        "keras is missing on a and 3.5 on bb"
    ]


def test_the_report() -> None:
    assert render(
        FACTS, [Link("a - bb", 52.4e-6, 1.25e9), Link("inside a", 2e-6, 1e10)], Coverage(1, 1)
    ).splitlines() == [
        "host  ranks  processors  kernel  horovodlike  python  torch",
        "a     2      8           6.1     1.0          3.11.7  2.1",
        "bb    1      16          6.2     1.0          3.11.7  2.2",
        "DIFFERENT: torch is 2.1 on a and 2.2 on bb",
        "",
        "link      4 B take  16 MiB go at",
        "a - bb    52 us     10.00 Gbit/s",
        "inside a  2 us      80.00 Gbit/s",
    ]
    assert render(FACTS[:1], [], Coverage(0, 0)).splitlines()[2:] == [
        "All hosts have the same versions.",
        "",
        "There is one rank only, so no link to measure.",
    ]


def test_of_many_links_the_slowest_are_shown() -> None:
    links = [Link(f"link{number}", 1e-6, 1e9 * (1 + number)) for number in range(100)]
    lines = render(FACTS[:1], links[::-1], Coverage(100, 101)).splitlines()[5:]
    assert [line.split()[0] for line in lines[:-2]] == [f"link{number}" for number in range(39, -1, -1)]
    assert lines[-2] == "These are the 40 slowest of 100 links; half of all are faster than 404.00 Gbit/s."
    assert lines[-1] == "100 of 101 links between hosts were measured, the same number of each host."


def test_of_many_hosts_not_every_link_is_measured() -> None:
    facts = [{"host": f"h{rank}", "local_rank": "0"} for rank in range(40)]
    between, inside = selftest._rounds(facts)
    assert [len(pairs) for pairs in between] == [20] * selftest._MOST_ROUNDS
    assert inside == {}
    between, inside = selftest._rounds([*facts[:32], {"host": "h31", "local_rank": "1"}])
    assert sum(map(len, between)) == 32 * 31 // 2
    assert inside == {"inside h31": (31, 32)}


def test_a_selftest_has_no_command() -> None:
    job = parse(["--selftest"], {})
    assert job.num_proc == 2
    assert job.command[1].endswith("selftest.py")
    assert parse(["--selftest", "-H", "localhost:3"], {}).num_proc == 3
    with pytest.raises(UsageError, match="--selftest runs a program of its own: leave out train.py"):
        parse(["--selftest", "train.py"], {})


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_selftest_of_this_machine(hvdrun: Callable[..., object], ranks: int) -> None:
    job = hvdrun("-np", ranks, "--selftest")
    assert job.code == 0, job.err
    lines = [line.decode() for line in job.lines_of(0)]
    assert re.match(rf"localhost +{ranks} ", lines[1])
    assert "All hosts have the same versions." in lines
    if ranks > 1:
        assert re.fullmatch(r"inside localhost +\d+ us +\d+\.\d\d Gbit/s", lines[-1])


def test_a_selftest_without_options(hvdrun: Callable[..., object]) -> None:
    job = hvdrun("--selftest")
    assert job.code == 0, job.err
    assert re.fullmatch(rb"inside localhost +\d+ us +\d+\.\d\d Gbit/s", job.lines_of(0)[-1])


def test_a_selftest_of_two_hosts_with_one_rank_each(hvdrun: Callable[..., object], ssh: Path) -> None:
    job = hvdrun("-H", "node1:1,node2:1", "--selftest", env={"PATH": f"{ssh}:{os.environ['PATH']}"})
    assert job.code == 0, job.err
    assert re.fullmatch(rb"node1 - node2 +\d+ us +\d+\.\d\d Gbit/s", job.lines_of(0)[-1])
