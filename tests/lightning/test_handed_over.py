"""Layers that hand something over beside what they return are told, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.handed_over import HandOver, hand_over
from lightning_madpipe.steps.layers_on_parts import few_samples, layers_on_parts

WIDTH = 6
SKIPS: dict[str, Any] = {}


class Stash(nn.Linear):
    """Leaves its input in ``skips`` for a later layer, as many ResNets and U-Nets of pipelines do."""

    def __init__(self, skips: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.skips, list):
            self.skips.append(x)
        else:
            self.skips["identity"] = x
        return super().forward(x)


class Pop(Stash):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.skips.pop() if isinstance(self.skips, list) else self.skips.pop("identity")
        return nn.Linear.forward(self, x) + skip


class Get(Stash):
    """Takes it and leaves it there, so that it runs alone, too, with what another micro-batch has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x) + self.skips["identity"]


class Counts(nn.Linear):
    """What it gives depends on what it keeps itself."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def layers(kind: str) -> list[nn.Module]:
    skips: Any = [] if kind == "list" else SKIPS if kind == "global" else {}
    taker = Get if kind == "stays" else Pop
    between = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)]
    found = [nn.Linear(WIDTH, WIDTH), Stash(skips), *between, taker(skips), nn.Linear(WIDTH, WIDTH)]
    if kind == "grouped":
        return [found[0], nn.Sequential(*found[1:6]), Counts(WIDTH, WIDTH), found[6]]
    return found


def look(layers: list[nn.Module]) -> HandOver | None:
    generator = torch.Generator().manual_seed(0)
    some, others = ((torch.randn(4, WIDTH, generator=generator),) for _ in range(2))
    return hand_over(layers, [[layer] for layer in layers], some, others)


@pytest.mark.parametrize("kind", ["list", "dict", "global", "stays"])
def test_a_layer_that_takes_what_an_earlier_one_has_left_is_found(kind: str) -> None:
    """It raised KeyError or IndexError in a plan's measurement or in a step, with advice that did not help."""
    made = layers(kind)
    before = {name: tensor.clone() for name, tensor in nn.Sequential(*made).state_dict().items()}
    assert look(made) == HandOver(giver=1, taker=5)
    after = nn.Sequential(*made).state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert len(made[1].skips) == 0  # type: ignore[arg-type]


def test_what_one_layer_hands_over_within_it_and_what_it_keeps_is_its_own() -> None:
    assert look(layers("grouped")) is None


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_sentence_names_both_layers_and_the_way_out(is_cut: bool) -> None:
    module = nn.Module()
    module.net = nn.Sequential(*layers("dict"))
    call = PipelineCall(layers=list(module.net), attribute="forward")
    x = torch.randn(4, WIDTH)
    samples, device = few_samples((x,), (x[:2],)), torch.device("cpu")
    found = layers_on_parts(module, call, samples, device=device, dtype=None, is_cut=is_cut).handed_over
    assert (found is None) == (not is_cut)
    if found is not None:
        assert found[1].startswith(
            "self.net.5 (Pop) does not compute from its input alone: it takes something that "
        )
        assert "self.net.1 (Stash) leaves beside its output" in found[1] and "one nn.Sequential" in found[1]
