"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.targets import MPI, Verdict, step_ratio
from benchmarks.torch_distributed import GLOO_OF_TORCHRUN
from benchmarks.training import OF_TENSORFLOW

KIB, MIB = 1 << 10, 1 << 20
PEERS = {
    "horovodlike": "horovodlike",
    "gloo": "Gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "memcpy": "memcpy",
    "alone": "no communication",
    "numpy": "horovodlike, NumPy",
    "openmpi.arrays": "Open MPI, windows of arrays",
    "mpich.arrays": "MPICH, windows of arrays",
}
HOSTS_PEERS = {
    "iperf3": "iperf3",
    "horovodlike": "horovodlike",
    "horovodlike.2": "horovodlike, 2 ranks on each host",
    "horovodlike.sealed": "horovodlike, HOROVODLIKE_SEAL_DATA=1",
    "gloo": "Gloo",
    "numpy": "horovodlike, NumPy arrays",
}
NETWORKS = {
    "shaped": "2 hosts, each with 1 Gbit/s to a switch",
    "cable": "2 hosts and an unshaped cable",
    "four": "4 hosts, each with 1 Gbit/s to a switch",
}
MODELS = {
    "mlp": "MLP, 12.6 M parameters",
    "resnet18": "ResNet-18, 32x32",
    "resnet18_channels_last": "ResNet-18, 32x32, channels_last",
    "gpt": "GPT, 6.9 M parameters",
    "tiny": "400 tiny layers",
    "resnet50": "ResNet-50, 224x224",
    "gpt87m": "GPT, 86.7 M parameters",
}
GPU_WAYS = {"nccl": "NCCL", "staging": "the host (staging)"}
GPU_PEERS = {"nccl": "torch.distributed, NCCL", "gloo": "torch.distributed, Gloo"}


def document(results: dict[str, Any], verdicts: Sequence[Verdict]) -> str:
    """Return all tables as one page."""
    meta = results["meta"]
    parts = [
        "# Measurements",
        f"{meta['date']}; {meta['cpu']}, {meta['cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
        + f"; median of {meta['rounds']} rounds, peers taking turns, one thread per rank."
        + " How it is measured: `benchmarks/__init__.py`.",
    ]
    for size in sorted({row["np"] for row in results.get("allreduce", [])}):
        for dtype in ("float32", "bfloat16"):
            rows = [row for row in results.get("allreduce", []) if (row["np"], row["dtype"]) == (size, dtype)]
            if rows:
                parts += [f"## In-place allreduce, {size} ranks, {dtype}", allreduce(rows)]
    if results.get("many"):
        parts += ["## 400 float32 tensors of 1 KiB, all in flight together", many(results["many"])]
    if results.get("training"):
        parts += ["## Training steps", training(results["training"])]
    if results.get("distributed"):
        parts += ["## torch.distributed", distributed(results["distributed"])]
    for large_pages, kind in ((True, "large pages, as hvdrun allocates memory"), (False, "ordinary pages")):
        rows = [row for row in results.get("messages", []) if row["large_pages"] == large_pages]
        if rows:
            parts += [f"## Messages there and back, 2 ranks, {kind}", messages(rows)]
    if results.get("parameters"):
        parts += ["## Parameter servers of 2 ranks", parameters(results["parameters"])]
    if results.get("memory"):
        parts += ["## Memory of the engine, the largest of all ranks", memory(results["memory"]["engine"])]
        parts.append(imports(results["memory"]["import"]))
    if results.get("fit"):
        parts += ["## Keras: a step of `fit`, MLP of 12.6 M parameters, 2 ranks", fit(results["fit"])]
        parts.append(small(results["small"]))
    if results.get("loop"):
        parts += [
            "## TensorFlow: a step in a loop, MLP of 12.6 M parameters, 2 ranks",
            loop(results["loop"]),
        ]
    if results.get("compression"):
        title = "## Compression of gradients, 2 ranks, {steps} steps of a CNN on real images"
        parts += [title.format(**results["compression"][0]), compression(results["compression"])]
    if results.get("monitor"):
        title = "## A training step of a job with `--monitor`, {np} ranks, {model}"
        parts += [title.format(**results["monitor"][0]), monitor(results["monitor"])]
    if results.get("hosts"):
        parts += _hosts(results["hosts"])
    if results.get("gpu"):
        parts += _gpu(results["gpu"])
    parts += ["## Targets", targets(verdicts)]
    return "\n\n".join(parts) + "\n"


