"""The four networks of the MadPipe paper's evaluation as chains of layers, for 1000 x 1000 images.

Each is a function of the micro-batch size that returns its layers, one micro-batch and the loss, so that the
profiler measures it where there is a GPU that can::

    cd examples/benchmarks/madpipe_vs_pipedream
    madpipe profile vision_networks.py:resnet50 --micro-batch 8 -o resnet50.json

The chains are as fine as one tensor between layers allows: a residual block, an inception module, one layer of
a dense block (whose output is all features of its block so far) is one layer. Sources: He et al. 2016, table 1
(stride in the 3 x 3 convolution, as most implementations have it); Szegedy et al. 2016, table 1 and figures 5
to 7, without the auxiliary classifier; Huang et al. 2017, table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 1000
IMAGE_PIXELS = 1000

Network = tuple[list[nn.Module], tuple[Tensor, Tensor], Callable[[Tensor, Tensor], Tensor]]


def resnet50(micro_batch_size: int, image_pixels: int = IMAGE_PIXELS) -> Network:
    return _network([*_resnet((3, 4, 6, 3)), *_head(2048)], micro_batch_size, image_pixels)


def resnet101(micro_batch_size: int, image_pixels: int = IMAGE_PIXELS) -> Network:
    return _network([*_resnet((3, 4, 23, 3)), *_head(2048)], micro_batch_size, image_pixels)


def densenet121(micro_batch_size: int, image_pixels: int = IMAGE_PIXELS) -> Network:
    return _network(_densenet((6, 12, 24, 16), growth=32), micro_batch_size, image_pixels)


def inception_v3(micro_batch_size: int, image_pixels: int = IMAGE_PIXELS) -> Network:
    return _network([*_inception(), *_head(2048)], micro_batch_size, image_pixels)


NETWORKS = {
    "ResNet-50": resnet50,
    "ResNet-101": resnet101,
    "Inception-v3": inception_v3,
    "DenseNet-121": densenet121,
}


def _network(layers: list[nn.Module], micro_batch_size: int, image_pixels: int) -> Network:
    images = torch.rand(micro_batch_size, 3, image_pixels, image_pixels)
    return layers, (images, torch.randint(NUM_CLASSES, (micro_batch_size,))), F.cross_entropy


def _head(num_features: int) -> list[nn.Module]:
    return [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_features, NUM_CLASSES))]


def _conv(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: object = 0
) -> nn.Module:
    """Convolution, normalization, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),  # type: ignore[arg-type]
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


# ResNet


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            _conv(inputs, width, 1),
            _conv(width, width, 3, stride, 1),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def _resnet(num_blocks: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = [_conv(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for group, count in enumerate(num_blocks):
        for block in range(count):
            width = 64 * 2**group
            layers.append(Bottleneck(inputs, width, stride=2 if group > 0 and block == 0 else 1))
            inputs = 4 * width
    return layers


# DenseNet


class DenseLayer(nn.Module):
    """Adds ``growth`` features to those that it is given."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], dim=1)


def _densenet(num_layers: Sequence[int], growth: int) -> list[nn.Module]:
    features = 2 * growth
    layers: list[nn.Module] = [_conv(3, features, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    for block, count in enumerate(num_layers):
        if block > 0:
            layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(features),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(features, features // 2, 1, bias=False),
                    nn.AvgPool2d(2, 2),
                )
            )
            features //= 2
        for _ in range(count):
            layers.append(DenseLayer(features, growth))
            features += growth
    return [*layers, nn.Sequential(nn.BatchNorm2d(features), nn.ReLU(inplace=True), *_head(features))]


# Inception-v3


class Branches(nn.Module):
    """Several paths from one input, whose outputs are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _module_a(inputs: int, pooled: int) -> Branches:
    """Build the module of 35 x 35 in the paper: 5 x 5 convolutions, the double ones as two of 3 x 3."""
    return Branches(
        _conv(inputs, 64, 1),
        nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5, padding=2)),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, padding=1)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, pooled, 1)),
    )


def _reduction_a(inputs: int) -> Branches:
    return Branches(
        _conv(inputs, 384, 3, 2),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _factorized(widths: Sequence[int], *, rows_first: bool) -> list[nn.Module]:
    """n x n convolutions as pairs of 1 x 7 and 7 x 1."""
    shapes = [((7, 1), (3, 0)), ((1, 7), (0, 3))]
    if not rows_first:
        shapes.reverse()
    return [
        _conv(before, after, shapes[place % 2][0], padding=shapes[place % 2][1])
        for place, (before, after) in enumerate(pairwise(widths))
    ]


def _module_b(width: int) -> Branches:
    """Build the module of 17 x 17 in the paper."""
    return Branches(
        _conv(768, 192, 1),
        nn.Sequential(_conv(768, width, 1), *_factorized([width, width, 192], rows_first=False)),
        nn.Sequential(_conv(768, width, 1), *_factorized([width, width, width, width, 192], rows_first=True)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(768, 192, 1)),
    )


def _reduction_b() -> Branches:
    return Branches(
        nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, 2)),
        nn.Sequential(_conv(768, 192, 1), *_factorized([192, 192, 192], rows_first=False), _conv(192, 192, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _module_c(inputs: int) -> Branches:
    """Build the module of 8 x 8 in the paper: the filter bank's outputs expanded."""

    def split() -> Branches:
        return Branches(_conv(384, 384, (1, 3), padding=(0, 1)), _conv(384, 384, (3, 1), padding=(1, 0)))

    return Branches(
        _conv(inputs, 320, 1),
        nn.Sequential(_conv(inputs, 384, 1), split()),
        nn.Sequential(_conv(inputs, 448, 1), _conv(448, 384, 3, padding=1), split()),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, 192, 1)),
    )


def _inception() -> list[nn.Module]:
    return [
        _conv(3, 32, 3, 2), _conv(32, 32, 3), _conv(32, 64, 3, padding=1), nn.MaxPool2d(3, 2),
        _conv(64, 80, 1), _conv(80, 192, 3), nn.MaxPool2d(3, 2),
        _module_a(192, 32), _module_a(256, 64), _module_a(288, 64), _reduction_a(288),
        _module_b(128), _module_b(160), _module_b(160), _module_b(192), _reduction_b(),
        _module_c(1280), _module_c(2048),
    ]  # fmt: skip
