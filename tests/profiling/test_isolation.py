"""What layers and a loss leave in helpers, weights and tables of modules when they are measured: nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deepspeed_partition import kept_values
from deepspeed_partition.profiling import profile_chain

QUICK: dict[str, Any] = {"warm_up": 1, "repeats": 1, "device": "cpu", "halves": False}
X = torch.ones(5, 8)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(kept_values, "tell_once", lambda _, sentence: sentences.append(sentence))
    return sentences


def measure(layer: Any, loss_fn: Any = None) -> None:
    """Measure a layer, between two others, and a loss."""
    sample = X if loss_fn is None else (X, torch.zeros(5, 8))
    profile_chain([nn.Linear(8, 8), layer, nn.Linear(8, 8)], sample, loss_fn=loss_fn, **QUICK)


def mean_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


# Helpers that can be called.

NUM_CALLS = [0]


class Warm:
    """A scale that rises with each call."""

    total = 0

    def __init__(self) -> None:
        self.calls, self.generator, self.inner = (
            0,
            random.Random(0),
            SimpleNamespace(deep=SimpleNamespace(calls=0)),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        Warm.total += 1
        NUM_CALLS[0] += 1
        self.inner.deep.calls += 1
        return x * min(1.0, self.calls / 20) * self.generator.random()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Slotted:
    """A helper without a dict, that can be called."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Helped(nn.Linear):
    """A layer whose helper is an attribute."""

    def __init__(self, helper: Any) -> None:
        super().__init__(8, 8)
        self.helper = helper

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        helper = self.helper[0] if isinstance(self.helper, list) else self.helper
        return helper(super().forward(x))


def _itself(warm: Warm) -> Any:
    return warm


def _method(warm: Warm) -> Any:
    return warm.apply


def _in_list(warm: Warm) -> Any:
    return [warm]


def _method_in_list(warm: Warm) -> Any:
    return [warm.apply]


@pytest.mark.parametrize("form", [_itself, _method, _in_list, _method_in_list])
def test_what_a_helper_that_is_called_keeps_is_put_back(form: Callable[[Warm], Any]) -> None:
    """A scale of a warm-up had risen by the runs that were made to measure, in silence."""
    warm = Warm()
    state, NUM_CALLS[0], Warm.total = warm.generator.getstate(), 0, 0
    helper = form(warm)
    layer = Helped(helper)
    measure(layer)
    assert warm.calls == 0 and warm.generator.getstate() == state
    assert layer.helper is helper
    assert (Warm.total, NUM_CALLS) == (0, [0]), "what its code names"


def test_what_objects_in_objects_of_a_helper_keep_is_put_back() -> None:
    layer = Helped(Warm())
    layer.around = SimpleNamespace(of=SimpleNamespace(it=layer.helper))
    measure(layer)
    assert layer.helper.inner.deep.calls == 0
    holder = Helped(nn.Identity())
    holder.config = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(calls=0)))

    def count(module: Any, *_: Any) -> None:
        module.config.a.b.calls += 1

    holder.register_forward_hook(count)
    measure(holder)
    assert holder.config.a.b.calls == 0


def test_what_lies_too_deep_is_said(said: list[str]) -> None:
    layer = Helped(nn.Identity())
    deep = SimpleNamespace(calls=0)
    for _ in range(5):
        deep = SimpleNamespace(inner=deep, count=0)
    layer.chain, layer.ring = deep, SimpleNamespace(calls=0)
    layer.ring.again = layer.ring

    def count(module: Any, *_: Any) -> None:
        module.chain.inner.inner.inner.inner.count += 1
        module.ring.calls += 1

    handle = layer.register_forward_hook(count)
    measure(layer)
    assert layer.ring.calls == 0
    assert [line.split(",")[0] for line in said] == [
        "chain (SimpleNamespace): what it holds was changed while layers or the loss function ran to be measured "
        "or tried"
    ]
    handle.remove()
    said.clear()
    measure(layer)
    assert not said


def test_a_helper_with_slots_that_is_called_is_put_back() -> None:
    layer = Helped(Slotted())
    measure(layer)
    assert layer.helper.calls == 0


def test_a_method_of_a_helper_that_a_loss_holds_is_put_back() -> None:
    warm = Warm()
    holder = SimpleNamespace(act=warm.apply)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return mean_loss(holder.act(outputs), labels)

    measure(nn.Linear(8, 8), loss_fn)
    assert warm.calls == 0
