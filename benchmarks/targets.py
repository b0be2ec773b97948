"""The figures that the project wants to reach, checked against the results of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.torch_distributed import GLOO_OF_TORCHRUN

KIB, MIB = 1 << 10, 1 << 20
MPI = ("openmpi", "mpich")

# (bytes, at least this many times the bandwidth of Gloo, of the better MPI, of memcpy); 2 ranks, float32.
ALLREDUCE = (
    (1 * MIB, 6.0, 1.0, None),
    (4 * MIB, 8.0, 1.0, None),
    (16 * MIB, 8.0, 1.0, None),
    (64 * MIB, 4.0, 3.0, 0.55),
    (256 * MIB, 4.0, 3.0, 0.55),
)
# At most this many times the step of processes that do not communicate; 2 ranks.
TRAINING = {"mlp": 1.35, "resnet18": 1.12, "gpt": 1.12, "tiny": 1.30}
# Of the time of Gloo, and of horovodlike's own API: all_reduce of 4 B, steps of DDP, and of FSDP.
DISTRIBUTED = {"4 B": 0.35, "mlp": 0.60, "resnet18": 0.60, "gpt": 0.80, "tiny": 0.60, "fsdp": 0.75}
DISTRIBUTED_OVER_API = 1.10
# A round trip of 4 B: of Gloo's time at most this part. 16 MiB: at least these multiples of Gloo's and raw MPI's rates.
MESSAGES_LATENCY, MESSAGES_RATE, MESSAGES_RATE_OVER_MPI = 0.5, 4.0, 1.0
# Parameter servers: rates over the rates of the allreduce of as many bytes, and of raw MPI; small pushes per second.
PARAMETERS_OVER_ALLREDUCE, PARAMETERS_OVER_MPI, PARAMETERS_OVER_IPERF, PARAMETERS_PUSHES = 0.8, 5.0, 0.95, 100_000
# A step of Keras's `fit` over 12.6 million parameters, in times of one without communication; and TensorFlow's smallest
# eager allreduce, in times of PyTorch's.
KERAS_FIT, TENSORFLOW_SMALL = 1.35, 3.0
ARRAYS_SMALL = 1.2  # 4 B of a NumPy array, without a framework, in times of a torch tensor's
# Over hosts: at least this part of iperf3's rate, by network; and of Gloo's time at most this part, for small
# tensors of this number of bytes.
HOSTS_RATE = {"shaped": 0.97, "cable": 0.85, "four": 0.95}
HOSTS_LATENCY = {"4 B": (4, 0.8), "64 KiB": (64 * KIB, 0.7)}
HOSTS_OVER_GLOO = 1.2
# With HOROVODLIKE_SEAL_DATA, at most this many times as long: most on a link that is as fast as the processor.
HOSTS_SEALED = {"shaped": 1.03, "cable": 3.5}
# Two ranks on each host against one: bytes on the wire may differ by this part, and the time by at most this factor.
HOSTS_BYTES, HOSTS_TIME = 0.01, 1.03
# At one rank on a GPU: the step at most this many times the one without communication, and the host's time DDP's.
GPU_STEP, GPU_HOST = 1.02, 1.0
# A step while the monitor is scraped each second, and with 220 idle and slow readers, in times of one without readers.
# An interval of half this width is a result; and they may take this percentage of one processor.
MONITOR = {"scraped": 1.005, "crowded": 1.005}
MONITOR_RESOLUTION, MONITOR_PROCESSOR = 0.002, 0.5
MEMORY_BYTES = 16 * MIB
IMPORT_SECONDS, IMPORT_BYTES = 0.1, 25 * MIB


@dataclass(frozen=True)
class Verdict:
    """One target: its subject, the limit, the measured value; None where it was not measured."""

    what: str
    limit: str
    measured: str | None
    passed: bool | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"what": self.what, "limit": self.limit, "measured": self.measured, "passed": self.passed}


def check(results: dict[str, Any]) -> list[Verdict]:
    """Return a verdict for each target."""
    return [
        *_latency(results),
        *_bandwidth(results),
        *_many_ranks(results),
        *_training(results),
        *_distributed(results),
        *_messages(results),
        *_parameters(results),
        *_memory(results),
        *_keras(results),
        *_monitor(results),
        *_hosts(results),
        *_gpu(results),
    ]


def allreduce_seconds(results: dict[str, Any], peer: str, size: int, dtype: str, nbytes: int) -> float | None:
    """Return the time of one allreduce, None if it was not measured."""
    for row in results.get("allreduce", []):
        if (row["peer"], row["np"], row["dtype"], row["nbytes"]) == (peer, size, dtype, nbytes):
            return float(row["seconds"])
    return None


def step_ratio(numerator: dict[str, Any] | None, denominator: dict[str, Any] | None) -> float | None:
    """Return the ratio of two rows of training steps: the median of single turns' ratios, where a row has them."""
    if numerator is None or denominator is None:
        return None
    above, below = (row.get("samples", [row["seconds"]]) for row in (numerator, denominator))
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _at_most(what: str, limit: float, value: float | None, unit: str = "", digits: int = 3) -> Verdict:
    measured = None if value is None else f"{value:.{digits}g}{unit}"
    return Verdict(what, f"<= {limit:g}{unit}", measured, None if value is None else value <= limit)


