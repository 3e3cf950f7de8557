"""Times taken in place equal those of the profiler: by a clock that only the layers turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_partition.profiling import in_place, profile_chain, run
from deepspeed_partition.profiling.in_place import InPlaceClock


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (run, in_place):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


class Costly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.seconds += layer.forward_seconds
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.clock.seconds += ctx.layer.backward_seconds
        return gradient, None


class Layer(nn.Module):
    def __init__(self, clock: Clock, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.clock, self.forward_seconds, self.backward_seconds = clock, forward_seconds, backward_seconds
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Costly.apply(x + self.bias, self)


class CostlyInPlace(Costly):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.seconds += layer.forward_seconds
        ctx.mark_dirty(x)
        return x.add_(1)


class InPlace(Layer):
    """Hands on the tensor that it was given, changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CostlyInPlace.apply(x, self)


class AsView(Layer):
    """Hands on a view of what it made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(x.shape)


class Differentiates(Layer):
    """Adds a gradient with respect to its input, as a force in a model of energies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        [force] = torch.autograd.grad((x * x).sum(), x, create_graph=True)
        return super().forward(x + force)


class Both(nn.Module):
    """Hands on what it was given, beside what it made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, kept = x if isinstance(x, tuple) else (x, x)
        return self.inner(first), kept


class Split(nn.Module):
    """Makes two tensors, each at its price."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.inner)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def networks(clock: Clock) -> dict[str, list[Any]]:
    costs = iter(range(1, 100))

    def layer(kind: type[Layer] = Layer) -> Layer:
        return kind(clock, float(next(costs)), float(next(costs)))

    return {
        "a chain": [layer(), layer(), layer(), layer()],
        "changed in place": [layer(), nn.ReLU(inplace=True), layer(), nn.ReLU(inplace=True), layer()],
        "changed in place at a cost": [layer(), layer(InPlace), layer(InPlace), layer()],
        "views changed in place": [
            layer(AsView),
            nn.ReLU(inplace=True),
            layer(),
            layer(AsView),
            nn.ReLU(inplace=True),
        ],
        "views of views changed in place": [
            layer(AsView),
            lambda x: x.view(-1),
            lambda x: x.relu_(),
            lambda x: x.view(-1, 8),
            layer(),
        ],
        "gradients in a forward": [layer(), layer(Differentiates), layer(), layer(Differentiates)],
        "functions and views": [layer(), lambda x: x, lambda x: x.view(-1), lambda x: x.view(-1, 8), layer()],
        "passed through": [layer(), Both(layer()), Both(layer()), lambda pair: pair[0] * pair[1], layer()],
        "two tensors": [layer(), Split(layer(), layer()), lambda pair: pair[0] + pair[1], layer()],
        "frozen beginning": [frozen(layer()), frozen(layer()), layer(), layer()],
        "frozen end": [layer(), layer(), frozen(layer())],
    }


NAMES = list(networks(Clock()))
NUM_MICRO_BATCHES, NUM_STEPS = 3, 4
DEPTH = 2


