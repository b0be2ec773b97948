"""Train a small CNN on scikit-learn's handwritten digits (1,797 real images of 8x8, shipped with the package).

One process:    python digits_fit.py
Two processes:  hvdrun -np 2 python digits_fit.py

Runs on Keras's TensorFlow and torch backends: set KERAS_BACKEND. The lines that make it a distributed job are marked
with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovodlike.keras as hvd

TEST_IMAGES = 360


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs", type=int, default=12, metavar="N", help="passes over the training data (default: 12)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="images per rank and step (default: 32)"
    )
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of one rank (default: 0.001)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the results here, as JSON")
    return parser.parse_args()


def load_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images [1797, 8, 8, 1] and labels [1797], in the same random order on every rank."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.images))
    return digits.images[order, :, :, None].astype("float32") / 16.0, digits.target[order]


def make_model() -> keras.Model:
    """Return two convolutions and two dense layers: 151,306 parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )


def weights_hash(model: keras.Model) -> bytes:
    """Return a digest of every bit of the weights."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return digest.digest()


def main() -> int:
    """Trains, reports, and returns 1 if the ranks do not hold the same weights, else 0."""
    args = parse_args()
    # horovodlike: start; without a launcher this is a job of one rank.
    hvd.init()
    # horovodlike: dropout and the order of the images differ between the ranks.
    keras.utils.set_random_seed(args.seed + hvd.rank())
    images, labels = load_data(args.seed)
    test_set = images[:TEST_IMAGES], labels[:TEST_IMAGES]
    # horovodlike: each rank trains on its share, of the same size as the others'.
    count = (len(images) - TEST_IMAGES) // hvd.size() * hvd.size()
    mine = slice(TEST_IMAGES + hvd.rank(), TEST_IMAGES + count, hvd.size())

    model = make_model()
    model.compile(
        # horovodlike: gradients are averaged; size() times the batch, so size() times the learning rate.
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * hvd.size())),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    start = time.perf_counter()
    model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        callbacks=[
            # horovodlike: all ranks start from rank 0's weights.
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            # horovodlike: what is shown is the average over the ranks.
            hvd.callbacks.MetricAverageCallback(),
            # horovodlike: the large learning rate is reached step by step.
            hvd.callbacks.LearningRateWarmupCallback(args.lr * hvd.size(), warmup_epochs=2),
        ],
        # horovodlike: only rank 0 shows progress.
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - start
    accuracy = model.evaluate(*test_set, verbose=0)[1]
    hashes = [digest.tobytes().hex() for digest in hvd.allgather(np.frombuffer(weights_hash(model), np.uint8)[None])]
    equal = len(set(hashes)) == 1
    if hvd.rank() == 0:
        print(f"backend {keras.backend.backend()}, {hvd.size()} ranks: test accuracy: {accuracy:.2%}")
        if equal:
            print(f"all {hvd.size()} ranks hold the same weights: {hashes[0]}")
        else:
            print("the ranks hold different weights:", *hashes)
        if args.report is not None:
            report = {
                "size": hvd.size(),
                "accuracy": accuracy,
                "seconds": seconds,
                "images_per_second": count * args.epochs / seconds,
                "hashes": hashes,
            }
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    hvd.shutdown()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