def allreduce(rows: Sequence[dict[str, Any]]) -> str:
    """One line per size: time and bandwidth of each peer, and how much faster horovodlike is."""
    by_place = {(row["nbytes"], row["peer"]): row for row in rows}
    peers = [peer for peer in PEERS if any(row["peer"] == peer for row in rows)]
    others = [peer for peer in peers if peer != "horovodlike"]
    head = ["size", *(PEERS[peer] for peer in peers), "busbw", *(f"x {PEERS[peer]}" for peer in others)]
    lines = []
    for nbytes in sorted({row["nbytes"] for row in rows}):
        ours = by_place.get((nbytes, "horovodlike"))
        line = [human_bytes(nbytes), *(_speed(by_place.get((nbytes, peer))) for peer in peers)]
        line.append(_bandwidth(ours["busbw"]) if ours else "")
        for peer in others:
            theirs = by_place.get((nbytes, peer))
            line.append(f"{theirs['seconds'] / ours['seconds']:.2f}" if ours and theirs else "")
        lines.append(line)
    return table(head, lines)


def many(rows: Sequence[dict[str, Any]]) -> str:
    """One line per number of ranks."""
    by_place = {(row["np"], row["peer"]): row["seconds"] for row in rows}
    peers = [peer for peer in PEERS if any(row["peer"] == peer for row in rows)]
    head = ["ranks", *(PEERS[peer] + (", one by one" if peer in MPI else "") for peer in peers)]
    lines = [
        [str(size), *(_optional_time(by_place.get((size, peer))) for peer in peers)]
        for size in sorted({row["np"] for row in rows})
    ]
    return table(head, lines)


def training(rows: Sequence[dict[str, Any]]) -> str:
    """One line per model."""
    by_place = {(row["model"], row["np"], row["peer"]): row for row in rows}
    head = ["model", "ranks", "no communication", "horovodlike", "DDP, Gloo", "x limit", "DDP's x limit", "x DDP"]
    peers = ["alone", "horovodlike", "gloo"]
    if any(row["peer"] == "python" for row in rows):
        head += ["no communication, malloc's defaults", "x that"]
        peers.append("python")
    lines = []
    for model, size in dict.fromkeys((row["model"], row["np"]) for row in rows):
        limit, ours, ddp, *plain = (by_place.get((model, size, peer)) for peer in peers)
        ratios = [step_ratio(*pair) for pair in ((ours, limit), (ddp, limit), (ddp, ours))]
        lines.append(
            [
                MODELS[model],
                str(size),
                *(_optional_time(row and row["seconds"]) for row in (limit, ours, ddp)),
                *(_optional_ratio(ratio) for ratio in ratios),
                *(_optional_time(row and row["seconds"]) for row in plain),
                *(_optional_ratio(step_ratio(ours, row)) for row in plain),
            ]
        )
    return table(head, lines)


def distributed(rows: Sequence[dict[str, Any]]) -> str:
    """One line for the smallest allreduce, and one for each model."""
    by_place = {(row["what"], row["np"], row["peer"]): row for row in rows}
    head = ["", "ranks", "backend hvd", "Gloo", "Gloo, torchrun's memory", "horovodlike's API", "no communication"]
    head += ["of Gloo's time", "of Gloo's, torchrun's memory", "of the API's", "of no communication"]
    lines = []
    for what, size in dict.fromkeys((row["what"], row["np"]) for row in rows):
        model, _, views = what.partition(".")
        title = {"4 B": "all_reduce of 4 B", "fsdp": "GPT, FSDP"}.get(what)
        title = title or f"{MODELS[model]}, DDP{', gradient_as_bucket_view' if views else ''}"
        ours, *gloo = (by_place.get((what, size, peer)) for peer in ("hvd_backend", "gloo", GLOO_OF_TORCHRUN))
        api, alone = by_place.get((model, size, "horovodlike")), by_place.get((what, size, "ddp_alone"))
        lines.append(
            [
                title,
                str(size),
                *(_optional_time(row and row["seconds"]) for row in (ours, *gloo, api, alone)),
                *(_optional_ratio(step_ratio(ours, row)) for row in (*gloo, api, alone)),
            ]
        )
    return table(head, lines)


