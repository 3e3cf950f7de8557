"""Modules whose calls, or steps between them, change tensors in place, as normalizing flows add to a sum.

They name no layers. Written like ``lightning_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.lightning import lightning_cases as cases
from tests.lightning.captured_cases import Sgd, trained
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import Host


class Coupling(nn.Module):
    """Adds to the sum that it is given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 16))

    def forward(self, z: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift = self.net(z).chunk(2, -1)
        scale = torch.tanh(scale)
        total += scale.sum(1)
        return (z + shift) * torch.exp(scale), total


class Flow(Sgd):
    """Calls one coupling after the other in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling() for _ in range(4))

    def encode(self, x: torch.Tensor) -> Any:
        z, total = x, torch.zeros(len(x))
        for flow in self.flows:
            z, total = flow(z, total)
        return z, total

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        z, total = self.encode(x)
        return 0.1 * (0.5 * z.square().sum(1) - total).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss_of(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch[0]))


class FlowAsForward(Flow):
    """The same in one call of the module itself."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().encode(x)

    def encode(self, x: torch.Tensor) -> Any:
        return self(x)


class Adding(nn.Module):
    """Adds to the sum that it is given, and does not return it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, z: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = self.net(z)
        total += y.square().sum(1)
        return z + y


class SumsByItself(Flow):
    """Its loss has the sum that its modules have added to."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Adding() for _ in range(3))

    def encode(self, x: torch.Tensor) -> Any:
        z, total = x, torch.zeros(len(x))
        for flow in self.flows:
            z = flow(z, total)
        return z, -total


class ChangesBetween(Sgd):
    """Its step changes in place what its modules return, and lengthens a list between its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.kept: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.first(batch[0])
        x += 1
        self.kept.append(batch_idx)
        x = self.second(x)
        x.mul_(0.5)
        self.kept.append(batch_idx)
        return F.cross_entropy(self.third(x), batch[1])


def changed_in_place(host: Host) -> dict[str, Any]:
    found = {}
    for build in (Flow, FlowAsForward, SumsByItself, ChangesBetween):
        with lines() as said:
            found[build.__name__] = trained(host, build, cases.loader(64), {"loss": "batch", "warmup_epochs": 0})
        found[build.__name__]["said"] = [line for line in said if " reads self." in line]
    return found


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [changed_in_place], 4: []}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [], 4: []}
