"""The table of hosts, from what the ranks report about themselves."""

from dataclasses import replace
from typing import Any

import pytest

from horovodlike._bootstrap.environment import RankInfo
from horovodlike._bootstrap.topology import HostFacts, HostTable
from horovodlike.errors import RendezvousError

FACTS = HostFacts("a", False, "machine", "boot", "pid:1", "net:1", 0, 1)


def facts_of(nodes: str, **changes: Any) -> list[HostFacts]:  # noqa: ANN401
    """Ranks on nodes, a letter each, as a launcher counts them."""
    return [
        replace(FACTS, node=node, local_rank=nodes[:rank].count(node), local_size=nodes.count(node), **changes)
        for rank, node in enumerate(nodes)
    ]


def place_of(table: HostTable, rank: int) -> RankInfo:
    return table.place(RankInfo(rank, len(table.facts)))


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        ("a", ((0,),)),
        ("aaa", ((0, 1, 2),)),
        ("aabb", ((0, 1), (2, 3))),
        ("bacab", ((0, 4), (1, 3), (2,))),
    ],
)
def test_hosts_are_numbered_by_their_lowest_ranks(nodes: str, ranks: tuple[tuple[int, ...], ...]) -> None:
    table = HostTable.of(facts_of(nodes))
    assert table.ranks == ranks
    assert [table.ranks[host] for host in table.hosts] == [table.ranks_beside(rank) for rank in range(len(nodes))]
    assert table.surprises() == []


@pytest.mark.parametrize(
    ("nodes", "cross", "homogeneous"),
    [
        ("aabb", [(0, 2), (0, 2), (1, 2), (1, 2)], True),
        ("aabc", [(0, 3), (0, 1), (1, 3), (2, 3)], False),
        ("abbbcc", [(0, 3), (1, 3), (0, 2), (0, 1), (2, 3), (1, 2)], False),
        ("aabbbc", [(0, 3), (0, 2), (1, 3), (1, 2), (0, 1), (2, 3)], False),  # local size x hosts = 6 on rank 0
    ],
)
def test_places(nodes: str, cross: list[tuple[int, int]], homogeneous: bool) -> None:
    table = HostTable.of(facts_of(nodes))
    for rank, node in enumerate(nodes):
        place = place_of(table, rank)
        assert (place.local_rank, place.local_size) == (nodes[:rank].count(node), nodes.count(node))
        assert (place.cross_rank, place.cross_size) == cross[rank]
        assert place.is_homogeneous == homogeneous


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        ("boot", "on different machines"),
        ("pid_namespace", "in different process namespaces (containers; --pid=host gives them one)"),
        (
            "network_namespace",
            "in different network namespaces (the same HOROVODLIKE_HOSTID says that they share a host)",
        ),
    ],
)
def test_ranks_of_one_node_that_run_in_different_places(fact: str, why: str) -> None:
    facts = facts_of("aaa")
    changed: dict[str, Any] = {fact: "elsewhere"}
    facts[1] = replace(facts[1], **changed)
    table = HostTable.of(facts)
    assert table.ranks == ((0, 2), (1,))
    assert place_of(table, 2).local_rank == 1
    assert table.names == ["a (ranks 0, 2)", "a (rank 1)"]
    assert table.surprises() == [f"ranks 0, 1, 2 of node 'a' do not share a host: they are {why}"]


def test_a_launcher_that_counted_as_the_table_does_is_no_surprise() -> None:
    """Two machines of one name, as when containers were not given their own."""
    facts = [replace(FACTS, boot=boot, local_rank=rank % 2, local_size=2) for rank, boot in enumerate("xxyy")]
    table = HostTable.of(facts)
    assert table.ranks == ((0, 1), (2, 3))
    assert table.surprises() == []


def test_a_host_id_puts_nodes_together_and_divides_them() -> None:
    together = [replace(each, node="mine", chosen=True) for each in facts_of("ab")]
    together[1] = replace(together[1], network_namespace="net:2")
    assert HostTable.of(together).ranks == ((0, 1),)
    divided = [replace(each, node=node, chosen=True) for each, node in zip(facts_of("aaaa"), "xyxy", strict=True)]
    table = HostTable.of(divided)
    assert table.ranks == ((0, 2), (1, 3))
    assert [place_of(table, rank).local_rank for rank in range(4)] == [0, 0, 1, 1]
    assert table.surprises() == []


def test_without_a_launchers_node_the_machine_counts() -> None:
    facts = [replace(FACTS, node=None, boot=boot, name=f"host-{boot}", local_rank=0) for boot in "xy"]
    table = HostTable.of(facts)
    assert (table.ranks, table.names) == (((0,), (1,)), ["host-x", "host-y"])


def test_ranks_that_claim_one_local_rank() -> None:
    with pytest.raises(RendezvousError, match=r"ranks 0, 2 are all local rank 0 of the same host.*HOROVODLIKE_HOSTID"):
        HostTable.of([replace(each, local_rank=0) for each in facts_of("aba")])
