"""The nodes that an elastic job uses: which get workers, how many, which leave, and how long that may take."""

from __future__ import annotations

from dataclasses import replace

from horovodlike.ray.node_choice import Node, Snapshot, Taken, seconds_to_leave


def seen(*nodes, taken=(), least=1, **rest):
    return Snapshot([Node(*node) if isinstance(node, tuple) else node for node in nodes], taken, least, **rest)


def test_nodes_with_room_get_workers_up_to_the_most():
    assert seen(("a", "1", 2), ("b", "2", 3), ("c", "3", 0)).starts() == {"a": 2, "b": 3}
    assert seen(("a", "1", 2), ("b", "2", 3), ("c", "3", 4), most=4).starts() == {"a": 2, "b": 2}
    assert seen(("a", "1", 2), Node("b", "2", 3, is_sure=False)).starts() == {"a": 2}
    assert seen(("a", "1", 2), ("b", "2", 3), resting={"a"}).starts() == {"b": 3}
    assert seen(("a", "1", 2), ("b", "2", 3), taken=[Taken("a", 2)], most=3).starts() == {"b": 1}


def test_a_node_that_joined_with_few_slots_gets_more_while_workers_are_missing():
    few = seen(("a", "1", 3), taken=[Taken("a", 1)], least=4)
    assert few.slots == 1 and few.starts() == {"a": 3}
    assert replace(few, least=1).starts() == {}, "a job that runs is not disturbed"
    assert seen(Node("a", "1", 3, is_sure=False), taken=[Taken("a", 1)], least=4).starts() == {}
    new = seen(("a", "1", 3), ("b", "2", 3), taken=[Taken("a", 1)], least=4)
    assert new.starts() == {"b": 3}, "a new node comes first"
    assert replace(new, least=5).starts() == {"b": 3, "a": 3}


def test_a_node_that_was_capped_gets_more_when_another_one_is_lost():
    capped = seen(("a", "1", 0), ("b", "2", 1), taken=[Taken("a", 2), Taken("b", 1)], least=2, most=3)
    assert capped.starts() == {}
    lost = seen(("b", "2", 1), taken=[Taken("b", 1)], least=2, most=3)
    assert lost.starts() == {"b": 1}
    assert replace(lost, least=1).starts() == {}
    leaving = replace(capped, nodes=[Node("a", "1", 0, is_draining=True), capped.nodes[1]])
    assert leaving.slots == 1 and leaving.starts() == {"b": 1} and leaving.leaving() == {"a"}


def test_limits_are_those_of_an_address():
    nodes = ("a", "1", 2), ("b", "1", 2), ("c", "2", 2)
    assert seen(*nodes, limits={"1": 3}).starts() == {"a": 2, "b": 1}
    assert seen(*nodes, limits={"1": 3, "2": 1}, taken=[Taken("a", 2)]).starts() == {"b": 1, "c": 1}
    assert seen(*nodes, limits={"1": 2}, taken=[Taken("a", 2, leaves=True)]).starts() == {}


def test_nodes_that_are_unwanted_leave_once():
    taken = [Taken("a", 2), Taken("b", 1), Taken("c", 1, leaves=True), Taken("gone", 1)]
    nodes = ("a", "1", 0), Node("b", "2", 0, is_draining=True), Node("c", "3", 0, is_draining=True)
    assert seen(*nodes, taken=taken).leaving() == {"b"}
    assert seen(*nodes, taken=taken, limits={"2": 1}).leaving() == {"a", "b"}
    assert seen(*nodes, limits={"2": 1, "3": 1}).starts() == {}


def test_a_job_gives_up_only_when_all_nodes_with_room_have_refused():
    nodes = ("a", "1", 2), ("b", "2", 2)
    assert not seen(*nodes).is_hopeless(set())
    assert not seen(*nodes).is_hopeless({"a"})
    assert seen(*nodes).is_hopeless({"a", "b"})
    assert not seen(*nodes, taken=[Taken("b", 2)]).is_hopeless({"a", "b"})
    assert not seen(*nodes[1:]).is_hopeless({"a"}), "it was lost"
    assert not seen().is_hopeless({"a"})
    assert seen(("a", "1", 0), ("busy", "2", 0)).is_hopeless({"a"})
    assert not seen(("a", "1", 0), Node("busy", "2", 0, is_sure=False)).is_hopeless({"a"}), "its room may change yet"
    assert seen(*nodes, limits={"1": 2}).is_hopeless({"a"})


def test_workers_get_the_time_that_ray_leaves():
    now = 1e9
    assert seconds_to_leave(0, now) == 30
    assert seconds_to_leave(int((now + 120) * 1000), now) == 118
    assert seconds_to_leave(int(now - 9) * 1000, now) == 5
    assert seconds_to_leave(int(now + 9000) * 1000, now) == 300
