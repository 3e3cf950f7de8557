"""Models of the benchmark of mCAP: their sizes are those of the papers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/benchmarks/mcap"))
import amoebanet
import vgg11


def test_amoebanet_has_the_parameters_of_the_papers():
    """(18, 208) and (36, 544) are in the table of GPipe's paper: 82 million and 1.05 billion."""
    assert amoebanet.num_parameters(36, 544) == 1_055_832_376
    assert round(amoebanet.num_parameters(18, 208), -6) == 82_000_000
    assert len(amoebanet.layers(36, 544)) == 42


def test_amoebanet_trains():
    layers, (x, labels), loss_fn = amoebanet.small(2)
    built = [spec.build() for spec in layers]
    for layer in built:
        x = layer(x)
    loss_fn(x, labels).backward()
    assert all(weight.grad is not None for layer in built for weight in layer.parameters())


def test_vgg11_has_30_layers_and_torchvisions_parameters():
    layers, (images, _), _ = vgg11.model(1)
    with torch.device("meta"):
        built = [spec.build() for spec in layers]
    x = images.to("meta")
    for layer in built:
        x = layer(x)
    assert len(built) == 30 and x.shape == (1, 1000)
    assert sum(weight.numel() for layer in built for weight in layer.parameters()) == 132_863_336
