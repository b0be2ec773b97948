"""The models that are trained, each with its batch: chosen to cover the shapes that communication meets.

All train with plain SGD on random data that stays the same, float32, one thread. The models in MODELS are trained on
the CPU, and the one whose channels are last if it is asked for; the larger ones on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.training import MLP_WIDTHS

MODELS = ("mlp", "resnet18", "gpt", "tiny")

TITLES = {
    "mlp": "MLP 1024-2048-2048-2048-1024, 12.6 M parameters, batch 32",
    "resnet18": "ResNet-18, 11.2 M parameters, 32x32 images, batch 4",
    "resnet18_channels_last": "ResNet-18, 11.2 M parameters, 32x32 images, batch 4, channels_last",
    "gpt": "GPT, 8 layers of width 256, 6.9 M parameters, batch 2 x 80 tokens",
    "tiny": "400 tiny layers of 1,024 parameters, 0.4 M parameters",
    "resnet50": "ResNet-50, 25.6 M parameters, 224x224 images, batch 32",
    "gpt87m": "GPT, 12 layers of width 768, 86.7 M parameters, batch 64 x 80 tokens",
}

GPT_VOCABULARY = 2048
GPT_CONTEXT = 80


def mlp() -> nn.Module:
    """Few large gradients, little computation: communication dominates."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(MLP_WIDTHS, MLP_WIDTHS[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """Adds the output of `body` to a shortcut."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResidualBlock(Residual):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        super().__init__(body, inputs, outputs, stride)


def _first_layers() -> list[nn.Module]:
    return [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def resnet18() -> nn.Module:
    """He et al. 2016, with the first layers as for large images: 62 gradients of all sizes."""
    layers = _first_layers()
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Bottleneck(Residual):
    """Convolutions of 1x1, 3x3 and 1x1, of which the middle one is narrow, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        outputs = 4 * width
        body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        super().__init__(body, inputs, outputs, stride)


def resnet50() -> nn.Module:
    """He et al. 2016, with the stride in the 3x3 convolutions, for images of 1000 kinds: 161 gradients."""
    layers = _first_layers()
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        feed_forward: torch.Tensor = self.feed_forward(self.norm2(x))
        return x + feed_forward


class Gpt(nn.Module):
    """A decoder-only transformer whose output layer shares the embedding's weights."""

    def __init__(self, width: int = 256, layers: int = 8, heads: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(GPT_VOCABULARY, width)
        self.position = nn.Embedding(GPT_CONTEXT, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        logits = functional.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return logits.flatten(0, 1)


class TinyLayers(nn.Module):
    """Many small gradients and next to no computation: the cost per tensor dominates."""

    def __init__(self, layers: int = 400, width: int = 1024) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([torch.zeros(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift in self.shifts:
            x = x + shift
        return x


def build(model: str) -> nn.Module:
    """Return a model; the same parameters for every caller."""
    torch.manual_seed(1)
    builders: dict[str, Callable[[], nn.Module]] = {
        "mlp": mlp,
        "resnet18": resnet18,
        "resnet18_channels_last": lambda: resnet18().to(memory_format=torch.channels_last),
        "gpt": Gpt,
        "tiny": TinyLayers,
        "resnet50": resnet50,
        "gpt87m": lambda: Gpt(width=768, layers=12, heads=12),
    }
    return builders[model]()


def batch(model: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    if model == "mlp":
        return torch.randn(32, 1024, generator=generator), torch.randint(1024, (32,), generator=generator)
    if model in ("resnet18", "resnet18_channels_last"):
        images, targets = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)
        return (images if model == "resnet18" else images.to(memory_format=torch.channels_last)), targets
    if model == "resnet50":
        return torch.randn(32, 3, 224, 224, generator=generator), torch.randint(1000, (32,), generator=generator)
    if model in ("gpt", "gpt87m"):
        rows = 2 if model == "gpt" else 64
        tokens = torch.randint(GPT_VOCABULARY, (rows, GPT_CONTEXT + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].flatten()
    return torch.randn(1024, generator=generator), torch.zeros(1024)


def sgd(module: nn.Module) -> torch.optim.SGD:
    """Return the optimizer that all train with."""
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def step(
    model: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    device: torch.device | str = "cpu",
) -> Callable[[], None]:
    """Return a function that makes one training step of a module on this device."""
    inputs, targets = (part.to(device) for part in batch(model, rank))
    loss_of = functional.mse_loss if model == "tiny" else functional.cross_entropy

    def training_step() -> None:
        optimizer.zero_grad()
        loss_of(module(inputs), targets).backward()
        optimizer.step()

    return training_step
