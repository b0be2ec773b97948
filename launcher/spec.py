"""What a user asks for."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovodlike.launcher.errors import UsageError

__all__ = ["Binding", "HostSlots", "JobSpec", "check_hosts", "parse_hosts"]

_HOST = re.compile(r"[\w.-]+:[0-9]+", re.ASCII)


class Binding(enum.Enum):
    """What each rank is bound to."""

    NONE = "none"
    CORE = "core"
    NUMA = "numa"


@dataclass(frozen=True)
class HostSlots:
    """A host and how many ranks it may have."""

    host: str
    slots: int


@dataclass(frozen=True)
class JobSpec:
    """A job as it was asked for, checked as far as that is possible without looking at this machine.

    Attributes:
        num_proc: The number of ranks.
        command: What each rank executes, as it was typed.
        settings: ``HOROVODLIKE_*`` variables for the ranks: those that were asked for, and no others.
        start_timeout: How long the ranks wait for each other, in seconds.
        bind_to: What each rank is bound to.
        output_directory: Where each rank's output goes as well, or None.
        timestamps: Each line of output begins with the time.
        verbose: Decisions are explained on standard error.
        compat: The command is a Python program that imports ``horovod``.
        ignored: Horovod's options that were given and have no effect.
    """

    num_proc: int
    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 30.0
    bind_to: Binding = Binding.NONE
    output_directory: str | None = None
    timestamps: bool = False
    verbose: bool = False
    compat: bool = False
    ignored: tuple[str, ...] = ()


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Reads ``host:slots,host:slots``.

    Raises:
        UsageError: It is something else.
    """
    entries = text.split(",")
    if not all(_HOST.fullmatch(entry) for entry in entries):
        raise UsageError(
            f"Invalid host input {text!r}, please make sure it has format as : worker-0:2,worker-1:2 (for this machine "
            "alone, leave it out)."
        )
    return tuple(HostSlots(host, int(slots)) for host, _, slots in (entry.partition(":") for entry in entries))


def check_hosts(hosts: tuple[HostSlots, ...], local_names: frozenset[str], num_proc: int) -> None:
    """Checks that the job fits on the hosts that it is given.

    Raises:
        UsageError: There is another host than this one, or too few slots.
    """
    others = [entry.host for entry in hosts if entry.host not in local_names]
    if others:
        raise UsageError(
            f"several hosts are not supported yet: {', '.join(others)} is not this machine; use localhost:{num_proc} "
            "or leave -H out"
        )
    slots = sum(entry.slots for entry in hosts)
    if slots < num_proc:
        raise UsageError(
            f"Requested more processes ({num_proc}) than there are available slots ({slots}); give localhost:{num_proc}"
        )
