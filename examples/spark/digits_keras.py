"""Train a Keras model on scikit-learn's handwritten digits from a DataFrame of Spark, and predict with it in Spark.

On this machine:     python digits_keras.py --store /tmp/store
On a cluster:        spark-submit --master spark://HOST:7077 digits_keras.py --store /shared/store --ranks 4
"""

from __future__ import annotations

import argparse
import sys

import keras
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from horovodlike.spark.keras import KerasEstimator
from horovodlike.spark.store import Store


def main() -> int:
    """Train, predict, and print the share of right predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a folder, or URL, that all executors reach")
    parser.add_argument("--ranks", type=int, default=2, help="the number of ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default: 12)")
    args = parser.parse_args()
    session = SparkSession.builder.appName("digits").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [([float(pixel) / 16 for pixel in image], int(label)) for image, label in zip(images, labels, strict=True)]
    train, test = session.createDataFrame(rows, ["image", "digit"]).randomSplit([0.8, 0.2], seed=1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    fitted = KerasEstimator(
        num_proc=args.ranks,
        store=Store.create(args.store),
        model=model,
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        feature_cols=["image"],
        label_cols=["digit"],
        batch_size=32,
        epochs=args.epochs,
        partitions_per_process=2,
        random_seed=1,
    ).fit(train)
    predicted = fitted.transform(test).select("digit", "digit__output").collect()
    right = sum(max(range(10), key=row["digit__output"].__getitem__) == row["digit"] for row in predicted)
    print(f"test accuracy: {right / len(predicted):.2%}")
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
