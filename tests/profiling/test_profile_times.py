"""Times: of layers whose cost is known, by a clock that the layers turn themselves; and of one that sleeps."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_partition.profiling import profile_chain, run
from tests.profiling.seen import noting


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class Costly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        layer.spend(layer.forward_costs)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.spend(ctx.layer.backward_costs)
        return gradient, None


class CostlyLayer(nn.Module):
    """Takes the seconds of its list, one after the other, the last one for ever."""

    def __init__(self, clock: Clock, forward_costs: list[float], backward_costs: list[float]) -> None:
        super().__init__()
        self.clock = clock
        self.forward_costs, self.backward_costs = list(forward_costs), list(backward_costs)
        self.bias = nn.Parameter(torch.zeros(8))

    def spend(self, costs: list[float]) -> None:
        self.clock.seconds += costs.pop(0) if len(costs) > 1 else costs[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Costly.apply(x + self.bias, self)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_the_median_and_the_spread_of_the_runs_that_count(clock):
    # One forward looks for parameters, two runs warm up, five count.
    layer = CostlyLayer(clock, [900, 800, 700, 5, 1, 4, 2, 3, 900], [600, 500, 30, 10, 50, 20, 40, 900])
    chain = profile_chain([layer], torch.zeros(5, 8), device="cpu", warm_up=2, repeats=5)
    (profile,) = chain.layers
    assert (profile.forward_seconds, profile.forward_spread_seconds) == (3, 2)
    assert (profile.backward_seconds, profile.backward_spread_seconds) == (30, 20)


def test_one_repeat_has_no_spread(clock):
    chain = profile_chain(
        [CostlyLayer(clock, [1.0], [2.0])], torch.zeros(5, 8), device="cpu", warm_up=1, repeats=1
    )
    (profile,) = chain.layers
    assert (profile.forward_seconds, profile.forward_spread_seconds) == (1, 0)
    assert (profile.backward_seconds, profile.backward_spread_seconds) == (2, 0)


def test_each_layer_is_charged_for_itself_and_the_last_for_the_loss(clock):
    loss_layer = CostlyLayer(clock, [4.0], [8.0])
    layers = [CostlyLayer(clock, [1.0], [2.0]), nn.Linear(8, 8), CostlyLayer(clock, [16.0], [32.0])]
    chain = profile_chain(
        layers, (torch.zeros(5, 8), None), loss_fn=lambda y, _: loss_layer(y).sum(), device="cpu"
    )
    assert [layer.forward_seconds for layer in chain.layers] == [1, 0, 20]
    assert [layer.backward_seconds for layer in chain.layers] == [2, 0, 40]


def test_the_first_layer_computes_no_gradient_of_the_input(clock):
    """A layer without parameters at the beginning has no backward; later it has."""

    class Plain(CostlyLayer):
        def __init__(self) -> None:
            super().__init__(clock, [1.0], [2.0])
            del self.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Costly.apply(x, self)

    chain = profile_chain([Plain(), nn.Linear(8, 8), Plain()], torch.zeros(5, 8), device="cpu")
    assert [layer.backward_seconds for layer in chain.layers] == [0, 0, 2]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return gradient


def test_a_layer_that_sleeps_takes_at_least_its_sleep():
    chain = profile_chain([nn.Linear(8, 8), Sleep.apply], torch.zeros(5, 8), device="cpu")
    sleeper = chain.layers[1]
    assert sleeper.forward_seconds >= 0.01
    assert sleeper.backward_seconds >= 0.03


def test_gradients_exist_when_the_backward_is_timed():
    """The first backward allocates them: it is dropped, the others add."""
    name, seen = noting()

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            sys.audit(name, layer.weight.grad is not None)
            return gradient

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Watch.apply(super().forward(x))

    layer = Watched(8, 8)
    profile_chain([layer], torch.zeros(5, 8), device="cpu", warm_up=1, repeats=2, halves=False)
    # Warm-up, two that count, and two that look at memory, of which one is a first backward.
    assert seen == [False, True, True, True, False]
    assert layer.weight.grad is None


@pytest.mark.parametrize("how", [{"repeats": 0}, {"warm_up": 0}, {"repeats": 2.5}, {"repeats": True}])
def test_bad_numbers_of_runs(how):
    (key,) = how
    with pytest.raises(ValueError, match=f"{key} is .*: it must be a whole number of at least 1"):
        profile_chain([nn.Linear(8, 8)], torch.zeros(5, 8), device="cpu", **how)