def messages(rows: Sequence[dict[str, Any]]) -> str:
    """One line per size: the time of each peer, and its rate in one direction."""
    by_place = {(row["nbytes"], row["peer"]): row["seconds"] for row in rows}
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = []
    for nbytes in sorted({row["nbytes"] for row in rows}):
        times = [by_place[nbytes, peer] for peer in peers]
        lines.append([human_bytes(nbytes), *(f"{human_time(each)}, {_bandwidth(2 * nbytes / each)}" for each in times)])
    return table(["", *peers], lines)


def parameters(rows: Sequence[dict[str, Any]]) -> str:
    """One line per operation: the time of each peer with its rate, per rank."""
    by_place = {(row["operation"], row["peer"]): row["seconds"] for row in rows}
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    titles = {"allreduce": "allreduce of 64 MiB", "send": "send (add) 64 MiB", "receive": "receive 64 MiB"}
    lines = []
    for operation, title in titles.items():
        times = [by_place[operation, peer] for peer in peers]
        lines.append([title, *(f"{human_time(each)}, {_bandwidth(64 * MIB / each)}" for each in times)])
    pushes = [2000 / by_place["push", peer] for peer in peers]
    head = ["", *(PEERS[peer] for peer in peers)]
    return table(head, [*lines, ["pushes of 1 KiB, both ranks", *(f"{each:,.0f}/s" for each in pushes)]])


