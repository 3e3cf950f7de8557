"""Backwards in two halves: gradients, hooks and memory of an undivided backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deepspeed_partition.profiling import profile_chain
from deepspeed_partition.profiling.backward_halves import CAN_SPLIT, Halves

pytestmark = pytest.mark.skipif(not CAN_SPLIT, reason="torch is older than 2.6")


class Product(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).sum(0)


class InPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)) * self.weight) * self.weight + self.linear.weight.sum()


class OfAPart(nn.Module):
    """Adds a weight to a part of a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x[:, :4] += self.weight
        return x


class First(nn.Module):
    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x[0]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(16, 16), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=self.reentrant)


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": lambda: [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Dropout(0.3)],
    "python": lambda: [nn.Linear(16, 16), InPython(), nn.GELU(), InPython()],
    "twice": lambda: [Twice(), nn.Linear(16, 16), Twice()],
    "batch norm": lambda: [nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16)],
    "convolution": lambda: [
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 1),
    ],
    "attention": lambda: [
        nn.Unflatten(1, (1, 16)), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Flatten(),
    ],
    "lstm": lambda: [nn.Unflatten(1, (4, 4)), nn.LSTM(4, 4, batch_first=True), First()],
}  # fmt: skip
UNDIVIDED = {
    "of a part": ([nn.Linear(16, 16), OfAPart()], "adds weights to a part of a tensor in place"),
    "recomputing": ([Checkpointed(reentrant=False)], "a layer recomputes itself"),
    "recomputing with inner backward": ([nn.Linear(16, 16), Checkpointed(reentrant=True)], "use_reentrant=True"),
}


def run(layers: list[nn.Module], x: torch.Tensor, between: Callable[[Any], Any] = lambda x: x) -> torch.Tensor:
    torch.manual_seed(5)  # of dropout
    for layer in layers:
        x = layer(x)
        x = x if layer is layers[-1] else between(x)
    return x


def parameters(layers: list[nn.Module]) -> dict[str, nn.Parameter]:
    return dict(nn.ModuleList(layers).named_parameters())


@pytest.mark.parametrize("how", ["plain", "recomputed", "first"])
@pytest.mark.parametrize("name", [*MODELS, *UNDIVIDED])
def test_gradients_and_hooks_are_those_of_an_undivided_backward(name, how):
    """In all bits, over two micro-batches; of a stage whose input needs no gradient, too."""
    torch.manual_seed(3)
    layers, told = (MODELS[name](), None) if name in MODELS else UNDIVIDED[name]
    layers = copy.deepcopy(layers)
    others = copy.deepcopy(layers)
    called: list[str] = []
    for each in (layers, others):
        for key, weight in parameters(each).items():
            weight.register_hook(lambda gradient, key=key: (called.append(key), gradient * 1.5)[1])
            weight.register_post_accumulate_grad_hook(lambda _, key=key: called.append(f"{key} is there"))
    needs = how != "first"
    for _ in range(2):
        x = torch.randn(8, 16)
        inputs, expected = x.clone().requires_grad_(needs), x.clone().requires_grad_(needs)
        called.clear()
        wanted = run(others, expected * 1.0 if needs else expected)
        gradient = torch.randn_like(wanted)
        wanted.backward(gradient)
        wanted_calls = sorted(called)
        called.clear()
        halves = Halves()
        given = inputs * 1.0 if needs else inputs
        with halves.saving():
            if needs:
                halves.begins_at(given)
            if how == "recomputed":
                output = halves.checkpoint(lambda tensor: run(layers, tensor), given)
            else:
                output = run(layers, given, halves.cut_behind_first if how == "first" else lambda x: x)
        torch.manual_seed(9)
        why_not = halves.survey([output])
        if told is not None:
            assert why_not is not None and told in why_not
            halves.whole([output], [gradient])
        else:
            assert why_not is None
            ends = halves.first([output], [gradient])
            assert not called, "no weight has a gradient yet"
            if needs:
                assert torch.equal(ends[0], expected.grad)
            halves.second()
        assert sorted(called) == wanted_calls, "each hook once"
        assert not list(halves.kept()) or told is not None
        torch.manual_seed(9)
    for key, weight in parameters(layers).items():
        assert torch.equal(weight.grad, parameters(others)[key].grad), key


