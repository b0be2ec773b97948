"""Train on scikit-learn's handwritten digits with workers of a Ray cluster, by `RayExecutor`.

    python digits_executor.py                           # a Ray of this machine's own
    python digits_executor.py --address auto            # on a node of a cluster
    python digits_executor.py --address ray://head:10001  # from elsewhere, by Ray Client

The function `train` is what a script for `hvdrun` would be.
"""

from __future__ import annotations

import argparse

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn

import horovodlike.torch as hvd
from horovodlike.ray import RayExecutor, log

TEST_IMAGES = 360


def train(epochs: int, batch_size: int = 32) -> float:
    """Train on this rank's share. Returns the accuracy on the test images, averaged over the ranks."""
    hvd.init()
    torch.manual_seed(1)
    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    count = (len(images) - TEST_IMAGES) // hvd.size() * hvd.size()
    mine = slice(TEST_IMAGES + hvd.rank(), TEST_IMAGES + count, hvd.size())  # each rank has as many images

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(epochs):
        loss = torch.zeros(())
        for batch, wanted in zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), wanted)
            loss.backward()
            optimizer.step()
        log({"epoch": epoch, "loss": loss.item()})  # rank 0 sends it to the callbacks
    with torch.no_grad():
        right = (model(images[:TEST_IMAGES]).argmax(1) == labels[:TEST_IMAGES]).float().mean()
    accuracy = hvd.allreduce(right).item()
    hvd.shutdown()
    return accuracy


def main() -> None:
    """Start the workers, train, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", metavar="ADDRESS", help="of the cluster (default: start Ray here)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--epochs", type=int, default=15, metavar="N", help="(default: 15)")
    args = parser.parse_args()
    ray.init(address=args.address)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=args.workers)
    executor.start()
    try:
        accuracies = executor.run(train, args=[args.epochs], callbacks=[print])
    finally:
        executor.shutdown()
    print(f"{len(accuracies)} ranks: test accuracy: {accuracies[0]:.2%}")


if __name__ == "__main__":
    main()
