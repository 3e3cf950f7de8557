"""VGG-11 without batch normalization: 30 layers, 132,863,336 parameters, as in torchvision's ``vgg11``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

CLASSES = 1000
PIXELS = 64
"""Of an image, in place of 224: the average pooling makes 7 x 7 of any size, so all parameters stay."""
FEATURES = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def layers() -> list[Any]:
    """Return the 30 layers: 21 of features, 1 average pooling, 1 flattening, 7 of the classifier."""
    found: list[Any] = []
    channels = 3
    for each in FEATURES:
        if isinstance(each, str):
            found.append(LayerSpec(nn.MaxPool2d, 2, 2))
        else:
            found += [LayerSpec(nn.Conv2d, channels, each, 3, padding=1), LayerSpec(nn.ReLU, inplace=True)]
            channels = each
    found += [LayerSpec(nn.AdaptiveAvgPool2d, 7), LayerSpec(nn.Flatten)]
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096)):
        found += [LayerSpec(nn.Linear, inputs, outputs), LayerSpec(nn.ReLU, inplace=True), LayerSpec(nn.Dropout)]
    return [*found, LayerSpec(nn.Linear, 4096, CLASSES)]


def model(micro_batch_size: int) -> tuple[list[Any], Any, Any]:
    """Return what ``madpipe profile`` and incremental profiling run."""
    images = torch.randn(micro_batch_size, 3, PIXELS, PIXELS)
    return layers(), (images, torch.randint(CLASSES, (micro_batch_size,))), F.cross_entropy
