"""What the ranks agree on: at a commit, whether to go on as they are; after ``init()``, whether to send the state."""

from __future__ import annotations

from horovodlike import basics
from horovodlike._exchange import highest
from horovodlike.elastic import _worker
from horovodlike.errors import HostsUpdatedInterrupt

__all__ = ["act_upon_changes", "agree_to_start"]


def act_upon_changes(changed: bool, added: bool) -> None:
    """Have all ranks interrupt the training at the same point, if one of them knows a reason. Collective.

    Args:
        changed: Whether this rank knows of a change, apart from what the driver says.
        added: Whether something was added.

    Raises:
        HostsUpdatedInterrupt: There is a reason.
        HorovodInternalError: The job is broken.
        SystemExit: This process has been asked to leave, and now all know.
    """
    worker = _worker.current()
    leaving = False
    if worker is not None:
        wants_change, wants_to_add = worker.changes()
        changed, added = changed or wants_change, added or wants_to_add
        leaving = worker.preemption.noted
    any_change, any_added, any_leaving = highest("horovodlike.elastic.commit", [changed, added, leaving])
    if worker is not None and leaving:
        basics.shutdown()
        worker.leave()
    if any_change or any_leaving:
        raise HostsUpdatedInterrupt(skip_sync=not any_added)


def agree_to_start(needs_sync: bool, commits: int) -> tuple[bool, bool]:
    """Whether any rank needs the state of another one, and whether any has seen a commit. Collective.

    Raises:
        HorovodInternalError: The job is broken.
    """
    agreed = highest("horovodlike.elastic.start", [needs_sync, commits])
    return bool(agreed[0]), bool(agreed[1])
