"""Train a small CNN on scikit-learn's handwritten digits, with one slow rank, until it has reached a loss.

Synchronous, each step takes as long as that of the slow rank. Asynchronous, the others do not wait for it:

    hvdrun -np 4 python digits.py --mode sync
    hvdrun -np 4 python digits.py --mode downpour
    hvdrun -np 4 python digits.py --mode easgd
    hvdrun -np 4 python digits.py --mode ssp

The last rank is 5 times slower than the others: after each step it sleeps for 4 times as long as the step has taken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn

import horovodlike.torch as hvd

EVALUATED_IMAGES = 360
MODES = ("sync", "downpour", "easgd", "ssp")


def make_model() -> nn.Module:
    """Return a CNN for images of 8x8: two convolutions and two linear layers, 151,306 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="downpour", help="how the ranks train (default: downpour)")
    parser.add_argument(
        "--target", type=float, default=0.1, metavar="LOSS", help="training loss to reach (default: 0.1)"
    )
    parser.add_argument("--slowdown", type=float, default=5.0, metavar="X", help="of the last rank (default: 5)")
    parser.add_argument("--staleness", type=int, default=128, metavar="N", help="of the mode ssp (default: 128)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="images per rank (default: 32)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of one rank (default: 0.1)")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="the most to train (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the losses here, as JSON")
    return parser.parse_args()


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    return images, torch.tensor(digits.target, dtype=torch.int64)


def batches(count: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the indices of random batches without end; each rank has its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)[: count // size]


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return the optimizer of a mode."""
    named = model.named_parameters()
    if args.mode == "sync":
        # size() times the batch, so size() times the learning rate.
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size()), named)
    if args.mode == "easgd":
        # The centre averages over the ranks and over time, so that each rank can take larger steps.
        sgd = torch.optim.SGD(model.parameters(), lr=args.lr * 2)
        return hvd.EASGDOptimizer(sgd, named, update_frequency=4, init_delay=0)
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr)
    staleness = args.staleness if args.mode == "ssp" else None
    return hvd.DownpourOptimizer(sgd, named, update_frequency=1, init_delay=0, staleness=staleness)


class Evaluation:
    """The losses over time of some of the training images, which rank 0 measures about four times a second."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace, console: Console) -> None:
        """Begin to count the seconds."""
        self.images, self.labels, self.args, self.console = images, labels, args, console
        self.model = make_model()
        self.points: list[tuple[float, float]] = []  # seconds, loss
        self.start = self.last = time.perf_counter()

    def is_done(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Measure if it is time to, and return whether the loss is reached or the time is over."""
        now = time.perf_counter()
        if now - self.last < 0.25:
            return False
        self.last = now
        if self.args.mode == "sync":
            self.model.load_state_dict(model.state_dict())
        else:  # the servers' values are those that are trained
            optimizer.parameter_server.receive(out=list(self.model.parameters())).wait()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels).item()
        self.points.append((now - self.start, loss))
        self.console.print(f"{now - self.start:6.1f} s  loss {loss:.4f}")
        return loss <= self.args.target or now - self.start > self.args.seconds


def train(args: argparse.Namespace, console: Console) -> tuple[list[tuple[float, float]], int]:
    """Train until the loss is reached; return the losses over time, on rank 0, and this rank's number of steps."""
    images, labels = load_data()
    torch.manual_seed(args.seed)
    model = make_model()
    optimizer = make_optimizer(model, args)
    evaluation = Evaluation(images[:EVALUATED_IMAGES], labels[:EVALUATED_IMAGES], args, console)
    is_done, steps = torch.zeros(1), 0
    # The ranks that do not wait for each other look whether this broadcast is complete: rank 0 takes part at the end.
    ends = hvd.broadcast_async_(is_done, root_rank=0, name="end") if args.mode != "sync" and hvd.rank() else None
    hvd.barrier()
    for indices in batches(len(images), args.batch_size, args.seed + hvd.rank()):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
        if hvd.rank() == hvd.size() - 1:
            time.sleep((args.slowdown - 1) * (time.perf_counter() - start))
        optimizer.step()
        steps += 1
        if hvd.rank() == 0:
            is_done.fill_(evaluation.is_done(model, optimizer))
        if args.mode == "sync":
            hvd.broadcast_(is_done, root_rank=0, name="end")
        if is_done if ends is None else hvd.poll(ends):
            break
    if args.mode != "sync":
        hvd.synchronize(hvd.broadcast_async_(is_done, root_rank=0, name="end") if ends is None else ends)
        optimizer.close()
    return evaluation.points, steps


def main() -> int:
    """Train and report; return 1 if the loss is not reached, else 0."""
    args = parse_args()
    hvd.init()
    console = Console(quiet=hvd.rank() != 0, highlight=False)
    points, steps = train(args, console)
    all_steps = hvd.allgather_object(steps)
    if hvd.rank() == 0:
        seconds, loss = points[-1]
        reached = loss <= args.target
        outcome = f"reached a loss of {args.target}" if reached else f"came to a loss of {loss:.4f} only"
        console.print(f"{args.mode}: {outcome} in {seconds:.1f} s")
        console.print(f"steps of the ranks: {', '.join(map(str, all_steps))}")
        if args.report is not None:
            report = {"mode": args.mode, "reached": reached, "seconds": seconds, "steps": all_steps, "points": points}
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    reached = hvd.broadcast_object(hvd.rank() == 0 and reached)
    hvd.shutdown()
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