def _at_least(what: str, limit: float, value: float | None) -> Verdict:
    measured = None if value is None else f"{value:.3g} x"
    return Verdict(what, f">= {limit:g} x", measured, None if value is None else value >= limit)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _latency(results: dict[str, Any]) -> Iterator[Verdict]:
    ours, gloo = (allreduce_seconds(results, peer, 2, "float32", 4) for peer in ("horovodlike", "gloo"))
    yield _at_most("4 B allreduce: time / Gloo's", 0.35, _ratio(ours, gloo))
    arrays = allreduce_seconds(results, "numpy", 2, "float32", 4)
    yield _at_most("4 B allreduce of a NumPy array: time / a torch tensor's", ARRAYS_SMALL, _ratio(arrays, ours))
    many = [row["seconds"] for row in results.get("many", []) if (row["peer"], row["np"]) == ("horovodlike", 2)]
    yield _at_most("400 x 1 KiB asynchronous", 1.2, many[0] * 1e3 if many else None, " ms")


def _bandwidth(results: dict[str, Any]) -> Iterator[Verdict]:
    for nbytes, over_gloo, over_mpi, over_memcpy in ALLREDUCE:

        def seconds(peer: str, nbytes: int = nbytes) -> float | None:
            return allreduce_seconds(results, peer, 2, "float32", nbytes)

        ours = seconds("horovodlike")
        title = f"{nbytes // MIB} MiB allreduce: speed"
        yield _at_least(f"{title} / Gloo's", over_gloo, _ratio(seconds("gloo"), ours))
        mpi = min((time for peer in MPI if (time := seconds(peer)) is not None), default=None)
        yield _at_least(f"{title} / the better raw MPI's", over_mpi, _ratio(mpi, ours))
        if over_memcpy is not None:
            yield _at_least(f"{title} / memcpy's with all cores busy", over_memcpy, _ratio(seconds("memcpy"), ours))


def _many_ranks(results: dict[str, Any]) -> Iterator[Verdict]:
    """More ranks than cores, where the machine has two: the worst size counts."""
    rows = [row for row in results.get("allreduce", []) if (row["peer"], row["np"]) == ("gloo", 4)]
    for dtype in ("float32", "bfloat16"):
        ratios = [
            ratio
            for row in rows
            if row["dtype"] == dtype
            and (ratio := _ratio(row["seconds"], allreduce_seconds(results, "horovodlike", 4, dtype, row["nbytes"])))
        ]
        yield _at_least(f"4 ranks, {dtype}, any size: speed / Gloo's", 1.0, min(ratios, default=None))


def _training(results: dict[str, Any]) -> Iterator[Verdict]:
    steps = {(row["model"], row["peer"]): row for row in results.get("training", []) if row["np"] == 2}
    for model, limit in TRAINING.items():
        ours = steps.get((model, "horovodlike"))
        ratio = step_ratio(ours, steps.get((model, "alone")))
        yield _at_most(f"step of {model}: time / no communication", limit, ratio)
        yield _at_least(f"step of {model}: speed / DDP's", 1.0, step_ratio(steps.get((model, "gloo")), ours))


def _distributed(results: dict[str, Any]) -> Iterator[Verdict]:
    rows = {(row["what"], row["peer"]): row for row in results.get("distributed", []) if row["np"] == 2}
    for what, limit in DISTRIBUTED.items():
        for views in ("", ".views") if what in TRAINING else ("",):
            title = f"backend hvd, {what}{', gradient_as_bucket_view' if views else ''}"
            peers = ("hvd_backend", "gloo", GLOO_OF_TORCHRUN)
            ours, gloo, of_torchrun = (rows.get((what + views, peer)) for peer in peers)
            yield _at_most(f"{title}: time / Gloo's", limit, step_ratio(ours, gloo))
            yield _at_most(f"{title}: time / Gloo's, torchrun's memory", limit, step_ratio(ours, of_torchrun))
            if what in TRAINING:
                ratio = step_ratio(ours, rows.get((what, "horovodlike")))
                yield _at_most(f"{title}: time / DistributedOptimizer's", DISTRIBUTED_OVER_API, ratio)


