"""Train on records: the digits of scikit-learn as image files, converted to shards, and read by each rank.

    pip install 'horovodlike[torch,examples,records]'
    hvdrun -np 2 python records.py

The first run writes the images, one folder for each digit, to `digits/images`, and their shards to `digits/train` and
`digits/test`, as `hvdrun-records digits/images/train digits/train --records-per-shard 256 --shuffle` does. Later runs
read the shards. The loop is `hvd.Engine`. The lines that make it a distributed job are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import horovodlike.torch as hvd
from horovodlike.data import RecordBatch, RecordReader, StaticPartition, convert_images, list_records

RECORDS_PER_SHARD = 256
BATCH = 32


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the training data (default: 8)")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of one rank (default: 0.03)")
    parser.add_argument("--folder", type=Path, default=Path("digits"), help="of images and shards (default: digits)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the results here, as JSON")
    return parser.parse_args()


def write_records(folder: Path) -> None:
    """Write the images to files, every fifth to the test set, and convert those of a set to shards if it has none."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = "test" if number % 5 == 0 else "train"
        file = folder / "images" / part / str(label) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(file)
    for part in ("train", "test"):
        if not (folder / part).exists():
            convert_images(folder / "images" / part, folder / part, RECORDS_PER_SHARD, shuffle=True)


def decode(record: dict[str, object]) -> tuple[np.ndarray, object]:
    """Return the pixels of an image, from 0 to 1, and its label; called in the thread that reads ahead."""
    image = Image.open(io.BytesIO(record["image"]))  # type: ignore[arg-type]  # bytes
    return np.asarray(image, dtype=np.float32)[np.newaxis] / 240.0, record["label"]


def as_tensors(batch: RecordBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of a batch, [n, 1, 8, 8], and their labels, [n]."""
    images, labels = zip(*batch.records, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def reader(folder: Path) -> RecordReader:
    """Return the records of a folder, of which this rank reads its own."""
    records = list_records(folder)
    # horovodlike: each rank gets its own tasks, parts of shards; the ranks together get each record once in an epoch.
    return RecordReader(records, StaticPartition(records.tasks(64), BATCH, seed=1), decode)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of right answers in a batch."""
    return (output.argmax(1) == target).double().mean()


def main() -> None:
    """Train and test; ranks that hold different parameters are an error."""
    args = parse_args()
    # horovodlike: start; without a launcher this is a job of one rank.
    hvd.init()
    # horovodlike: one rank writes, and the others wait for it.
    if hvd.rank() == 0 and not (args.folder / "test").exists():
        write_records(args.folder)
    hvd.barrier()
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU()
    )
    model.append(nn.Linear(64, 10))
    # horovodlike: size() times the batch, so size() times the learning rate.
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # horovodlike: the loop averages the gradients, and the loss and accuracy that rank 0 prints.
    engine = hvd.Engine(model, nn.functional.cross_entropy, optimizer, metrics={"accuracy": accuracy}, read=as_tensors)
    engine.train(reader(args.folder / "train"), epochs=args.epochs)
    result = engine.evaluate(reader(args.folder / "test"))
    hvd.check_consistency(model.named_parameters())
    if hvd.rank() == 0:
        print(f"test accuracy: {result['accuracy']:.2%}")
        if args.report is not None:
            args.report.write_text(json.dumps({"size": hvd.size(), **result}) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
