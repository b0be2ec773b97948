"""The pairs that ``hvdrun --selftest`` measures, and its report. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Pair = tuple[int, int]

_MOST_LINKS = 40
"""If there are more links than this, the report shows this number of the slowest."""
_MUST_BE_EQUAL = ("horovodlike", "python", "torch", "tensorflow", "keras", "numpy")


@dataclass(frozen=True)
class Link:
    """The measurement between two ranks.

    Attributes:
        name: The two hosts, or the host of both ranks.
        latency: Seconds that a small allreduce took.
        rate: Bytes per second in each direction, in a large allreduce.
    """

    name: str
    latency: float
    rate: float


@dataclass(frozen=True)
class Coverage:
    """The share of the links between hosts that were measured.

    Attributes:
        measured: The number of measured links.
        links: The number of all links.
    """

    measured: int
    links: int


def pair_up(number: int) -> list[list[Pair]]:
    """Return all pairs of the numbers below ``number``, in rounds with each number once at most (circle method)."""
    players = list(range(number + number % 2))  # the last one is a dummy if the number is odd
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < number])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """List the versions that differ between ranks, as ``torch is 2.1 on node-1 and 2.2 on node-2``."""
    found = []
    for package in _MUST_BE_EQUAL:
        hosts: dict[str, dict[str, None]] = {}
        for fact in facts:
            hosts.setdefault(fact.get(package, "missing"), {})[fact["host"]] = None
        if len(hosts) > 1:
            found.append(
                f"{package} is " + " and ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items())
            )
    return found


def render(facts: Sequence[Mapping[str, str]], links: Sequence[Link], coverage: Coverage) -> str:
    """Write the report.

    Args:
        facts: The facts that each rank reports: ``host``, ``processors``, ``kernel`` and versions of packages.
        links: The measurements.
        coverage: How many of the links between hosts were measured.
    """
    hosts: dict[str, list[Mapping[str, str]]] = {}
    for fact in facts:
        hosts.setdefault(fact["host"], []).append(fact)
    packages = [name for name in _MUST_BE_EQUAL if any(name in fact for fact in facts)]
    columns = ("processors", "kernel", *packages)
    rows = [("host", "ranks", *columns)]
    rows += [(host, str(len(of)), *(of[0].get(name, "-") for name in columns)) for host, of in hosts.items()]
    lines = _table(rows)
    different = differences(facts)
    lines += [f"DIFFERENT: {text}" for text in different] or ["All hosts have the same versions."]
    lines += ["", *_links(links)]
    if coverage.measured < coverage.links:
        lines.append(
            f"{coverage.measured} of {coverage.links} links between hosts were measured, the same number of each host."
        )
    return "\n".join(lines)


def _links(links: Sequence[Link]) -> list[str]:
    if not links:
        return ["There is one rank only, so no link to measure."]
    slowest = sorted(links, key=lambda link: link.rate)[:_MOST_LINKS]
    shown = [link for link in links if link in slowest]
    rows = [("link", "4 B take", "16 MiB go at")]
    rows += [(link.name, f"{link.latency * 1e6:.0f} us", f"{link.rate * 8e-9:.2f} Gbit/s") for link in shown]
    lines = _table(rows)
    if len(shown) < len(links):
        rate = median(link.rate for link in links) * 8e-9
        lines.append(
            f"These are the {len(shown)} slowest of {len(links)} links; half of all are faster than {rate:.2f} Gbit/s."
        )
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
