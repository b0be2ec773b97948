"""Fault injection, to test a training job.

A *fault plan* says which rank fails, when, where and how. It is a YAML file for ``hvdrun --chaos plan.yaml``::

    - {rank: 1, step: 20, point: data, action: SIGKILL}
    - {rank: 0, step: 35, point: commit, action: slow, seconds: 3}
    - {rank: 2, step: 5, generation: 2, point: rendezvous, action: raise}

Each fault happens once, in the process that has the rank in the given *generation* of an elastic job: a job begins
with generation 1, and each change of its members begins a new one. A job that is not elastic has generation 1 only. The
*step* is the number of commits that the elastic state has seen, so step 0 lasts until the first commit. A script
without an elastic state marks the beginning of its steps itself::

    from horovodlike import testing

    for step in range(steps):
        testing.reach("step", step)

The points:

* ``rendezvous``: in ``init()``, before the ranks meet
* ``sync``: before the state is synchronised
* ``step``: when the step begins
* ``negotiation``: in the step, when the engine has sent a request and has no answer yet
* ``data``: in the step, in the middle of the data of an allreduce, so that no rank completes it
* ``commit``: in the commit that ends the step, after this rank has saved the state and before the ranks have agreed

The actions:

* ``raise``: an :class:`InjectedFault` is raised; at ``negotiation`` and ``data`` the engine fails, and breaks the job
* ``SIGKILL``, ``SIGSTOP``, ``SIGTERM``: the process sends itself that signal
* ``close``: all TCP connections of the process are shut down, as if the network had failed. It has no effect on one
  host, where ranks communicate without connections
* ``slow``: the process sleeps for ``seconds``

Without a plan (HOROVODLIKE_FAULT_PLAN is not set), fault injection costs nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovodlike._bootstrap import environment
from horovodlike._engine import ops
from horovodlike._engine.native import lib
from horovodlike.errors import ConfigError

__all__ = ["ACTIONS", "POINTS", "VARIABLE", "Fault", "FaultPlan", "InjectedFault", "reach"]

POINTS = ("rendezvous", "negotiation", "data", "commit", "sync", "step")
ACTIONS = ("raise", "SIGKILL", "SIGSTOP", "SIGTERM", "close", "slow")
VARIABLE = environment.FAULT_PLAN
"""The environment variable with the active plan, as JSON."""

_IN_ENGINE = {"negotiation": lib.HVL_FAULT_IN_NEGOTIATION, "data": lib.HVL_FAULT_IN_DATA}


class InjectedFault(RuntimeError):  # noqa: N818 - it names a fault, not an error
    """The exception of the action ``raise``."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan; the module's docstring explains the points and actions.

    Attributes:
        rank: The rank that fails.
        step: The step in which it fails: the number of commits before it.
        point: The point of the step, one of :data:`POINTS`.
        action: The kind of fault, one of :data:`ACTIONS`.
        seconds: How long ``slow`` lasts.
        generation: The generation of an elastic job in which it fails.
    """

    rank: int
    step: int
    point: str
    action: str
    seconds: float = 0.0
    generation: int = 1

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is not valid.
        """
        for name, least in (("rank", 0), ("step", 0), ("generation", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, choices in (("point", POINTS), ("action", ACTIONS)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if not isinstance(self.seconds, (int, float)) or isinstance(self.seconds, bool):
            raise ConfigError(f"seconds must be a number, got {self.seconds!r}")
        if self.action == "slow" and not 0 < self.seconds < float("inf"):
            raise ConfigError(f"the action slow needs seconds, more than 0; got {self.seconds!r}")
        if self.action != "slow" and self.seconds != 0:
            raise ConfigError(f"seconds are for the action slow, not for {self.action}")


@dataclass(frozen=True)
class FaultPlan:
    """The faults of a job.

    Attributes:
        faults: The faults, in no particular order.
    """

    faults: tuple[Fault, ...] = ()

    @classmethod
    def from_entries(cls, entries: Iterable[Mapping[str, Any]]) -> FaultPlan:
        """Return the plan of these entries, mappings from the attributes of :class:`Fault` to their values.

        Raises:
            ConfigError: An entry has a wrong or unknown value, or lacks one; the message has its number, from 1 on.
        """
        if not isinstance(entries, Iterable) or isinstance(entries, (str, Mapping)):
            raise ConfigError(f"a fault plan is a list of entries, not {entries!r}")
        return cls(tuple(_fault(number, entry) for number, entry in enumerate(entries, 1)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FaultPlan:
        """Read a plan from a YAML file.

        Raises:
            OSError: The file cannot be read.
            ConfigError: The content is not a valid plan; the message names the file and the entry.
        """
        import yaml

        try:
            return cls.from_entries(yaml.safe_load(Path(path).read_text()))
        except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as problem:
            raise ConfigError(f"{os.fspath(path)}: {problem}") from problem

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Return the plan that :meth:`to_json` has written.

        Raises:
            ConfigError: The text is not a valid plan.
        """
        try:
            return cls.from_entries(json.loads(text))
        except json.JSONDecodeError as problem:
            raise ConfigError(f"a fault plan is JSON: {problem}") from problem

    def to_json(self) -> str:
        """Return the plan in one line, for :data:`VARIABLE`."""
        return json.dumps([dataclasses.asdict(fault) for fault in self.faults])


def _fault(number: int, entry: Any) -> Fault:
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Fault)}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"entry {number}: {entry!r} is not a mapping with the keys {', '.join(fields)}")
    if unknown := [str(key) for key in entry if key not in fields]:
        raise ConfigError(f"entry {number}: unknown key {', '.join(unknown)}; there are {', '.join(fields)}")
    if missing := [name for name, is_needed in fields.items() if is_needed and name not in entry]:
        raise ConfigError(f"entry {number}: {', '.join(missing)} is missing")
    try:
        return Fault(**entry)
    except ConfigError as problem:
        raise ConfigError(f"entry {number}: {problem}") from problem


class _Active:
    """The faults of this process's plan that have not happened yet."""

    def __init__(self, plan: FaultPlan) -> None:
        self._left = list(plan.faults)
        self._step = 0

    def reach(self, point: str, step: int | None) -> None:
        self._step = self._step if step is None else step
        if not self._left:
            return
        here = (environment.find_rank_info(os.environ).rank, self._step, environment.generation())
        for fault in [fault for fault in self._left if (fault.rank, fault.step, fault.generation) == here]:
            if fault.point in _IN_ENGINE and point == "step":
                self._left.remove(fault)
                _arm(fault)
            elif fault.point == point:
                self._left.remove(fault)
                _happen(fault)


def _arm(fault: Fault) -> None:
    action, amount = {
        "raise": (lib.HVL_FAULT_RAISE, 0),
        "close": (lib.HVL_FAULT_CLOSE, 0),
        "slow": (lib.HVL_FAULT_SLOW, fault.seconds),
    }.get(fault.action) or (lib.HVL_FAULT_SIGNAL, signal.Signals[fault.action])
    ops.check(lib.hvl_arm_fault(_IN_ENGINE[fault.point], action, amount))


def _happen(fault: Fault) -> None:
    if fault.action == "raise":
        raise InjectedFault(f"injected by the fault plan: {fault}")
    if fault.action == "slow":
        time.sleep(fault.seconds)
    elif fault.action == "close":
        ops.check(lib.hvl_cut_connections())
    else:
        os.kill(os.getpid(), signal.Signals[fault.action])


def _find_plan() -> _Active | None:
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return _Active(FaultPlan.from_json(text))
    except ConfigError as problem:
        raise ConfigError(f"{VARIABLE}: {problem}") from problem


_active = _find_plan()


def reach(point: str, step: int | None = None) -> None:
    """Note that this process has reached a point, and inject the plan's faults for it. Does nothing without a plan.

    Call it from the thread that trains. Elastic states and ``init()`` call it themselves if there is a plan.

    Args:
        point: One of :data:`POINTS` except ``negotiation`` and ``data``: the engine reaches these itself, and their
            faults are armed at ``step``.
        step: The number of commits so far. None: the number of the last call, 0 at first.

    Raises:
        InjectedFault: The plan has the action ``raise`` here.
        ValueError: There is no such point, or only the engine can reach it.
        NotInitializedError: The plan has a fault for the engine, and ``init()`` has not been called.
    """
    if point not in POINTS or point in _IN_ENGINE:
        raise ValueError(f"point must be one of {', '.join(p for p in POINTS if p not in _IN_ENGINE)}, got {point!r}")
    if _active is not None:
        _active.reach(point, step)
