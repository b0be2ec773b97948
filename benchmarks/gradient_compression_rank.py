"""One rank of the measurement of compression: `gradient_compression_rank.py FOLDER EPOCHS`, started by hvdrun.

Trains a small CNN on scikit-learn's digits (real images of 8x8) once with each method, from the same parameters and
with the same batches. The methods take turns, an epoch each, so that a disturbance of the machine hits all alike.
Writes FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import horovodlike.torch as hvd

TEST_IMAGES = 360
BATCH = 32  # of a rank

METHODS: dict[str, Callable[[], Any]] = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "bf16": lambda: hvd.Compression.bf16,
    "powersgd(rank=4)": lambda: hvd.Compression.powersgd(rank=4),
    "powersgd(rank=2)": lambda: hvd.Compression.powersgd(rank=2),
    "powersgd(rank=1)": lambda: hvd.Compression.powersgd(rank=1),
    "topk(ratio=0.05)": lambda: hvd.Compression.topk(ratio=0.05),
    "topk(ratio=0.01)": lambda: hvd.Compression.topk(ratio=0.01),
}


def cnn() -> nn.Module:
    """151,306 parameters; the same for every caller."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels, in an order that is the same everywhere."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(digits.target)[order]


class Training:
    """Training with one method."""

    def __init__(self, method: str, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.method = method
        self.images, self.labels = images, labels
        self.model = cnn()
        self.compression = METHODS[method]()
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), compression=self.compression)
        self.batches = torch.Generator().manual_seed(2)
        self.steps = 0
        self.seconds: list[float] = []  # of a step, in each epoch
        self.losses: list[float] = []  # of all training images, after each epoch

    def epoch(self) -> None:
        """Sees every whole batch once."""
        order = torch.randperm(len(self.images), generator=self.batches)
        batches = [batch for batch in order.split(BATCH * hvd.size()) if len(batch) == BATCH * hvd.size()]
        hvd.barrier()
        start = time.perf_counter()
        for batch in batches:
            mine = batch[hvd.rank() :: hvd.size()]
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(self.images[mine]), self.labels[mine]).backward()
            self.optimizer.step()
        self.seconds.append((time.perf_counter() - start) / len(batches))
        self.steps += len(batches)
        with torch.no_grad():
            self.losses.append(functional.cross_entropy(self.model(self.images), self.labels).item())

    def bytes_per_step(self) -> float:
        """Return the bytes that this rank contributes to the collectives of a step."""
        if isinstance(self.compression, hvd.GradientReducer):
            return self.compression.bytes_sent / self.steps
        sent = [self.compression.compress(parameter.grad)[0] for parameter in self.model.parameters()]
        return sum(tensor.numel() * tensor.element_size() for tensor in sent)

    def row(self, test_images: torch.Tensor, test_labels: torch.Tensor) -> dict[str, Any]:
        """Return the row of this method in the table of results."""
        with torch.no_grad():
            accuracy = (self.model(test_images).argmax(1) == test_labels).float().mean().item()
        if len(set(hvd.allgather_object(self.losses[-1]))) > 1:
            raise RuntimeError(f"{self.method}: the ranks do not hold the same parameters")
        return {
            "method": self.method,
            "steps": self.steps,
            "nbytes": self.bytes_per_step(),
            "losses": self.losses,
            "accuracy": accuracy,
            "seconds": statistics.median(self.seconds),
        }


def main() -> None:
    """Trains and writes."""
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    hvd.init()
    images, labels = data()
    train, test = slice(TEST_IMAGES, None), slice(TEST_IMAGES)
    trainings = [Training(method, images[train], labels[train]) for method in METHODS]
    for _ in range(epochs):
        for training in trainings:
            training.epoch()
    rows = [training.row(images[test], labels[test]) for training in trainings]
    (folder / f"{hvd.rank()}.json").write_text(json.dumps({"rows": rows}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
