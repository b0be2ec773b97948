"""The decisions of an elastic job, one rule after the other."""

from __future__ import annotations

import re

import pytest
from play import Play

from horovodlike.launcher.elastic.events import (
    Abandon,
    Adrift,
    Announce,
    Continued,
    End,
    Exited,
    Finished,
    Form,
    HostLost,
    HostsFound,
    Kill,
    Leaving,
    Noted,
    Ready,
    Remove,
    Report,
    Spawn,
    Stopped,
    Training,
)
from horovodlike.launcher.elastic.host_health import Backoff
from horovodlike.launcher.elastic.membership import SETTLE_S


def kinds(decisions: list[object]) -> list[type]:
    return [type(each) for each in decisions]


def test_the_first_generation_waits_for_the_number_that_was_asked_for() -> None:
    play = Play(num_proc=3, max_np=3)
    assert [(each.worker, each.host, each.slot) for each in play.happen(HostsFound({"a": 2, "b": 4}))] == [
        (0, "a", 0),
        (1, "a", 1),
        (2, "b", 0),
    ]
    assert play.ready(2, 0) == []
    [form] = play.ready(1)
    assert (form.generation, form.members) == (1, (0, 1, 2))


def test_a_start_waits_a_moment_for_more_than_it_needs() -> None:
    play = Play(num_proc=2, max_np=4)
    play.happen(HostsFound({"a": 4}))
    assert play.ready(0, 1, 2) == []
    [form] = play.wait(SETTLE_S)
    assert form.members == (0, 1, 2)
    play = Play(num_proc=2, max_np=4)
    play.happen(HostsFound({"a": 4}))
    assert play.of(Form, play.ready(0, 1, 2, 3))[0].members == (0, 1, 2, 3)


def test_a_start_with_fewer_after_the_time_out() -> None:
    play = Play(num_proc=4, min_np=2, elastic_timeout=60)
    play.start(a=2)
    assert play.wait(59) == []
    assert play.of(Form, play.wait(1))[0].members == (0, 1)


def test_too_few_until_the_time_out() -> None:
    play = Play(num_proc=4, min_np=3, elastic_timeout=60).start(a=2)
    assert play.wait(59) == []
    [end] = play.wait(1)
    assert (end.exit_code, end.failure) == (1, None)
    assert end.reason.startswith("Timed out after 60 s with 2 workers. Please check that you have enough resources")
    assert end.reason.endswith("at least 3 Horovod processes.")


def test_a_killed_worker_is_replaced_and_nobody_waits_for_the_new_one() -> None:
    play = Play().start()
    report, abandon, spawn = play.kill(1)
    assert (report.worker, report.status) == (1, -9)
    assert abandon.generation == 1
    assert (spawn.worker, spawn.host, spawn.slot) == (4, "here", 1)
    assert play.ready(3, 0, why="broken") == []
    [form] = play.ready(2, why="broken")
    assert (form.generation, form.members) == (2, (0, 2, 3))
    [announce] = play.ready(4)
    assert (announce.number, announce.added, announce.removed, announce.members) == (1, True, False, (0, 2, 3))
    assert play.of(Form, play.ready(0, 2, 3, why="changed"))[0].members == (0, 2, 3, 4)


def test_the_oldest_survivor_is_rank_0() -> None:
    play = Play().start()
    play.kill(0)
    play.ready(4)  # it is ready before the survivors have noticed
    assert play.of(Form, play.ready(3, 2, 1, why="broken"))[0].members == (1, 2, 3, 4)


def test_with_fewer_than_the_least_the_survivors_wait_for_new_ones() -> None:
    play = Play(num_proc=2, min_np=2, max_np=2).start(here=2)
    play.kill(0)
    assert play.ready(1, why="broken") == []
    assert play.of(Form, play.ready(2))[0].members == (1, 2)


def test_two_at_once() -> None:
    play = Play().start()
    assert kinds(play.happen(Exited(0, -9), Exited(3, -9))) == [Report, Report, Abandon, Spawn, Spawn]
    assert play.of(Form, play.ready(2, 1, why="broken"))[0].members == (1, 2)
    assert play.ready(4) == []  # the other one is about to come: one announcement for both
    [announce] = play.ready(5)
    assert announce.reason == "change 1: workers to join: 2, to go: 0"
    assert play.ready(4, 5) == []


