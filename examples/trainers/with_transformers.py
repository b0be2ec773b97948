"""Train a tiny vision transformer on scikit-learn's handwritten digits with the Trainer of transformers, on 2 ranks.

    hvdrun -np 2 python with_transformers.py

The model is made from a configuration, and nothing is downloaded. The lines that differ from a script for one process
are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Digits(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """1,797 images as the model takes them."""

    def __init__(self) -> None:
        """Read the images, which scikit-learn brings along."""
        digits = load_digits()
        self.images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one image and its label."""
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hvd", metavar="NAME", help="of the process group (default: hvd)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of the optimizer (default: 20)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the losses here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Train, and show the mean loss of every five steps."""
    args = parse_args()
    # horovodlike: before TrainingArguments(), which keeps the group that there is.
    distributed.init_process_group(args.backend)
    torch.manual_seed(1)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=10,
            initializer_range=0.2,  # the default is for much larger models
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=16,
                max_steps=args.steps,
                learning_rate=5e-3,
                average_tokens_across_devices=False,  # there are no tokens: the loss would be multiplied by the ranks
                logging_steps=5,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                seed=1,
            ),
            train_dataset=Digits(),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    size = distributed.get_world_size()
    if trainer.is_world_process_zero():
        print(f"{size} ranks, losses:", *(f"{loss:.4f}" for loss in losses))
        if args.report is not None:
            args.report.write_text(json.dumps({"size": size, "losses": losses}) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
