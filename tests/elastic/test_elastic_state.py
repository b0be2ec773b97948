"""States, and `run` in a job that has no driver."""

from __future__ import annotations

import pytest

from horovodlike import elastic


def test_saved_values_are_copies_that_later_changes_do_not_reach():
    state = elastic.ObjectState(step=1, seen=[1, 2], nested={"a": [1]})
    state._commits = 3
    state.save()
    state.seen.append(3)
    state.nested["a"].append(2)
    state.step = 5
    state._commits = 4
    state.restore()
    assert (state.step, state.seen, state.nested, state._commits) == (1, [1, 2], {"a": [1]}, 3)
    state.seen.append(4)  # nor are they reached after that
    state.restore()
    assert state.seen == [1, 2]


def test_what_two_attributes_share_they_share_after_restoring():
    shared = [1]
    state = elastic.ObjectState(a=shared, b=shared)
    state.restore()
    state.a.append(2)
    assert state.b == [1, 2]


@pytest.mark.parametrize("name", ["commit", "save", "register_reset_callbacks", "_saved"])
def test_an_attribute_cannot_hide_one_of_the_states_own(name):
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        elastic.ObjectState(**{name: 1})


def test_reset_callbacks_run_in_order_after_reset():
    calls = []

    class State(elastic.ObjectState):
        def reset(self):
            calls.append("reset")

    state = State()
    state.register_reset_callbacks([lambda: calls.append("first"), lambda: calls.append("second")])
    state.register_reset_callbacks([lambda: calls.append("third")])
    state.on_reset()
    assert calls == ["reset", "first", "second", "third"]


def test_the_names_of_the_api():
    assert elastic.__all__ == ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]
    assert all(hasattr(elastic, name) for name in elastic.__all__)


def test_run_before_init_says_what_is_missing():
    @elastic.run
    def loop(state):
        raise AssertionError("not reached")

    with pytest.raises(ValueError, match="has not been initialized"):
        loop(elastic.ObjectState())


def _run_without_driver() -> tuple[object, ...]:
    from horovodlike import basics, elastic

    calls: list[object] = []

    @elastic.run
    def loop(state, first, second):
        """Trains."""
        calls.append((state.step, state._commits))
        state.step += 1
        state.commit()
        return first + second + state.step

    state = elastic.ObjectState(step=basics.rank() * 10)
    result = loop(state, 1, second=2)
    return result, calls, loop.__name__, loop.__doc__, basics.is_initialized()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_begin_with_the_state_of_rank_0(ranks, size):
    assert ranks(size).run(_run_without_driver) == [(4, [(0, 0)], "loop", "Trains.", True)] * size


def _told_of_hosts(update_res: int) -> tuple[object, ...]:
    from horovodlike import basics, elastic

    resets, synced = [], []

    class State(elastic.ObjectState):
        def sync(self):
            synced.append(self.step)
            super().sync()

    @elastic.run
    def loop(state):
        state.step += 1
        if not resets:
            if basics.rank() == basics.size() - 1:  # one rank knows
                state.on_hosts_updated(0, update_res)
            state.commit()
            raise AssertionError("not reached")
        return state.step

    before = basics.generation()
    state = State(step=0)
    state.register_reset_callbacks([lambda: resets.append(basics.size())])
    return loop(state), resets, synced, basics.generation() - before


@pytest.mark.parametrize(("update_res", "synced"), [(1, [0]), (2, [0, 1]), (3, [0, 1])])
def test_a_change_that_one_rank_knows_of_interrupts_all_which_sync_if_something_was_added(ranks, update_res, synced):
    assert ranks(3).run(_told_of_hosts, update_res) == [(2, [3], synced, 1)] * 3


def _check_without_commit() -> tuple[int, int]:
    from horovodlike import elastic

    @elastic.run
    def loop(state):
        if state.step == 0:
            state.step = 7
            state.on_hosts_updated(0, 1)
            state.check_host_updates()
        return state.step, state._commits

    return loop(elastic.ObjectState(step=0))


def test_an_interrupt_keeps_what_was_not_committed(ranks):
    assert ranks(2).run(_check_without_commit) == [(7, 0)] * 2


def _elect() -> list[int]:
    from horovodlike import basics, elastic

    state = elastic.ObjectState(value=basics.rank())
    found = []
    for commits in ([0, 0, 0], [2, 2, 3], [4, 5, 5]):
        state._commits = commits[basics.rank()]
        found.append(state._elect_root())
    state.sync()
    return [*found, state.value, state._commits]


def test_the_root_is_the_lowest_of_the_ranks_with_the_most_commits(ranks):
    assert ranks(3).run(_elect) == [[0, 2, 1, 1, 5]] * 3


def _broadcast() -> list[object]:
    from horovodlike import basics
    from horovodlike.errors import HorovodInternalError
    from horovodlike.objects import broadcast_object, highest

    found = [broadcast_object({"rank": basics.rank()}, root) for root in range(basics.size())]
    found.append(broadcast_object(b"x" * 3_000_000 if basics.rank() == 0 else None)[-1:])
    found.append(broadcast_object(None, name="of none"))
    try:
        broadcast_object(open("/dev/null") if basics.rank() == 1 else None, 1)  # noqa: SIM115
    except TypeError as error:
        assert basics.rank() == 1, error
    except HorovodInternalError as error:
        assert "rank 1 could not pickle its object" in str(error)
        assert basics.rank() != 1
    found.append(highest("numbers", [basics.rank(), -basics.rank(), 2**62, -(2**62)]))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_objects_and_numbers_without_a_framework(ranks, size):
    expected = [*({"rank": root} for root in range(size)), b"x", None, [size - 1, 0, 2**62, -(2**62)]]
    assert ranks(size).run(_broadcast) == [expected] * size


def _lose_one() -> str:
    import os
    import signal

    from horovodlike import basics, elastic

    @elastic.run
    def loop(state):
        if basics.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

    loop(elastic.ObjectState())
    raise AssertionError("not reached")


def test_a_job_of_fixed_size_says_why_it_cannot_go_on(fresh_ranks):
    pool = fresh_ranks(2)
    pool.start(_lose_one)
    survivor, _ = pool.collect()
    assert "JobBrokenError: rank 1 (pid" in survivor.error
    assert "This job has a fixed number of ranks" in survivor.error
    assert "hvdrun --min-np" in survivor.error
