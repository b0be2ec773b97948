"""An MLP on scikit-learn's handwritten digits, trained with Horovod: automatic mixed precision on CPUs, with bfloat16.

horovodrun -np 2 python amp.py
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Handwritten digits with Horovod, in mixed precision")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--seed", type=int, default=42)


def load_data(seed):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model, optimizer, loader):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(data)
            loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
    return loss.item()


def test(model, loader, share):
    model.eval()
    correct = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for data, target in loader:
            correct += (model(data).argmax(dim=1) == target).sum().item()
    return metric_average(correct / share, "avg_accuracy")


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)

    train_set, test_set = load_data(args.seed)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=180, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = optim.Adam(model.parameters(), lr=args.lr * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        loss = metric_average(train(model, optimizer, train_loader), "avg_loss")
        accuracy = test(model, test_loader, len(test_sampler))
        if hvd.rank() == 0:
            print(f"epoch {epoch}: train loss {loss:.4f}, test accuracy {accuracy:.2%}")
    if hvd.rank() == 0:
        print(f"final accuracy on {hvd.size()} ranks: {accuracy:.4f}")


if __name__ == "__main__":
    main()