def test_one_of_two_newcomers_takes_long() -> None:
    play = Play().start()
    play.happen(Exited(0, -9), Exited(3, -9))
    play.ready(2, 1, why="broken")
    play.ready(4)
    [first] = play.wait(SETTLE_S)
    [second] = play.ready(5)
    assert [each.number for each in (first, second)] == [1, 2]


def test_all_of_them_die() -> None:
    play = Play().start()
    assert len(play.of(Spawn, play.happen(*[Exited(number, -9) for number in range(4)]))) == 4
    assert play.ready(4, 5, 6) == []
    [form] = play.ready(7)
    assert (form.generation, form.members) == (2, (4, 5, 6, 7))


def test_a_death_while_a_generation_is_being_formed() -> None:
    play = Play().start()
    play.kill(1)
    play.ready(0, 2, 3, why="broken")  # generation 2 is formed ...
    _, abandon, spawn = play.kill(2)  # ... and cannot come together
    assert (abandon.generation, spawn.worker) == (2, 5)
    assert play.ready(0, why="failed") == []
    [form] = play.ready(3, why="failed")
    assert (form.generation, form.members) == (3, (0, 3))


def test_a_generation_that_fails_without_a_death_is_formed_anew() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    [abandon] = play.ready(0, why="failed")
    assert abandon.generation == 1
    assert play.of(Form, play.ready(1, why="failed"))[0].members == (0, 1)


def test_generations_that_fail_again_and_again_without_a_reason_end_the_job() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    for _ in range(4):
        play.happen(Ready(0, "failed", "no memory"))
        play.ready(1, why="failed")
    play.happen(Ready(0, "failed", "no memory"))
    [end] = play.ready(1, why="failed")
    assert (end.exit_code, end.reason) == (1, "init() has failed 5 times in a row: no memory")


def test_somebody_does_not_come_back() -> None:
    play = Play(elastic_timeout=60).start()
    play.kill(3)
    play.ready(4)
    play.ready(0, 1, why="broken")
    kill, form = play.wait(60)
    assert (kill.worker, kill.reason) == (2, "worker 2 is killed: the others have waited for it for 60 s")
    assert form.members == (0, 1, 4)


# Stopped, cut off, terminated.


def test_a_stopped_worker_is_killed() -> None:
    play = Play(heartbeat_timeout=5).start()
    play.happen(Stopped(2))
    assert play.wait(4.9) == []
    [kill] = play.wait(0.2)
    assert (kill.worker, kill.reason) == (2, "worker 2 is killed: it has been stopped for 5 s")
    assert play.wait(100) == []


def test_a_worker_that_is_continued_lives() -> None:
    play = Play(heartbeat_timeout=5).start()
    play.happen(Stopped(2))
    play.wait(4)
    play.happen(Continued(2))
    assert play.wait(100) == []


def test_a_worker_that_hangs_up_without_exiting_is_killed() -> None:
    play = Play(heartbeat_timeout=5).start()
    play.happen(Adrift(1))
    assert [each.worker for each in play.of(Kill, play.wait(5))] == [1]


def test_a_worker_leaves() -> None:
    play = Play(backoff=Backoff(1, 60)).start()
    assert play.happen(Leaving(0)) == []
    play.ready(1, 2, why="changed")
    assert play.of(Form, play.ready(3, why="changed"))[0].members == (1, 2, 3)  # its end is not awaited
    assert play.happen(Exited(0, 0)) == []
    assert play.wait(59) == []
    assert kinds(play.wait(1)) == [Spawn]


@pytest.mark.parametrize("status", [-15, 143])
def test_a_worker_that_is_terminated_without_a_word_has_not_failed(status: int) -> None:
    play = Play().start()
    [abandon] = play.happen(Exited(2, status))
    assert isinstance(abandon, Abandon)


def test_a_slot_that_was_left_is_used_when_there_are_too_few() -> None:
    play = Play(min_np=3).start()
    play.happen(Leaving(0), Exited(0, 0))
    play.ready(1, 2, 3, why="changed")
    [spawn] = play.happen(Leaving(1), Exited(1, 0))
    assert isinstance(spawn, Spawn)


def test_a_slot_that_was_left_is_used_when_the_host_is_offered_anew() -> None:
    play = Play().start(a=2, b=2)
    play.happen(Leaving(2), Exited(2, 0))
    play.ready(0, 1, 3, why="changed")
    play.happen(HostsFound({"a": 2}))
    assert kinds(play.happen(HostsFound({"a": 2, "b": 2}))) == [Spawn]


# Hosts.


