"""The peak of a stage is predicted from its layers alone, and found by an allocator beneath its tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from deepspeed_partition import LayerProfile  # noqa: E402
from deepspeed_partition.engine.runtime.autograd_boundary import Arrived, Departed  # noqa: E402
from deepspeed_partition.profiling import counted_memory, measure_stage, profile_chain  # noqa: E402
from tests.profiling.networks import Checkpointed  # noqa: E402

QUICK = {"warm_up": 1, "repeats": 1, "device": "cpu", "progress": False}
FLOAT = 4
SLACK = 0.005
"""For numbers of a few bytes, such as losses, and an alignment here and there."""


def convolutions() -> tuple[list[Any], torch.Tensor]:
    """In the manner of VGG: a convolution's input is what the ReLU before it keeps; the first layers need most."""
    layers: list[Any] = []
    for inputs, outputs in pairwise((3, 16, 16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return [*layers, nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)], torch.randn(8, 3, 32, 32)


def normalized() -> tuple[list[Any], torch.Tensor]:
    """Convolutions with batch normalization, and ReLU in place."""
    layers = [
        nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        for channels in (3, 16, 16, 16)
    ]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)], torch.randn(8, 3, 32, 32)


def transformer() -> tuple[list[Any], torch.Tensor]:
    """Words, blocks with dropout, and a head."""
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, 0.1, batch_first=True) for _ in range(3)]
    return [nn.Embedding(100, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 100)], torch.randint(100, (8, 32))


def recomputed() -> tuple[list[Any], torch.Tensor]:
    """Layers that the model itself recomputes."""
    layers = [nn.Linear(64, 64), Checkpointed(False), nn.Tanh(), Checkpointed(True), nn.Linear(64, 64)]
    for layer in layers:
        if isinstance(layer, Checkpointed):
            layer.inner = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    return layers, torch.randn(256, 64)


NETWORKS = (convolutions, normalized, transformer, recomputed)


def test_who_keeps_the_tensor_at_a_cut_by_hand():
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh(), nn.Softmax(dim=-1)]
    chain = profile_chain(layers, torch.randn(5, 8), **QUICK)
    # ReLU and the linear layer behind it keep one tensor; tanh and softmax keep their own outputs alone.
    assert [layer.cut_stash_bytes for layer in chain.layers] == [0, FLOAT * 5 * 16, 0, 0, 0]


def test_running_bytes_by_hand():
    rows, inputs, outputs = 64, 128, 32
    layers = [nn.Linear(inputs, inputs), nn.Linear(inputs, outputs, bias=False), nn.Identity()]
    chain = profile_chain(layers, torch.randn(rows, inputs), **QUICK)
    linear = chain.layers[1]
    x, y, weight = (FLOAT * each for each in (rows * inputs, rows * outputs, inputs * outputs))
    assert linear.stash_bytes == x
    assert linear.forward_running_bytes == x + y
    assert linear.running_bytes == x + y + weight + x  # the gradients of the output, the weight and the input


def test_a_first_backward_makes_the_gradients_that_stay():
    """The one of the second weight stays while that of the first one is made; later ones are added up and go."""
    rows, width = 8, 96
    layers = [nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)]
    [both], _ = measure_stage(
        [nn.Sequential(*layers)], torch.randn(rows, width), warm_up=1, repeats=1, device="cpu"
    )
    [one], _ = measure_stage(layers[:1], torch.randn(rows, width), warm_up=1, repeats=1, device="cpu")
    weight, activation = FLOAT * width * width, FLOAT * rows * width
    assert one.memory.first_backward_bytes == one.memory.backward_bytes
    more = both.memory.first_backward_bytes - both.memory.backward_bytes
    assert weight - 3 * activation <= more <= weight


class Patches(nn.Module):
    """Its output is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 96, 8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + 1


def test_a_gradient_that_another_rank_sent_may_have_to_be_copied():
    images = torch.randn(2, 3, 64, 64)
    [layer] = profile_chain([Patches()], images, **QUICK).layers
    x, y, weight = (FLOAT * numbers for numbers in (images.numel(), 2 * 64 * 96, 96 * (3 * 64 + 1)))
    # Two copies of the weight's gradient: one as the kernel makes it. The gradient of the output comes contiguous.
    assert layer.running_bytes - x - 2 * y - 2 * weight < FLOAT * 96 * 3
    found = peak_of_one_micro_batch([Patches()], images, is_first=True)
    assert found <= layer.running_bytes + 6000


def peak_of_one_micro_batch(layers: list[Any], boundary: torch.Tensor, *, is_first: bool) -> int:
    """The most bytes of a forward and a backward of a stage as the engine runs it, its input with them."""
    for repeat in range(2):  # gradients of weights are there from the first time on
        with counted_memory() as memory:
            arrived = Arrived(boundary.clone())
            outputs = arrived._boundary if is_first else arrived.clone()
            arrived._boundary = None
            for layer in layers:
                outputs = layer(outputs)
            departed, shape = Departed(outputs), outputs.shape
            del outputs  # it has left before its gradient comes
            departed.give((torch.ones(shape),))
            departed.root.backward()
            del departed, arrived
        assert repeat == 0 or memory.current_bytes < 1000
    return memory.peak_bytes


def predicted(layers: tuple[LayerProfile, ...]) -> int:
    """What layers before the running one keep, and the running one's bytes."""
    before, most = 0, 0
    for layer in layers:
        most = max(most, before + layer.running_bytes)
        before += layer.stash_bytes
    return most


@pytest.mark.parametrize("network", NETWORKS)
def test_the_peak_of_a_stage_is_that_of_its_running_layers(network):
    layers, x = network()
    chain = profile_chain(layers, x, **QUICK)
    for start in range(len(layers)):
        boundary = x
        with torch.no_grad():
            for layer in layers[:start]:
                boundary = layer(boundary)
        for stop in {start + 1, (start + len(layers)) // 2, len(layers)} - {start}:
            found = peak_of_one_micro_batch(layers[start:stop], boundary, is_first=start == 0)
            expected = predicted(chain.layers[start:stop])
            slack = SLACK * found + 6000
            # The gradient of a layer's output counts until its backward ends, and of a layer of several operations
            # all that its backward begins with.
            most = found + chain.boundary_bytes(stop)
            most += 2 * chain.boundary_bytes(1) if network is normalized else 0
            assert found - slack <= expected <= most + slack, (start, stop, found, expected)


def test_what_a_loss_keeps_is_not_recomputed():
    """A layer whose output goes to a loss is run again without it."""
    layers, x = [nn.Linear(8, 8), nn.Linear(8, 5)], torch.randn(4, 8)
    labels = torch.zeros(4, dtype=torch.long)
    chain = profile_chain(layers, (x, labels), loss_fn=nn.functional.cross_entropy, **QUICK)
    assert [layer.recomputable for layer in chain.layers] == [True, False]
    assert [layer.recomputable for layer in profile_chain(layers, x, **QUICK).layers] == [True, True]
