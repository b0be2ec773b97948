"""Train a small CNN on scikit-learn's handwritten digits by Keras's `fit()`, with ranks that come and go.

One process:    python digits_keras.py
Fixed ranks:    hvdrun -np 2 python digits_keras.py
Elastic:        hvdrun --min-np 2 --max-np 4 -np 4 python digits_keras.py

Runs on Keras's TensorFlow and torch backends: set KERAS_BACKEND. Kill one of its processes while it trains: the others
continue from the last commit, and another one takes its place. The lines that make it an elastic job are marked with
`horovodlike:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
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
    parser.add_argument(
        "--batches-per-commit", type=int, default=1, metavar="N", help="steps between commits (default: 1)"
    )
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


def weights_hash(model: keras.Model) -> np.ndarray:
    """Return a digest of every bit of the weights, of shape [1, 32]."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)[None]


# horovodlike: called again, with the ranks that there are, whenever they have changed.
@hvd.elastic.run
def train(
    state: hvd.elastic.KerasState, images: np.ndarray, labels: np.ndarray, args: argparse.Namespace
) -> tuple[float, list[str]]:
    """Trains what is left; returns the test accuracy and the hashes of all ranks' weights."""
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, epoch {state.epoch + 1}, {state.batch} batches of it done", flush=True)
    # horovodlike: each rank trains on its share, of the same size as the others'.
    count = (len(images) - TEST_IMAGES) // hvd.size() * hvd.size()
    mine = slice(TEST_IMAGES + hvd.rank(), TEST_IMAGES + count, hvd.size())
    state.model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch_size,
        initial_epoch=state.epoch,
        epochs=args.epochs,
        callbacks=[
            # horovodlike: a commit is what the others go back to when a rank is lost.
            hvd.elastic.CommitStateCallback(state, args.batches_per_commit),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            # horovodlike: what is shown is the average over the ranks.
            hvd.callbacks.MetricAverageCallback(),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    accuracy = state.model.evaluate(images[:TEST_IMAGES], labels[:TEST_IMAGES], verbose=0)[1]
    return accuracy, [digest.tobytes().hex() for digest in hvd.allgather(weights_hash(state.model))]


def main() -> int:
    """Trains, reports, and returns 1 if the ranks do not hold the same weights, else 0."""
    args = parse_args()
    # horovodlike: start; in an elastic job this waits for a place in it.
    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())
    images, labels = load_data(args.seed)
    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * hvd.size())),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )

    # horovodlike: everything that changes. Rank 0's, or a survivor's, goes to all others.
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    resets = 0

    def adapt() -> None:
        nonlocal resets
        resets += 1
        model.optimizer.learning_rate = args.lr * hvd.size()

    # horovodlike: with other ranks, another batch of all together, and so another learning rate.
    state.register_reset_callbacks([adapt])

    accuracy, hashes = train(state, images, labels, args)
    equal = len(set(hashes)) == 1
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}, after {resets} changes of the ranks")
        print(f"all {len(hashes)} ranks hold the same weights: {hashes[0]}" if equal else f"they differ: {hashes}")
        if args.report is not None:
            report = {"size": len(hashes), "accuracy": accuracy, "resets": resets, "hashes": hashes}
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    hvd.shutdown()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