def test_a_host_that_is_offered_later() -> None:
    play = Play(max_np=None).start(a=2)
    play.wait(600)
    assert play.members == (0, 1)
    assert [each.host for each in play.happen(HostsFound({"b": 1, "a": 2}))] == ["b"]
    [announce] = play.ready(2)
    assert (announce.added, announce.removed) == (True, False)


def test_a_host_that_is_dropped() -> None:
    play = Play(max_np=None).start(a=2, b=2)
    [announce] = play.happen(HostsFound({"b": 2}))
    assert (announce.added, announce.removed, announce.members) == (False, True, (0, 1, 2, 3))
    decisions = play.ready(1, 0, 3, 2, why="changed")
    assert [each.worker for each in play.of(Remove, decisions)] == [1, 0]
    assert play.of(Form, decisions)[0].members == (2, 3)
    assert play.happen(Exited(0, 0), Exited(1, 1)) == []


def test_slots_that_are_dropped_take_the_newest_workers() -> None:
    play = Play(max_np=None).start(a=3, b=1)
    play.happen(HostsFound({"a": 1, "b": 1}))
    assert play.of(Form, play.ready(0, 1, 2, 3, why="changed"))[0].members == (0, 3)


def test_added_and_dropped_together() -> None:
    play = Play().start(a=2, b=2)
    assert kinds(play.happen(HostsFound({"a": 2, "c": 2}))) == [Spawn, Spawn, Announce]


def test_the_state_passes_from_hosts_that_go_to_hosts_that_come() -> None:
    play = Play(num_proc=2, min_np=2, max_np=2).start(a=2)
    assert kinds(play.happen(HostsFound({"b": 2}))) == [Spawn, Spawn]
    [announce] = play.ready(2)
    assert (announce.added, announce.removed) == (True, True)
    play.ready(3)
    play.ready(0, 1, why="changed")
    assert play.members == (0, 2)  # one with the state, one without
    play.ready(0, 2, why="changed")
    assert play.members == (2, 3)


def test_no_host_at_all_changes_nothing() -> None:
    play = Play().start()
    assert play.happen(HostsFound({})) == []


def test_a_host_is_lost() -> None:
    play = Play(max_np=None).start(a=2, b=2)
    decisions = play.happen(HostLost("b", "it has been silent for 5 s"))
    assert kinds(decisions) == [Abandon]
    assert play.of(Form, play.ready(0, 1, why="broken"))[0].members == (0, 1)
    assert [each.host for each in play.of(Spawn, play.wait(5))] == ["b", "b"]


def test_hosts_that_cannot_be_used() -> None:
    play = Play()
    play.happen(HostsFound({"a": 2}))
    for _ in range(2):
        play.happen(HostLost("a", "ssh says: no"))
        assert play.of(Spawn, play.wait(60))
    [end] = play.happen(HostLost("a", "ssh says: no"))
    assert (end.exit_code, end.reason) == (1, "no host could be used; a: ssh says: no")


# Failing again and again.


def test_a_host_that_fails_again_and_again_is_left_alone_for_longer_and_longer() -> None:
    play = Play(num_proc=3, min_np=1, max_np=None, backoff=Backoff(10, 30, patient=False)).start(a=2, b=1)
    pauses, next_on_b = [], 2
    for _ in range(4):
        play.kill(next_on_b)
        play.ready(0, 1, why="broken")
        before = play.now
        while not (spawned := play.of(Spawn, play.wait(1))):
            assert play.now < before + 100
        next_on_b = spawned[0].worker
        pauses.append(play.now - before)
        play.ready(next_on_b)
        play.ready(0, 1, why="changed")
    assert pauses == [10, 20, 30, 30]


def test_failures_now_and_then_have_no_consequence() -> None:
    play = Play(num_proc=2, min_np=1, max_np=2).start(here=2)
    newest = 1
    for _ in range(50):
        [spawn] = play.of(Spawn, play.kill(newest))
        newest = spawn.worker
        play.ready(0, why="broken")
        play.ready(newest)
        play.ready(0, why="changed")
        play.wait(5)


def test_a_program_that_cannot_work() -> None:
    play = Play(num_proc=2, max_np=2)
    play.happen(HostsFound({"a": 2}))
    for worker in range(4):
        assert play.of(Spawn, play.happen(Exited(worker, 3, said=b"no %d" % worker)))
    [report, end] = play.happen(Exited(4, 3))
    assert isinstance(report, Report)
    assert (end.exit_code, end.failure) == (3, 4)
    assert end.reason.startswith("3 workers in a row on one slot have failed before they asked for a place")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_that_all_make_alike_before_they_ask_for_a_place_ends_the_job_at_once(number: int) -> None:
    play = Play(num_proc=number, min_np=1, max_np=number)
    play.happen(HostsFound({"a": number}))
    for worker in range(number):
        assert not play.of(End)
        play.happen(Exited(worker, 3, said=b"no data"))
    assert play.of(End)[0].exit_code == 3


