"""Train a small CNN on scikit-learn's handwritten digits, with ranks that come and go.

One process:    python digits_torch.py
Fixed ranks:    hvdrun -np 2 python digits_torch.py
Elastic:        hvdrun --min-np 2 --max-np 4 -np 4 python digits_torch.py

Kill one of its processes while it trains: the others continue from the last commit, and another one takes its place.
The lines that make it an elastic job are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovodlike.torch as hvd

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
    parser.add_argument(
        "--batches-per-commit", type=int, default=1, metavar="N", help="steps between commits (default: 1)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the results here, as JSON")
    return parser.parse_args()


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set; the same split for the same seed on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Return two convolutions and two linear layers: 151,306 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def test_accuracy(model: nn.Module, test_set: TensorDataset) -> float:
    """Returns the accuracy on the whole test set; each rank looks at every size-th image of it."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test_set.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.stack([correct, torch.tensor(len(labels))])
    correct, total = hvd.allreduce(counts, name="test_counts", op=hvd.Sum).tolist()
    return float(correct) / float(total)


def parameter_hash(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, to the bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


# horovodlike: called again, with the ranks that there are, whenever they have changed.
@hvd.elastic.run
def train(
    state: hvd.elastic.TorchState, train_set: TensorDataset, test_set: TensorDataset, args: argparse.Namespace
) -> tuple[float, list[str]]:
    """Trains what is left; returns the test accuracy and the hashes of all ranks' parameters."""
    model, optimizer, sampler = state.model, state.optimizer, state.sampler
    torch.manual_seed(args.seed + 1 + hvd.rank())  # dropout differs between the ranks, as their data does
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, epoch {state.epoch + 1}, {sampler.processed_num} images of it done", flush=True)
    accuracy = 0.0
    while state.epoch < args.epochs:
        model.train()
        # horovodlike: what is left of the epoch, divided among the ranks.
        loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
        for batch, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            # horovodlike: a commit is what the others go back to when a rank is lost.
            sampler.record_batch(batch, len(labels))
            if (batch + 1) % args.batches_per_commit == 0:
                state.commit()
        accuracy = test_accuracy(model, test_set)
        if hvd.rank() == 0:
            print(
                f"epoch {state.epoch + 1:2d}/{args.epochs}  {hvd.size()} ranks  test accuracy {accuracy:.2%}",
                flush=True,
            )
        # horovodlike: at the end of the epoch: what has been processed belongs to it.
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()
    if accuracy == 0.0:  # a rank was lost after the last epoch
        accuracy = test_accuracy(model, test_set)
    return accuracy, hvd.allgather_object(parameter_hash(model), name="parameter_hash")


def main() -> int:
    """Trains, reports, and returns 1 if the ranks do not hold the same parameters, else 0."""
    args = parse_args()
    # horovodlike: start; in an elastic job this waits for a place in it.
    hvd.init()
    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args.seed)
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

    # horovodlike: everything that changes. Rank 0's, or a survivor's, goes to all others.
    sampler = hvd.elastic.ElasticSampler(train_set, shuffle=True, seed=args.seed)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    resets = 0

    def adapt() -> None:
        nonlocal resets
        resets += 1
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    # horovodlike: with other ranks, another batch of all together, and so another learning rate.
    state.register_reset_callbacks([adapt])

    accuracy, hashes = train(state, train_set, test_set, args)
    equal = len(set(hashes)) == 1
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.2%}, after {resets} changes of the ranks")
        print(f"all {len(hashes)} ranks hold the same parameters: {hashes[0]}" if equal else f"they differ: {hashes}")
        if args.report is not None:
            report = {"size": len(hashes), "accuracy": accuracy, "resets": resets, "hashes": hashes}
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    hvd.shutdown()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
