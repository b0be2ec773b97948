"""What ``horovodlike.run`` is given: checked before anything starts, so that errors name the argument."""

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from horovodlike import config
from horovodlike.errors import ConfigError
from horovodlike.launcher.elastic.discovery import HostDiscovery
from horovodlike.launcher.errors import UsageError, shown
from horovodlike.launcher.planning.job_spec import MOST_RANKS

__all__ = ["check_kinds", "setting_variables", "take_integer", "take_number_of_ranks"]

_FILE = (str, os.PathLike)
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "args": (Iterable, "a sequence, such as (1, 2)"),
    "kwargs": (Mapping, "a mapping, such as {'first': 1}"),
    "env": (Mapping, "a mapping of texts to texts"),
    "hosts": (str, "a text such as 'node-1:4,node-2:4'"),
    "hostfile": (_FILE, "the name of a file"),
    "ssh_identity_file": (_FILE, "the name of a file"),
    "network_interfaces": (Iterable, "a text, or a sequence of texts"),
    "output_filename": (_FILE, "the name of a folder"),
    "executable": (_FILE, "the name of a program"),
    "host_discovery": (HostDiscovery, "a horovodlike.launcher.elastic.HostDiscovery"),
    "host_discovery_script": (str, "the name of a program"),
}


def check_kinds(given: Mapping[str, Any]) -> None:
    """Checks that arguments are of a kind that can be used, as None is but for the function.

    Raises:
        UsageError: One is not.
    """
    if not callable(given["func"]):
        raise UsageError(f"run(): func={shown(given['func'])} cannot be used: it must be a function")
    for name, (kind, wanted) in _KINDS.items():
        value = given.get(name)
        if value is not None and (not isinstance(value, kind) or (name == "args" and isinstance(value, str))):
            raise UsageError(f"run(): {name}={shown(value)} cannot be used: it must be {wanted}")
        if isinstance(value, str | os.PathLike) and "\0" in os.fsdecode(value):
            raise UsageError(f"run(): {name}={os.fsdecode(value)!r} cannot be used: it must not hold a NUL character")
    interfaces = given.get("network_interfaces")
    if interfaces is not None and not all(isinstance(each, str) for each in interfaces):
        raise UsageError(f"run(): network_interfaces={shown(interfaces)} cannot be used: each of them must be a text")
    for name, value in (given.get("env") or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise UsageError(f"run(): env has {shown(name)}: {shown(value)}; names and values must be texts")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(
                f"run(): env has {shown(name)}: {shown(value)}; a name has no '=', and neither holds a NUL character"
            )


def take_integer(name: str, value: Any, least: int, most: int) -> int | None:
    """Returns the integer that an argument is, or None if it is not given.

    Raises:
        UsageError: It is none, or is out of bounds.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise UsageError(
            f"run(): {name}={shown(value)} cannot be used: it must be an integer >= {least}, and at most {most}"
        )
    return number


def take_number_of_ranks(num_proc: Any, np: Any) -> int | None:
    """Returns the number of ranks, for which there are two names.

    Raises:
        UsageError: It is none, or there are two.
    """
    first, second = (take_integer(name, value, 1, MOST_RANKS) for name, value in (("num_proc", num_proc), ("np", np)))
    if first is not None and second is not None and first != second:
        raise UsageError(f"run(): num_proc={first} and np={second} contradict each other; give one of them")
    return second if first is None else first


def setting_variables(given: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of the arguments that stand for settings of the same name, but for those that are None.

    Raises:
        UsageError: A value is not accepted.
    """
    variables = {}
    for name, value in given.items():
        if value is None:
            continue
        setting = config.SETTINGS[name]
        try:
            config.parse(setting, f"{value}")
        except (ConfigError, ValueError):  # Python does not write out thousands of digits
            raise UsageError(f"run(): {name}={shown(value)} cannot be used: it must be {setting.accepts}") from None
        variables[setting.variable] = f"{value}"
    return variables