def test_early_errors_that_are_not_alike_do_not_end_the_job_at_once() -> None:
    for last in (Exited(1, 3, said=b"no room"), Exited(1, 4, said=b"no data"), Exited(1, -9, said=b"no data")):
        play = Play(num_proc=2, max_np=2)
        play.happen(HostsFound({"a": 1, "b": 1}))
        play.happen(Exited(0, 3, said=b"no data"))
        assert play.of(Spawn, play.happen(last))


def test_replacements_that_cannot_start_do_not_end_a_job_that_works() -> None:
    play = Play(max_np=2, num_proc=2, min_np=1).start(here=2)
    play.kill(1)
    play.ready(0, why="broken")
    for worker in range(2, 10):
        play.happen(Exited(worker, 3))
        play.wait(60)
    assert not play.of(End)


def test_members_that_all_fail_by_themselves_end_the_job_in_the_end() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    for number in (0, 2):
        play.happen(Exited(number, 1))
        play.happen(Exited(number + 1, 1, said=b"otherwise"))
        play.ready(number + 2, number + 3)
    play.happen(Exited(4, 7))
    decisions = play.happen(Exited(5, 1))
    assert play.of(End, decisions)[0].exit_code == 7


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_that_all_members_make_alike_before_the_first_commit_ends_the_job_at_once(
    number: int, status: int
) -> None:
    play = Play(num_proc=number, min_np=1, max_np=number).start(here=number)
    for worker in range(number):
        assert not play.of(End)
        play.happen(Exited(worker, status, said=b"ValueError: no variables"))
    [end] = play.of(End)
    assert (end.exit_code, end.failure) == (1, number - 1)
    assert end.reason == "all members have failed alike before anything was committed"


def test_after_a_commit_such_an_error_does_not_end_the_job_at_once() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    play.happen(Noted(0, "committed"), Exited(0, 1, said=b"no room"), Exited(1, 1, said=b"no room"))
    assert not play.of(End)
    play.ready(2, 3)
    play.happen(Exited(2, 1, said=b"no room"), Exited(3, 1, said=b"no room"))  # from the commit on, again
    assert play.of(End)[0].exit_code == 1


def test_a_member_that_is_killed_has_not_failed_as_the_others() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    play.happen(Exited(0, 1, said=b"no room"), Exited(1, -9, said=b"no room"))
    assert not play.of(End)


def test_one_that_fails_again_and_again_before_anything_is_saved_ends_the_job() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1, backoff=Backoff(1, 1)).start(here=2)
    for number in range(1, 6):
        assert not play.of(End)
        play.happen(Exited(number, 3))  # worker 0 lives on
        play.happen(Ready(0, "broken", commits=7 if number == 1 else 9))
        play.wait(1)
        play.happen(Ready(number + 1))
        play.happen(Ready(0, "changed", commits=9))
    play.happen(Exited(6, 3))
    [end] = play.of(End, play.happen(Ready(0, "broken", commits=9)))
    assert (end.exit_code, end.failure) == (3, 6)
    assert end.reason == "in 5 generations in a row a worker has failed before anything was committed"


def test_a_job_that_breaks_again_and_again_without_a_loss_ends_with_the_reason() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    for _ in range(4):
        play.happen(Ready(0, "broken", "stalled: rank 1 did not get on"))
        assert play.of(Form, play.ready(1, why="broken"))
    play.happen(Ready(0, "broken", "stalled: rank 1 did not get on"))
    [end] = play.of(End, play.ready(1, why="broken"))
    assert end.exit_code == 1
    assert re.fullmatch(
        r"in 5 generations in a row the job has broken \(.*stalled: rank 1 did not get on.*\) "
        "before anything was committed",
        end.reason,
    )


def test_failures_do_not_end_a_job_that_gets_further() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1, backoff=Backoff(1, 1)).start(here=2)
    for number in range(1, 30):
        play.happen(Exited(number, 3))
        play.happen(Ready(0, "broken", commits=number))
        play.wait(1)
        play.happen(Ready(number + 1))
        play.happen(Ready(0, "changed", commits=number))
    assert not play.of(End)


