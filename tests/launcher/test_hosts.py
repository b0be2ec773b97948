from __future__ import annotations

import pytest

from horovodlike.launcher.errors import UsageError
from horovodlike.launcher.planning.hosts import HostSlots, Placement, parse_hostfile, parse_hosts, place_ranks

A, B, C = HostSlots("a", 2), HostSlots("b", 1), HostSlots("c", 3)


def test_the_hosts_of_the_command_line() -> None:
    assert parse_hosts("a:2") == (A,)
    assert parse_hosts("a:2, b:1") == (A, B)
    assert parse_hosts("worker-0.example.com:4,127.0.0.1:1") == (
        HostSlots("worker-0.example.com", 4),
        HostSlots("127.0.0.1", 1),
    )
    assert parse_hosts("[fd00::1]:2,[fe80::1%eth0]:1") == (HostSlots("fd00::1", 2), HostSlots("fe80::1%eth0", 1))
    assert parse_hosts("a:1,b:1,a:1") == (A, B)  # one host, at its first place


@pytest.mark.parametrize("text", ["", "a", "a:", ":2", "a:x", "a:-1", "a:1,", "fd00::1:2", "[a:1", "a b:1", "-oX=y:1"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match="Invalid host input .*worker-0:2,worker-1:2"):
        parse_hosts(text)


def test_a_hostfile() -> None:
    text = "# the cluster\n\na slots=2\n  b:1  # slow\n\tc  slots = 1\nc\nc:1\n[fd00::1]:2\n"
    assert parse_hostfile(text, "hosts") == (A, B, C, HostSlots("fd00::1", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb slots=x", "hosts, line 2: 'b slots=x' cannot be used; write it like: worker-0 slots=2"),
        ("a slots=2 max_slots=4", "hosts, line 1: 'a slots=2 max_slots=4' cannot be used"),
        ("a 2", "hosts, line 1: 'a 2' cannot be used"),
        ("\n# a slots=2\n", "hosts names no host"),
    ],
)
def test_a_hostfile_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hostfile(text, "hosts")


def test_hosts_are_filled_in_order() -> None:
    names = ("a", "b", "c")
    assert place_ranks((A, B, C), None) == tuple(Placement(names, (2, 1, 3), number) for number in range(3))
    assert place_ranks((A, B, C), 4) == tuple(Placement(names, (2, 1, 1), number) for number in range(3))
    assert place_ranks((A, B, C), 3) == tuple(Placement(("a", "b"), (2, 1), number) for number in range(2))
    assert place_ranks((A, HostSlots("z", 0), C), 3) == tuple(
        Placement(("a", "c"), (2, 1), number) for number in (0, 1)
    )


@pytest.mark.parametrize(("hosts", "wanted"), [((A, B), 4), ((HostSlots("z", 0),), None)])
def test_too_few_slots(hosts: tuple[HostSlots, ...], wanted: int | None) -> None:
    with pytest.raises(UsageError, match=r"Requested more processes \(.\) than there are available slots \(.\)"):
        place_ranks(hosts, wanted)


def test_the_ranks_of_a_host() -> None:
    placement = Placement(("a", "b", "c"), (2, 1, 3), 2)
    assert (placement.name, placement.first_rank, placement.local_size, placement.size) == ("c", 3, 3, 6)
    assert list(placement.ranks) == [3, 4, 5]
    assert [placement.cross(local_rank) for local_rank in range(3)] == [(2, 3), (1, 2), (0, 1)]
