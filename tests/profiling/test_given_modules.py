"""Modules that a specification is given, and that its class changes when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition.given_modules import built_aside, put_back_as_given


class Loading(nn.Module):
    """A layer that gives a part of a whole model its weights, as where a model was made without data."""

    def __init__(self, whole: nn.Module, *, rate: float = 0.5) -> None:
        super().__init__()
        self.part = whole.part
        del self.part.weight.name_in_the_file
        self.part.weight = nn.Parameter(torch.full((2, 2), rate))
        self.part.bias.data = torch.ones_like(self.part.bias)
        self.part.register_buffer("scale", torch.tensor(rate))
        self.part.num_built = getattr(self.part, "num_built", 0) + 1


@pytest.fixture
def whole() -> nn.Module:
    whole = nn.Module()
    whole.part = nn.Linear(2, 2)
    whole.part.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    whole.part.weight.name_in_the_file = "part.weight"
    nn.init.zeros_(whole.part.bias)
    return whole


def test_what_is_built_aside_leaves_no_trace(whole: nn.Module) -> None:
    spec, weight = LayerSpec(Loading, whole), whole.part.weight
    for _ in range(3):
        with built_aside(spec, spec.build) as built:
            assert built.part.num_built == 1 and built.part.weight[0, 0] == 0.5
        assert whole.part.weight is weight and weight.name_in_the_file == "part.weight"
        assert torch.equal(whole.part.bias, torch.zeros(2))
        assert not hasattr(whole.part, "num_built") and not dict(whole.named_buffers())


def test_a_layer_that_trains_keeps_what_it_has(whole: nn.Module) -> None:
    spec = LayerSpec(Loading, whole)
    with built_aside(spec, spec.build):
        pass
    layer = spec.build()
    weight, bias = layer.part.weight, layer.part.bias
    with torch.no_grad():
        for each in (weight, bias):
            each.fill_(7)
    bias.data = bias.data.bfloat16()
    gradients = []
    accumulator = bias.expand_as(bias).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: gradients.append(1))
    hook = layer.part.register_forward_pre_hook(lambda *_: None)
    with built_aside(spec, spec.build, layer) as built:
        assert built.part.weight is not weight
        assert not layer.part._forward_pre_hooks, "it is built of what it was given"
    assert layer.part.weight is weight and layer.part.bias is bias
    assert weight.eq(7).all() and bias.eq(7).all() and layer.part.num_built == 1
    assert bias.dtype == torch.bfloat16
    bias.sum().backward()
    assert gradients == [1], "hooks of an engine on the gradients are there"
    assert len(layer.part._forward_pre_hooks) == 1
    hook.remove()
    assert not layer.part._forward_pre_hooks, "the handle knows its table"


def test_a_layer_that_comes_back_is_built_of_what_its_specification_was_given(whole: nn.Module) -> None:
    spec = LayerSpec(Loading, whole)
    with built_aside(spec, spec.build):
        pass
    for _ in range(2):
        put_back_as_given(spec)
        assert spec.build().part.num_built == 1


def test_what_changes_nothing_that_it_is_given_is_not_looked_at_again(whole: nn.Module) -> None:
    spec = LayerSpec(nn.Sequential, whole.part)
    with built_aside(spec, spec.build):
        pass
    whole.part.later = 1
    with built_aside(spec, spec.build):
        pass
    put_back_as_given(spec)
    assert whole.part.later == 1


class Writing(nn.Module):
    """A layer that writes to what it takes, as Hugging Face's ``_init_weights``, and sets what may be set."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part.requires_grad_(True).train()
        self.part.weight.data.normal_()
        torch._foreach_mul_([self.part.bias.data], 0.5)


def test_numbers_are_as_they_were_given() -> None:
    """A class that halves weights halved them three times, one that reads a file read it over trained weights."""
    part = nn.Linear(2, 2)
    given = [each.detach().clone() for each in part.parameters()]
    spec = LayerSpec(Writing, part)
    for _ in range(2):
        with built_aside(spec, spec.build):
            assert torch.equal(part.bias, given[1] / 2) and not torch.equal(part.weight, given[0])
        assert all(map(torch.equal, part.parameters(), given))


def test_a_layer_that_trains_keeps_numbers_and_what_a_script_sets() -> None:
    """It was drawn anew, and trained what the script had frozen, where its class had changed nothing at first."""
    part = nn.Linear(2, 2)
    spec = LayerSpec(Writing, part)
    with built_aside(spec, spec.build):
        pass
    layer = spec.build()
    layer.part.weight.requires_grad_(False)
    layer.part.eval()
    kept = [each.detach().clone() for each in layer.parameters()]
    with built_aside(spec, spec.build, layer):
        assert part.weight.requires_grad and part.training
    assert all(map(torch.equal, layer.parameters(), kept))
    assert not part.weight.requires_grad and part.bias.requires_grad and not part.training


@dataclass
class Described(LayerSpec):
    """A specification without a hash."""

    part: nn.Module

    def __post_init__(self) -> None:
        super().__init__(nn.Sequential, self.part)


def test_specifications_and_modules_of_any_kind_are_built_aside() -> None:
    for part in nn.LazyLinear(2), nn.Linear(2, 2):
        spec = Described(part)
        for _ in range(2):
            with built_aside(spec, spec.build, spec.build()) as built:
                assert built[0] is part
    with torch.inference_mode():
        part = nn.Linear(2, 2)
        values = part.weight.clone()
    spec = LayerSpec(Writing, part)
    for trains in None, part:
        with torch.inference_mode():
            context = built_aside(spec, spec.build, trains)
            context.__enter__()
        context.__exit__(None, None, None)
        assert torch.equal(part.weight, values)
    other = SimpleNamespace(module_args=None)
    with built_aside(other, lambda: 1) as built:
        assert built == 1