def _messages(results: dict[str, Any]) -> Iterator[Verdict]:
    by_place = {(row["large_pages"], row["nbytes"], row["peer"]): row["seconds"] for row in results.get("messages", [])}

    def ratio(large_pages: bool, nbytes: int, peers: Sequence[str], ours: str) -> float | None:
        """Return the time of the fastest of the peers divided by ours."""
        times = (by_place.get((large_pages, nbytes, peer)) for peer in peers)
        best = min((seconds for seconds in times if seconds is not None), default=None)
        return _ratio(best, by_place.get((large_pages, nbytes, ours)))

    for peer, ours in (("NumPy", "numpy"), ("backend hvd", "hvd_backend")):
        slowness = _ratio(by_place.get((True, 4, ours)), by_place.get((True, 4, "gloo")))
        yield _at_most(f"round trip of 4 B, {peer}: time / Gloo's", MESSAGES_LATENCY, slowness)
        for large_pages, pages in ((True, "large pages"), (False, "ordinary pages")):
            what = f"messages of 16 MiB, {peer}, {pages}: rate"
            yield _at_least(f"{what} / Gloo's", MESSAGES_RATE, ratio(large_pages, 16 * MIB, ["gloo"], ours))
            against_mpi = ratio(large_pages, 16 * MIB, MPI, ours)
            yield _at_least(f"{what} / the better raw MPI's", MESSAGES_RATE_OVER_MPI, against_mpi)


def _parameters(results: dict[str, Any]) -> Iterator[Verdict]:
    seconds = {(row["operation"], row["peer"]): row["seconds"] for row in results.get("parameters", [])}
    ours = seconds.get(("send", "numpy"))
    ratio = _ratio(seconds.get(("allreduce", "numpy")), ours)
    yield _at_least("parameter server, send of 64 MiB: rate / allreduce's", PARAMETERS_OVER_ALLREDUCE, ratio)
    for operation in ("send", "receive"):
        best = min((seconds[operation, peer] for peer in MPI if (operation, peer) in seconds), default=None)
        ratio = _ratio(best, seconds.get((operation, "numpy")))
        yield _at_least(f"parameter server, {operation} of 64 MiB: rate / MPI's", PARAMETERS_OVER_MPI, ratio)
    rates = {row["peer"]: row["rate"] for row in results.get("hosts", {}).get("parameters", [])}
    ratio = _ratio(rates.get("numpy"), rates.get("iperf3"))
    yield _at_least("parameter server, 2 hosts, 1 Gbit/s: rate of a send / iperf3's", PARAMETERS_OVER_IPERF, ratio)
    pushes = seconds.get(("push", "numpy"))
    ratio = None if pushes is None else 2000 / pushes / PARAMETERS_PUSHES
    yield _at_least(f"parameter server, pushes of 1 KiB / {PARAMETERS_PUSHES:,} per second", 1.0, ratio)


def _keras(results: dict[str, Any]) -> Iterator[Verdict]:
    fit, small = ({row["peer"]: row["seconds"] for row in results.get(name, [])} for name in ("fit", "small"))
    for backend in ("tensorflow", "torch"):
        ratio = _ratio(fit.get(f"keras.{backend}"), fit.get(f"keras.{backend}.alone"))
        yield _at_most(f"step of Keras's fit, {backend}: time / no communication", KERAS_FIT, ratio)
    ratio = _ratio(small.get("keras.tensorflow"), small.get("horovodlike"))
    yield _at_most("4 B eager allreduce: TensorFlow's time / PyTorch's", TENSORFLOW_SMALL, ratio)


