"""The results as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from benchmarks.tables import MODELS, PEERS, human_bytes  # noqa: E402
from benchmarks.targets import step_ratio  # noqa: E402

COLOURS = {
    "horovodlike": "#d1495b",
    "gloo": "#00798c",
    "openmpi": "#66a182",
    "mpich": "#8d96a3",
    "memcpy": "#2e4057",
    "alone": "#c9c9c9",
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a PNG: bandwidth over size, one panel per number of ranks and dtype, and the training steps."""
    rows = results.get("allreduce", [])
    panels = list(dict.fromkeys((row["np"], row["dtype"]) for row in rows))
    count = len(panels) + (1 if results.get("training") else 0)
    if count == 0:
        return
    columns = min(count, 3)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.2 * columns, 4.2 * lines), squeeze=False, layout="constrained"
    )
    axes = grid.flatten()
    for axis in axes[count:]:
        axis.set_axis_off()
    for axis, (size, dtype) in zip(axes, panels, strict=False):
        _bandwidths(axis, [row for row in rows if (row["np"], row["dtype"]) == (size, dtype)])
        axis.set_title(f"in-place allreduce, {size} ranks, {dtype}")
    if results.get("training"):
        _steps(axes[count - 1], results["training"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bandwidths(axis: Axes, rows: list[dict[str, Any]]) -> None:
    for peer, colour in COLOURS.items():
        points = sorted((row["nbytes"], row["algbw"] / 1e9) for row in rows if row["peer"] == peer)
        if points:
            style: dict[str, Any] = (
                {"linestyle": "--", "linewidth": 1.2} if peer == "memcpy" else {"marker": "o", "markersize": 4}
            )
            axis.plot(*zip(*points, strict=True), label=PEERS[peer], color=colour, **style)
    ticks = sorted({row["nbytes"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [human_bytes(tick) for tick in ticks], rotation=45)
    axis.set_ylabel("algbw, GB/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _steps(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Bars relative to no communication: the models differ by a factor of ten."""
    fewest = min(row["np"] for row in rows)
    steps = {(row["model"], row["peer"]): row for row in rows if row["np"] == fewest}
    models = [model for model in MODELS if (model, "alone") in steps]
    for place, peer in enumerate(("alone", "horovodlike", "gloo")):
        heights = [step_ratio(steps.get((model, peer)), steps[model, "alone"]) or 0.0 for model in models]
        title = "DDP, Gloo" if peer == "gloo" else PEERS[peer]
        axis.bar([x + 0.27 * (place - 1) for x in range(len(models))], heights, 0.25, label=title, color=COLOURS[peer])
    axis.set_xticks(range(len(models)), [MODELS[model] for model in models], rotation=15, fontsize=8)
    axis.set_ylabel("time of a step / no communication")
    axis.set_title(f"training step, {fewest} ranks")
    axis.margins(y=0.25)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8)
