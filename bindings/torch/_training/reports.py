"""The averages of a training loop over the samples of all ranks, and the lines and the bar that rank 0 shows."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horovodlike import basics
from horovodlike.torch.mpi_ops import allreduce

__all__ = ["Averages", "report_line", "shown_progress"]

_SAMPLES = ""  # a name that no metric should have


class Averages:
    """Sums of values over samples, each a mean over a batch; kept on the device, so that no step waits for it.

    Args:
        names: The names of the values.
        before: Results of `totals`, of which these sums are the continuation.
    """

    def __init__(self, names: Sequence[str], before: Iterable[Mapping[str, float]] = ()) -> None:
        self._names = names
        self._before = [*before]
        self._samples = 0
        self._sums: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, values: Sequence[Any], samples: int) -> None:
        """Add the values of a batch, in the order of the names: numbers, or tensors of one element.

        Raises:
            TypeError: A value is none of these.
        """
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
        for name, value in zip(self._names, values, strict=True):
            if not isinstance(value, (int, float)) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                raise TypeError(f"Engine: {name} must be a number or a tensor of one element, got {value!r}")
        row = (
            torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device).reshape(()) for value in values])
            * samples
        )
        self._sums = row if self._sums is None else self._sums + row
        self._samples += samples

    def totals(self) -> dict[str, float]:
        """Return the number of samples of this rank as `_SAMPLES`, and the sums by name."""
        sums = [0.0] * len(self._names) if self._sums is None else self._sums.tolist()
        mine = {_SAMPLES: float(self._samples), **dict(zip(self._names, sums, strict=True))}
        # A metric that a script has got since then has no mean in this epoch.
        return {name: value + sum(each.get(name, math.nan) for each in self._before) for name, value in mine.items()}

    def of_all_ranks(self, name: str) -> dict[str, float]:
        """Return the means over the samples of all ranks; an empty dictionary if there is none. Collective."""
        totals = torch.tensor([*self.totals().values()], dtype=torch.float64, device="cpu")
        samples, *sums = allreduce(totals, name=name, op=basics.Sum).tolist()
        return {each: total / samples for each, total in zip(self._names, sums, strict=True)} if samples else {}


@contextmanager
def shown_progress(text: str, total: int | None, enabled: bool) -> Iterator[Callable[[], object]]:
    """Show a progress bar on rank 0, if the output is a terminal and `rich` is installed; yield its step function."""
    if not (enabled and basics.rank() == 0 and sys.stdout.isatty() and importlib.util.find_spec("rich")):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def report_line(text: str, averages: Mapping[str, float], begun: float, enabled: bool) -> None:
    """On rank 0, print a line with averages and the seconds since `begun`, a time of `time.perf_counter`."""
    if enabled and basics.rank() == 0:
        shown = "".join(f"  {name} {value:.6g}" for name, value in averages.items())
        print(f"{text}{shown}  {time.perf_counter() - begun:.1f} s", flush=True)
