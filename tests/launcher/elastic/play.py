"""Plays an elastic job through `Membership`, with a clock of its own."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

from horovodlike.launcher.elastic.events import Decision, Event, Exited, Form, HostsFound, Ready, Spawn
from horovodlike.launcher.elastic.membership import Membership
from horovodlike.launcher.elastic.state import Policy

D = TypeVar("D")


class Play:
    """`happen(...)` and `wait(...)` return the decisions that follow; `log` has all of them."""

    def __init__(self, num_proc: int = 4, min_np: int = 2, max_np: int | None = 4, **policy: Any) -> None:
        self.now = 100.0
        self.membership = Membership(Policy(num_proc, min_np, max_np, **policy), self.now)
        self.log: list[Decision] = []

    def happen(self, *events: Event) -> list[Decision]:
        for event in events:
            self.membership.observe(event, self.now)
        found = self.membership.decide(self.now)
        assert self.membership.decide(self.now) == [], "nothing has happened, and no time has passed"
        self.log += found
        return found

    def wait(self, seconds: float) -> list[Decision]:
        """Lets time pass, and looks whenever it is time to look."""
        end, found = self.now + seconds, []
        for turn in itertools.count():
            assert turn < 10000, "it looks again and again without a decision"
            at = self.membership.look_again()
            if at is None or at > end:
                self.now = end
                return found
            assert at > self.now
            self.now = at
            found += self.happen()

    def start(self, **slots: int) -> Play:
        """Offers hosts, and has every worker become ready."""
        self.ready(*[each.worker for each in self.of(Spawn, self.happen(HostsFound(slots or {"here": 4})))])
        return self

    def ready(self, *workers: int, why: str = "start") -> list[Decision]:
        return [decision for worker in workers for decision in self.happen(Ready(worker, why))]

    def kill(self, worker: int) -> list[Decision]:
        return self.happen(Exited(worker, -9))

    def of(self, kind: type[D], decisions: list[Decision] | None = None) -> list[D]:
        return [each for each in (self.log if decisions is None else decisions) if isinstance(each, kind)]

    @property
    def members(self) -> tuple[int, ...]:
        return self.of(Form)[-1].members
