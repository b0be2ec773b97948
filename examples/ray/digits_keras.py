"""Train a Keras model on scikit-learn's handwritten digits with Ray Train.

    python digits_keras.py
    KERAS_BACKEND=torch python digits_keras.py --address auto

Runs on Keras's TensorFlow and torch backends.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.tensorflow import TensorflowTrainer

from horovodlike.ray import HorovodlikeConfig


def train(config: dict[str, Any]) -> None:
    """Fit on this rank's share, and report the accuracy on the test images with the model."""
    os.environ.setdefault("KERAS_BACKEND", config["backend"])  # before Keras is imported in this process
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    import horovodlike.keras as hvd

    hvd.init()
    keras.utils.set_random_seed(1)
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.data))
    images, labels = digits.data[order].astype("float32") / 16.0, digits.target[order]
    count = (len(images) - 360) // hvd.size() * hvd.size()
    mine = slice(360 + hvd.rank(), 360 + count, hvd.size())
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.003 * hvd.size())),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    model.fit(images[mine], labels[mine], batch_size=32, epochs=config["epochs"], callbacks=callbacks, verbose=0)
    accuracy = model.evaluate(images[:360], labels[:360], verbose=0)[1]
    with tempfile.TemporaryDirectory() as folder:
        kept = None
        if hvd.rank() == 0:
            model.save(Path(folder) / "model.keras")
            kept = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"accuracy": accuracy, "size": hvd.size()}, checkpoint=kept)
    hvd.shutdown()


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", metavar="ADDRESS", help="of the cluster (default: start Ray here)")
    parser.add_argument("--storage", metavar="PATH", help="where checkpoints go (default: ~/ray_results)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="(default: 8)")
    args = parser.parse_args()
    ray.init(address=args.address)
    result = TensorflowTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "backend": os.environ.get("KERAS_BACKEND", "tensorflow")},
        tensorflow_config=HorovodlikeConfig(),  # the line that makes the workers ranks of a job
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(storage_path=args.storage),
    ).fit()
    print(f"{args.workers} ranks: {result.metrics}")


if __name__ == "__main__":
    main()
