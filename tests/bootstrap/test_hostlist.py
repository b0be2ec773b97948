from __future__ import annotations

import pytest

from horovodlike._bootstrap.hostlist import MOST_HOSTS, expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,m2", ["n1", "m2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7],m2", ["n01", "n02", "n03", "n7", "m2"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]n[3,5]", ["rack1n3", "rack1n5", "rack2n3", "rack2n5"]),
        ("gpu-[1-2].cluster.example,login", ["gpu-1.cluster.example", "gpu-2.cluster.example", "login"]),
        ("[1-2]", ["1", "2"]),
        ("b,a,b", ["b", "a", "b"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a,,b", "n[1-3", "n1-3]", "n[]", "n[a-b]", "n[3-1]", "n[1-]", "n[-1]", "n[1,,2]", "a b"],
)
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of hosts"):
        expand_hosts(text)


@pytest.mark.parametrize("text", [f"n[1-{MOST_HOSTS + 1}]", "a[1-60000],b[1-60000]", "a[1-999]b[1-999]c[1-999]"])
def test_too_many_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=f"more than {MOST_HOSTS} hosts"):
        expand_hosts(text)


def test_counts() -> None:
    assert expand_counts("4(x2),3") == [4, 4, 3]
    assert expand_counts("16") == [16]


@pytest.mark.parametrize("text", ["", "4(2)", "x2", "4(x2", "4,", "-1", "1(x999999999)"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number for each host"):
        expand_counts(text)
