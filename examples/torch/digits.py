"""Train a small CNN on scikit-learn's handwritten digits (1,797 real images of 8x8, shipped with the package).

One process:    python digits.py
Two processes:  hvdrun -np 2 python digits.py

The lines that make it a distributed job are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovodlike.torch as hvd

TEST_IMAGES = 360


class Net(nn.Module):
    """Two convolutions and two linear layers: 151,306 parameters."""

    def __init__(self) -> None:
        """Draws the initial parameters from torch's global generator."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images, [n, 1, 8, 8] -> [n, 10]."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs", type=int, default=12, metavar="N", help="passes over the training data (default: 12)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="images per rank and step (default: 32)"
    )
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of one rank (default: 0.03)")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD (default: 0.9)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the results here, as JSON")
    return parser.parse_args()


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set; the same split for the same seed on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def test_accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Returns the accuracy on the whole test set; each rank looks at every size-th image of it."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test_set.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.stack([correct, torch.tensor(len(labels))])
    # horovodlike: counts are summed, not accuracies averaged: the shares of the ranks may differ by one image.
    correct, total = hvd.allreduce(counts, name="test_counts", op=hvd.Sum).tolist()
    return float(correct) / float(total)


def parameter_hash(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, to the bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_set: TensorDataset,
    test_set: TensorDataset,
    args: argparse.Namespace,
    console: Console,
) -> tuple[float, float, int]:
    """Trains; returns the last test accuracy, the seconds spent in training and the images seen by all ranks."""
    # horovodlike: each rank gets its own share of the training data.
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True, seed=args.seed
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    accuracy, seconds, images_seen = 0.0, 0.0, 0
    # horovodlike: one progress bar, on rank 0; where the output is no terminal, a line per epoch.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=args.epochs * len(loader))
        for epoch in range(args.epochs):
            start = time.perf_counter()
            model.train()
            sampler.set_epoch(epoch)
            loss_sum = torch.zeros(())
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach()
                progress.advance(task)
            seconds += time.perf_counter() - start
            images_seen += len(sampler) * hvd.size()
            # horovodlike: the metric is averaged over the ranks.
            mean_loss = hvd.allreduce(loss_sum / len(loader), name="train_loss").item()
            accuracy = test_accuracy(model, test_set)
            console.print(
                f"epoch {epoch + 1:2d}/{args.epochs}  {bar(epoch + 1, args.epochs)}  "
                f"loss {mean_loss:.4f}  test accuracy {accuracy:.2%}"
            )
    return accuracy, seconds, images_seen


def bar(done: int, total: int, width: int = 24) -> str:
    """Return a bar of text that shows how much is done."""
    filled = width * done // total
    return "█" * filled + "░" * (width - filled)


def main() -> int:
    """Trains, reports, and returns 1 if the ranks do not hold the same parameters, else 0."""
    args = parse_args()
    # horovodlike: start; without a launcher this is a job of one rank.
    hvd.init()
    torch.manual_seed(args.seed)
    console = Console(quiet=hvd.rank() != 0, highlight=False)
    train_set, test_set = load_data(args.seed)
    model = Net()

    # horovodlike: size() times the batch, so size() times the learning rate.
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum
    )
    # horovodlike: all ranks start from rank 0's state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # horovodlike: step() averages the gradients over the ranks.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Dropout differs between the ranks, as their data does.
    torch.manual_seed(args.seed + 1 + hvd.rank())

    accuracy, seconds, images = train(model, optimizer, train_set, test_set, args, console)
    # horovodlike: the job is as fast as its slowest rank.
    seconds = hvd.allreduce(torch.tensor(seconds, dtype=torch.float64), name="seconds", op=hvd.Max).item()
    console.print(f"test accuracy: {accuracy:.2%}")
    console.print(f"speed: {images / seconds:,.0f} images per second ({seconds:.2f} s of training)")

    hashes = hvd.allgather_object(parameter_hash(model), name="parameter_hash")
    equal = len(set(hashes)) == 1
    if hvd.size() == 1:
        console.print(f"parameters: {hashes[0]}", soft_wrap=True)
    elif equal:
        console.print(f"all {hvd.size()} ranks hold the same parameters: {hashes[0]}", soft_wrap=True)
    else:
        for rank, value in enumerate(hashes):
            console.print(f"rank {rank} holds other parameters than the rest: {value}", soft_wrap=True)
    if args.report is not None and hvd.rank() == 0:
        report = {
            "size": hvd.size(),
            "accuracy": accuracy,
            "seconds": seconds,
            "images_per_second": images / seconds,
            "threads": torch.get_num_threads(),
            "hashes": hashes,
        }
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    hvd.shutdown()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
