"""Bytes read in the middle of training are those of the profiler, and training does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deepspeed_partition.planner.problem import LayerProfile
from deepspeed_partition.profiling import LiveBytes, allocated, layer_profiles, profile_chain
from deepspeed_partition.profiling.in_place_memory import InPlaceMemory
from deepspeed_partition.profiling.measure import MeasuredLayer, Spread
from tests.exhaustive import is_exhaustive
from tests.profiling.networks import after_a_step, frozen, networks

LOSSES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "sum": lambda y, _: y.sum(),
    "square": lambda y, _: (y * y).mean(),
}
LOSSES_WATCHED = [
    (loss, watched) for number, loss in enumerate(LOSSES) for watched in (0, 1)
    if is_exhaustive() or watched == number % 2
]  # fmt: skip
"""Which micro-batch is watched, with which loss: each of both, with another loss, where not everything runs."""

NUM_MICRO_BATCHES = 3
CPU = torch.device("cpu")
NO_TIME = Spread(median_seconds=0.0, interquartile_seconds=0.0)


def train(
    layers: list[Any], x: torch.Tensor, loss_fn: Any, watched: int | None, device: torch.device = CPU
) -> tuple[InPlaceMemory, list[torch.Tensor]]:
    """A step with two micro-batches in flight, one of them watched; with the gradients."""
    module = nn.ModuleList([layer for layer in layers if isinstance(layer, nn.Module)])
    torch.manual_seed(1)
    module.zero_grad(set_to_none=True)
    memory = InPlaceMemory(device, module, None if loss_fn is None else len(layers) - 1)
    functions = [memory.watched_layer(place, layer) for place, layer in enumerate(layers)]
    loss = memory.watched_loss(loss_fn)
    in_flight: list[torch.Tensor] = []

    def forward() -> None:
        y = x.clone()
        for function in functions:
            y = function(y)
        in_flight.append(y if loss_fn is None else loss(y, None))

    def backward() -> None:
        root = in_flight.pop(0)
        if root.requires_grad:
            root.backward(torch.ones_like(root))

    for number in range(NUM_MICRO_BATCHES + 1):
        if number < NUM_MICRO_BATCHES:
            with memory.forward() if number == watched else nullcontext():
                forward()
        if number > 0:
            with memory.backward() if number - 1 == watched else nullcontext():
                backward()
    return memory, [weight.grad for weight in module.parameters() if weight.grad is not None]


def profiles(memory: InPlaceMemory) -> list[LayerProfile]:
    return layer_profiles([
        MeasuredLayer(
            name=str(layer), type="", forward=NO_TIME, backward=NO_TIME, weight_bytes=0,
            trainable_parameters=(), buffer_bytes=0,
            input_tensor_bytes=found.input_tensor_bytes, output_bytes=found.output_bytes, memory=found.memory,
        )
        for layer, found in sorted(memory.found.items())
    ])  # fmt: skip


@pytest.mark.parametrize("loss, watched", LOSSES_WATCHED)
@pytest.mark.parametrize("name", networks())
def test_bytes_in_place_are_those_of_the_profiler(name, loss, watched):
    """Of the first micro-batch of a step, whose gradients stay, and of one that adds to them."""
    layers, x = networks()[name]
    loss_fn = LOSSES[loss]
    sample = x if loss_fn is None else (x, None)
    chain = profile_chain(layers, sample, loss_fn=loss_fn, warm_up=1, repeats=1, device="cpu")
    after_a_step(layers, x)
    memory, _ = train(layers, x, loss_fn, watched)
    found = profiles(memory)
    assert len(found) == len(layers)
    received = chain.input_bytes
    for layer, expected in zip(found, chain.layers, strict=True):
        sizes = layer.stash_bytes, layer.output_bytes
        assert sizes == (expected.stash_bytes, expected.output_bytes), expected.name
        # A gradient that a layer hands through is copied by the profiler alone, whose leaf keeps it. One that
        # comes as a view in another order, as from an LSTM, may have to be copied; one that is contiguous where
        # the output is not, too, and the profiler takes the one that needs more.
        copied = expected.output_bytes if name == "recurrent" else 0
        handed = received if name in ("nothing kept", "kept out of sight") else 0
        least, most = expected.transient_bytes - handed - copied, expected.transient_bytes + copied
        assert least <= layer.transient_bytes <= most, expected.name
        received = expected.output_bytes


class Allocator(LiveBytes):
    """Counts as that of a GPU does: all tensors, whoever made them, and a peak that others set back."""

    @contextmanager
    def in_the_place_of_cuda(self) -> Iterator[None]:
        counters = {
            "memory_allocated": lambda _: self.current_bytes,
            "max_memory_allocated": lambda _: self.peak_bytes,
            "reset_peak_memory_stats": lambda _: self.reset_peak(),
        }
        with patch.multiple(torch.cuda, **counters), self:
            yield


@pytest.mark.parametrize("name", networks())
def test_bytes_of_an_allocator_are_those_that_are_counted(name):
    layers, x = networks()[name]
    train(layers, x, LOSSES["square"], None)  # what layers make once
    for watched in (0, 1):
        # Tensors alone, in both: the allocator of this device has work spaces, too.
        with patch.object(allocated, "_counts_on_cpu", lambda: False):
            expected, _ = train(layers, x, LOSSES["square"], watched)
        with Allocator().in_the_place_of_cuda():
            found, _ = train(layers, x, LOSSES["square"], watched, torch.device("cuda"))
        assert found.found == expected.found


@pytest.mark.parametrize("name", networks())
def test_training_does_not_notice(name):
    layers, x = networks()[name]
    grads = [train(layers, x, LOSSES["square"], watched)[1] for watched in (None, 0, 2)]
    for found in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, grads[0], strict=True))
    weights = [weight for layer in layers if isinstance(layer, nn.Module) for weight in layer.parameters()]
    assert not any(weight._post_accumulate_grad_hooks for weight in weights)


def test_nothing_is_kept():
    layers, x = networks()["transformer"]
    with LiveBytes() as live:
        memory, grads = train(layers, x, LOSSES["square"], 0)
        kept = sum(gradient.numel() * gradient.element_size() for gradient in grads)
        assert memory.found and live.current_bytes == kept


class Remembering(nn.Linear):
    """Holds what it made last, which the graph does not need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = torch.zeros(1000)
        return super().forward(x)


