"""What hooks change in layers is noticed before the next step, and what layers change themselves is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_madpipe.compat.elsewhere import Elsewhere
from lightning_madpipe.steps.layer_settings import LayerSettings


class Meter:
    total = 0.0


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("heat", torch.ones(3))
        self.register_buffer("long", torch.zeros(2000))
        self.register_buffer("nan", torch.full((2,), torch.nan))
        self.alpha, self.settings, self.items = 0.5, {"share": [0.0]}, [1, 2]
        self.mask, self.meter, self.last = torch.zeros(4), Meter(), float("nan")
        self.calls = 0


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.outside = Layer(), nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.outside.register_buffer("heat", torch.ones(3))


class InLayers(Elsewhere):
    def __init__(self, module: Module) -> None:
        self._owners = {module.layer: {"0"}, module.norm: {"1"}}


def set_to(name: str, value: Any) -> Callable[[Module], object]:
    return lambda module: setattr(module.layer, name, value)


CHANGES: dict[str, Callable[[Module], object]] = {
    "a number": set_to("alpha", 0.25),
    "a mode": lambda module: module.layer.eval(),
    "a buffer in place": lambda module: module.layer.heat.mul_(2),
    "a buffer without a count": lambda module: module.layer.heat.data.fill_(0.5),
    "another buffer": set_to("heat", torch.zeros(3)),
    "a long buffer": lambda module: module.layer.long.add_(1),
    "an attribute": lambda module: module.layer.mask.data.fill_(1),
    "a dict": lambda module: module.layer.settings["share"].append(1.0),
    "a list": lambda module: module.layer.items.reverse(),
    "an object": lambda module: setattr(module.layer.meter, "total", 1.0),
    "a hook": lambda module: module.layer.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_two_steps_is_noticed(change: str) -> None:
    module = Module()
    settings = LayerSettings(module, InLayers(module), set())
    settings.note()
    CHANGES[change](module)
    assert settings.is_look_due(epoch_begins=False)
    settings.note()
    assert not settings.is_look_due(epoch_begins=False)


def test_what_layers_change_themselves_is_not_noticed() -> None:
    """Averages and counts, the weights, and what stands beside the layers."""
    module = Module()
    settings = LayerSettings(module, InLayers(module), {"self.layer.calls"})
    assert not settings.is_look_due(epoch_begins=True), "nothing was noted before"
    module.layer.calls += 1
    module.norm.running_mean.fill_(1.0)  # type: ignore[union-attr]
    module.outside.heat.fill_(2.0)  # type: ignore[operator]
    with torch.no_grad():
        module.layer.weight.fill_(1.0)
    assert not settings.is_look_due(epoch_begins=False)


def test_what_changes_in_every_step_is_looked_at_ever_less_often() -> None:
    """A look takes seventeen forwards, and annealing changes a buffer in every step."""
    module = Module()
    settings = LayerSettings(module, InLayers(module), set())
    looks = []
    for step in range(1, 41):
        settings.note()
        module.layer.heat.fill_(step + 1)
        if settings.is_look_due(epoch_begins=step == 23):
            looks.append(step)
            settings._changed.clear()  # as bring() does, for which ranks meet
    assert looks == [1, 2, 4, 8, 16, 23, 32]
