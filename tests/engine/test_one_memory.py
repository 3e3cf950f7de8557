"""Tensors of a layer that lie in one memory, laid together in another copy of the layer; here in one process."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import nn  # noqa: E402

from deepspeed_partition.engine.repartition import one_memory  # noqa: E402
from deepspeed_partition.engine.repartition.one_memory import (  # noqa: E402
    in_memory_of_others,
    lay_together,
    memories_of,
    take_apart,
)
from deepspeed_partition.engine.repartition.part_descriptions import describe, tensors_in  # noqa: E402


class Layer(nn.Module):
    """Has views of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        flat = torch.randn(40)
        self.register_buffer("first", flat[8:30])
        self.register_buffer("second", flat[20:40])
        self.register_buffer("turned", self.first[:12].view(3, 4).t())
        self.register_buffer("bits", self.second[1:5].view(torch.int32))
        self.register_buffer("wide", self.first[3:4].expand(5))
        self.register_buffer("of_weight", self.weight.detach()[:, 1])
        self.register_buffer("alone", flat[:8])
        self.same, self.pair, self.named = self.first, (self.first[0], 1), {"x": [self.second]}
        self.meter = SimpleNamespace(last=self.second[-1:])
        self.hidden = [nn.BatchNorm1d(4)]
        self.hidden[0].running_mean = self.weight.detach()[2]


def laid_like(layer: nn.Module) -> nn.Module:
    """Another copy of a layer, each tensor of which had memory of its own, with the values of this one."""
    memories = pickle.loads(pickle.dumps(describe(layer).memories))
    other, values = Layer(), [found.tensor.detach().clone() for found in tensors_in(layer)]
    take_apart(tensors_in(other), [])
    other.same = other.same.clone()
    assert not in_memory_of_others(tensors_in(other))
    here = {place: found.tensor for found in tensors_in(other) for place in found.places}
    for found, value in zip(tensors_in(layer), values, strict=True):
        for place in found.places:
            here[place].data = value.clone()
    lay_together(tensors_in(other), memories)
    return other


def test_tensors_lie_as_where_they_come_from():
    layer = Layer()
    other = laid_like(layer)
    assert memories_of(tensors_in(other)) == memories_of(tensors_in(layer))
    assert other.same is other.first and other.named["x"][0] is other.second
    for found, there in zip(tensors_in(other), tensors_in(layer), strict=True):
        assert torch.equal(found.tensor, there.tensor), found.places
        assert found.tensor.stride() == there.tensor.stride()
    weight = other.weight
    for each in (layer, other):
        each.turned.mul_(2)
        each.bits.zero_()
        each.named["x"][0][3:].add_(1)
        each.meter.last.fill_(7)
        each.weight.data.add_(1)
        each.hidden[0].running_mean.mul_(3)
    assert other.weight is weight and weight.requires_grad
    for found, there in zip(tensors_in(other), tensors_in(layer), strict=True):
        assert torch.equal(found.tensor, there.tensor), found.places


def test_tensors_without_a_common_byte_have_nothing_to_keep():
    """Such are the parameters of a flat buffer, of which the layer would else take all along."""
    flat = torch.zeros(100)
    layer = nn.Linear(4, 4)
    layer.weight.data, layer.bias.data = flat[10:26].view(4, 4), flat[26:30]
    assert not describe(layer).memories and not in_memory_of_others(tensors_in(layer))
    layer.register_buffer("both", flat[20:28])
    [memory] = describe(layer).memories
    assert len(memory.tensors) == 3 and memory.num_bytes <= 20 * 4 + 16
    assert len(in_memory_of_others(tensors_in(layer))) == 3


def test_what_lies_apart_where_it_comes_from_comes_apart():
    layer = Layer()
    other = copy.deepcopy(layer)
    layer.second = layer.second.clone()
    take_apart(tensors_in(other), describe(layer).memories)
    lay_together(tensors_in(other), describe(layer).memories)
    other.second.zero_()
    assert torch.equal(other.first, layer.first)
    other.turned.zero_()
    assert not other.first[:12].any()


def test_what_cannot_be_laid_together_is_said(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(one_memory, "warn_once", lambda key, line: said.append(line))
    layer, other, table = nn.Module(), nn.Module(), torch.zeros(9)
    layer.register_buffer("plain", torch.zeros(3, dtype=torch.complex64))
    layer.register_buffer("turned", layer.plain.conj())
    layer.register_buffer("third", table[6:])
    layer.register_buffer("first", torch.zeros(9)[:3])
    other.register_buffer("second", table[5:7])
    assert not describe(layer).memories
    layers = {"1": tensors_in(layer), "2": tensors_in(other)}
    one_memory.say_what_lies_outside(layers, [], "stay")
    assert not said
    one_memory.say_what_lies_outside(layers, ["1"], "stay")
    assert len(said) == 2, said
    assert "plain of layer '1'" in said[0] and "with turned, and one of both is a conjugate" in said[0]
    assert "third of layer '1'" in said[1] and "with second of layer '2'" in said[1] and said[1].endswith("stay")
    one_memory.say_what_lies_outside({"1": layers["1"]}, ["1"], "stay")
    assert len(said) == 4 and "with a tensor that is not the layer's" in said[3], said
