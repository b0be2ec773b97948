"""Invariants of every elastic job, whatever happens to it: random events against workers that keep to the protocol."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st
from play import Play

from horovodlike.launcher.elastic.events import (
    Abandon,
    Announce,
    Continued,
    Decision,
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
    Spawn,
    Stopped,
    Training,
)

HOSTS = ("a", "b", "c")
SETTLED_S = 3000.0


class World:
    """Workers that do what they are told, as long as no event disturbs them."""

    def __init__(self, play: Play) -> None:
        self.play = play
        # By worker: starting, waiting, working, called (it waits from its next step on), dying (it exits there), or
        # hanging (it was to exit, and never does).
        self.doing: dict[int, str] = {}
        self.commits = 0
        self.stopped: set[int] = set()
        self.host: dict[int, str] = {}
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self.ended = False

    def tell(self, *events: object) -> None:
        self.carry_out(self.play.happen(*events))

    def carry_out(self, decisions: list[Decision]) -> None:
        for each in decisions:
            assert not self.ended, f"{each} after the end"
            if isinstance(each, Spawn):
                assert each.worker not in self.doing
                self.doing[each.worker], self.host[each.worker] = "starting", each.host
            elif isinstance(each, Form):
                self.form(each)
            elif isinstance(each, Announce):
                assert set(each.members) <= set(self.members)
                for worker in each.members:
                    if self.doing.get(worker) == "working":
                        self.doing[worker] = "called"
            elif isinstance(each, Abandon):
                assert each.generation == self.generation
                for worker in self.members:
                    if self.doing.get(worker) == "working":
                        self.doing[worker] = "called"
            elif isinstance(each, Remove | Kill):
                assert each.worker in self.doing
                self.doing[each.worker] = "dying"
            elif isinstance(each, End):
                self.ended = True

    def form(self, form: Form) -> None:
        policy = self.play.membership.policy
        assert form.generation == self.generation + 1
        assert len(set(form.members)) == len(form.members)
        assert policy.max_np is None or len(form.members) <= policy.max_np
        assert len(form.members) >= policy.min_np
        assert all(self.doing[worker] == "waiting" for worker in form.members), "a place is given to who asks for one"
        survivors = [worker for worker in self.members if worker in form.members]
        assert list(form.members[: len(survivors)]) == survivors, "survivors keep their order and come first"
        newcomers = form.members[len(survivors) :]
        assert list(newcomers) == sorted(newcomers)
        self.members, self.generation = form.members, form.generation
        for worker in form.members:
            self.doing[worker] = "working"

    def go_on(self, worker: int) -> None:
        """One worker does its next step."""
        doing = self.doing.get(worker)
        if doing == "dying":
            self.exit(worker, -9)
        elif worker in self.stopped:
            return
        elif doing == "starting":
            self.doing[worker] = "waiting"
            self.tell(Ready(worker))
        elif doing == "called":
            self.doing[worker] = "waiting"
            self.tell(Ready(worker, "changed", commits=self.commits))
        elif doing == "working":
            self.commits += 1
            self.tell(Noted(worker, "committed"))

    def exit(self, worker: int, status: int) -> None:
        if self.doing.pop(worker, None) is not None:
            self.tell(Exited(worker, status, said=b"error %d" % worker))  # if all fail alike, the job ends

    def train_again(self) -> None:
        """The script's training comes to its end, and another one begins."""
        working = [worker for worker in self.members if self.doing.get(worker) == "working"]
        if len(working) == len(self.members) and not self.stopped:
            for worker in working:
                self.tell(Finished(worker))
            for worker in working:
                self.tell(Training(worker))

    def leave(self, worker: int, then: str = "dying") -> None:
        """All agree at a commit that it leaves."""
        if self.doing.get(worker) == "working" and not self.stopped:
            self.tell(Leaving(worker))
            for other in self.members:
                if self.doing.get(other) == "working":
                    self.doing[other] = "called"
            self.doing[worker] = then

    def lose(self, host: str) -> None:
        for worker in [each for each in self.doing if self.host[each] == host]:
            del self.doing[worker]
        self.tell(HostLost(host, "it is lost"))

    def stop(self, worker: int) -> None:
        if worker in self.doing:
            self.stopped.add(worker)
            self.tell(Stopped(worker))

    def settle(self) -> None:
        """Nothing happens any more: all workers do what there is to do until only time can pass."""
        end = self.play.now + SETTLED_S
        for turn in itertools.count():
            if self.ended or self.play.now >= end:
                return
            assert turn < 10000, "workers are started and removed again and again"
            before = dict(self.doing)
            for worker in list(self.doing):
                self.go_on(worker)
            if self.doing == before:
                at = self.play.membership.look_again()
                self.carry_out(self.play.wait((end if at is None else min(at, end)) - self.play.now + 0.001))


