"""Train a small CNN on scikit-learn's handwritten digits (1,797 real images of 8x8), with a tape in a `tf.function`.

One process:    python digits_tape.py
Two processes:  hvdrun -np 2 python digits_tape.py

The lines that make it a distributed job are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovodlike.tensorflow as hvd

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
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of one rank (default: 0.03)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the results here, as JSON")
    return parser.parse_args()


def make_model() -> keras.Model:
    """Return a network of two convolutions and two dense layers: 151,306 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def load_data(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the training and the test set; the same split for the same seed on every rank."""
    digits = load_digits()
    images = digits.images[..., np.newaxis].astype(np.float32) / 16.0
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def batches_of(images: np.ndarray, labels: np.ndarray, args: argparse.Namespace) -> tf.data.Dataset:
    """Return this rank's share of the training data, in an order that changes from epoch to epoch."""
    # horovodlike: each rank gets its own share of the training data, as many images on each.
    share = len(images) // hvd.size()
    own = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
    dataset = tf.data.Dataset.from_tensor_slices((images[own], labels[own]))
    return dataset.shuffle(share, seed=args.seed).batch(args.batch_size)


def test_accuracy(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the accuracy on the whole test set; each rank looks at every size-th image of it."""
    images, labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    correct = int((model(images, training=False).numpy().argmax(axis=1) == labels).sum())
    # horovodlike: counts are summed, not accuracies averaged: the shares of the ranks may differ by one image.
    correct, total = hvd.allreduce(tf.constant([correct, len(labels)]), name="test_counts", op=hvd.Sum).numpy()
    return float(correct) / float(total)


def parameter_hash(model: keras.Model) -> str:
    """Return the SHA-256 of all parameters, to the bit."""
    return hashlib.sha256(b"".join(value.tobytes() for value in model.get_weights())).hexdigest()


def train(model: keras.Model, data: Any, args: argparse.Namespace) -> tuple[float, float, int]:
    """Trains; returns the last test accuracy, the seconds spent in training and the images seen by all ranks."""
    (images, labels), (test_images, test_labels) = data
    # horovodlike: size() times the batch, so size() times the learning rate.
    optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # horovodlike: all ranks start from rank 0's state. Of model.variables, the random state of Dropout stays their own.
    hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # horovodlike: the gradients are averaged over the ranks.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = batches_of(images, labels, args)
    accuracy, seconds, images_seen = 0.0, 0.0, 0
    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss = tf.reduce_mean([step(*batch) for batch in batches])
        seconds += time.perf_counter() - start
        images_seen += len(images) // hvd.size() * hvd.size()
        # horovodlike: the metric is averaged over the ranks.
        mean_loss = float(hvd.allreduce(loss, name="train_loss"))
        accuracy = test_accuracy(model, test_images, test_labels)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2d}/{args.epochs}  loss {mean_loss:.4f}  test accuracy {accuracy:.2%}")
    return accuracy, seconds, images_seen


def main() -> int:
    """Trains, reports, and returns 1 if the ranks do not hold the same parameters, else 0."""
    args = parse_args()
    # horovodlike: start; without a launcher this is a job of one rank.
    hvd.init()
    # Dropout differs between the ranks, as their data does. They get the same initial parameters by broadcast.
    keras.utils.set_random_seed(args.seed + hvd.rank())
    model = make_model()
    accuracy, seconds, images = train(model, load_data(args.seed), args)
    # horovodlike: the job is as fast as its slowest rank.
    seconds = float(hvd.allreduce(tf.constant(seconds, tf.float64), name="seconds", op=hvd.Max))
    hashes = hvd.allgather_object(parameter_hash(model), name="parameter_hash")
    equal = len(set(hashes)) == 1
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}")
        print(f"speed: {images / seconds:,.0f} images per second ({seconds:.2f} s of training)")
        which = "hold the same parameters" if equal else "do not hold the same parameters"
        print(f"all {hvd.size()} ranks {which}: {' '.join(dict.fromkeys(hashes))}")
        if args.report is not None:
            report = {
                "size": hvd.size(),
                "accuracy": accuracy,
                "seconds": seconds,
                "images_per_second": images / seconds,
                "hashes": hashes,
            }
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    hvd.shutdown()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
