"""The decisions of the rendezvous, with an invented clock."""

from typing import Any

import pytest

from horovodlike._bootstrap.rendezvous_state import RendezvousState, Reply, name_ranks


def told(replies: list[Reply]) -> dict[int, Any]:
    return {reply.rank: reply.error or reply.result for reply in replies}


def full(size: int) -> RendezvousState:
    roll = RendezvousState(size)
    for rank in range(size):
        roll.connected(rank)
    return roll


def test_all_gather_in_any_order() -> None:
    roll = full(3)
    assert roll.arrive(2, "1/a", "c", 0.0, 30.0) == []
    assert roll.arrive(0, "1/a", "a", 1.0, 30.0) == []
    assert told(roll.arrive(1, "1/a", "b", 2.0, 30.0)) == dict.fromkeys(range(3), ["a", "b", "c"])
    assert roll.next_deadline() is None


def test_a_job_of_one() -> None:
    assert told(RendezvousState(1).arrive(0, "join", 7, 0.0, 1.0)) == {0: [7]}


def test_time_out_names_who_is_missing_and_who_never_came() -> None:
    roll = RendezvousState(4)
    for rank in (0, 1, 2):
        roll.connected(rank)
    roll.arrive(0, "1/a", None, 10.0, 30.0)
    roll.arrive(1, "1/a", None, 20.0, 30.0)
    assert roll.next_deadline() == 40.0
    assert roll.expire(39.9) == []
    replies = told(roll.expire(40.0))
    assert set(replies) == {0, 1}
    assert replies[0].startswith("after 30 s ranks 2, 3 of 4 had not arrived (rank 3 never connected)")
    assert "--start-timeout" in replies[0]
    late = told(roll.arrive(2, "1/a", None, 41.0, 30.0))
    assert "ranks 2, 3 of 4" in late[2]


def test_a_lost_rank_fails_what_waits_and_what_comes_later() -> None:
    roll = full(3)
    roll.arrive(0, "1/a", None, 0.0, 30.0)
    assert told(roll.lost(2, "rank 2 is gone")) == {0: "rank 2 is gone"}
    assert told(roll.arrive(1, "1/b", None, 0.0, 30.0)) == {1: "rank 2 is gone"}
    assert told(roll.arrive(1, "join", None, 0.0, 30.0)) == {1: "rank 2 is gone"}
    roll.connected(2)
    assert roll.arrive(1, "join", None, 0.0, 30.0) == []


def test_a_rank_that_is_lost_while_it_waits() -> None:
    roll = full(3)
    roll.arrive(0, "1/a", None, 0.0, 30.0)
    roll.arrive(2, "1/a", None, 0.0, 30.0)
    assert told(roll.lost(2, "rank 2 is gone")) == {0: "rank 2 is gone"}
    assert roll.next_deadline() is None


def test_a_rank_that_exits_before_it_comes() -> None:
    roll = RendezvousState(3)
    roll.connected(0)
    roll.arrive(0, "join", None, 0.0, 30.0)
    reason = "rank 2 exited with code 0 before it called init(); every rank of the job must call it"
    assert told(roll.exited(2, "rank 2 exited with code 0")) == {0: reason}
    roll.connected(1)
    assert told(roll.arrive(1, "join", None, 0.0, 30.0)) == {1: reason}, "it came late"
    roll.connected(2)  # a wrapper has exited, and its child comes
    assert roll.arrive(0, "join", None, 0.0, 30.0) == []


def test_a_rank_that_exits_between_two_generations() -> None:
    roll = full(2)
    roll.left(1)
    assert roll.exited(1, "rank 1 exited with code 0") == []
    assert "before it called init() again" in told(roll.arrive(0, "join", None, 0.0, 30.0))[0]


def test_an_exit_does_not_hide_that_the_connection_broke_first() -> None:
    roll = full(2)
    roll.lost(1, "rank 1 is gone")
    assert roll.exited(1, "rank 1 exited with code 3") == []
    assert told(roll.arrive(0, "join", None, 0.0, 30.0)) == {0: "rank 1 is gone"}


def test_leaving_in_order_disturbs_nobody_and_allows_another_generation() -> None:
    roll = full(2)
    roll.arrive(0, "join", 0, 0.0, 30.0)
    assert roll.left(1) == []
    roll.connected(1)
    assert told(roll.arrive(1, "join", 1, 1.0, 30.0)) == {0: [0, 1], 1: [0, 1]}
    assert roll.generation == 1


def test_abort_fails_its_generation_only() -> None:
    roll = full(3)
    roll.arrive(0, "4/a", None, 0.0, 30.0)
    assert told(roll.abort(1, "4", "no memory")) == {0: "rank 1 failed: no memory"}
    assert told(roll.arrive(2, "4/a", None, 0.0, 30.0)) == {2: "rank 1 failed: no memory"}
    assert roll.arrive(2, "join", None, 0.0, 30.0) == []
    assert roll.abort(0, "4", "again") == []
    assert roll.last_failure() is None
    roll.generation = 4
    assert roll.last_failure() == "rank 1 failed: no memory"


def test_a_failed_join_may_be_tried_again() -> None:
    roll = full(2)
    roll.arrive(0, "join", 0, 0.0, 30.0)
    assert set(told(roll.expire(30.0))) == {0}
    assert roll.arrive(1, "join", 1, 31.0, 30.0) == []
    assert told(roll.arrive(0, "join", 0, 32.0, 30.0)) == {0: [0, 1], 1: [0, 1]}


def test_ranks_at_different_topics_need_not_wait() -> None:
    roll = full(3)
    roll.arrive(0, "1/a", None, 0.0, 30.0)
    roll.arrive(1, "1/b", None, 0.0, 30.0)
    replies = told(roll.arrive(2, "1/a", None, 0.0, 30.0))
    assert set(replies) == {0, 1, 2}
    assert "ranks 0, 2: '1/a'; rank 1: '1/b'" in replies[0]


def test_a_rank_at_two_topics() -> None:
    roll = full(2)
    roll.arrive(0, "1/a", None, 0.0, 30.0)
    assert "rank 0 came to '1/b'" in told(roll.arrive(0, "1/b", None, 0.0, 30.0))[0]


def test_memory_of_failures_is_bounded() -> None:
    roll = full(2)
    for generation in range(1000):
        roll.abort(0, str(generation), "x")
    assert len(roll._failed_groups) <= 8


@pytest.mark.parametrize(("ranks", "text"), [([2], "rank 2"), ([3, 1], "ranks 1, 3")])
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_many_ranks_in_words() -> None:
    assert name_ranks(range(100)).endswith("14, 15 and 84 more")