def memory(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of memory: the engine's own figures, and figures of /proc."""
    keys = {
        "shared_per_rank": "shared per rank, from /proc",
        "counted_shared_per_rank": "the engine's count",
        "private_after_init": "private after init, from /proc",
        "private_after_allreduce": "private after the allreduce",
    }
    lines = [
        [str(row["np"]), human_bytes(row["nbytes"]), *(f"{row[key] / MIB:.2f} MiB" for key in keys)] for row in rows
    ]
    return table(["ranks", "tensor", *keys.values()], lines)


def imports(row: dict[str, float]) -> str:
    """One sentence."""
    return (
        f"`import horovodlike` adds {row['seconds'] * 1e3:.0f} ms and {row['bytes'] / MIB:.1f} MiB to the bare "
        f"interpreter's {row['bare_seconds'] * 1e3:.0f} ms and {row['bare_bytes'] / MIB:.1f} MiB."
    )


def compression(rows: Sequence[dict[str, Any]]) -> str:
    """One line per method; the bytes sent as a part of the bytes sent without compression, which comes first."""
    first, epochs = rows[0], len(rows[0]["losses"])
    early = min(2, epochs)
    losses = [f"loss after {early} epochs", f"after {epochs}"]
    head = ["compression", "sent per rank and step", "of none", *losses, "test accuracy", "step", "x none"]
    lines = [
        [
            row["method"],
            f"{row['nbytes']:,.0f} B",
            f"1/{first['nbytes'] / row['nbytes']:.3g}",
            f"{row['losses'][early - 1]:.3f}",
            f"{row['losses'][-1]:.4f}",
            f"{row['accuracy']:.1%}",
            human_time(row["seconds"]),
            f"{row['seconds'] / first['seconds']:.2f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def fit(rows: Sequence[dict[str, Any]]) -> str:
    """One line per backend."""
    seconds = {row["peer"]: row["seconds"] for row in rows}
    backends = [peer.split(".")[1] for peer in seconds if not peer.endswith(".alone")]
    lines = []
    for backend in backends:
        ours, limit = seconds[f"keras.{backend}"], seconds.get(f"keras.{backend}.alone")
        ratio = f"{ours / limit:.2f}" if limit else ""
        lines.append([backend, _optional_time(limit), human_time(ours), ratio])
    return table(["backend", "no communication", "horovodlike", "x limit"], lines)


def loop(rows: Sequence[dict[str, Any]]) -> str:
    """One line: the time of each peer, and the ratios."""
    by_peer = {row["peer"]: row for row in rows}
    ours, mirrored, limit = (by_peer.get(peer) for peer in OF_TENSORFLOW)
    times = [_optional_time(row and row["seconds"]) for row in (limit, ours, mirrored)]
    ratios = [step_ratio(*pair) for pair in ((ours, limit), (mirrored, limit), (mirrored, ours))]
    head = ["no communication", "horovodlike", "MultiWorkerMirroredStrategy, ring over gRPC"]
    head += ["x limit", "the strategy's x limit", "x the strategy"]
    return table(head, [[*times, *map(_optional_ratio, ratios)]])


def small(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence."""
    names = {"horovodlike": "PyTorch", "keras.tensorflow": "TensorFlow, eager"}
    times = ", ".join(f"{names[row['peer']]} {human_time(row['seconds'])}" for row in rows)
    return f"A named allreduce of 4 B into a new tensor: {times}."


def monitor(rows: Sequence[dict[str, Any]]) -> str:
    """One line per crowd of readers."""
    titles = {"scraped": "one scrape a second", "crowded": "and 200 idle, 20 slow ones"}
    lines = [
        [
            titles[row["readers"]],
            *(human_time(row[name]) for name in ("without", "seconds")),
            f"{row['ratio']:.4f}",
            "{:.4f} to {:.4f}".format(*row["interval"]),
            str(len(row["pairs"])),
            f"{row['more_processor']:.2%}",
        ]
        for row in rows
    ]
    head = ["readers", "step without", "step with readers", "x without", "95 % interval", "pairs", "of a processor"]
    return table(head, lines)


def _hosts(results: dict[str, Any]) -> list[str]:
    """Titles and tables of all networks."""
    parts = []
    for network, title in NETWORKS.items():
        rows = [row for row in results.get("allreduce", []) if row["network"] == network]
        large = [row for row in rows if row["nbytes"] >= MIB]
        if large:
            parts += [f"## {title}: allreduce of {human_bytes(large[0]['nbytes'])}, float32", rates(large)]
        small = [row for row in rows if row["nbytes"] < MIB]
        if small:
            parts += [f"## {title}: latency of a named, synchronous allreduce", latencies(small)]
    if results.get("parameters"):
        parts += [f"## {NETWORKS['shaped']}: parameter servers, send", rates(results["parameters"])]
    if results.get("training"):
        parts += ["## Training steps over that cable", training(results["training"])]
    return parts


def _gpu(results: dict[str, Any]) -> list[str]:
    """Titles and tables of GPUs."""
    device = ", ".join(f"{name}: {value}" for name, value in results["device"].items())
    parts = ["## GPUs", device]
    for size in dict.fromkeys(row["np"] for row in results["allreduce"]):
        rows = [row for row in results["allreduce"] if row["np"] == size]
        title = f"### In-place allreduce, float32, ranks: {size}, through {GPU_WAYS[rows[0]['through']]}"
        parts += [title, gpu_allreduce(rows)]
    parts += ["### Training steps, 1 rank", gpu_training(results["training"])]
    if results["overlap"]:
        parts += ["### Communication that overlaps computation", gpu_overlap(results["overlap"])]
    return parts


def gpu_allreduce(rows: Sequence[dict[str, Any]]) -> str:
    """One line per size: times, and how long the host's thread is busy."""
    by_place = {(row["count"], row["nbytes"], row["peer"]): row for row in rows}
    peer = next(row["peer"] for row in rows if row["peer"] != "horovodlike")
    lines = []
    for count, nbytes in dict.fromkeys((row["count"], row["nbytes"]) for row in rows):
        ours, theirs = (by_place[count, nbytes, name] for name in ("horovodlike", peer))
        size = human_bytes(nbytes) if count == 1 else f"{count} x {human_bytes(nbytes)}"
        times = [human_time(row[key]) for key in ("seconds", "host_seconds") for row in (ours, theirs)]
        lines.append([size, *times, f"{(ours['seconds'] - theirs['seconds']) * 1e6:+.3g} us"])
    name = GPU_PEERS[peer]
    return table(["size", "horovodlike", name, "the host's time", f"{name}'s", "more than " + name], lines)


def gpu_training(rows: Sequence[dict[str, Any]]) -> str:
    """One line per model."""
    by_place = {(row["model"], row["peer"]): row for row in rows}
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        plain, ours, ddp = (by_place[model, peer] for peer in ("plain", "horovodlike", "ddp"))
        lines.append(
            [
                MODELS[model],
                *(human_time(row["seconds"]) for row in (plain, ours, ddp)),
                *(f"{row['seconds'] / plain['seconds']:.3f}" for row in (ours, ddp)),
                *(human_time(row["host_seconds"]) for row in (plain, ours, ddp)),
            ]
        )
    head = ["model", "no communication", "horovodlike", "DDP", "x plain", "DDP's x plain"]
    return table([*head, "the host's time, plain", "horovodlike", "DDP"], lines)


def gpu_overlap(rows: Sequence[dict[str, Any]]) -> str:
    """One line per model and number of ranks."""
    lines = [
        [
            MODELS[row["model"]],
            str(row["np"]),
            GPU_WAYS[row["through"]],
            human_time(row["communicating"]),
            f"{row['share']:.1%}",
        ]
        for row in rows
    ]
    return table(["model", "ranks", "through", "communication", "of it during computation"], lines)


def rates(rows: Sequence[dict[str, Any]]) -> str:
    """One line per peer: the bytes that each host sends per second, and its interface's count for the same calls."""
    by_peer = {row["peer"]: row for row in rows}
    limit, ours = by_peer.get("iperf3"), by_peer.get("horovodlike")
    lines = []
    for peer, title in HOSTS_PEERS.items():
        if row := by_peer.get(peer):
            time = "" if row is limit else human_time(row["seconds"])
            ratio = f"{row['rate'] / limit['rate']:.3f}" if limit else ""
            sent = f"{row['sent'] / ours['sent']:.4f}" if ours and "sent" in row else ""
            lines.append([title, time, f"{row['rate'] / 1e9:.3f} Gbit/s", ratio, sent])
    return table(["peer", "time", "rate", "x iperf3", "bytes on the wire, x horovodlike"], lines)


def latencies(rows: Sequence[dict[str, Any]]) -> str:
    """One line per size."""
    seconds = {(row["nbytes"], row["peer"]): row["seconds"] for row in rows}
    lines = []
    for nbytes in sorted({row["nbytes"] for row in rows}):
        ours, gloo = (seconds.get((nbytes, peer)) for peer in ("horovodlike", "gloo"))
        ratio = f"{ours / gloo:.2f}" if ours and gloo else ""
        lines.append([human_bytes(nbytes), _optional_time(ours), _optional_time(gloo), ratio])
    return table(["size", "horovodlike", "Gloo", "time / Gloo's"], lines)


def targets(verdicts: Sequence[Verdict]) -> str:
    """One line per target."""
    words = {True: "pass", False: "**FAIL**", None: "not known"}
    lines = [[v.what, v.limit, v.measured or "", words[v.passed]] for v in verdicts]
    return table(["what", "target", "measured", ""], lines)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with columns aligned so that it reads well as text too."""
    rows = [list(head), *(list(line) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def human_bytes(nbytes: int) -> str:
    """Return 4 B, 64 KiB, 1 MiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def human_time(seconds: float) -> str:
    """Return three figures and a unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _bandwidth(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def _optional_time(seconds: float | None) -> str:
    return "" if seconds is None else human_time(seconds)


def _optional_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _speed(row: dict[str, Any] | None) -> str:
    """Time for small sizes, where latency counts, else bandwidth."""
    if row is None:
        return ""
    return human_time(row["seconds"]) if row["nbytes"] < MIB else _bandwidth(row["algbw"])