def test_the_reset_limit() -> None:
    play = Play(reset_limit=1).start()
    play.kill(3)
    play.ready(0, 1, 2, why="broken")
    assert play.members == (0, 1, 2)
    assert play.ready(4) == []  # to let it in would be one too many
    play.kill(2)
    [end] = play.ready(0, 1, why="broken")[-1:]
    assert (end.exit_code, end.failure) == (137, 2)
    assert "the job has been reset 1 time, which is all that --reset-limit 1 allows" in end.reason
    assert end.reason.endswith("number of resets during elastic job exceeded limit: 1")


def test_horovods_reset_limit_counts_losses_and_changes_of_hosts() -> None:
    play = Play(num_proc=2, max_np=None, reset_limit=2, min_np=1, resets_like_horovod=True).start(here=2)
    play.kill(1)
    play.ready(0, why="broken")  # the first reset
    play.ready(2)
    play.ready(0, why="changed")  # the replacement joins, which is none
    assert play.members == (0, 2)
    play.happen(HostsFound({"here": 2, "there": 1}))
    play.ready(3)
    play.ready(0, 2, why="changed")  # the second one
    assert play.members == (0, 2, 3)
    assert not play.of(End)
    assert kinds(play.happen(HostsFound({"here": 2}))) == [Announce]  # one too many
    [end] = play.of(End, play.ready(0, 2, 3, why="changed"))
    assert (end.exit_code, end.failure) == (1, None)
    assert end.reason.startswith("the set of workers has changed, and the job has been reset 2 times")


def test_the_last_of_horovods_resets_is_followed_by_a_loss() -> None:
    play = Play(num_proc=2, max_np=2, reset_limit=0, min_np=1, resets_like_horovod=True).start(here=2)
    assert Spawn not in kinds(play.kill(1))
    [end] = play.of(End, play.ready(0, why="broken"))
    assert (end.exit_code, end.failure) == (137, 1)


def test_the_reset_limit_waits_to_know_who_is_to_blame() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1, reset_limit=0).start(here=2)
    assert kinds(play.ready(0, why="broken")) == [Abandon]  # faster than the news of the death
    [end] = play.of(End, play.kill(1))
    assert (end.exit_code, end.failure) == (137, 1)


# The end.


def test_the_end_of_a_good_job() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    assert play.happen(Finished(0)) == []
    assert play.happen(Finished(1), Exited(0, 0)) == []
    [end] = play.happen(Exited(1, 0))
    assert end.exit_code == 0


def test_a_program_that_knows_nothing_of_elastic_jobs() -> None:
    play = Play(num_proc=2, max_np=2)
    play.happen(HostsFound({"here": 2}))
    assert play.happen(Exited(1, 0)) == []
    assert play.of(End, play.happen(Exited(0, 0)))[0].exit_code == 0


def test_a_program_of_which_a_process_fails_has_not_ended_well() -> None:
    play = Play(num_proc=2, max_np=2)
    play.happen(HostsFound({"here": 2}))
    play.happen(Exited(1, 0))
    assert play.of(Spawn, play.happen(Exited(0, -9)))


def test_code_0_before_a_place_is_a_loss_if_others_ask_for_one() -> None:
    for exits_first in (True, False):
        play = Play(num_proc=2, max_np=2)
        play.happen(HostsFound({"here": 2}))
        events = [Exited(1, 0), Ready(0)]
        play.happen(*(events if exits_first else reversed(events)))
        assert [each.worker for each in play.of(Spawn)] == [0, 1, 2]
        assert not play.of(Form)


@pytest.mark.parametrize("number", [2, 3])
def test_code_0_in_the_middle_of_the_training_is_a_loss(number: int) -> None:
    play = Play(num_proc=number, min_np=number, max_np=number).start(here=number)
    assert kinds(play.happen(Exited(1, 0))) == [Report, Abandon, Spawn]
    play.ready(*(worker for worker in range(number) if worker != 1), why="broken")
    assert len(play.of(Form, play.ready(number))[0].members) == number


def test_a_script_that_shuts_down_may_exit() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1).start(here=2)
    assert play.happen(Noted(0, "committed"), Noted(0, "shutdown"), Exited(0, 0)) == []
    assert play.of(End, play.happen(Noted(1, "shutdown"), Exited(1, 0)))[0].exit_code == 0


def test_a_script_that_shuts_down_and_initializes_again_may_not() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    play.happen(Noted(0, "shutdown"), Noted(1, "shutdown"))
    play.ready(0, 1, why="changed")
    assert play.members == (0, 1)
    assert kinds(play.happen(Exited(1, 0))) == [Report, Abandon, Spawn]