def _monitor(results: dict[str, Any]) -> Iterator[Verdict]:
    """Leave a ratio without a verdict if its interval is so large that it says nothing."""
    rows = {row["readers"]: row for row in results.get("monitor", [])}
    titles = {"scraped": "a scrape each second", "crowded": "a scrape each second, 200 idle and 20 slow readers"}
    for readers, limit in MONITOR.items():
        row = rows.get(readers)
        what = f"step of a job with --monitor, {titles[readers]}: time / without"
        verdict = _at_most(what, limit, None if row is None else row["ratio"], digits=5)
        if row is not None:
            low, high = row["interval"]
            resolved = (high - low) / 2 <= MONITOR_RESOLUTION
            measured = f"{verdict.measured} ({low:.4f} to {high:.4f}{'' if resolved else ': the machine is too busy'})"
            verdict = replace(verdict, measured=measured, passed=verdict.passed if resolved else None)
        yield verdict
        what = f"monitor, {titles[readers]}: share of a processor that it takes"
        yield _at_most(what, MONITOR_PROCESSOR, None if row is None else 100 * row["more_processor"], " %")


def _hosts(results: dict[str, Any]) -> Iterator[Verdict]:
    rows = results.get("hosts", {}).get("allreduce", [])
    largest = max((row["nbytes"] for row in rows), default=0)

    def value(key: str, network: str, peer: str, nbytes: int = largest) -> float | None:
        found = [
            row.get(key) for row in rows if (row["network"], row["peer"], row["nbytes"]) == (network, peer, nbytes)
        ]
        return found[0] if found else None

    titles = {"shaped": "2 hosts, 1 Gbit/s", "cable": "2 hosts, one cable", "four": "4 hosts, 1 Gbit/s"}
    for network, limit in HOSTS_RATE.items():
        ratio = _ratio(value("rate", network, "horovodlike"), value("rate", network, "iperf3"))
        yield _at_least(f"{titles[network]}: rate of an allreduce / iperf3's", limit, ratio)
    ratio = _ratio(value("rate", "cable", "horovodlike"), value("rate", "cable", "gloo"))
    yield _at_least(f"{titles['cable']}: rate of an allreduce / Gloo's", HOSTS_OVER_GLOO, ratio)
    ratio = _ratio(value("sent", "shaped", "horovodlike.2"), value("sent", "shaped", "horovodlike"))
    difference = None if ratio is None else abs(ratio - 1)
    yield _at_most("2 hosts x 2 ranks: bytes on the wire, difference to 2 x 1", HOSTS_BYTES, difference)
    ratio = _ratio(value("seconds", "shaped", "horovodlike.2"), value("seconds", "shaped", "horovodlike"))
    yield _at_most("2 hosts x 2 ranks: time / that of 2 x 1", HOSTS_TIME, ratio)
    for network, limit in HOSTS_SEALED.items():
        sealed, plain = (value("seconds", network, peer) for peer in ("horovodlike.sealed", "horovodlike"))
        yield _at_most(f"{titles[network]}: time with sealed data / without", limit, _ratio(sealed, plain))
    for title, (nbytes, limit) in HOSTS_LATENCY.items():
        ours, gloo = (value("seconds", "cable", peer, nbytes) for peer in ("horovodlike", "gloo"))
        yield _at_most(f"2 hosts: {title} allreduce: time / Gloo's", limit, _ratio(ours, gloo))


def _gpu(results: dict[str, Any]) -> Iterator[Verdict]:
    rows = {(row["model"], row["peer"]): row for row in results.get("gpu", {}).get("training", [])}

    def value(model: str, peer: str, key: str) -> float | None:
        row = rows.get((model, peer))
        return None if row is None else float(row[key])

    for model in ("resnet50", "gpt87m"):
        ours = value(model, "horovodlike", "seconds")
        title = f"GPU, 1 rank, step of {model}"
        yield _at_most(f"{title}: time / no communication", GPU_STEP, _ratio(ours, value(model, "plain", "seconds")))
        ours, ddp = (value(model, peer, "host_seconds") for peer in ("horovodlike", "ddp"))
        yield _at_most(f"{title}: the host's time / DDP's", GPU_HOST, _ratio(ours, ddp))


def _memory(results: dict[str, Any]) -> Iterator[Verdict]:
    memory = results.get("memory", {})
    engine = memory.get("engine", [])
    for what, keys in (
        ("shared memory per rank", ("shared_per_rank", "counted_shared_per_rank")),
        ("private memory of the engine", ("private_after_init", "private_after_allreduce")),
    ):
        worst = max((row[key] / MIB for row in engine for key in keys), default=None)
        yield _at_most(what, MEMORY_BYTES / MIB, worst, " MiB")
    added = memory.get("import")
    yield _at_most("import horovodlike: time", IMPORT_SECONDS, added["seconds"] if added else None, " s")
    yield _at_most("import horovodlike: memory", IMPORT_BYTES / MIB, added["bytes"] / MIB if added else None, " MiB")
