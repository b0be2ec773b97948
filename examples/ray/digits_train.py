"""Train on scikit-learn's handwritten digits with Ray Train: data, checkpoints and metrics are Ray's.

    python digits_train.py
    python digits_train.py --address auto --storage s3://bucket/runs

Ray Data gives each rank its share of the images. After a failure Ray Train starts the workers again, and the function
continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import torch
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

import horovodlike.torch as hvd
from horovodlike.ray import HorovodlikeConfig


def train(config: dict[str, Any]) -> None:
    """Train on this rank's share; rank 0 reports a checkpoint after each epoch."""
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(first, config["epochs"]):
        right, seen = 0, 0
        for batch in shard.iter_torch_batches(batch_size=32, dtypes=torch.float32, drop_last=False):
            labels = batch["label"].long()
            outputs = model(batch["image"] / 16.0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(outputs, labels).backward()
            optimizer.step()
            right, seen = right + int((outputs.argmax(1) == labels).sum()), seen + len(labels)
        counts = hvd.allreduce(torch.tensor([right, seen]), op=hvd.Sum)
        metrics = {"epoch": epoch, "accuracy": (counts[0] / counts[1]).item(), "images": int(counts[1])}
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if hvd.rank() == 0:
                torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder) / "state.pt")
                kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=kept)
    hvd.shutdown()


def main() -> None:
    """Train, and print the metrics of the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", metavar="ADDRESS", help="of the cluster (default: start Ray here)")
    parser.add_argument("--storage", metavar="PATH", help="where checkpoints go (default: ~/ray_results)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="(default: 8)")
    args = parser.parse_args()
    ray.init(address=args.address)
    digits = load_digits()
    # As many images for each rank, so that all take as many steps.
    count = len(digits.data) // args.workers * args.workers
    images = ray.data.from_items(
        [
            {"image": image, "label": int(label)}
            for image, label in zip(digits.data[:count], digits.target[:count], strict=True)
        ]
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        torch_config=HorovodlikeConfig(),  # the line that makes the workers ranks of a job
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            storage_path=args.storage, failure_config=ray.train.FailureConfig(max_failures=1)
        ),
        datasets={"train": images},
        dataset_config=ray.train.DataConfig(datasets_to_split=["train"]),
    )
    result = trainer.fit()
    print(f"{args.workers} ranks: {result.metrics}")


if __name__ == "__main__":
    main()
