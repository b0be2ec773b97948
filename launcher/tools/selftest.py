"""The program that the ranks of ``hvdrun --selftest`` execute: ``python selftest.py``.

``init()`` finds out whether every two ranks reach each other. This program measures the links between hosts, many at
the same time but only one per host, and the shared memory within each host. It times allreduces of two ranks, as a
training job makes them, so the time of a small one includes its negotiation.
"""

import os
import sys

# This file is started by its path, so that the current folder does not hide the installed package. Nor must its own
# folder, which Python then puts on the search path, hide any module.
sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

import array  # noqa: E402 - after the search path was cleared of this folder
import contextlib  # noqa: E402
import importlib.metadata  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from horovodlike import basics  # noqa: E402
from horovodlike._engine.ops import DType, Kind, ReduceOp, Request, wait_done  # noqa: E402
from horovodlike.launcher.tools.selftest_report import Coverage, Link, differences, pair_up, render  # noqa: E402
from horovodlike.objects import allgather_object  # noqa: E402
from horovodlike.process_set import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    registered_id,
    remove_process_set,
)

_PACKAGES = ("horovodlike", "torch", "tensorflow", "keras", "numpy")
_Pairs = dict[str, tuple[int, int]]

_MOST_ROUNDS = 31
"""The most rounds. In each, a host measures one link, so with more than 32 hosts not every link is measured."""
_SMALL, _LARGE = 1, 4 << 20
"""Elements of float32."""
_SMALL_TIMES, _LARGE_TIMES = 200, 8


def main() -> int:
    """Run on each rank; return the exit code."""
    basics.init()
    facts: list[dict[str, str]] = allgather_object(_facts(), "selftest.facts")
    between, inside = _rounds(facts)
    links = [link for pairs in (*between, inside) if pairs for link in _measure_round(pairs)]
    if basics.rank() == 0:
        hosts = sum(fact["local_rank"] == "0" for fact in facts)
        print(render(facts, links, Coverage(sum(map(len, between)), hosts * (hosts - 1) // 2)))
    basics.shutdown()
    return 1 if differences(facts) else 0


def _facts() -> dict[str, str]:
    facts = {
        "host": os.environ.get("HOROVODLIKE_NODE_ID") or platform.node(),
        "local_rank": str(basics.local_rank()),
        "processors": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    return facts


def _rounds(facts: Sequence[dict[str, str]]) -> tuple[list[_Pairs], _Pairs]:
    """Return the two ranks that measure each link, by its name: links between hosts, by round, and within hosts."""
    leaders = [rank for rank, fact in enumerate(facts) if fact["local_rank"] == "0"]
    hosts = [facts[rank]["host"] for rank in leaders]
    rounds = [
        {f"{hosts[low]} - {hosts[high]}": (leaders[low], leaders[high]) for low, high in pairs}
        for pairs in pair_up(len(leaders))[:_MOST_ROUNDS]
    ]
    inside = {
        f"inside {host}": (rank, rank + 1)
        for host, rank in zip(hosts, leaders, strict=True)
        if rank + 1 < len(facts) and facts[rank + 1]["local_rank"] == "1"
    }
    return [each for each in rounds if each], inside


def _measure_round(pairs: _Pairs) -> list[Link]:
    """Measure several pairs at the same time; every rank receives all results."""
    if basics.size() == 2:  # the global set has these ranks already
        process_sets = [global_process_set]
    else:
        process_sets = [add_process_set(ProcessSet(pair)) for pair in pairs.values()]
    times = (0.0, 0.0)
    for process_set, pair in zip(process_sets, pairs.values(), strict=True):
        if basics.rank() in pair:
            small = _measure(process_set, _SMALL, _SMALL_TIMES)
            times = statistics.median(small), statistics.median(_measure(process_set, _LARGE, _LARGE_TIMES))
    found = allgather_object(times, "selftest.times")
    for process_set in process_sets:
        if process_set is not global_process_set:
            remove_process_set(process_set)
    links = []
    for name, (low, high) in pairs.items():
        small, large = (max(of) for of in zip(found[low], found[high], strict=True))
        links.append(Link(name, small, 4 * _LARGE / large))
    return links


def _measure(process_set: ProcessSet, elements: int, times: int) -> list[float]:
    """Run an allreduce ``times`` times and check the results; return the duration of each, in seconds."""
    data = array.array("f", bytes(4 * elements))
    address, _ = data.buffer_info()
    request = Request(
        Kind.ALLREDUCE,
        f"selftest.{elements}",
        [(DType["float32"], [elements])],
        op=ReduceOp.SUM,
        process_set=registered_id(process_set),
    )
    found = []
    for number in range(times):
        data[0] = data[-1] = number + 1.0
        begin = time.perf_counter()
        wait_done(request.enqueue_inplace(address))
        found.append(time.perf_counter() - begin)
        if data[0] != 2 * (number + 1) or data[-1] != 2 * (number + 1):
            raise RuntimeError(
                f"an allreduce of {elements} elements has gone wrong: {data[0]} instead of {2 * number + 2}"
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
