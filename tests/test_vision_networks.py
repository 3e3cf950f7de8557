"""The networks of the evaluation against what is known of them, and the computed chains against arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks" / "madpipe_vs_pipedream"))

from computed import Roofline, computed_chain
from vision_networks import densenet121, inception_v3, resnet50, resnet101

COUNTS_ONLY = Roofline("counts operations", flops_per_second=1e9, bytes_per_second=float("inf"))


@pytest.mark.parametrize(
    ("network", "num_parameters", "image_pixels", "giga_multiplications"),
    [  # as torchvision documents its models of these names, Inception without its auxiliary classifier
        (resnet50, 25_557_032, 224, 4.09),
        (resnet101, 44_549_160, 224, 7.80),
        (inception_v3, 23_834_568, 299, 5.71),
        (densenet121, 7_978_856, 224, 2.83),
    ],
)
def test_parameters_and_operations(network, num_parameters, image_pixels, giga_multiplications) -> None:
    chain = computed_chain("network", lambda size: network(size, image_pixels), 1, COUNTS_ONLY)
    assert sum(layer.num_trainable_parameters for layer in chain.layers) == num_parameters
    forward = sum(layer.forward_seconds for layer in chain.layers)
    # Two operations, a multiplication and an addition.
    assert forward / 2 == pytest.approx(giga_multiplications, abs=0.02)
    # The backward multiplies once for the weights and, but in the first layer, once for the input.
    last = chain.layers[-1]
    assert last.backward_seconds == 2 * last.forward_seconds
    first = chain.layers[0]
    assert first.backward_seconds == first.forward_seconds


def test_roofline_by_hand() -> None:
    """16 x 8 by 8 x 4: 1024 operations; 4 bytes each of operands and result, with the bias."""

    def network(size: int):
        return [nn.Linear(8, 4)], (torch.rand(size, 8), torch.rand(size, 4)), lambda output, _: output.sum()

    device = Roofline("by hand", flops_per_second=1024.0, bytes_per_second=float("inf"), efficiency=0.5)
    [layer] = computed_chain("linear", network, 16, device).layers
    assert (layer.forward_seconds, layer.weight_bytes, layer.output_bytes) == (2.0, 4 * 36, 4 * 64)
    assert layer.stash_bytes == 4 * 16 * 8  # the input
    slow_memory = Roofline("by hand", flops_per_second=float("inf"), bytes_per_second=4.0)
    [layer] = computed_chain("linear", network, 16, slow_memory).layers
    assert layer.forward_seconds == (16 * 8 + 36 + 16 * 4) + (16 * 4 + 1)  # the layer, and the sum as its loss