def test_what_the_first_half_alone_needs_is_freed_with_it():
    """Of two linear layers with functions between them their inputs and the gradients of their outputs stay."""
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1), nn.Linear(64, 16), nn.Tanh()]
    halves = Halves()
    with halves.saving():
        given = torch.randn(8, 16, requires_grad=True) * 1.0
        halves.begins_at(given)
        output = run(layers, given)

    def kept() -> set[tuple[int, ...]]:
        weights = {id(weight) for weight in parameters(layers).values()}
        found = {each.data_ptr(): tuple(each.shape) for each in halves.kept() if id(each) not in weights}
        return {shape for shape in found.values() if shape[0] == 8}

    def num_kept() -> int:
        return len({each.data_ptr() for each in halves.kept() if each.shape in ((8, 16), (8, 64))})

    assert num_kept() == 5, "the input, three functions of the middle, the output"
    assert halves.survey([output]) is None
    halves.first([output], [torch.ones_like(output)])
    assert num_kept() == 4, "the inputs of both linear layers, and the gradients of their outputs"
    assert kept() == {(8, 16), (8, 64)}
    halves.second()
    assert not list(halves.kept())


def test_a_saved_tensor_that_a_layer_changes_is_found_out():
    """As by autograd, which does not look where tensors are saved through hooks."""
    halves = Halves()
    with halves.saving():
        given = torch.randn(4, 4, requires_grad=True) * 1.0
        halves.begins_at(given)
        made = torch.relu(given)
        output = made * 2
    with torch.no_grad():
        made.add_(1)
    assert halves.survey([output]) is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        halves.first([output], [torch.ones_like(output)])


def test_an_output_that_needs_no_input_or_is_the_input():
    """Its gradient goes to the second half, or to the input as it is."""
    weight = nn.Parameter(torch.ones(3))
    halves = Halves()
    with halves.saving():
        given = torch.randn(3, requires_grad=True) * 1.0
        halves.begins_at((given, torch.zeros(2, dtype=torch.long)))
        alone, both = weight * 3, given * weight
    roots = [alone, both, given]
    assert halves.survey(roots) is None
    [gradient] = halves.first(roots, [torch.full((3,), 2.0), torch.ones(3), torch.full((3,), 5.0)])
    assert torch.equal(gradient, torch.full((3,), 6.0))
    assert weight.grad is None
    halves.second()
    assert torch.allclose(weight.grad, 6.0 + given)


def test_a_profile_has_the_halves_of_each_backward():
    """Together as long as the backward; none of the input in the first layer; functions have no second half."""
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), Checkpointed(reentrant=False), nn.Linear(16, 4)]
    layers[3:4] = [nn.Linear(128, 16), Checkpointed(reentrant=False)]
    chain = profile_chain(layers, torch.randn(32, 64), repeats=1, progress=False)
    halves = [(each.backward_input_seconds, each.backward_weight_seconds) for each in chain.layers]
    assert halves[4] == (None, None), "it recomputes itself"
    assert halves[0] == (0.0, chain.layers[0].backward_seconds)
    for layer, (first, second) in zip(chain.layers, halves, strict=True):
        assert first is None or first + second == pytest.approx(layer.backward_seconds)
    assert halves[2][0] > 0 and halves[2][1] > 0
    assert chain.layers[2].weight_stash_bytes == 2 * 32 * 128 * 4, "its input, and the gradient of its output"
    assert chain.layers[1].weight_stash_bytes == 0
    without = profile_chain(layers, torch.randn(32, 64), repeats=1, progress=False, halves=False)
    assert all(each.backward_input_seconds is None for each in without.layers)
