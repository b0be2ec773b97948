"""The start of a job among workers: their ranks, and the key, which is not shown."""

from __future__ import annotations

from horovodlike.ray.node_caller import NodeOptions
from horovodlike.ray.rendezvous import WorkerJob, places_of


def test_ranks_are_counted_on_each_node():
    places = places_of(["a", "a", "b", "c", "c"])
    assert [(each.local_rank, each.local_size) for each in places] == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]
    assert [(each.cross_rank, each.cross_size) for each in places] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]
    assert [each.rank for each in places] == [0, 1, 2, 3, 4] and {each.size for each in places} == {5}


def test_a_job_does_not_show_its_key():
    assert "deadbeef" not in repr(WorkerJob(None, [{"HOROVODLIKE_SECRET_KEY": "deadbeef"}]))
    assert "deadbeef" not in repr(NodeOptions("deadbeef", "127.0.0.1", 1, 1.0, {}))
