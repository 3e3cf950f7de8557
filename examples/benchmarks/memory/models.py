"""The models of the table, scaled down: lists of layers with a micro-batch and a loss.

GPT with and without tied weights, ViT, ResNet-50, DenseNet-121, and a network in the manner of VGG whose
convolutions and ReLUs are layers of their own, without batch normalization. They have the depth of the originals
where that fits, and less width, so that a step takes about a second and a rank tens of megabytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "madpipe_vs_pipedream"))
from vision_networks import Bottleneck, DenseLayer, _conv

WORDS, TOKENS, WIDTH, HEADS, BLOCKS = 1500, 64, 192, 6, 6
CLASSES, PIXELS, PATCH = 100, 64, 8


@dataclass(frozen=True)
class Model:
    """A model that each rank builds for itself."""

    layers: Callable[[], list[Any]]
    """Makes the specifications of its layers."""
    micro_batch: Callable[[torch.dtype], tuple[Tensor, Tensor]]
    """Makes inputs, in this type where they are floating, and labels."""


class Attention(nn.Module):
    """Attention of several heads, in torch's own kernel."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A block of a transformer that normalizes first."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Words(nn.Module):
    """Embedding of words and their places."""

    def __init__(self, words: int, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(words, width))
        self.places = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) + self.places


def as_head(embedding: Words, x: Tensor) -> Tensor:
    """Return logits by the embedding's own weight."""
    return F.linear(x, embedding.weight)


class Patches(nn.Module):
    """Embedding of the patches of an image and their places."""

    def __init__(self, patch: int, places: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(places, width))

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.places


class Mean(nn.Module):
    """Mean over all patches, normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).mean(1)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, of words or of classes, in single precision."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), labels.flatten())


def _gpt(*, tied: bool) -> list[Any]:
    embedding = (WORDS, TOKENS, WIDTH)
    ends: tuple[Any, Any] = (LayerSpec(Words, *embedding), LayerSpec(nn.Linear, WIDTH, WORDS, bias=False))
    if tied:
        ends = (
            TiedLayerSpec("words", Words, *embedding),
            TiedLayerSpec("words", Words, *embedding, forward_fn=as_head),
        )
    blocks = [LayerSpec(Block, WIDTH, HEADS, causal=True) for _ in range(BLOCKS)]
    return [ends[0], *blocks, LayerSpec(nn.LayerNorm, WIDTH), ends[1]]


def _vit() -> list[Any]:
    blocks = [LayerSpec(Block, WIDTH, HEADS, causal=False) for _ in range(BLOCKS)]
    patches = LayerSpec(Patches, PATCH, (PIXELS // PATCH) ** 2, WIDTH)
    return [patches, *blocks, LayerSpec(Mean, WIDTH), LayerSpec(nn.Linear, WIDTH, CLASSES)]


class Head(nn.Sequential):
    """Mean over an image, and its classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


class Norm(nn.Sequential):
    """The end of a DenseNet: normalization and its classes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(nn.BatchNorm2d(features), nn.ReLU(inplace=True), Head(features, classes))


class Stem(nn.Sequential):
    """The first convolution of a network for images, with normalization and ReLU."""

    def __init__(self, features: int) -> None:
        super().__init__(*_conv(3, features, 7, 2, 3))


def _resnet50(base: int = 24) -> list[Any]:
    layers: list[Any] = [LayerSpec(Stem, base), LayerSpec(nn.MaxPool2d, 3, 2, 1)]
    inputs = base
    for group, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            width = base * 2**group
            layers.append(LayerSpec(Bottleneck, inputs, width, stride=2 if group > 0 and block == 0 else 1))
            inputs = 4 * width
    return [*layers, LayerSpec(Head, inputs, CLASSES)]


class Transition(nn.Sequential):
    """What stands between two dense blocks: half of the features and of the pixels."""

    def __init__(self, features: int) -> None:
        super().__init__(
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
            nn.Conv2d(features, features // 2, 1, bias=False),
            nn.AvgPool2d(2, 2),
        )


def _densenet121(growth: int = 12) -> list[Any]:
    features = 2 * growth
    layers: list[Any] = [LayerSpec(Stem, features), LayerSpec(nn.MaxPool2d, 3, 2, 1)]
    for block, count in enumerate((6, 12, 24, 16)):
        if block:
            layers.append(LayerSpec(Transition, features))
            features //= 2
        for _ in range(count):
            layers.append(LayerSpec(DenseLayer, features, growth))
            features += growth
    return [*layers, LayerSpec(Norm, features, CLASSES)]


def _vgg() -> list[Any]:
    """The shape of VGG-16: 13 convolutions, 3 linear layers, ReLUs as layers of their own."""
    layers: list[Any] = []
    inputs = 3
    for count, width in ((2, 16), (2, 32), (3, 64), (3, 128), (3, 128)):
        for _ in range(count):
            layers += [LayerSpec(nn.Conv2d, inputs, width, 3, padding=1), LayerSpec(nn.ReLU)]
            inputs = width
        layers.append(LayerSpec(nn.MaxPool2d, 2))
    flat = inputs * (PIXELS // 32) ** 2
    layers += [LayerSpec(nn.Flatten), LayerSpec(nn.Linear, flat, 1024), LayerSpec(nn.ReLU)]
    layers += [LayerSpec(nn.Linear, 1024, 1024), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 1024, CLASSES)]
    return layers


def _text(samples: int) -> Callable[[torch.dtype], tuple[Tensor, Tensor]]:
    def make(_: torch.dtype) -> tuple[Tensor, Tensor]:
        words = torch.randint(WORDS, (samples, TOKENS + 1))
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    return make


def _images(samples: int) -> Callable[[torch.dtype], tuple[Tensor, Tensor]]:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 3, PIXELS, PIXELS, dtype=dtype), torch.randint(CLASSES, (samples,))

    return make


MODELS = {
    "GPT": Model(lambda: _gpt(tied=False), _text(4)),
    "GPT, tied": Model(lambda: _gpt(tied=True), _text(4)),
    "ViT": Model(_vit, _images(4)),
    "ResNet-50": Model(_resnet50, _images(4)),
    "DenseNet-121": Model(_densenet121, _images(4)),
    "VGG": Model(_vgg, _images(8)),
}
