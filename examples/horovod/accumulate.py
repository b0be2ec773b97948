"""A CNN on scikit-learn's handwritten digits, trained with Horovod: gradient accumulation, clipping, and a schedule.

horovodrun -np 2 python accumulate.py --batches-per-allreduce 2
"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Handwritten digits with Horovod, accumulating gradients")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--base-lr", type=float, default=0.015)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--max-norm", type=float, default=2.0)
parser.add_argument("--seed", type=int, default=42)


def load_data(seed):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(optimizer, args, epoch, batch, batches):
    """Warm up from the learning rate of one process to that of all of them."""
    progress = (epoch + batch / batches) / max(args.warmup_epochs, 1)
    factor = 1 + min(progress, 1.0) * (hvd.size() - 1)
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * args.batches_per_allreduce * factor


def train(model, optimizer, loader, sampler, args, epoch):
    model.train()
    sampler.set_epoch(epoch)
    loss_metric = Metric("train_loss")
    # Each step takes several batches, whose gradients add up before they are averaged over the ranks.
    for step, (data, target) in enumerate(loader):
        adjust_learning_rate(optimizer, args, epoch, step, len(loader))
        optimizer.zero_grad()
        for start in range(0, len(data), args.batch_size):
            data_batch = data[start : start + args.batch_size]
            target_batch = target[start : start + args.batch_size]
            loss = F.cross_entropy(model(data_batch), target_batch)
            loss_metric.update(loss)
            loss.div(args.batches_per_allreduce).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        with optimizer.skip_synchronize():
            optimizer.step()
    return loss_metric.avg.item()


def test(model, loader):
    model.eval()
    accuracy = Metric("test_accuracy")
    with torch.no_grad():
        for data, target in loader:
            accuracy.update((model(data).argmax(dim=1) == target).float().mean())
    return accuracy.avg.item()


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(args.seed)

    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    train_set, test_set = load_data(args.seed)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=allreduce_batch_size, sampler=train_sampler, drop_last=True)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=60, sampler=test_sampler)

    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(args.epochs):
        loss = train(model, optimizer, train_loader, train_sampler, args, epoch)
        accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: train loss {loss:.4f}, test accuracy {accuracy:.2%}")
    if hvd.rank() == 0:
        print(f"final accuracy on {hvd.size()} ranks: {accuracy:.4f}")


if __name__ == "__main__":
    main()
