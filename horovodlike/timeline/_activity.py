"""The time of a framework in a profile: when it computes, and in which operators. Times are ns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from horovodlike.timeline._events import Event
from horovodlike.timeline._intervals import Interval, union
from horovodlike.timeline._profile import RankProfile
from horovodlike.timeline._profile_trace import nested

# PyTorch's categories of events that compute, on the processor and on a GPU.
_COMPUTES = {"cpu_op", "kernel", "gpu_memcpy", "gpu_memset"}
# Collectives, also those that the bindings have as autograd functions, which wait for one.
_NOT_COMPUTING = re.compile(
    r"horovodlike|c10d::|nccl|^(?:_Collective|_Alltoall|_Normalize|_Sum|_Gather|_Copy|_Split)(?:Backward)?$",
    re.IGNORECASE,
)


class Activity(NamedTuple):
    """The work of a framework on one rank.

    Attributes:
        computing: The time in which an operator that calls no other one ran; None: the recording does not tell, as
            samples of stacks do not.
        self_times: Time of each operator, without the operators that it called.
    """

    computing: list[Interval] | None
    self_times: Counter[str]


def activity_of(profile: RankProfile, window: Interval) -> Activity | None:
    """Return the framework's activity within ``window``; None: it was not recorded."""
    if profile.events_of_framework is None:
        return None
    events, offset = profile.events_of_framework()
    rows: dict[tuple[object, object], list[Event]] = {}
    for event in events:
        if event["ph"] == "X" and (profile.framework != "torch" or event.get("cat") in _COMPUTES):
            rows.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    self_times: Counter[str] = Counter()
    computing: list[Interval] = []
    for of_row in rows.values():
        _add_row(nested(of_row, offset), window, self_times, computing)
    return Activity(None if profile.framework == "stacks" else union(computing), self_times)


def _add_row(
    slices: Iterable[tuple[int, Event, Interval]],
    window: Interval,
    self_times: Counter[str],
    computing: list[Interval],
) -> None:
    """Add the slices of a thread. Only those that call no others compute: in others the thread may wait as well."""
    open_slices: dict[int, list[tuple[Interval, str, list[int]]]] = {}

    def close(stack: list[tuple[Interval, str, list[int]]]) -> None:
        interval, name, within = stack.pop()
        if interval[0] >= interval[1]:
            return
        self_times[name] += interval[1] - interval[0] - sum(within)
        if not within and not _NOT_COMPUTING.search(name):
            computing.append(interval)

    for row, event, interval in slices:
        clipped = max(interval[0], window[0]), min(interval[1], window[1])
        if clipped[0] >= clipped[1]:
            continue
        stack = open_slices.setdefault(row, [])
        while stack and stack[-1][0][1] <= clipped[0]:
            close(stack)
        if stack:
            stack[-1][2].append(clipped[1] - clipped[0])
        stack.append((clipped, str(event.get("name")), []))
    for stack in open_slices.values():
        while stack:
            close(stack)
