"""Train on scikit-learn's handwritten digits with accelerate, on 2 ranks.

    hvdrun -np 2 python with_accelerate.py

The lines that differ from a script for one process are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hvd", metavar="NAME", help="of the process group (default: hvd)")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="passes over the data (default: 4)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the losses here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Train, and show the loss of each epoch."""
    args = parse_args()
    # horovodlike: before Accelerator(), which keeps the group that there is, and on a CPU would make one of Gloo.
    distributed.init_process_group(args.backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(args.epochs):
        of_batches = []
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            of_batches.append(loss.detach())
        losses.append(accelerator.reduce(torch.stack(of_batches).mean(), reduction="mean").item())
    accelerator.print(f"{accelerator.num_processes} ranks, losses:", *(f"{loss:.4f}" for loss in losses))
    if args.report is not None and accelerator.is_main_process:
        args.report.write_text(json.dumps({"size": accelerator.num_processes, "losses": losses}) + "\n")
    accelerator.end_training()  # destroys the group, too


if __name__ == "__main__":
    main()
