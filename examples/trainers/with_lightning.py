"""Train on scikit-learn's handwritten digits with Lightning, on 2 ranks in one of two ways.

Strategy "horovodlike":         hvdrun -np 2 python with_lightning.py
DDP over process group "hvd":   hvdrun -np 2 python with_lightning.py --backend hvd

The lines that differ from a script for one process are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovodlike.torch.lightning  # noqa: F401  # horovodlike: registers the strategy


class Digits(pl.LightningModule):
    """A perceptron with one hidden layer."""

    def __init__(self, lr: float) -> None:
        """Draw the initial parameters from torch's global generator."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch of images [n, 64] and labels [n]."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        # horovodlike: sync_dist averages what is logged over the ranks, as with every strategy.
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return loss

    def on_train_epoch_end(self) -> None:
        """Keep the mean loss of the epoch."""
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD. The learning rate stays what it is here, however many ranks there are."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", metavar="NAME", help="train with DDP over this process group, such as hvd or gloo")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="passes over the data (default: 4)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches per step (default: 1)")
    parser.add_argument("--clip", type=float, metavar="NORM", help="the largest norm of a step's gradients")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the losses here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Train, and show the loss of each epoch."""
    args = parse_args()
    pl.seed_everything(1, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)
    # horovodlike: one of the two.
    strategy: str | Strategy = "horovodlike"
    devices: str | int = "auto"
    if args.backend:
        strategy = DDPStrategy(process_group_backend=args.backend)
        devices = int(os.environ["LOCAL_WORLD_SIZE"])  # as many as processes; hvdrun and torchrun set it
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits(lr=0.05)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, losses:", *(f"{loss:.4f}" for loss in model.losses))
        if args.report is not None:
            args.report.write_text(json.dumps({"size": trainer.world_size, "losses": model.losses}) + "\n")


if __name__ == "__main__":
    main()