def test_what_a_later_forward_replaces_is_not_kept_for_the_backward():
    layers, x = [Remembering(8, 8), nn.Tanh()], torch.randn(5, 8)
    memory, _ = train(layers, x, None, 0)
    assert profiles(memory)[0].stash_bytes == 4 * 5 * 8


class AsView(nn.Linear):
    """Hands on a view of what it made, at least."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).t()


class Differentiates(nn.Module):
    """Adds a gradient with respect to its input, as a force in a model of energies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        [force] = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)
        return x + force


@pytest.mark.parametrize("watched", [0, 1])
@pytest.mark.parametrize("second", [nn.ReLU(), nn.ReLU(inplace=True), Differentiates()], ids=str)
@pytest.mark.parametrize("first", [AsView, nn.Linear])
def test_the_next_layer_does_not_change_what_is_read_of_a_backward(first, second, watched):
    """A view that it changes in place, and a gradient that it asks for in its forward, hide or bring arrivals."""
    network = [nn.Tanh(), first(8, 8), second, nn.Linear(5 if first is AsView else 8, 8)]
    chain = profile_chain(network, torch.randn(5, 8), warm_up=1, repeats=1, device="cpu")
    memory, _ = train(network, torch.randn(5, 8), None, watched)
    assert profiles(memory)[1].transient_bytes == chain.layers[1].transient_bytes > 0


def test_the_inputs_say_how_many_samples_there_are():
    memory, _ = train([nn.Linear(8, 8), nn.Tanh(), torch.sum], torch.randn(5, 8), None, 0)
    assert [memory.found[layer].num_samples for layer in range(3)] == [5, 5, 5]
    memory, _ = train([nn.Linear(8, 8), torch.sum, torch.exp], torch.randn(5, 8), None, 0)
    assert memory.found[2].num_samples is None


def test_what_is_no_tensor_between_layers_is_not_found():
    layers = [nn.Linear(8, 8), lambda x: {"y": x}, lambda given: given["y"], frozen(nn.Linear(8, 8))]
    memory, _ = train(layers, torch.randn(5, 8), LOSSES["sum"], 0)
    assert sorted(memory.found) == [0, 3]


def test_where_nothing_is_watched_nothing_is_found():
    memory, _ = train([nn.Linear(8, 8), nn.Tanh()], torch.randn(5, 8), LOSSES["sum"], None)
    assert memory.found == {}
