"""The membership of an elastic job: all decisions of the driver. Pure: no clock, no thread, no I/O.

:meth:`Membership.observe` takes events. :meth:`Membership.decide` returns decisions, each with its reason; from then on
they count as carried out. Times are the caller's, in seconds, and never go back.

A *member* has a rank in the current generation. The next one is formed when all members that live have asked for a rank
again ("come back"). They keep the order of their ranks, so rank 0 is the oldest; *newcomers* that are ready follow.
While the members work, announcements tell them of newcomers that are ready, and of members without a slot.
"""

import signal
from collections.abc import Iterator

from horovodlike.launcher.elastic.events import (
    Abandon,
    Adrift,
    Announce,
    Continued,
    Decision,
    End,
    Event,
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
from horovodlike.launcher.elastic.host_health import HostHealth
from horovodlike.launcher.elastic.state import Generation, Policy, Roster, Status, WorkerState
from horovodlike.launcher.errors import counted, listed
from horovodlike.launcher.supervisor import failure_attribution

FAILED = 1
"""The exit code of a job that ends for a reason that is no worker's failure."""
SETTLE_S = 3.0
"""How long workers that are ready wait for others that are still starting, if there are enough without these."""
_REMOVED_S = 30.0
"""How long a worker that was removed, or leaves, may take to exit."""
_ATTEMPTS = 3
"""This number of failures of one kind in a row ends the job: of a slot's workers, of all members, or of every host."""
_FRUITLESS = 5
"""This number of generations in a row, too, whose init() fails, or in which a worker fails and nothing is committed."""
_TERMINATED = (-signal.SIGTERM, failure_attribution.exit_code(-signal.SIGTERM))


class Membership(Roster):
    """The state of an elastic job."""

    def __init__(self, policy: Policy, now: float) -> None:
        """Start without hosts and workers.

        Args:
            policy: The limits and timeouts that the user has asked for.
            now: The time.
        """
        super().__init__(policy)
        self._health: dict[str, HostHealth] = {}
        self._next_number = 0
        self._resets = 0
        self._changes = 0
        self._blocked_since: float | None = now  # since when a generation is needed
        self._collapses = 0
        self._early_deaths: dict[tuple[str, int], list[tuple[int, bytes]]] = {}  # by slot, of unready workers
        self._asked = False  # whether any worker has ever asked for a rank
        self._completed = ""  # the worker that was the first to complete the training; empty if none has
        self._most_commits = 0
        self._barren = 0  # how many generations in a row made no commit and had a member that exited with an error
        self._pending: list[Decision] = []
        self._end: End | None = None
        self._told_end = False
        self._deadlines: list[float] = []

    @property
    def _finishing(self) -> str:
        """The reason why no worker may join now, or an empty text; it ends if a finished worker trains again."""
        finished = (each for each in self.workers.values() if each.status is Status.FINISHED)
        return self._completed or next((f"worker {each.number} has finished" for each in finished), "")

    @property
    def ended(self) -> bool:
        """True if the job is over, with no more decisions."""
        return self._end is not None

    def look_again(self) -> float | None:
        """Return when to call :meth:`decide` again even without a new event, or None to wait for an event.

        The last call of :meth:`decide` has determined that time.
        """
        return min(self._deadlines, default=None)

    # Events.

    def observe(self, event: Event, now: float) -> None:
        """Note an event. Events of a worker that has gone are ignored."""
        if isinstance(event, HostsFound):
            self._find(event, now)
        elif isinstance(event, HostLost):
            self._lose_host(event, now)
        elif (worker := self.workers.get(event.worker)) is None:
            return
        elif isinstance(event, Exited):
            self._exit(worker, event, now)
        elif isinstance(event, Ready):
            self._get_ready(worker, event, now)
        elif isinstance(event, Finished) and worker.active:
            self._set(worker, Status.FINISHED, now)
        elif isinstance(event, Noted):
            worker.has_shut_down = event.what == "shutdown"
            self._most_commits = self._most_commits or int(event.what == "committed")
        elif isinstance(event, Training) and worker.status is Status.FINISHED:
            self._train_again(worker, now)
        elif isinstance(event, Leaving) and (worker.active or worker.status is Status.FINISHED):
            self._set(worker, Status.LEAVING, now)
            self.generation.returning |= self.is_member(worker)
        elif isinstance(event, Stopped):
            worker.stopped_at = worker.stopped_at or now
        elif isinstance(event, Continued):
            worker.stopped_at = None
        elif isinstance(event, Adrift):
            worker.adrift_at = worker.adrift_at or now

    def _find(self, event: HostsFound, now: float) -> None:
        for host in event.slots:
            if host not in self.slots:  # offered for the first time, or again
                self._health[host] = HostHealth(self.policy.backoff)
        known = [host for host in self.slots if host in event.slots]
        new = [host for host in event.slots if host not in self.slots]
        self.slots = {host: event.slots[host] for host in (*known, *new)}

    def _get_ready(self, worker: WorkerState, event: Ready, now: float) -> None:
        if worker.status is Status.FINISHED:  # the script calls init() once more
            self._train_again(worker, now)
        if not worker.active:
            return
        worker.commits = event.commits
        self._most_commits = max(self._most_commits, event.commits)
        if worker.status is Status.MEMBER and event.why in ("broken", "failed"):
            self._break(f"worker {worker.number} has come back: {event.text or event.why}")
            if event.why == "failed":
                self.generation.failed = self.generation.failed or event.text or event.why
        worker.was_ready, worker.has_shut_down = True, False
        if not self._asked:
            self._asked, self._completed = True, ""  # the program does know of elastic jobs
        self._early_deaths.pop((worker.host, worker.slot), None)
        self._health[worker.host].losses = 0
        if worker.status is not Status.READY:
            self._set(worker, Status.READY, now)

    def _train_again(self, worker: WorkerState, now: float) -> None:
        """Note a worker that trains again; if the others have continued without it, it will ask for a rank."""
        self._set(worker, Status.MEMBER if self.is_member(worker) else Status.STARTING, now)

    def _exit(self, worker: WorkerState, event: Exited, now: float) -> None:
        status = event.status
        del self.workers[worker.number]
        if worker.status is Status.REMOVED:
            return
        if worker.status is Status.FINISHED:
            self._complete(f"worker {worker.number} has finished")
            if status != 0:
                self._conclude(
                    failure_attribution.exit_code(status), f"worker {worker.number} failed in the end", worker.number
                )
            return
        if worker.status is Status.LEAVING or status in _TERMINATED:
            self._health[worker.host].hold(now)
            if worker.status is Status.MEMBER:
                self._break(f"worker {worker.number} was terminated")
            return
        if status == 0 and (worker.has_shut_down or not self._asked):
            self._complete(f"worker {worker.number} has ended with code 0")
            return
        self._fail(worker, event, now)

    def _fail(self, worker: WorkerState, event: Exited, now: float) -> None:
        status = event.status
        self._completed = self._completed if self._asked else ""  # all of the program's processes must end well
        follows = self._health[worker.host].fail(now, self.slots.get(worker.host, 0))
        self._pending.append(Report(worker.number, status, f"worker {worker.number} has failed: {follows}"))
        if self.is_member(worker):
            self.generation.failures.append((worker.number, status, event.said))
            if worker.status is Status.MEMBER:
                self._break(f"worker {worker.number} has ended")
            self._look_for_collapse(now)
        elif event.started and not worker.was_ready:
            deaths = self._early_deaths.setdefault((worker.host, worker.slot), [])
            deaths.append((status, event.said))
            kinds = {death for slot in self._early_deaths.values() for death in slot}
            everywhere = all((each.host, each.slot) in self._early_deaths for each in self.workers.values())
            alike = everywhere and len(kinds) == 1 and status >= 0 and not self._asked
            if (alike or len(deaths) >= _ATTEMPTS) and not any(each.was_ready for each in self.workers.values()):
                who = "all workers" if alike else f"{_ATTEMPTS} workers in a row on one slot"
                reason = f"{who} have failed before they asked for a place; the last lines say why"
                self._conclude(failure_attribution.exit_code(status), reason, worker.number)

    def _look_for_collapse(self, now: float) -> None:
        """End the job if all members have failed by themselves again and again: another start would fail, too."""
        if any(self.is_member(worker) for worker in self.workers.values()):
            return
        if now - self.generation.formed_at > self.policy.elastic_timeout:
            self._collapses = 0
        failures, members = self.generation.failures, self.generation.members
        self._collapses = self._collapses + 1 if all(status >= 0 for _, status, _ in failures) else 0
        alike = not self._most_commits and len(failures) == len(members) and len({each[1:] for each in failures}) == 1
        if self._collapses and not self._finishing and (alike or self._collapses >= _ATTEMPTS):
            number, status, _ = failures[-1 if alike else 0]  # the last one is not reported yet
            how = "alike before anything was committed" if alike else f"by themselves, {_ATTEMPTS} times in a row"
            self._conclude(failure_attribution.exit_code(status), f"all members have failed {how}", number)

    def _lose_host(self, event: HostLost, now: float) -> None:
        self._health.setdefault(event.host, HostHealth(self.policy.backoff)).lose(now)
        for worker in [each for each in self.workers.values() if each.host == event.host]:
            del self.workers[worker.number]
            if worker.status is Status.FINISHED:
                self._complete(f"worker {worker.number} has finished")
            if worker.status is Status.MEMBER:
                self._break(f"worker {worker.number} is lost with {event.host}: {event.reason}")
        tried = [self._health[host].losses for host in self.slots]
        if not self.generation.number and tried and min(tried) >= _ATTEMPTS:
            self._conclude(FAILED, f"no host could be used; {event.host}: {event.reason}")

    def _break(self, reason: str) -> None:
        self.generation.broken = self.generation.broken or reason

    def _complete(self, reason: str) -> None:
        self._completed = self._completed or reason

    def _conclude(self, exit_code: int, reason: str, failure: int | None = None) -> None:
        # A worker that is lost may have exited with code 0.
        self._end = self._end or End(exit_code if failure is None else exit_code or FAILED, reason, failure)

    def _set(self, worker: WorkerState, status: Status, now: float) -> None:
        worker.status, worker.since = status, now

    # Decisions.

    def decide(self, now: float) -> list[Decision]:
        """Return the decisions that are due now. Each is returned once; the end of the job is the last one."""
        decisions, self._pending, self._deadlines = self._pending, [], []
        if self._told_end:
            return []
        while self._end is None and (found := self._decide_once(now)):  # a decision may be a reason for another
            decisions += found
        if self._finishing and not self.workers:
            self._conclude(0, self._finishing)
        if self._end is not None:
            self._told_end = True
            decisions.append(self._end)
        return decisions

    def _decide_once(self, now: float) -> list[Decision]:
        self._deadlines = []
        steps = (self._abandon, self._kill, self._remove, self._form, self._spawn, self._announce)
        return [decision for step in steps for decision in step(now)]

    @property
    def _next_counts(self) -> bool:
        """True if the generation after this one counts against ``reset_limit``."""
        before = self.generation
        if before.number == 0 or self._finishing:
            return False
        lost_or_changed = before.broken or before.returning or before.slots != self.slots
        return bool(lost_or_changed) or not self.policy.resets_like_horovod

    @property
    def _exhausted(self) -> bool:
        """True if ``reset_limit`` allows no further generation."""
        limit = self.policy.reset_limit
        return limit is not None and self._next_counts and self._resets >= limit

    @property
    def _frozen(self) -> bool:
        """True if no worker may join or go, because ``reset_limit`` allows no further generation."""
        return self._exhausted and (bool(self.generation.broken) or not self.policy.resets_like_horovod)

    def _over(self, since: float | None, seconds: float, now: float) -> bool:
        """Return True ``seconds`` after ``since``; before that, note the time for :meth:`look_again`."""
        if since is None:
            return False
        if now >= since + seconds:
            return True
        self._deadlines.append(since + seconds)
        return False

    def _abandon(self, _: float) -> Iterator[Decision]:
        generation = self.generation
        if generation.broken and not generation.abandoned:
            generation.abandoned = True
            yield Abandon(generation.number, generation.broken)

    def _kill(self, now: float) -> Iterator[Decision]:
        for worker in list(self.workers.values()):
            if worker.killed:
                continue
            reason = self._reason_to_kill(worker, now)
            if reason:
                worker.killed = True
                if self._completed and self._asked and worker.status is Status.STARTING:
                    self._set(worker, Status.REMOVED, now)
                if worker.status is Status.MEMBER and self._blocked_since is not None:
                    self._blocked_since = now  # its replacement has the full time
                yield Kill(worker.number, f"worker {worker.number} is killed: {reason}")

    def _reason_to_kill(self, worker: WorkerState, now: float) -> str:
        policy = self.policy
        if self._over(worker.stopped_at, policy.heartbeat_timeout, now):
            return f"it has been stopped for {policy.heartbeat_timeout:g} s"
        if worker.status in (Status.REMOVED, Status.LEAVING):
            return "it does not exit" if self._over(worker.since, _REMOVED_S, now) else ""
        if worker.active and self._over(worker.adrift_at, policy.heartbeat_timeout, now):
            return "it has closed its connection to the driver"
        if worker.status is Status.STARTING:
            if self._completed and self.generation.number:
                return "the job is done without it"
            if self._over(worker.since, policy.elastic_timeout, now):
                return f"it has not asked for a place within {policy.elastic_timeout:g} s"
        # Others wait for a member that has not come back: one that has come back is READY.
        blocked = self.generation.number > 0 and self._blocked_since is not None
        if worker.status is Status.MEMBER and blocked and self._over(self._blocked_since, policy.elastic_timeout, now):
            return f"the others have waited for it for {policy.elastic_timeout:g} s"
        return ""

    def _remove(self, now: float) -> Iterator[Decision]:
        staying = {worker.number for worker in self.staying()}
        unwanted = self.unwanted()
        for worker in list(self.workers.values()):
            if not worker.active or worker.status is not Status.READY or worker.number in staying:
                continue
            done = self._completed and not self.is_member(worker)
            if done or worker.number in unwanted:
                reason = self._completed if done else f"{worker.host} has no slot for it any more"
                self._set(worker, Status.REMOVED, now)
                yield Remove(worker.number, f"worker {worker.number} is removed: {reason}")

    # Generations.

    def _form(self, now: float) -> Iterator[Decision]:
        members = self.members()
        if members and all(worker.status is Status.MEMBER for worker in members):
            self._blocked_since = None
            return
        if self._finishing and not members:
            return
        if self._blocked_since is None:
            self._blocked_since = now
        if any(worker.status is Status.MEMBER for worker in members):
            self._over(self._blocked_since, self.policy.elastic_timeout, now)
            return
        if self._exhausted:
            self._give_up_resetting()
            return
        staying = self.staying()
        newcomers = [] if self._finishing else sorted(self.newcomers(), key=lambda each: each.number)
        most = self.policy.max_np
        chosen = (staying + newcomers)[: most if most is not None else None]
        overdue = self._over(self._blocked_since, self.policy.elastic_timeout, now)
        if self._is_enough(len(staying), newcomers, chosen, overdue, now):
            yield from self._begin(chosen, len(staying), now)
        elif overdue:
            self._conclude(
                FAILED,
                f"Timed out after {self.policy.elastic_timeout:g} s with {counted(len(chosen), 'worker')}. Please "
                f"check that you have enough resources to run at least {self.policy.min_np} Horovod processes.",
            )

    def _is_enough(
        self, staying: int, newcomers: list[WorkerState], chosen: list[WorkerState], overdue: bool, now: float
    ) -> bool:
        """Return True if a generation of the chosen workers must be formed now."""
        policy = self.policy
        if staying or overdue:
            return len(chosen) >= (1 if self._finishing else policy.min_np)
        enough = policy.min_np if self.generation.number else policy.num_proc  # with no member left, or at the start
        if len(chosen) < enough:
            return False
        # There is no member to delay: wait a moment for workers that are still starting.
        complete = not self.starting() or len(chosen) == policy.max_np
        enough_since = sorted(worker.since for worker in newcomers)[enough - 1]
        return complete or self._over(enough_since, SETTLE_S, now)

    def _begin(self, chosen: list[WorkerState], survivors: int, now: float) -> Iterator[Decision]:
        before = self.generation
        members = tuple(worker.number for worker in chosen)
        failed = before.failed_before + 1 if before.failed and members == before.members else 0
        if failed >= _FRUITLESS:
            self._conclude(FAILED, f"init() has failed {failed} times in a row: {before.failed}")
            return
        if self._is_barren(before, members, now):
            number, status, _ = next((each for each in before.failures if each[1] >= 0), (None, FAILED, b""))
            what = f"the job has broken ({before.broken})" if number is None else "a worker has failed"
            reason = f"in {_FRUITLESS} generations in a row {what} before anything was committed"
            self._conclude(failure_attribution.exit_code(status), reason, number)
            return
        self._resets += self._next_counts
        said = f"{listed('worker', members)}; {counted(survivors, 'survivor')}"
        reason = f"generation {before.number + 1}: {said} of generation {before.number}"
        if before.broken:
            reason += f" ({before.broken})"
        if not survivors:
            self._most_commits = max(worker.commits for worker in chosen)
        commits = self._most_commits
        self.generation = Generation(
            before.number + 1, members, formed_at=now, commits=commits, slots=self.slots, failed_before=failed
        )
        for worker in chosen:
            self._set(worker, Status.MEMBER, now)
        self._blocked_since = None
        yield Form(before.number + 1, members, reason)

    def _is_barren(self, generation: Generation, next_members: tuple[int, ...], now: float) -> bool:
        """Return True if too many generations in a row made no commit, and each broke without the loss of a worker."""
        if self._most_commits > generation.commits or now - generation.formed_at > self.policy.elastic_timeout:
            self._barren = 0
        elif any(status >= 0 for _, status, _ in generation.failures) or (
            generation.broken and generation.members == next_members
        ):
            self._barren += 1
        return self._barren >= _FRUITLESS

    def _give_up_resetting(self) -> None:
        limit = self.policy.reset_limit
        assert limit is not None
        cause = self.generation.broken or "the set of workers has changed"
        number, status, _ = self.generation.failures[0] if self.generation.failures else (None, FAILED, b"")
        self._conclude(
            failure_attribution.exit_code(status),
            f"{cause}, and the job has been reset {counted(limit, 'time')}, which is all that --reset-limit {limit} "
            f"allows. Horovod was shutdown because number of resets during elastic job exceeded limit: {limit}",
            number,
        )

    # Workers.

    def _spawn(self, now: float) -> Iterator[Decision]:
        if self._finishing or self._frozen:
            return
        unwanted = self.unwanted()
        active = sum(each.active and each.number not in unwanted for each in self.workers.values())
        for host, slots in self.slots.items():
            taken = {worker.slot for worker in self.workers.values() if worker.host == host}
            for slot in range(slots):
                if self.policy.max_np is not None and active >= self.policy.max_np:
                    return
                # Workers on slots that were dropped count, too: one more would be removed, and started again.
                free = 0 if slot in taken else slots - len(taken)
                if free <= 0 or not self._may_use(host, free, active, now):
                    continue
                worker = WorkerState(self._next_number, host, slot, now)
                self.workers[worker.number] = worker
                self._next_number += 1
                active += 1
                taken.add(slot)
                yield Spawn(worker.number, host, slot, f"worker {worker.number} is started on slot {slot} of {host}")

    def _may_use(self, host: str, free: int, active: int, now: float) -> bool:
        health = self._health[host]
        if now < health.cooling_until:
            self._deadlines.append(health.cooling_until)
            return False
        if active >= self.policy.min_np and health.held_slots(now) >= free:
            self._deadlines += health.held
            return False
        return True

    def _announce(self, now: float) -> Iterator[Decision]:
        generation, members = self.generation, self.members()
        if not members or self._finishing or self._frozen or generation.broken or generation.returning:
            return
        if any(worker.status is Status.READY for worker in members):
            return
        staying = {worker.number for worker in self.staying()}
        most = self.policy.max_np
        room = None if most is None else max(0, most - len(staying))
        newcomers = self.newcomers()[:room]
        joining = {worker.number for worker in newcomers}
        going = {worker.number for worker in members} - staying
        if not (joining | going) - generation.told:
            return
        # Wait a moment for workers that are still starting, to announce all together; members work meanwhile.
        since = [worker.since for worker in newcomers if worker.number not in generation.told]
        if not going - generation.told and self.starting() and not self._over(min(since), SETTLE_S, now):
            return
        generation.told = frozenset(joining | going)
        self._changes += 1
        told = tuple(worker.number for worker in members)
        reason = f"change {self._changes}: workers to join: {len(joining)}, to go: {len(going)}"
        yield Announce(self._changes, bool(joining), bool(going), told, reason)
