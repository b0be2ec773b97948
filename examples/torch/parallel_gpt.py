"""Train a small language model on the reference of the Python language, which every Python ships (`pydoc_data`).

One process:                                    python parallel_gpt.py
Four processes, 2 x 2:                          hvdrun -np 4 python parallel_gpt.py --tensor 2

Each layer is split among `--tensor` ranks, which work on the same sequences (tensor parallelism). There are as many
such groups as the ranks make, each with its own share of the batch (data parallelism). The result does not depend on
the split. The lines that make it a distributed job are marked with `horovodlike:`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

import horovodlike.torch as hvd

WORDS = 128  # the characters of ASCII
HELD_OUT = 1 / 16


class Block(nn.Module):
    """A layer of a transformer: attention to what comes before, and an MLP."""

    def __init__(self, width: int, heads: int, tensor: hvd.ProcessSet) -> None:
        """Draws the initial parameters from torch's global generator."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # horovodlike: each rank of the set has some of the heads, and some of the hidden features.
        self.attention = hvd.nn.ParallelSelfAttention(width, heads, process_set=tensor)
        self.mlp = hvd.nn.ParallelMLP(width, 4 * width, process_set=tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of x, [n, length, width]."""
        x = x + self.attention(self.norm1(x), is_causal=True)
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Gpt(nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, args: argparse.Namespace, tensor: hvd.ProcessSet) -> None:
        """Draws the initial parameters from torch's global generator."""
        super().__init__()
        self.tensor = tensor
        self.position = nn.Parameter(torch.zeros(args.length, args.width))
        self.blocks = nn.Sequential(*(Block(args.width, args.heads, tensor) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        # horovodlike: each rank of the set has some of the characters, with their embeddings and their logits.
        self.embedding = hvd.nn.VocabParallelEmbedding(WORDS, args.width, process_set=tensor)
        self.head = hvd.nn.ColumnParallelLinear(args.width, WORDS, bias=False, gather_output=False, process_set=tensor)
        with torch.no_grad():
            self.embedding.weight.mul_(0.05)
        self.head.weight = self.embedding.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each character of [n, length + 1] but the first."""
        x = self.embedding(characters[:, :-1]) + self.position
        logits = self.head(self.norm(self.blocks(x)))
        # horovodlike: the loss for the whole vocabulary, of logits that stay where they are.
        return hvd.nn.vocab_parallel_cross_entropy(logits, characters[:, 1:], self.tensor)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="ranks that share a layer (default: 1)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of the optimizer (default: 100)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="sequences of all ranks (default: 16)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="characters of a sequence (default: 64)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="features of a character (default: 64)")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="of each attention (default: 4)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of the transformer (default: 2)")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate of Adam (default: 0.005)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="rank 0 also writes the results here, as JSON")
    return parser.parse_args()


def load_text() -> torch.Tensor:
    """Return the characters of the reference, 300,000 or more."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([byte for byte in text.encode("ascii", "ignore")])


def batch_of(text: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """Return random sequences, the same on all ranks: [batch_size, length + 1]."""
    starts = torch.randint(len(text) - args.length, (args.batch_size, 1), generator=generator)
    return text[starts + torch.arange(args.length + 1)]


def sets_of(tensor: int) -> tuple[hvd.ProcessSet, hvd.ProcessSet]:
    """Return the process set that shares this rank's layers, and the one of the ranks with the same parts of them."""
    # horovodlike: neighbours share layers. All ranks register all sets, in the same order.
    size = hvd.size()
    known = {tuple(range(size)): hvd.global_process_set}

    def registered(ranks: range) -> hvd.ProcessSet:
        if tuple(ranks) not in known:
            known[tuple(ranks)] = hvd.add_process_set(ranks)
        return known[tuple(ranks)]

    of_tensor = [registered(range(first, first + tensor)) for first in range(0, size, tensor)]
    of_data = [registered(range(first, size, tensor)) for first in range(tensor)]
    return next(one for one in of_tensor if one.included()), next(one for one in of_data if one.included())


def main() -> int:
    """Trains, reports, and returns 1 if the ranks do not hold the same model, else 0."""
    args = parse_args()
    # horovodlike: start; without a launcher this is a job of one rank.
    hvd.init()
    if args.tensor < 1 or hvd.size() % args.tensor or args.batch_size % (hvd.size() // args.tensor):
        print(f"{hvd.size()} ranks cannot be split in groups of {args.tensor}, or the batch not among the groups")
        return 2
    tensor, data = sets_of(args.tensor)
    # horovodlike: the same seed on all ranks, so each has its part of the same model.
    torch.manual_seed(args.seed)
    model = Gpt(args, tensor)
    # horovodlike: gradients are averaged over the ranks that have the same parts and other sequences.
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr), model.named_parameters(), process_set=data
    )
    text = load_text()
    train, test = text[: -int(len(text) * HELD_OUT)], text[-int(len(text) * HELD_OUT) :]
    generator, losses, start = torch.Generator().manual_seed(args.seed), [], time.perf_counter()
    for step in range(args.steps):
        # horovodlike: a share of the batch for each group.
        share = batch_of(train, args, generator).chunk(data.size())[data.rank()]
        optimizer.zero_grad()
        loss = model(share)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss", process_set=data).item())
        if hvd.rank() == 0 and (step + 1) % 25 == 0:
            print(f"step {step + 1:4d}/{args.steps}  loss {sum(losses[-25:]) / 25:.3f}", flush=True)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        held_out = model(batch_of(test, args, torch.Generator().manual_seed(0))).item()
    # horovodlike: the whole model, in the form that it has without a split, on all ranks.
    state = hvd.nn.full_state_dict(model)
    values = (value.cpu().contiguous().numpy().tobytes() for value in state.values())
    digest = hashlib.sha256(b"".join(values)).hexdigest()
    hashes = hvd.allgather_object(digest, name="hash")
    if hvd.rank() == 0:
        own = sum(parameter.numel() for parameter in model.parameters())
        print(f"loss on text that was held out: {held_out:.3f}; {seconds:.1f} s")
        print(f"{hvd.size()} ranks, {args.tensor} for each layer: {own:,} parameters on this one")
        if args.report is not None:
            report = {"size": hvd.size(), "losses": losses, "held_out": held_out, "own": own, "hashes": hashes}
            args.report.write_text(json.dumps(report, indent=2) + "\n")
    hvd.shutdown()
    return 0 if len(set(hashes)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
