"""Steps with `hvd.DataParallel` on the CPU, beside torch's way and two ranks: `python benchmarks/data_parallel.py`.

The first table is its overhead in a step: the processor time, of all threads, beyond a plain loop's time, which
applies the module to each part of the batch on the calling thread and joins the outputs. Processor time, since the
threads of replicas work at the same time, and other programs make a step longer. Its peer is
`benchmarks/torch_replicas.py`; in both, replica 0 has the parameters' memory. *With copies* is DataParallel on
`cpu:0` and `cpu:1`.

The second table is the time on the clock of a step of the same batch in one process with two threads for its operators,
with DataParallel, and in two ranks with `DistributedOptimizer` and half of the batch each.

All take turns, the ways in this process in random order; figures are medians, with one thread for operators if nothing
else is said.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Run as a file: the checkout goes last, so that `horovodlike` is the installed package and not the source folder.
sys.path[0:1] = []
sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import horovodlike.torch as hvd  # noqa: E402
from benchmarks import driver, launch, models  # noqa: E402
from benchmarks.protocol import Message  # noqa: E402
from benchmarks.torch_replicas import DEVICES, Forward, torchs_way  # noqa: E402
from benchmarks.training import TrainingCase  # noqa: E402

MODELS = ("mlp", "resnet18", "gpt")


def plain_loop(module: nn.Module) -> Forward:
    """Return a forward pass of the parts of a batch, one after another."""
    return lambda x: torch.cat([module(part) for part in x.chunk(DEVICES)])


WAYS: dict[str, Callable[[nn.Module], Forward]] = {
    "plain loop": plain_loop,
    "torch's way": torchs_way,
    "DataParallel": lambda module: hvd.DataParallel(module, ["cpu"] * DEVICES),
    "with copies": lambda module: hvd.DataParallel(module, [f"cpu:{i}" for i in range(DEVICES)]),
}


def small_layers(count: int = 120) -> nn.Module:
    """Return a model whose cost depends on the number of modules and parameters."""
    return nn.Sequential(*(nn.LayerNorm(16) if number % 2 else nn.Linear(16, 16) for number in range(count)))


def _batch(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batches of two ranks as one."""
    inputs, targets = zip(*(models.batch(model, rank) for rank in range(DEVICES)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _step(module: nn.Module, forward: Forward, x: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    optimizer = models.sgd(module)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(forward(x), targets).backward()
        optimizer.step()

    return step


def _steps(model: str) -> dict[str, Callable[[], None]]:
    steps = {}
    for name, way in WAYS.items():
        module = small_layers() if model == "small" else models.build(model)
        batch = (torch.randn(8, 16), torch.randint(16, (8,))) if model == "small" else _batch(model)
        steps[name] = _step(module, way(module), *batch)
    return steps


def measure_overhead(rounds: int) -> None:
    """Print each way's overhead in a step, and its ratio to torch's overhead."""
    for model in ("small", *MODELS):
        steps = _steps(model)
        for step in [*steps.values()] * 2:
            step()
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name in random.sample(list(steps), len(steps)):
                start = time.process_time()
                steps[name]()
                samples[name].append(time.process_time() - start)
        plain = samples["plain loop"]
        added = {
            name: statistics.median(a - b for a, b in zip(each, plain, strict=True)) for name, each in samples.items()
        }
        print(f"\n{models.TITLES.get(model, '120 small layers')}\n")
        for name, seconds in samples.items():
            ratio = added[name] / added["torch's way"]
            milliseconds = statistics.median(seconds) * 1e3, added[name] * 1e3
            print(f"  {name:14} {milliseconds[0]:8.2f} ms, added {milliseconds[1]:7.2f} ms, x torch's {ratio:5.2f}")


class InProcess:
    """A way to make steps in this process, as a participant beside processes of ranks."""

    def __init__(self, name: str, threads: int, way: Callable[[nn.Module], Forward]) -> None:
        self.name = name
        self._threads = threads
        self._way = way

    def call(self, command: Message) -> list[Message]:
        """Time steps of a model: see driver.Participant."""
        torch.set_num_threads(self._threads)
        module = models.build(command["model"])
        step = _step(module, self._way(module), *_batch(command["model"]))
        iterations = int(command["iterations"])
        for _ in range(max(2, iterations // 5)):
            step()
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        return [{"seconds": (time.perf_counter() - start) / iterations}]


def measure_ranks(rounds: int) -> None:
    """Print the time of a step in this process, with DataParallel, and in two ranks."""
    cases = [TrainingCase(model) for model in MODELS]
    alone = InProcess("alone", DEVICES, lambda module: module)
    parallel = InProcess("DataParallel", 1, WAYS["DataParallel"])
    with driver.started([launch.with_memory_of_hvdrun(launch.horovodlike())], DEVICES) as groups:
        ranks = {"one process, two threads": alone, "DataParallel": parallel, "two ranks": groups[0]}
        for case in cases:
            samples: dict[str, list[float]] = {name: [] for name in ranks}
            for _ in range(rounds):
                for name in random.sample(list(ranks), len(ranks)):
                    samples[name].append(case.seconds(ranks[name].call(case.command(10))))
            print(f"\n{models.TITLES[case.model]}, {DEVICES} of these batches\n")
            for name, seconds in samples.items():
                ratio = statistics.median(a / b for a, b in zip(seconds, samples["two ranks"], strict=True))
                print(f"  {name:26} {statistics.median(seconds) * 1e3:8.2f} ms, x two ranks {ratio:5.2f}")


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="of single steps; a fifth of it of ten steps")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    measure_overhead(rounds)
    measure_ranks(max(1, rounds // 5))


if __name__ == "__main__":
    main()
