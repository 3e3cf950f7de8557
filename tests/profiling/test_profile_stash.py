"""The stash of a stage is what its layers together keep alive, by two ways of counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_partition.profiling import LiveBytes, profile_chain
from tests.profiling.networks import HiddenKeeper, Keeper, after_a_step, networks

QUICK = {"warm_up": 1, "repeats": 1, "device": "cpu"}


def kept_alive(layers: list[Any], x: torch.Tensor, loss_fn: Any = torch.sum) -> int:
    """The bytes that live from the end of a real forward of all layers to their backward."""
    with LiveBytes() as live:
        y = x.clone()
        for layer in layers:
            y = layer(y)
        loss = loss_fn(y)
        del y
        return live.current_bytes - loss.numel() * loss.element_size()


@pytest.mark.parametrize("name", networks())
def test_stash_of_a_chain_is_what_a_forward_keeps_alive(name):
    layers, x = networks()[name]
    chain = profile_chain(layers, x, **QUICK)
    after_a_step(layers, x)
    assert sum(layer.stash_bytes for layer in chain.layers) == kept_alive(layers, x)


@pytest.mark.parametrize("name", networks())
def test_a_sum_keeps_nothing_so_the_loss_adds_nothing(name):
    layers, x = networks()[name]
    plain = profile_chain(layers, x, **QUICK)
    summed = profile_chain(layers, (x, None), loss_fn=lambda y, _: y.sum(), **QUICK)
    assert [layer.stash_bytes for layer in summed.layers] == [layer.stash_bytes for layer in plain.layers]


def test_the_loss_is_part_of_the_last_layer():
    layers = [nn.Linear(8, 16), nn.Tanh()]
    x, labels = torch.randn(5, 8), torch.zeros(5, dtype=torch.long)
    chain = profile_chain(layers, (x, labels), loss_fn=nn.functional.cross_entropy, **QUICK)
    together = kept_alive(layers, x, lambda y: nn.functional.cross_entropy(y, labels))
    # The labels are kept, too, and are there anyway for the counter, which did not see them made.
    assert sum(layer.stash_bytes for layer in chain.layers) == together
    without = profile_chain(layers, x, **QUICK)
    assert chain.layers[0].stash_bytes == without.layers[0].stash_bytes
    assert chain.layers[1].stash_bytes > without.layers[1].stash_bytes
    assert chain.layers[1].output_bytes == 5 * 16 * 4  # not the loss


def test_who_pays_by_hand():
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()]
    chain = profile_chain(layers, torch.randn(5, 8), **QUICK)
    sizes = [layer.stash_bytes for layer in chain.layers]
    # ReLU keeps its output, which the second linear layer pays for as its input; tanh pays for its own.
    assert sizes == [4 * 5 * 8, 0, 4 * 5 * 16, 4 * 5 * 4]
    assert [layer.output_bytes for layer in chain.layers] == [4 * 5 * 16, 4 * 5 * 16, 4 * 5 * 4, 4 * 5 * 4]
    assert chain.input_bytes == 4 * 5 * 8


@pytest.mark.parametrize("keeper", [Keeper, HiddenKeeper])
def test_a_layer_that_keeps_n_bytes(keeper):
    layers = [nn.Linear(8, 8), lambda x: keeper.apply(x, 1000)]
    chain = profile_chain(layers, torch.randn(5, 8), **QUICK)
    assert chain.layers[1].stash_bytes == 4 * 1000


def test_a_dropout_keeps_its_mask_and_not_its_input():
    chain = profile_chain([nn.Linear(8, 8), nn.Dropout(0.5), lambda x: x + 1], torch.randn(5, 8), **QUICK)
    mask = chain.layers[1].stash_bytes
    assert mask in (5 * 8, 4 * 5 * 8)  # one byte or one float for each element, as the kernel likes


def test_an_expanded_output_is_stored_once_and_sent_whole():
    layers = [nn.Linear(8, 1), lambda x: x.expand(-1, 50), torch.exp, lambda x: x + 1]
    chain = profile_chain(layers, torch.randn(5, 8), **QUICK)
    assert chain.layers[1].output_bytes == 4 * 5 * 50
    assert chain.layers[1].stash_bytes == 0
    chain = profile_chain(
        [nn.Linear(8, 1), lambda x: x.expand(-1, 50), lambda x: x * x], torch.randn(5, 8), **QUICK
    )
    assert chain.layers[2].stash_bytes == 4 * 5


def test_the_first_layers_that_need_no_gradient_keep_nothing():
    layers, x = networks()["frozen beginning"]
    chain = profile_chain(layers, x, **QUICK)
    assert [layer.stash_bytes for layer in chain.layers[:3]] == [0, 0, 0]
    assert [layer.backward_seconds for layer in chain.layers[:3]] == [0, 0, 0]
    assert all(layer.backward_seconds > 0 for layer in chain.layers[3:])


def test_a_slice_of_a_data_set_is_no_larger_than_itself():
    data = torch.randn(1000, 8)
    chain = profile_chain([nn.Linear(8, 4)], data[10:15], **QUICK)
    assert chain.input_bytes == chain.layers[0].stash_bytes == 4 * 5 * 8


def test_autocast_keeps_the_cast_weights_of_every_micro_batch():
    layers = [nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)]
    x = torch.randn(2, 64)
    chain = profile_chain(layers, x, autocast_dtype=torch.bfloat16, **QUICK)
    with LiveBytes() as live, torch.autocast("cpu", dtype=torch.bfloat16):
        y = layers[1](layers[0](x.clone()))
    torch.clear_autocast_cache()
    assert sum(layer.stash_bytes for layer in chain.layers) == live.current_bytes - 2 * y.numel()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the caller's autocast is as good
        under = profile_chain(layers, x, **QUICK)
    assert [layer.stash_bytes for layer in under.layers] == [layer.stash_bytes for layer in chain.layers]
    assert [layer.output_bytes for layer in under.layers] == [2 * 2 * 64] * 2


def test_transient_is_what_is_needed_only_meanwhile():
    def spacious(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.zeros(10_000)  # gone before the layer returns
        return x + 1

    def frugal(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    layers = [nn.Linear(8, 8), spacious, frugal]
    chain = profile_chain(layers, torch.randn(5, 8), **QUICK)
    assert chain.layers[1].transient_bytes == 40_000 - 4 * 5 * 8  # the output is made only afterwards
    # Its output, a gradient of it and one of its input: the first is no work space.
    assert chain.layers[2].transient_bytes <= 2 * 4 * 5 * 8


@pytest.mark.parametrize("name", networks())
def test_nothing_is_left_in_memory(name):
    with LiveBytes() as live:
        layers, x = networks()[name]
        profile_chain(layers, x, **QUICK)
        del layers, x
        assert live.current_bytes == 0