KINDS = ["kill", "fail", "quit", "leave", "hang", "again", "stop", "continue", "hosts", "lose", "wait"]
EVENT = st.tuples(
    st.sampled_from(["go on"] * 3 + KINDS),
    st.integers(0, 7),
    st.lists(st.integers(0, 3), min_size=len(HOSTS), max_size=len(HOSTS)),
    st.floats(0.0, 20.0),
)


def carry_on(world: World, what: str, which: int, slots: list[int], seconds: float) -> None:
    living = sorted(world.doing)
    worker = living[which % len(living)] if living else -1
    if what == "wait":
        world.carry_out(world.play.wait(seconds))
    elif what == "hosts":
        world.tell(HostsFound({host: number for host, number in zip(HOSTS, slots, strict=True) if number}))
    elif what == "lose":
        world.lose(HOSTS[which % len(HOSTS)])
    elif what == "kill":
        world.exit(worker, -9)
    elif what == "fail":
        world.exit(worker, 1)
    elif what == "quit":
        world.exit(worker, 0)
    elif what == "leave":
        world.leave(worker)
    elif what == "hang":
        world.leave(worker, "hanging")
    elif what == "again":
        world.train_again()
    elif what == "stop":
        world.stop(worker)
    elif what == "continue" and worker in world.stopped:
        world.stopped.discard(worker)
        world.tell(Continued(worker))
    else:
        world.go_on(worker)


# With fewer slots than before, workers are on the first slot and the last one: the one between them stays empty.
DROPPED_SLOT: list[tuple[str, int, list[int], float]] = [
    ("kill", 6, [0, 0, 0], 0.0),
    ("hosts", 0, [3, 3, 3], 0.0),
    ("kill", 1, [0, 0, 0], 0.0),
    ("lose", 1, [0, 0, 0], 0.0),
    ("lose", 2, [0, 0, 0], 0.0),
]


@settings(max_examples=300, deadline=None)
@example(DROPPED_SLOT, 3, 3, 1)
@given(st.lists(EVENT, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2))
def test_whatever_happens(events: list[tuple[str, int, list[int], float]], least: int, more: int, most: int) -> None:
    play = Play(num_proc=least + more, min_np=least, max_np=least + more + most)
    world = World(play)
    world.tell(HostsFound({"a": 2, "b": 2}))
    for event in events:
        if world.ended:
            break
        carry_on(world, *event)
    if world.ended:
        return
    # Now all is well: the job must come to work with all the workers that it may have, and with no others.
    for worker in sorted(world.stopped):
        if world.doing.get(worker) == "starting":  # or it may be the third in a row to fail there
            world.stopped.discard(worker)
            world.tell(Continued(worker))
    world.tell(HostsFound({"a": 2, "b": 2, "c": 2}))
    world.settle()
    assert not world.ended
    assert sorted(world.doing) == sorted(world.members)
    assert len(world.members) == min(6, play.membership.policy.max_np or 6)
    assert set(world.doing.values()) == {"working"}


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENT, max_size=30), st.integers(2, 4))
def test_too_few_hosts_end_the_job_in_time(events: list[tuple[str, int, list[int], float]], least: int) -> None:
    world = World(Play(num_proc=least, min_np=least, max_np=least))
    world.tell(HostsFound({"a": 2, "b": 2}))
    for event in events:
        if world.ended:
            return
        carry_on(world, *event)
    world.tell(HostsFound({"c": 1}))
    for worker in list(world.doing):
        world.exit(worker, -9)
    world.settle()
    assert world.ended
