"""Agreements among ranks: at a commit, whether the members change; after ``init()``, whether to send the state."""

from __future__ import annotations

import os
from dataclasses import dataclass

from horovodlike._bootstrap import driver_client
from horovodlike._bootstrap.preemption import Preemption
from horovodlike.objects import highest

__all__ = ["Agreement", "agree_on_changes", "agree_to_start", "preemption", "wait_for_all"]

_preemption = Preemption(lambda: None)
os.register_at_fork(after_in_child=_preemption.forget_in_child)


def preemption() -> Preemption:
    """Return the state of the request to this process, by SIGTERM, to leave the job; with a driver, its worker's."""
    worker = driver_client.current()
    return _preemption if worker is None else worker.preemption


@dataclass(frozen=True)
class Agreement:
    """The decision after a commit.

    Attributes:
        goes_on: Whether the training continues with the same members; equal on all ranks.
        adds: Whether new members will join; equal on all ranks.
        leaves: Whether this process has been asked to leave; then ``goes_on`` is False on all ranks. Without a driver,
            all leave if any has been asked to.
        write_failed: Whether a commit could not be written to disk since the last agreement; equal on all ranks.
    """

    goes_on: bool
    adds: bool
    leaves: bool
    write_failed: bool


def agree_on_changes(changed: bool, added: bool, write_failed: bool) -> Agreement:
    """Let the ranks agree whether the members change, because any rank has a reason. Collective.

    Args:
        changed: Whether this rank has a reason besides messages of the driver and SIGTERM.
        added: Whether hosts were added, as part of that reason.
        write_failed: Whether this rank could not write a commit to disk.

    Raises:
        HorovodInternalError: The job is broken.
    """
    worker = driver_client.current()
    leaves = preemption().noted
    if worker is not None:
        wants_change, wants_to_add = worker.changes()
        changed, added = changed or wants_change, added or wants_to_add
    of_all = highest("horovodlike.elastic.commit", [changed, added, leaves, write_failed])
    any_change, any_added, any_leaves, any_failed = map(bool, of_all)
    if worker is not None and worker.commits == 0:
        worker.tell("committed")
    leaves = leaves or (worker is None and any_leaves)
    return Agreement(not (any_change or any_leaves), any_added, leaves, any_failed)


def agree_to_start(needs_sync: bool, commits: int) -> tuple[bool, bool]:
    """Return whether any rank needs the state of another one, and whether any has seen a commit. Collective.

    Raises:
        HorovodInternalError: The job is broken.
    """
    needs, most_commits = highest("horovodlike.elastic.start", [needs_sync, commits])
    return bool(needs), bool(most_commits)


def wait_for_all() -> None:
    """Return when all ranks have called this. Collective.

    Raises:
        HorovodInternalError: The job is broken.
    """
    highest("horovodlike.elastic.leave", [False])
