"""The place of a process among the nodes of a job, and the facts from which it is read."""

import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovodlike.errors import ConfigError

PORT = 29400
"""The port of node 0 where a platform names none."""
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
"""The names that each host has for itself."""


@dataclass(frozen=True)
class Place:
    """The place of this process among the nodes of a job; facts that a platform does not provide are None or empty.

    Attributes:
        platform: The name of the platform.
        evidence: The variables or the file that say so, with their values.
        nnodes: The number of nodes.
        node_rank: The number of this node.
        host: A name or address of node 0.
        port: The port at which node 0 can listen.
        ranks: The number of ranks of this node; or ``gpu``, ``cpu``, ``auto`` (GPUs, else processors) or ``gpu or 1``.
        hostfile: A file with all hosts, which ssh reaches from here: this process runs on one of them only.
        discovery: A program that prints the hosts that can be used now.
        slots: The slots of a host that the program prints without a number.
        ssh_options: The options that the platform gives to ssh.
        settings: Settings that fit the platform.
        key_advice: How to provide the nodes with a key there.
    """

    platform: str
    evidence: str
    nnodes: int | None = None
    node_rank: int | None = None
    host: str | None = None
    port: int | None = None
    ranks: int | str | None = None
    hostfile: str | None = None
    discovery: str | None = None
    slots: int | None = None
    ssh_options: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    key_advice: str = ""

    @property
    def is_among_others(self) -> bool:
        """Whether other nodes start the same command: there are several, or their number is not known."""
        return self.hostfile is None if self.nnodes is None else self.nnodes > 1

    def __str__(self) -> str:
        """Return one line that explains the place."""
        shown = {
            "hosts": self.hostfile,
            "nodes": self.nnodes,
            "this is node": self.node_rank,
            "node 0": self.host and f"{self.host}:{self.port}",
            "ranks": self.ranks,
        }
        told = ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None)
        return f"{self.platform} ({self.evidence}): {told}"


def read_text(path: str) -> str | None:
    """Return the content of a file; None if there is no such file, or it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Facts:
    """The sources of the table: variables, files, and the name of this host.

    Attributes:
        environ: The environment variables; empty ones do not count.
        read: Returns the content of a file, or None.
        host_name: Returns this host's short name.
        full_name: Returns this host's name with its domain.
    """

    environ: Mapping[str, str]
    read: Callable[[str], str | None] = read_text
    host_name: Callable[[], str] = socket.gethostname
    full_name: Callable[[], str] = socket.getfqdn

    def get(self, name: str) -> str:
        """Return a variable, or an empty text."""
        return self.environ.get(name, "").strip()

    def has(self, *names: str) -> bool:
        """Return whether all of these variables are set."""
        return all(map(self.get, names))

    def shown(self, *names: str) -> str:
        """Return those variables that are set, with their values, which may be long."""
        texts = ((name, self.get(name)) for name in names)
        return ", ".join(f"{name}={text if len(text) <= 60 else f'{text[:57]}...'}" for name, text in texts if text)

    def number(self, name: str) -> int | None:
        """Return a variable as a number; None if it is not set."""
        return read_number(self.get(name), name) if self.get(name) else None


def read_number(text: str, source: str, least: int = 0) -> int:
    """Read a number that a platform has set in ``source``.

    Raises:
        ConfigError: It is no integer, or too small; so do the other functions here.
    """
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise ConfigError(f"{source}={text!r} is not an integer of at least {least}; --no-detect ignores it")
    return int(text)


def read_port(text: str, source: str) -> int:
    """Read the number of a port."""
    port = read_number(text, source, 1)
    if port > 65535:
        raise ConfigError(f"{source}={text!r} is no port; --no-detect ignores it")
    return port


def split_address(text: str, source: str, default: int = PORT) -> tuple[str, int]:
    """Split ``host:port`` or ``host``; an IPv6 address stands in brackets if there is a port."""
    match = re.fullmatch(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]+))?", text, re.ASCII)
    if match is None:
        raise ConfigError(f"{source}={text!r} is not like host:port; --no-detect ignores it")
    return match[1].strip("[]"), read_port(match[2], source) if match[2] else default


def read_json(text: str, source: str) -> Any:
    """Read JSON; its content is not checked."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is no JSON ({error}); --no-detect ignores it") from None


def read_mapping(found: Any, source: str) -> dict[str, Any]:
    """Return a JSON value that must be an object."""
    if not isinstance(found, dict):
        raise ConfigError(f"{source} is no JSON object, but {found!r:.80}; --no-detect ignores it")
    return found


def read_names(found: Any, source: str) -> list[str]:
    """Return a JSON value that must be a list of names, at least one."""
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise ConfigError(f"{source} is no list of names, but {found!r:.80}; --no-detect ignores it")
    return found


def read_master(facts: Facts, prefix: str = "") -> tuple[str | None, int | None]:
    """Return the host and port in ``MASTER_ADDR`` and ``MASTER_PORT``."""
    host, port = facts.get(f"{prefix}MASTER_ADDR"), facts.get(f"{prefix}MASTER_PORT")
    if not host:
        return None, None
    return host.strip("[]"), read_port(port, f"{prefix}MASTER_PORT") if port else PORT


def check_number(platform: str, count: int, number: int, evidence: str) -> None:
    """Check that a node's number is one of those that there are."""
    if not 0 <= number < count:
        raise ConfigError(
            f"{platform}: node {number} is not one of {count} nodes, 0 to {count - 1} ({evidence}); --no-detect "
            "ignores that"
        )
