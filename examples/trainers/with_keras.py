"""Train a Keras model on scikit-learn's handwritten digits, on Keras's torch backend and 2 ranks, in one of two ways.

`fit()` and horovodlike's optimizer:          KERAS_BACKEND=torch hvdrun -np 2 python with_keras.py
a loop of one's own and DDP over a group:     KERAS_BACKEND=torch hvdrun -np 2 python with_keras.py --backend hvd

The lines that differ from a script for one process are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import keras
import torch
from sklearn.datasets import load_digits
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import horovodlike.keras as hvd

BATCH = 32
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", metavar="NAME", help="train with DDP over this process group, such as hvd or gloo")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="passes over the data (default: 4)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the losses here, as JSON")
    return parser.parse_args()


def share_of_the_data(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images [n, 64] and labels [n] of a rank; all ranks have as many."""
    digits = load_digits()
    count = len(digits.data) // (size * BATCH) * (size * BATCH)
    images, labels = digits.data[rank:count:size] / 16, digits.target[rank:count:size]
    return torch.tensor(images, dtype=torch.float32), torch.tensor(labels)


def make_model() -> keras.Model:
    """Return a perceptron with one hidden layer; the same on all ranks."""
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])


def train_with_fit(epochs: int) -> tuple[int, int, list[float]]:
    """Return rank, size and the loss of each epoch."""
    hvd.init()
    images, labels = share_of_the_data(hvd.rank(), hvd.size())
    model = make_model()
    # horovodlike: the optimizer averages gradients over the ranks.
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss=LOSS)
    # horovodlike: all ranks start from rank 0's weights, and the loss that is shown is the average.
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(images, labels, batch_size=BATCH, epochs=epochs, shuffle=False, callbacks=callbacks, verbose=0)
    return hvd.rank(), hvd.size(), history.history["loss"]


def train_with_ddp(backend: str, epochs: int) -> tuple[int, int, list[float]]:
    """Return rank, size and the loss of each epoch."""
    # horovodlike: the process group has another name; all else is torch's.
    distributed.init_process_group(backend)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    images, labels = share_of_the_data(rank, size)
    model = DistributedDataParallel(make_model())  # on this backend a model of Keras is a torch.nn.Module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(epochs):
        of_batches = []
        for inputs, wanted in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            loss = LOSS(wanted, model(inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            of_batches.append(loss.detach())
        mean = torch.stack(of_batches).mean() / size
        distributed.all_reduce(mean)
        losses.append(mean.item())
    del model  # before its group: a DDP that is the last to use a group of Gloo's may wait for ever when it ends
    distributed.destroy_process_group()
    return rank, size, losses


def main() -> None:
    """Train, and show the loss of each epoch."""
    args = parse_args()
    rank, size, losses = train_with_ddp(args.backend, args.epochs) if args.backend else train_with_fit(args.epochs)
    if rank == 0:
        print(f"{size} ranks, losses:", *(f"{loss:.4f}" for loss in losses))
        if args.report is not None:
            args.report.write_text(json.dumps({"size": size, "losses": losses}) + "\n")


if __name__ == "__main__":
    main()
