"""Train a small network on scikit-learn's handwritten digits from a DataFrame of Spark, and predict with it in Spark.

On this machine:     python digits_torch.py --store /tmp/store
On a cluster:        spark-submit --master spark://HOST:7077 digits_torch.py --store /shared/store --ranks 4
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from horovodlike.spark.store import Store
from horovodlike.spark.torch import TorchEstimator


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the share of rows with the right digit."""
    return (output.argmax(dim=1) == label).float().mean()


def digits(session: Any) -> tuple[Any, Any]:
    """Return a DataFrame of 80 % of the digits to train on, and one of the others."""
    images, labels = load_digits(return_X_y=True)
    rows = [([float(pixel) / 16 for pixel in image], int(label)) for image, label in zip(images, labels, strict=True)]
    train, test = session.createDataFrame(rows, ["image", "digit"]).randomSplit([0.8, 0.2], seed=1)
    return train, test


def main() -> int:
    """Train, predict, and print the share of right predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a folder, or URL, that all executors reach")
    parser.add_argument("--ranks", type=int, default=2, help="the number of ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default: 12)")
    args = parser.parse_args()
    session = SparkSession.builder.appName("digits").getOrCreate()
    train, test = digits(session)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    estimator = TorchEstimator(
        num_proc=args.ranks,
        store=Store.create(args.store),
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
        loss=torch.nn.functional.cross_entropy,
        metrics=[accuracy],
        feature_cols=["image"],
        label_cols=["digit"],
        validation=0.1,
        batch_size=32,
        epochs=args.epochs,
        partitions_per_process=2,
        random_seed=1,
    )
    fitted = estimator.fit(train)
    print("validation accuracy by epoch:", *(f"{value:.3f}" for value in fitted.getHistory()["val_accuracy"]))
    rows = fitted.transform(test).select("digit", "digit__output").collect()
    right = sum(max(range(10), key=row["digit__output"].__getitem__) == row["digit"] for row in rows)
    print(f"test accuracy: {right / len(rows):.2%}")
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