def segment(layers: list[Callable[[Any], Any]], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def recomputed(layers: list[Callable[[Any], Any]], size: int, **how: Any) -> list[Callable[[Any], Any]]:
    """Segments of so many layers, each a checkpoint."""
    return [
        functools.partial(checkpoint, functools.partial(segment, layers[start : start + size]), **how)
        for start in range(0, len(layers), size)
    ]


WAYS: dict[str, Callable[[list[Callable[[Any], Any]]], list[Callable[[Any], Any]]]] = {
    "kept": lambda layers: layers,
    "recomputed one by one": lambda layers: recomputed(layers, 1, use_reentrant=False),
    "recomputed two by two": lambda layers: recomputed(layers, 2, use_reentrant=False),
    "recomputed by reentrant backwards": lambda layers: recomputed(layers, 2, use_reentrant=True),
}


def train(clock: Clock, layers: list[Any], way: str) -> InPlaceClock:
    """Several steps, with two micro-batches in flight."""
    measured = InPlaceClock(torch.device("cpu"))
    timed = WAYS[way]([measured.timed_layer(index, layer) for index, layer in enumerate(layers)])

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        clock.seconds += 1000.0
        return output.mean()

    loss = measured.timed_loss(len(layers) - 1, loss_fn)
    for _ in range(NUM_STEPS):
        with measured.step():
            in_flight = []
            for number in range(NUM_MICRO_BATCHES + DEPTH):
                if number < NUM_MICRO_BATCHES:
                    x = torch.randn(4, 8, requires_grad="reentrant" in way).clone()
                    in_flight.append(loss(segment(timed, x)))
                if number >= DEPTH:
                    clock.seconds += 50.0  # between a forward and a backward: nobody's
                    in_flight.pop(0).backward()
            measured.timed_optimizer(lambda: setattr(clock, "seconds", clock.seconds + 0.5))()
    return measured


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_times_in_place_are_those_of_the_profiler(clock, name, way):
    if "reentrant" in way and name not in ("a chain", "functions and views"):
        pytest.skip("a reentrant checkpoint takes tensors one by one, all of which get gradients")
    if way != "kept" and "in place" in name:
        pytest.skip("a layer that changes its own input cannot be recomputed")
    layers = networks(clock)[name]

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        clock.seconds += 1000.0
        return output.mean()

    expected = profile_chain(layers, (torch.randn(4, 8), torch.zeros(())), loss_fn=loss_fn).layers
    times = train(clock, layers, way).times()
    assert sorted(times) == list(range(len(layers)))
    found = [(each.forward.median_seconds, each.backward.median_seconds) for _, each in sorted(times.items())]
    assert found == [(layer.forward_seconds, layer.backward_seconds) for layer in expected]
    assert any(backward for _, backward in found)
    assert all(each.forward.interquartile_seconds == 0.0 for each in times.values())


def test_the_optimizer_step_is_timed(clock):
    measured = train(clock, networks(clock)["a chain"], "kept")
    assert measured.optimizer_step().median_seconds == 0.5
    assert InPlaceClock(torch.device("cpu")).optimizer_step() is None


def test_a_loss_may_ask_for_gradients(clock):
    """As one with a penalty on them: what arrives then is no backward of a micro-batch."""
    layer, measured = Layer(clock, 1.0, 2.0), InPlaceClock(torch.device("cpu"))

    def penalty(output: torch.Tensor) -> torch.Tensor:
        [gradient] = torch.autograd.grad((output * output).sum(), output, create_graph=True)
        return gradient.mean()

    with measured.step():
        measured.timed_loss(0, penalty)(measured.timed_layer(0, layer)(torch.randn(4, 8))).backward()
    [times] = measured.times().values()
    assert (times.forward.median_seconds, times.backward.median_seconds) == (1.0, 2.0)


def step_of(measured: InPlaceClock, layer: Layer) -> None:
    with measured.step():
        segment([measured.timed_layer(0, layer)], torch.randn(4, 8)).sum().backward()


def test_first_steps_are_dropped_where_there_are_others(clock):
    layer, measured = Layer(clock, 100.0, 200.0), InPlaceClock(torch.device("cpu"))
    assert measured.times() == {}
    for steady in (False, False, True, True, True):
        if steady:
            layer.forward_seconds, layer.backward_seconds = 1.0, 2.0
        step_of(measured, layer)
        expected = (1.0, 2.0) if steady else (100.0, 200.0)
        [times] = measured.times().values()
        assert (times.forward.median_seconds, times.backward.median_seconds) == expected


def test_a_step_that_fails_does_not_count(clock):
    layer, measured = Layer(clock, 1.0, 2.0), InPlaceClock(torch.device("cpu"))
    layer.bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_of(measured, layer)
    assert measured.num_steps == 0 and measured.times() == {}
    layer.bias = nn.Parameter(torch.zeros(8))
    step_of(measured, layer)
    assert measured.times()[0].backward.median_seconds == 2.0


def test_what_an_optimizer_does_with_gradients_is_the_layers_by_their_shares(clock):
    """As DeepSpeed's for bf16: before and after each backward it goes through all of them."""
    layers = [Layer(clock, 1.0, 2.0), Layer(clock, 3.0, 4.0)]
    timer = InPlaceClock(torch.device("cpu"))

    def go_through(seconds: float) -> None:
        clock.seconds += seconds

    shares = {0: 0.25, 1: 0.75}
    clear, add_up = (timer.timed_accumulation(go_through, shares) for _ in range(2))
    timed = [timer.timed_layer(number, layer) for number, layer in enumerate(layers)]
    for _ in range(NUM_STEPS):
        with timer.step():
            for _ in range(NUM_MICRO_BATCHES):
                outputs = segment(timed, torch.zeros(8))
                clear(1.0)
                outputs.sum().backward()
                add_up(seconds=7.0)
    times = timer.times()
    assert [times[layer].backward.median_seconds for layer in (0, 1)] == [2.0 + 0.25 * 8, 4.0 + 0.75 * 8]
    assert [times[layer].forward.median_seconds for layer in (0, 1)] == [1.0, 3.0]