def test_after_one_has_finished_nobody_is_replaced_and_the_others_go_on() -> None:
    play = Play().start()
    play.happen(Finished(0), Exited(0, 0))
    assert kinds(play.kill(1)) == [Report, Abandon]
    play.ready(2, why="broken")
    assert play.of(Form, play.ready(3, why="broken"))[0].members == (2, 3)
    play.happen(Finished(2), Finished(3), Exited(2, 0))
    assert play.of(End, play.happen(Exited(3, 0)))[0].exit_code == 0


def test_newcomers_are_not_needed_any_more_once_one_has_finished() -> None:
    play = Play().start()
    play.kill(1)
    play.ready(0, 2, 3, why="broken")
    assert play.happen(Finished(0)) == []  # it may train again
    assert [each.worker for each in play.of(Kill, play.happen(Exited(0, 0)))] == [4]
    play = Play().start()
    play.kill(1)
    play.ready(0, 2, 3, why="broken")
    play.ready(4)
    assert play.happen(Finished(0)) == []
    assert [each.worker for each in play.of(Remove, play.happen(Exited(0, 0)))] == [4]


def test_a_script_that_trains_twice() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1).start(here=2)
    assert play.happen(Finished(0), Finished(1), Training(0), Training(1)) == []
    assert kinds(play.kill(1)) == [Report, Abandon, Spawn]
    assert play.of(Form, play.ready(0, why="broken"))[0].members == (0,)
    assert play.of(Announce, play.ready(2))[0].added


def test_a_script_that_initializes_itself_anew_after_its_training() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    play.happen(Finished(0), Finished(1))
    assert play.of(Form, play.ready(0, why="changed"))[0].members == (0,)  # the other one may be about to exit
    assert play.of(Announce, play.ready(1, why="changed"))[0].added
    assert play.of(Form, play.ready(0, why="changed"))[0].members == (0, 1)


def test_one_begins_its_second_training_after_the_other_has_gone_on_without_it() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1).start(here=2)
    play.happen(Finished(0))
    assert play.of(Form, play.ready(1, why="broken"))[0].members == (1,)
    assert play.happen(Training(0)) == []
    [announce] = play.ready(0, why="broken")  # which it could not but notice
    assert (announce.members, announce.added) == ((1,), True)
    assert play.of(Form, play.ready(1, why="changed"))[0].members == (1, 0)


def test_others_that_still_finish_do_not_cost_those_that_train_again_their_places() -> None:
    play = Play(num_proc=4, max_np=4, min_np=1).start(here=4)
    play.happen(Finished(0), Finished(2), Exited(3, -9))
    assert play.of(Form, play.ready(1, why="broken"))[0].members == (1,)
    assert play.happen(Training(0)) == []
    assert play.ready(0, why="broken") == []  # 2 may be about to come
    assert play.of(Announce, play.happen(Training(2)) + play.ready(2, why="broken") + play.wait(SETTLE_S))
    assert set(play.of(Form, play.ready(1, why="changed"))[0].members) >= {0, 1, 2}


def test_one_that_gets_notice_after_its_training_leaves() -> None:
    play = Play(num_proc=2, max_np=2, min_np=1).start(here=2)
    play.happen(Finished(0), Finished(1), Leaving(1), Exited(1, 0), Training(0))
    assert play.of(Spawn, play.wait(120))


def test_a_process_that_cannot_be_made_is_no_early_death() -> None:
    play = Play(num_proc=4, min_np=1, max_np=4, elastic_timeout=60)
    play.happen(HostsFound({"here": 4}))
    for number in range(3, 9):
        play.happen(Exited(number, 126, started=False))
    play.ready(0, 1, 2)
    play.wait(60)
    assert play.members == (0, 1, 2)
    assert not play.of(End)


def test_a_worker_that_fails_after_it_has_finished_fails_the_job() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    play.happen(Finished(0), Finished(1))
    [end] = play.happen(Exited(0, 9))
    assert (end.exit_code, end.failure) == (9, 0)


def test_nothing_is_decided_after_the_end() -> None:
    play = Play(num_proc=2, max_np=2).start(here=2)
    play.happen(Finished(0), Exited(0, 0), Exited(1, 0))
    assert play.happen(HostsFound({"here": 9}), Ready(5), Exited(5, 1)) == []
    assert play.wait(1000) == []
