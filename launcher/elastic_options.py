"""The flags of elastic jobs, and of plans of faults; what is a setting is in ``options``."""

import argparse
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from horovodlike.config import Config
from horovodlike.launcher.elastic.discovery import HostDiscovery
from horovodlike.launcher.errors import UsageError, shown
from horovodlike.launcher.planning.job_spec import MOST_RANKS, ElasticSpec
from horovodlike.launcher.run_arguments import take_integer
from horovodlike.launcher.schedulers.host_resolution import HostResolution, find_hosts

__all__ = [
    "ELASTIC_ARGUMENTS",
    "add_arguments",
    "choose_hosts",
    "fault_plan",
    "find_elastic",
    "is_elastic",
    "take_elastic",
    "without_effect",
]

_MOST_DIGITS = 20
_MOST_RESETS = 2**63 - 1
_LONGEST_S = 1e6
_DECIDE = ("min_np", "max_np", "host_discovery_script")
_SERVE = ("slots", "reset_limit", "blacklist_cooldown_range")


class _Store(argparse.Action):
    """Keeps the value, and by which of its names the flag was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.elastic_flags = {**namespace.elastic_flags, self.dest: option}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group(
        "elastic jobs",
        "Workers may come and go if one of the first three is given. The job starts with as many as there are slots, "
        "up to --max-np; with fewer than -np only after --elastic-timeout, and if they are --min-np.",
    )
    parser.set_defaults(elastic_flags={})
    add = functools.partial(group.add_argument, action=_Store)
    add("--min-np", "--min-num-proc", dest="min_np", metavar="N", help="with fewer workers it waits (default: -np)")
    add("--max-np", "--max-num-proc", dest="max_np", metavar="N", help="it never has more (default: all slots)")
    add("--host-discovery-script", metavar="FILE", help="a program that prints a line for each host: HOST or HOST:N")
    add("--slots", "--slots-per-host", dest="slots", metavar="N", help="slots of a host without a number (default: 1)")
    add("--reset-limit", metavar="N", help="end the job when workers have come or gone more often (default: no limit)")
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="leave a host alone after each failure of a worker there: LOW seconds the first time, then twice as long "
        "each time, HIGH at most (default: 1 to 60 seconds after many failures in a row)",
    )
    parser.add_argument(
        "--chaos", metavar="FILE", help="YAML file with faults to be made: horovodlike.testing.FaultPlan"
    )


def is_elastic(arguments: argparse.Namespace) -> bool:
    """Whether the job is elastic."""
    return any(name in arguments.elastic_flags for name in _DECIDE)


def without_effect(arguments: argparse.Namespace) -> list[str]:
    """The flags that were given and mean something in an elastic job only, if the job is none."""
    flags: dict[str, str] = arguments.elastic_flags
    return [] if is_elastic(arguments) else [flags[name] for name in _SERVE if name in flags]


def find_elastic(arguments: argparse.Namespace, values: Config) -> ElasticSpec | None:
    """What was asked for, or None if the job is not elastic.

    Args:
        arguments: The parsed command line.
        values: The settings.

    Raises:
        UsageError: A value is not accepted, or does not go with other flags; with ``compat``, those of elastic jobs are
            without effect in others.
    """
    if not is_elastic(arguments):
        idle = without_effect(arguments)
        if idle and not arguments.compat:
            raise UsageError(
                f"{idle[0]} is for elastic jobs; add --min-np, --max-np or --host-discovery-script, or leave it out"
            )
        return None
    for flag, given in (("--mpi", arguments.mpi), ("--nnodes", arguments.nnodes), ("--selftest", arguments.selftest)):
        if given:
            raise UsageError(f"{flag} cannot be used for an elastic job; leave it out, or the flags of elastic jobs")
    return ElasticSpec(
        min_np=_number(arguments, "min_np", 1),
        max_np=_number(arguments, "max_np", 1),
        discovery_script=arguments.host_discovery_script,
        slots=_number(arguments, "slots", 1),
        reset_limit=_number(arguments, "reset_limit", 0, _MOST_RESETS),
        cooldown_range=_range(arguments.blacklist_cooldown_range),
        discovery_timeout=values.discovery_timeout,
        elastic_timeout=values.elastic_timeout,
        heartbeat_timeout=values.heartbeat_timeout,
        grace_period=values.grace_period,
    )


def _number(arguments: argparse.Namespace, name: str, least: int, most: int = MOST_RANKS) -> int | None:
    text: str | None = getattr(arguments, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and least <= int(text) <= most):
        called = arguments.elastic_flags[name]
        raise UsageError(f"{called} {text} cannot be used: it must be an integer >= {least}, and at most {most}")
    return int(text)


def _range(texts: list[str] | None) -> tuple[float, float] | None:
    if texts is None:
        return None
    try:
        low, high = (float(text) for text in texts)
    except ValueError:
        low = high = 0.0
    return check_range((low, high), f"--blacklist-cooldown-range {' '.join(texts)}")


def check_range(found: tuple[float, float], source: str) -> tuple[float, float]:
    """Returns a range of cool-downs.

    Raises:
        UsageError: It is none; the message begins with the source.
    """
    low, high = found
    if not 0 < low <= high <= _LONGEST_S:
        raise UsageError(
            f"{source} cannot be used: it must be two numbers of seconds, such as 10 100, up to {_LONGEST_S:g}"
        )
    return low, high


def choose_hosts(
    elastic: ElasticSpec | None,
    hosts: str | None,
    hostfile: str | None,
    number: int | None,
    environ: Mapping[str, str],
    discovery: HostDiscovery | None = None,
) -> HostResolution:
    """Where the job runs, and with how many workers it starts if it is elastic.

    Args:
        elastic: What was asked for, if the job is elastic.
        hosts: What ``-H`` says, or None.
        hostfile: The name of a file with hosts, or None.
        number: The number of ranks, or None if nobody says.
        environ: The environment, which a scheduler may have made.
        discovery: Finds the hosts, instead of all these.

    Raises:
        UsageError: What is said about hosts makes no sense, or there are too few slots.
    """
    if elastic is None:
        return find_hosts(hosts, hostfile, number, environ)
    number = elastic.min_np if number is None else number
    if elastic.discovery_script is not None or discovery is not None:
        if hosts or hostfile or (elastic.discovery_script is not None and discovery is not None):
            raise UsageError(
                "the hosts are given in two ways; give a discovery of hosts, a list or a file, and no other"
            )
        return HostResolution(number, reason="the hosts are found out again and again")
    where = find_hosts(hosts, hostfile, number, environ)
    if number is None and where.num_proc is not None and elastic.max_np is not None:
        where = replace(where, num_proc=min(where.num_proc, elastic.max_np))
    return where


_OTHER_NAMES = {"min_num_proc": "min_np", "max_num_proc": "max_np"}
ELASTIC_ARGUMENTS = frozenset(
    {
        *("min_np", "max_np", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range"),
        *("host_discovery_script", "discovery_timeout", "elastic_timeout", "heartbeat_timeout", "grace_period"),
    }
)
"""What :func:`take_elastic` understands."""


def take_elastic(given: Mapping[str, Any], always: bool, values: Config) -> ElasticSpec | None:
    """What was asked for from Python, or None if the job is not elastic.

    Args:
        given: Arguments, of which others do not count, nor those that are None.
        always: The job is elastic in any case.
        values: The settings.

    Raises:
        UsageError: A value is not accepted.
    """
    found = {name: value for name, value in given.items() if name in ELASTIC_ARGUMENTS and value is not None}
    for name in [name for name in found if name in _OTHER_NAMES]:
        found[_OTHER_NAMES[name]] = take_integer(name, found.pop(name), 1, MOST_RANKS)
    if not always and not found.keys() & {"min_np", "max_np", "host_discovery_script"}:
        if found:
            raise UsageError(f"run(): {min(found)} is for elastic jobs; give min_np, max_np or host_discovery_script")
        return None
    numbers = {name: take_integer(name, found.get(name), 1, MOST_RANKS) for name in ("min_np", "max_np", "slots")}
    cooldown = found.get("cooldown_range")
    if cooldown is not None:
        try:
            low, high = (float(each) for each in cooldown)
        except (TypeError, ValueError, OverflowError):
            low = high = 0.0
        cooldown = check_range((low, high), f"run(): cooldown_range={shown(found['cooldown_range'])}")
    return ElasticSpec(
        min_np=numbers["min_np"],
        max_np=numbers["max_np"],
        slots=numbers["slots"],
        reset_limit=take_integer("reset_limit", found.get("reset_limit"), 0, _MOST_RESETS),
        discovery_script=found.get("host_discovery_script"),
        cooldown_range=cooldown,
        discovery_timeout=values.discovery_timeout,
        elastic_timeout=values.elastic_timeout,
        heartbeat_timeout=values.heartbeat_timeout,
        grace_period=values.grace_period,
    )


def fault_plan(path: str | None) -> Mapping[str, str]:
    """The variable that hands a plan of faults to the ranks; none without a plan.

    Raises:
        UsageError: The file cannot be read, or is no plan.
    """
    if path is None:
        return {}
    from horovodlike.testing import FaultPlan

    try:
        return {"HOROVODLIKE_FAULT_PLAN": FaultPlan.load(path).to_json()}
    except OSError as error:
        raise UsageError(f"--chaos {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # it names the file
        raise UsageError(f"--chaos {error}") from None
