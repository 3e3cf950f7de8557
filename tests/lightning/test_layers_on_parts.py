"""Layers that compute something else for a part of a batch are named by what they do, and no others."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_madpipe.compat.unsupported import notes_on_statistics
from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.layers_on_parts import OnParts, _places_left_out, few_samples, layers_on_parts

WIDTH, LENGTH = 6, 5


class Layer(nn.Module):
    """What ``function`` does, with the layer as its first argument; in training only if it says so."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)
        self.calls, self.average, self.generator, self.seen = 0, 0.0, random.Random(0), {"sums": [0.0]}
        self.meter, self.last, self.cache = Meter(), None, None
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Meter:
    total = 0.0


class Recurrent(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, **arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Attention(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Statistics(nn.Module):
    """A batch normalization that keeps nothing, and so has the statistics of the batch in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Each sample goes to one of two experts, whose samples are gathered."""
    chosen = x.sum(-1) > 0
    y = torch.empty_like(x)
    y[chosen], y[~chosen] = m.linear(x[chosen]), -m.linear(x[~chosen])
    return y


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return x / m.calls


def averaged(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.average = 0.9 * m.average + 0.1 * float(x.detach().mean())
    return x - m.average


def summed_up(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen["sums"][0] += float(x.detach().sum())
    return x


def metered(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.meter.total += 1.0
    return x


def buffered(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.number += 1
    return x


def drawn(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x if m.generator.random() < 0.5 else 2 * x


def carried(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x if m.last is None else x + m.last
    m.last = x.detach()
    return y


def shown(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Keeps what is looked at by others, and what it computes once."""
    m.last = x.detach()
    m.cache = torch.arange(WIDTH) if m.cache is None else m.cache
    return x + m.cache


def queried(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries that are the same for all samples, in rows of two heads: those of the first head come first."""
    queries = m.linear(torch.linspace(0, 1, 2 * WIDTH).view(1, 2, WIDTH).repeat(len(x), 1, 1))
    return x, torch.cat(queries.split(WIDTH // 2, 2), 0)


def attended(m: Any, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, queries = given
    keys = torch.cat(m.linear(x).split(WIDTH // 2, 2), 0)
    pooled = queries + (queries @ keys.transpose(1, 2)).softmax(2) @ keys
    return torch.cat(pooled.split(len(x), 0), 2)


class Normalizing(torch.autograd.Function):
    """Divides the gradient by its norm over the batch, or by each sample's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by = {
            "batch": lambda: gradient.norm(),
            "sample": lambda: gradient.norm(dim=-1, keepdim=True),
            "number": lambda: len(gradient),
            "sign": lambda: gradient.abs() + 1e-12,
        }
        return gradient / by[ctx.kind](), None


def hooked(x: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(hook)
    return x


class Hooked(nn.Module):
    """A linear layer, or an embedding, with a hook on what it returns."""

    def __init__(
        self, hook: Callable[[Any, torch.Tensor], torch.Tensor], inner: nn.Module | None = None, p: float = 0.0
    ) -> None:
        super().__init__()
        self.inner, self.p, self.hook, self.seen = inner or nn.Linear(WIDTH, WIDTH), p, hook, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.abs().long().clamp(max=3) if isinstance(self.inner, nn.Embedding) else x)
        return F.dropout(hooked(x, lambda gradient: self.hook(self, gradient)), self.p)


def normed(m: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm()


def summing(m: Any, gradient: torch.Tensor) -> None:
    m.seen += float(gradient.sum())


def reentrant(m: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: hooked(m.linear(y), lambda g: g / g.norm()), x, use_reentrant=True)


TEXTS = (4, LENGTH, WIDTH)
APART: dict[str, tuple[tuple[int, ...], int, Callable[[], list[Any]]]] = {
    "linear": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), torch.tanh]),
    "dropout": ((4, WIDTH), 0, lambda: [nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()]),
    "functional dropout": ((4, WIDTH), 0, lambda: [lambda x: F.dropout(x, 0.5), nn.Linear(WIDTH, WIDTH)]),
    "noise": ((4, WIDTH), 0, lambda: [lambda x: x + torch.randn_like(x), nn.Linear(WIDTH, 2)]),
    "depth": ((4, WIDTH), 0, lambda: [lambda x: x * (torch.rand(len(x), 1) < 0.5), nn.Linear(WIDTH, 2)]),
    "batch normalization": ((4, WIDTH), 0, lambda: [nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]),
    "statistics of the batch": ((4, WIDTH), 0, lambda: [Statistics(), nn.Linear(WIDTH, WIDTH)]),
    "images": ((4, 3, 5, 5), 0, lambda: [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2)]),
    "attention": (TEXTS, 0, lambda: [Attention(batch_first=True, dropout=0.3), nn.Linear(WIDTH, 2)]),
    "time first": ((LENGTH, 4, WIDTH), 1, lambda: [Recurrent(), nn.Dropout(0.1), Attention(), nn.Tanh()]),
    "reshaped": (
        TEXTS, 0, lambda: [lambda x: x.flatten(0, 1), nn.Linear(WIDTH, 4), lambda x: x.view(-1, LENGTH, 4),
                           lambda x: x - x.mean(1, keepdim=True)],
    ),
    "reshaped, time first": (
        (LENGTH, 4, WIDTH), 1, lambda: [lambda x: x.flatten(0, 1), nn.Dropout(0.1), nn.Linear(WIDTH, 4),
                                        lambda x: x.view(LENGTH, -1, 4), lambda x: x - x.mean(0)],
    ),
    "transposed": (TEXTS, 0, lambda: [lambda x: x.transpose(0, 1), Recurrent(), lambda x: x[-1]]),
    "two views": ((4, WIDTH), 0, lambda: [lambda x: torch.cat([x, x.flip(-1)]), nn.Linear(WIDTH, WIDTH)]),
    "three views": (
        TEXTS, 0, lambda: [lambda x: torch.cat([x, -x, 2 * x]), lambda x: x.unflatten(0, (3, -1)).transpose(0, 1),
                           lambda x: x.flatten(0, 1)],
    ),
    "experts": ((4, WIDTH), 0, lambda: [Layer(experts)]),
    "checkpoint": ((4, WIDTH), 0, lambda: [
        Layer(lambda m, x: checkpoint(m.linear, x, use_reentrant=False)), nn.Linear(WIDTH, 2)]),
    "auxiliary loss": ((4, WIDTH), 0, lambda: [lambda x: (x, x.square().mean()), lambda p: (p[0].tanh(), p[1])]),
    "weight normalization": ((4, WIDTH), 0, lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2))]),
    "a sample's own": (TEXTS, 0, lambda: [lambda x: (x - x.mean((1, 2), keepdim=True)).softmax(1).cumsum(1)]),
    "what is shown": ((4, WIDTH), 0, lambda: [Layer(shown)]),
    "reentrant checkpoint": ((4, WIDTH), 0, lambda: [
        nn.Linear(WIDTH, WIDTH), Layer(lambda m, x: checkpoint(m.linear, x, use_reentrant=True))]),
    "a sample's own gradient": ((4, WIDTH), 0, lambda: [
        nn.Linear(WIDTH, WIDTH), lambda x: Normalizing.apply(x, "sample"),
        lambda x: Normalizing.apply(x, "sign")]),
    "a hook on each number": ((4, WIDTH), 0, lambda: [
        Hooked(lambda m, g: g.clamp(-0.1, 0.1)), Hooked(lambda m, g: -g, p=0.5)]),
    "what needs no gradient": ((4, WIDTH), 0, lambda: [
        lambda x: hooked(x, lambda g: g / g.norm()), nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        lambda x: hooked(x, lambda g: g / g.norm()), nn.Linear(WIDTH, WIDTH)]),
    "no gradient at all": ((4, WIDTH), 0, lambda: [
        nn.Linear(WIDTH, WIDTH), lambda x: x.argmax(-1), nn.Embedding(WIDTH, WIDTH), lambda x: x.detach()]),
    "rounding alone": ((4, 3, 9, 9), 0, lambda: [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.ReLU())]),
    "in place": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), lambda x: x.mul_(2)]),
    "a backward that fails": ((4, WIDTH), 0, lambda: [
        nn.Linear(WIDTH, WIDTH), lambda x: hooked(x, lambda g: 1 / 0), nn.Tanh()]),
}  # fmt: skip
MIXING: dict[str, tuple[tuple[int, ...], int, Callable[[], list[Any]], list[int]]] = {
    "mean": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), lambda x: x - x.mean(0), nn.Linear(WIDTH, 2)], [1]),
    "deviation": ((4, WIDTH), 0, lambda: [lambda x: x * x.std(0), nn.Tanh(), lambda x: x / x.norm()], [0, 2]),
    "after dropout": ((4, WIDTH), 0, lambda: [nn.Dropout(0.2), lambda x: x - 0.01 * x.mean(0), nn.Tanh()], [1]),
    "with dropout": ((4, WIDTH), 0, lambda: [nn.Tanh(), lambda x: F.dropout(x - x.mean(0), 0.5)], [1]),
    "softmax": ((4, WIDTH), 0, lambda: [lambda x: x.softmax(0), nn.Linear(WIDTH, 2)], [0]),
    "number of samples": ((4, WIDTH), 0, lambda: [lambda x: x / len(x), nn.Linear(WIDTH, 2)], [0]),
    "beside a normalization": (
        (4, WIDTH), 0, lambda: [nn.Sequential(nn.BatchNorm1d(WIDTH), Layer(lambda m, x: x - x.mean(0)))], [0],
    ),
    "attention over samples": (TEXTS, 0, lambda: [Attention(), nn.Linear(WIDTH, 2)], [0]),
    "time first": ((LENGTH, 4, WIDTH), 1, lambda: [Recurrent(batch_first=True), nn.Linear(WIDTH, 2)], [0]),
    "handed on": ((4, WIDTH), 0, lambda: [lambda x: (x, x.mean(0)), lambda p: p[0] - p[1]], [0]),
    "a number handed on": ((4, WIDTH), 0, lambda: [lambda x: (x, x.std()), lambda p: p[0] / p[1]], [1]),
    "reversed": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), lambda x: x.flip(0), nn.Tanh()], [1]),
    "in turn": ((4, WIDTH), 0, lambda: [lambda x: torch.cat([x[::2], x[1::2]]), nn.Linear(WIDTH, 2)], [0]),
    "two views of others": ((4, WIDTH), 0, lambda: [lambda x: torch.cat([x, x.roll(1, 0)]), nn.Tanh()], [0]),
    "others beside": (TEXTS, 0, lambda: [nn.Tanh(), lambda x: (x, x.roll(1, 0)), lambda p: p[0] * p[1]], [1]),
    "similarities": ((4, WIDTH), 0, lambda: [lambda x: x @ x.t(), nn.ReLU()], [0]),
    "pair": ((2, WIDTH), 0, lambda: [lambda x: x - x.mean(0)], [0]),
}  # fmt: skip
MIXING_GRADIENTS: dict[str, tuple[tuple[int, ...], int, Callable[[], list[Any]], list[int]]] = {
    "function": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), lambda x: Normalizing.apply(x, "batch")], [1]),
    "number": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), lambda x: Normalizing.apply(x, "number")], [1]),
    "hook": ((4, WIDTH), 0, lambda: [Hooked(normed), nn.Linear(WIDTH, WIDTH)], [0]),
    "mean": ((4, WIDTH), 0, lambda: [nn.Tanh(), Hooked(lambda m, g: g - g.mean(0)), nn.Tanh()], [1]),
    "dropout": ((4, WIDTH), 0, lambda: [nn.Dropout(0.3), Hooked(normed, p=0.4), Hooked(normed)], [1, 2]),
    "of parameters alone": ((4, WIDTH), 0, lambda: [Hooked(normed, nn.Embedding(4, WIDTH)), nn.Tanh()], [0]),
    "with dropout": ((4, WIDTH), 0, lambda: [Hooked(normed, nn.Embedding(4, WIDTH), 0.4), nn.Tanh()], [0]),
    "reentrant checkpoint": ((4, WIDTH), 0, lambda: [nn.Linear(WIDTH, WIDTH), Layer(reentrant)], [1]),
    "texts": (TEXTS, 0, lambda: [Attention(batch_first=True), Hooked(normed), lambda x: x.flatten(0, 1)], [1]),
    "flattened": (TEXTS, 0, lambda: [lambda x: x.flatten(0, 1), Hooked(normed), nn.Tanh()], [1]),
    "time first": ((LENGTH, 4, WIDTH), 1, lambda: [Recurrent(), Hooked(normed), lambda x: x[-1]], [1]),
    "a counter": ((4, WIDTH), 0, lambda: [Hooked(normed), Layer(counted)], [0]),
    "queries": (TEXTS, 0, lambda: [Layer(queried), Layer(attended), Hooked(normed)], [2]),
}  # fmt: skip
KEEPING: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a counter": (counted, ["self.net.1.calls"]),
    "a running average": (averaged, ["self.net.1.average"]),
    "a list in a dict": (summed_up, ["self.net.1.seen"]),
    "an object": (metered, ["self.net.1.meter"]),
    "a buffer": (buffered, ["self.net.1.number"]),
    "a generator": (drawn, ["self.net.1.generator"]),
    "what it had before": (carried, ["self.net.1.last"]),
}


def gated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).tanh() if x.mean() > -9 else x


def limited(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    return y / max(9e9, y.abs().max().item())


def searched(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x if 1000 in x.long() else m.linear(x)


def as_array(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x if numpy.asarray(x.detach()).sum() > 999 else m.linear(x)


def written_into(m: Any, x: torch.Tensor) -> torch.Tensor:
    largest = torch.empty(())
    torch.amax(x.detach(), (0, 1), out=largest)
    return x if largest > 99 else m.linear(x)


def routed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Each sample goes to one of two experts, in a loop over those that have one."""
    chosen, y = (x.sum(-1) > 0).long(), torch.zeros_like(x)
    for expert in (0, 1):
        if (chosen == expert).any():
            y[chosen == expert] = m.linear(x[chosen == expert]) * (expert + 1)
    return y


def counted_places(m: Any, x: torch.Tensor) -> torch.Tensor:
    places = (x > 9).nonzero()
    if len(places) > 3:
        return x
    rows, columns = torch.where(x > 9)
    if rows.shape[0] > 3 or columns[:2].size(0) > 3:
        return x
    return m.linear(x)


def counted_kinds(m: Any, x: torch.Tensor) -> torch.Tensor:
    kinds = x.argmax(1).unique()
    if kinds.numel() > 99:
        return x
    if len(torch.bincount(x.argmax(1))) > 99 or torch.unique(x, dim=1).shape[1] > 99:
        return x
    return m.linear(x)


def counted_selection(m: Any, x: torch.Tensor) -> torch.Tensor:
    large = m.linear(x)[x[:, 0] > 0] * 2
    if large.size(0) > 99 or large.relu().t().size(-1) > 99:
        return x
    if x.masked_select(x > 9).view(-1, 1).numel() > 99:
        return x
    return m.linear(x)


def sizes_that_stay(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Asks for sizes that no numbers decide, of what was selected and of what is made of it."""
    kept = torch.ones(WIDTH, dtype=torch.bool).nonzero()[:, 0]
    large, chosen = x[x[:, 0] > 9], (x > 0).long()
    if large.size(1) > 99 or large.size(-1) > 99 or len(kept) > 99 or len(large.sum(0)) > 99:
        return x
    if len(x[:, kept]) > 99 or chosen.numel() > 999 or (x[:, kept] > 0).shape[1] > 99:
        return x
    return m.linear(x.masked_fill(x > 9, 9.0))


def of_itself(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Asks for numbers of weights, buffers and sizes, and shows one of its input."""
    m.number.copy_(torch.ones(()))
    if m.linear.weight.sum() > 99 or m.number.item() > 9 or len(x) > 9 or x.shape[1] < 2:
        return x
    assert f"{x.detach().mean():.1f}"
    return F.one_hot(x.argmax(1), WIDTH) * m.linear(x)


def limited_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Divides by the norm over the batch from 20 on, which four ordinary samples do not have."""
    return m.linear(x) / (x.detach().norm() / 20).clamp(min=1)


def floored(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) / x.detach().std(0).clamp(min=0.2, max=0.2001)


def with_room(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Two experts with room for half of the samples each, and for four at least; what is too much passes by."""
    chosen = F.one_hot((x[:, 0] > 0).long(), 2)
    place = (chosen.cumsum(0) * chosen).sum(1)
    return x + (place <= max(4, len(x) // 2))[:, None] * m.linear(x)


UNUSUAL = {"a limited norm": limited_norm, "a floor": floored, "experts with room": with_room}
DECIDING = {
    "a branch": gated, "a limit": limited, "a search": searched, "an array": as_array, "a result": written_into,
    "a router": routed, "of itself": of_itself, "places": counted_places, "kinds": counted_kinds,
    "a selection": counted_selection, "sizes that stay": sizes_that_stay,
}  # fmt: skip


def looked_at(
    shape: tuple[int, ...], dim: int, layers: list[Any], kind: str = "train", num_more: int = 16
) -> OnParts:
    module = nn.Module()
    module.net = nn.ModuleList(layer if isinstance(layer, nn.Module) else nn.Identity() for layer in layers)
    module.train(kind == "train")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    many = (*shape[:dim], num_more, *shape[dim + 1 :])
    samples = few_samples((x,), (x.narrow(dim, 0, shape[dim] // 2),))
    samples = replace(samples, more=(torch.randn(many, generator=generator),) if num_more else None)
    call = PipelineCall(layers=tuple(layers), attribute="forward")
    numbers, states = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    found = layers_on_parts(module, call, samples, device=torch.device("cpu"), dtype=None)
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(torch.equal(value, states[name]) for name, value in module.state_dict().items())
    return found


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("case", APART)
def test_layers_that_treat_samples_apart_are_not_named(case: str, kind: str) -> None:
    shape, dim, layers = APART[case]
    torch.manual_seed(0)
    assert replace(looked_at(shape, dim, layers(), kind), drawing=[]) == OnParts()


def test_layers_that_draw_from_common_generators_are_named() -> None:
    """Noise, dropout and blocks that leave themselves out were other ones than in one process, in silence."""

    def of_python(x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 0.5 else 2 * x

    def of_numpy(x: torch.Tensor) -> torch.Tensor:
        return x * numpy.random.rand()

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(1) < 0.3 else 2 * x

    nested = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    layers = [nested, nn.Dropout(0.0), of_python, nn.Tanh(), of_numpy, of_torch]
    functions = [f"layer {place} ({layers[place].__name__})" for place in (2, 4, 5)]
    before = random.getstate()
    assert looked_at((4, WIDTH), 0, layers).drawing == ["self.net.0.1 (Dropout)", *functions]
    assert looked_at((4, WIDTH), 0, layers, "eval").drawing == functions
    assert random.getstate() == before


@pytest.mark.parametrize("case", MIXING)
def test_layers_that_mix_samples_are_named_and_those_behind_them_are_not(case: str) -> None:
    """A centering layer trained other weights in a pipeline than in one process, and nothing said so."""
    shape, dim, layers, places = MIXING[case]
    torch.manual_seed(0)
    found = looked_at(shape, dim, layers())
    assert [int(re.sub(r"self\.net\.|layer | \(.*", "", name)) for name in found.mixing] == places
    assert not found.keeping


@pytest.mark.parametrize("case", MIXING_GRADIENTS)
def test_layers_that_mix_samples_in_their_backward_are_named(case: str) -> None:
    """A layer that divided its gradient by the norm over the batch trained otherwise in a pipeline, in silence."""
    shape, dim, layers, places = MIXING_GRADIENTS[case]
    torch.manual_seed(0)
    made = layers()
    found = looked_at(shape, dim, made)
    assert [int(re.sub(r"self\.net\.|layer | \(.*", "", name)) for name in found.mixing_gradients] == places
    assert not found.mixing and found.keeping == (["self.net.1.calls"] if case == "a counter" else [])
    assert looked_at(shape, dim, made, "eval").mixing_gradients == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sample", "batch"])
def test_rounding_of_half_precision_is_no_mixing(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(16, 16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(),
        nn.Linear(8 * 36, 32), lambda x: Normalizing.apply(x, kind), nn.GELU(), nn.Linear(32, 4),
    ]  # fmt: skip
    module = nn.Module()
    module.net = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))
    x = torch.randn(4, 3, 8, 8).to(dtype)
    call = PipelineCall(layers=tuple(layers), attribute="forward")
    found = layers_on_parts(module, call, few_samples((x,), (x[:2],)), device=torch.device("cpu"), dtype=dtype)
    assert found == OnParts(mixing_gradients=["layer 6 (<lambda>)"] if kind == "batch" else [])


def test_what_a_backward_keeps_is_named_and_put_back() -> None:
    layer = Hooked(summing)
    found = looked_at((4, WIDTH), 0, [nn.Linear(WIDTH, WIDTH), layer, nn.Tanh()])
    assert found == OnParts(keeping=["self.net.1.seen"]) and layer.seen == 0.0
    numbers: list[int] = []

    def collecting(m: Any, gradient: torch.Tensor) -> torch.Tensor:
        numbers.append(1)
        return gradient * len(numbers)

    found = looked_at((4, WIDTH), 0, [nn.Linear(WIDTH, WIDTH), Hooked(collecting), nn.Tanh()])
    assert found == OnParts(keeping=["something in self.net.1 (Hooked)"])


@pytest.mark.parametrize("case", KEEPING)
def test_what_a_layer_keeps_from_run_to_run_is_named_and_put_back(case: str) -> None:
    function, names = KEEPING[case]
    layer = Layer(function)
    before = repr((layer.calls, layer.average, layer.seen, layer.meter.total, layer.last, layer.number))
    numbers = layer.generator.getstate()
    found = looked_at((4, WIDTH), 0, [nn.Linear(WIDTH, WIDTH), layer, nn.Tanh()])
    assert found.keeping == names
    # What is taken away in the same run, as an average, depends on all samples besides.
    assert found.mixing == (["self.net.1 (Layer)"] if function is averaged else [])
    assert before == repr((layer.calls, layer.average, layer.seen, layer.meter.total, layer.last, layer.number))
    assert layer.generator.getstate() == numbers


@pytest.mark.parametrize("case", UNUSUAL)
def test_layers_that_mix_samples_for_some_numbers_alone_are_named(case: str) -> None:
    """Four ordinary samples stayed below a limit, and within the room of each expert, and nothing was said."""
    torch.manual_seed(0)
    for kind in ("train", "eval"):
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), Layer(UNUSUAL[case]), nn.Tanh()]
        assert looked_at((4, WIDTH), 0, layers, kind) == OnParts(mixing=["self.net.2 (Layer)"])


def scaled_by_observed(given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Divides each sample by its mean, and one without observations by that of the batch, as gluonts does."""
    x, observed = given
    total, number = (x.abs() * observed).sum(1, keepdim=True), observed.sum(1, keepdim=True)
    of_all = total.sum() / number.sum().clamp(min=1)
    return x / torch.where(number > 0, total / number.clamp(min=1), of_all)


def pooled_over_observed(given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, observed = given
    return x * observed / observed.sum()


def each_over_observed(given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, observed = given
    return (x * observed) / observed.sum(1, keepdim=True)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int64])
@pytest.mark.parametrize("num_more", [0, 16])
@pytest.mark.parametrize("function", [scaled_by_observed, pooled_over_observed, each_over_observed])
def test_layers_that_mix_samples_where_masks_leave_some_out_are_named(
    function: Callable[..., Any], num_more: int, kind: torch.dtype
) -> None:
    """Samples of later batches alone had no observations, and a scale over the micro-batch, in silence."""
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)

    def drawn_samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand((number, WIDTH), generator=generator), torch.ones(number, WIDTH).to(kind)

    few = drawn_samples(4)
    samples = few_samples(few, tuple(tensor[:2] for tensor in few))
    samples = replace(samples, more=drawn_samples(num_more) if num_more else None)
    call = PipelineCall(layers=(function, nn.Tanh()), attribute="forward")
    found = layers_on_parts(module, call, samples, device=torch.device("cpu"), dtype=None)
    mixes = function is not each_over_observed
    assert found == OnParts(mixing=[f"layer 0 ({function.__name__})"] if mixes else [])


@pytest.mark.parametrize("before", ["mean", "statistics", "experts with room", "normalization"])
def test_experts_with_room_behind_a_layer_that_mixes_samples_are_named(before: str) -> None:
    """A layer that mixed samples was named, and one behind it that only many samples alike show was not."""
    torch.manual_seed(0)
    build = {
        "mean": lambda: Layer(lambda m, x: x - 0.1 * x.mean(0)), "statistics": Statistics,
        "experts with room": lambda: Layer(with_room), "normalization": lambda: nn.BatchNorm1d(WIDTH),
    }  # fmt: skip
    first = {"mean": ["self.net.1 (Layer)"], "experts with room": ["self.net.1 (Layer)"]}.get(before, [])
    layers = [nn.Linear(WIDTH, WIDTH), build[before](), nn.Tanh(), Layer(with_room), nn.Linear(WIDTH, WIDTH)]
    assert looked_at((4, WIDTH), 0, layers).mixing == [*first, "self.net.3 (Layer)"]
    # Of layers behind it, those that treat each sample by itself are not.
    layers = [nn.Linear(WIDTH, WIDTH), build[before](), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    assert looked_at((4, WIDTH), 0, layers).mixing == first


def test_embeddings_that_divide_gradients_by_how_often_a_number_stands_in_a_batch_are_named() -> None:
    layers = [lambda x: x.abs().long(), nn.Embedding(9, WIDTH, scale_grad_by_freq=True), nn.Linear(WIDTH, 2)]
    assert looked_at((4, WIDTH), 0, layers) == OnParts(mixing_gradients=["self.net.1 (Embedding)"])
    assert looked_at((4, WIDTH), 0, layers, "eval") == OnParts()
    layers[1].requires_grad_(False)
    assert looked_at((4, WIDTH), 0, layers) == OnParts()


@pytest.mark.parametrize("case", DECIDING)
def test_layers_that_decide_by_numbers_of_their_samples_are_named_with_the_line(case: str) -> None:
    """`if x.mean() > 0` in a layer decided for each micro-batch, in silence where four samples lay on one side.

    So did `if len(mask.nonzero()) > 3`.
    """
    function = DECIDING[case]
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Layer(function), nn.Tanh()]
    for kind in ("train", "eval"):
        found = looked_at((4, WIDTH), 0, layers, kind)
        lines, first = inspect.getsourcelines(function)
        asking = [
            first + place for place, line in enumerate(lines) if re.match(r" +(return .* )?if |.*item", line)
        ]
        shown = ", ".join(f"test_layers_on_parts.py:{line}" for line in asking)
        named = [] if case in ("of itself", "sizes that stay") else [f"self.net.1 (Layer), {shown}"]
        assert found == OnParts(deciding=named), (asking, found)


def test_what_is_kept_elsewhere_is_named_by_the_layer() -> None:
    numbers: list[int] = []

    def collecting(x: torch.Tensor) -> torch.Tensor:
        numbers.append(1)
        return x * len(numbers)

    found = looked_at((4, WIDTH), 0, [nn.Tanh(), collecting, nn.ReLU()])
    assert found == OnParts(keeping=["something in layer 1 (collecting)"])


def test_a_layer_that_fails_or_returns_something_else_ends_the_look() -> None:
    def failing(x: torch.Tensor) -> Any:
        raise RuntimeError

    for layer in (failing, lambda x: {"x": x}):
        assert looked_at((4, WIDTH), 0, [nn.Tanh(), layer, lambda x: x - x.mean(0)]) == OnParts()


def test_samples_that_are_not_known_are_looked_at_for_what_layers_keep_alone() -> None:
    x = torch.randn(4, WIDTH)
    module = nn.Module()
    module.net = nn.ModuleList([nn.Tanh(), Layer(counted)])
    call = PipelineCall(layers=(*module.net, lambda x: x - x.mean(0)), attribute="forward")
    for half in (x[:1], x, x[:2, :3], x[None]):
        found = layers_on_parts(module, call, few_samples((x,), (half,)), device=torch.device("cpu"), dtype=None)
        assert found == OnParts(keeping=["self.net.1.calls"])


def test_a_look_that_fails_is_told_and_forms_do_not_end_it() -> None:
    """An attribute whose numbers could not be read ended the look at all layers in silence."""

    class Unreadable(dict[str, int]):
        def items(self) -> Any:
            raise OSError("no numbers")

    layer = Layer(lambda m, x: x - x.mean(0))
    layer.form = torch.empty(3, device="meta")
    found = looked_at((4, WIDTH), 0, [layer])
    assert found == OnParts(mixing=["self.net.0 (Layer)"])
    layer.settings = Unreadable()
    assert looked_at((4, WIDTH), 0, [layer]) == OnParts(ended="self.net.0 (Layer) (OSError: no numbers)")


def test_layers_that_change_what_the_step_gives_them_in_place_are_named():
    """In one process the step and the loader see it; in a pipeline the first stage has a copy."""

    def names(*layers: Any) -> list[str]:
        return looked_at((4, WIDTH), 0, [*layers]).writing

    scaled = Layer(lambda m, x: x.mul_(2))
    assert names(scaled, nn.Linear(WIDTH, WIDTH)) == ["self.net.0 (Layer)"]
    assert names(nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True)) == ["self.net.2 (ReLU)"]
    assert names(Layer(lambda m, x: m.linear(x.t_().t_()))) == ["self.net.0 (Layer)"]
    assert names(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), scaled) == []
    assert names(Layer(lambda m, x: x.clone().mul_(2)), nn.Dropout(0.0), scaled) == []


class SetsWeights(nn.Linear):
    """Sets its parameters in the first call: one in place, and another one anew."""

    is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            with torch.no_grad():
                self.weight.mul_(0.5)
            self.bias = nn.Parameter(self.bias + 1)
            self.is_ready = True
        return super().forward(x)


class Grows(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(2)
        return super().forward(x)


def test_layers_that_set_weights_in_their_first_call_do_not_mix_samples() -> None:
    """Each run set them anew, and so gave something else: they were said to mix samples."""
    layer = SetsWeights(WIDTH, WIDTH)
    assert looked_at((4, WIDTH), 0, [nn.Linear(WIDTH, WIDTH), layer, nn.Tanh()]) == OnParts()
    assert not layer.is_ready


def test_weights_that_change_in_each_call_are_kept() -> None:
    found = looked_at((4, WIDTH), 0, [nn.Linear(WIDTH, WIDTH), Grows(WIDTH, WIDTH), nn.Tanh()])
    assert found == OnParts(keeping=["something in self.net.1 (Grows)"])


def test_of_very_many_layers_the_first_are_named() -> None:
    for number, rest in ((20, ""), (155, " and 135 more")):
        names = [f"norm{place}" for place in range(number)]
        [note] = notes_on_statistics(names, [4, 4])
        assert f"batch normalization ({', '.join(names[:20])}{rest}) has the statistics of a micro-batch" in note


@pytest.mark.parametrize(
    ("shape", "dim", "on_a_cpu", "elsewhere"),
    [
        ((1,), 0, (1,), (1,)),
        ((1, 5), 0, (1, 5), (1, 4)),
        ((5, 1), 1, (5, 1), (4, 1)),
        ((1, 1), 0, (1, 1), (0, 1)),
        ((1, 3, 1), 0, (1, 3, 1), (1, 2, 1)),
    ],
)
def test_a_sample_keeps_a_place_on_a_device(shape: Any, dim: int, on_a_cpu: Any, elsewhere: Any) -> None:
    """There a place of -1 ends the process. A mask by samples alone, or with samples last, left none out."""
    assert _places_left_out(torch.ones(shape), dim).shape == on_a_cpu
    assert _places_left_out(torch.ones(shape, device="meta"), dim).shape == elsewhere
