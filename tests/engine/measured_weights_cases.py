"""Cases: weights of a loss, and of modules in lists, are as they were before layers were measured."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_partition.engine import PipelineModule
from tests.engine.pipelines import loss_fn, mlp, train_alone, two_groups
from tests.engine.running import batches, cut, planned, same, start, train

OUT = 4
"""The width of what the last layer returns."""
ACCUMULATES: dict[str, Any] = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}


class Centered(nn.Module):
    """A loss with a weight that trains, a teacher that follows it, and a centre that follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.scale = nn.Linear(OUT, OUT)
        self.center = nn.Parameter(torch.zeros(OUT), requires_grad=False)
        self.teacher = copy.deepcopy(self.scale).requires_grad_(False)
        self.norms = [nn.BatchNorm1d(OUT, affine=False, momentum=0.5)]

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.norms[0](outputs.float())
        with torch.no_grad():
            self.center.lerp_(outputs.mean(0), 0.2)
            self.teacher.weight.lerp_(self.scale.weight, 0.2)
        shift = (self.norms[0].running_mean.to(outputs.dtype) + self.center).mean()
        return loss_fn(self.scale(outputs), labels) + (self.teacher(outputs) - shift).square().mean()


class Follows(nn.Module):
    """A layer with a teacher in a list, which follows it from one micro-batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.net = nn.Linear(16, 16)
        self.teacher = [copy.deepcopy(self.net).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher[0].weight.lerp_(self.net.weight, 0.2)
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(16, affine=False, momentum=0.2)
        return self.net(x) + self.teacher[0](x.detach()) + self.norm(x).detach() + self.norm.running_mean.clone()


def following() -> list[Any]:
    layers = mlp()
    layers[1], layers[6] = Follows(), Follows()
    return layers


def what_follows_weights_is_as_before(_: Path) -> None:
    """A teacher and a centre had moved, and statistics were kept, in the runs that were made to measure."""
    data = batches(3)
    expected = train_alone(following(), data, two_groups, loss_fn=Centered())
    engine, _, _ = start(following(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=Centered())
    same(train(engine, data), expected)


def gradients_of_a_loss_are_as_before(_: Path) -> None:
    """DeepSpeed's hooks had added the gradients that were measured to those of the first update."""
    data, losses = batches(3, dtype=torch.bfloat16), []
    for method, config in ((cut(), {}), ("madpipe", planned(cut()))):
        engine, _, _ = start(mlp(), method, {**ACCUMULATES, **config}, loss_fn=Centered())
        losses.append(train(engine, data))
    same(losses[1], losses[0])


class OwnCentre(PipelineModule):
    """Has a loss among its methods, and a weight of its own that follows the outputs."""

    def __init__(self, layers: list[Any], loss_fn: Any, **options: Any) -> None:
        super().__init__(layers=layers, loss_fn=self.loss, **options)
        self.centre = nn.Parameter(torch.zeros(OUT), requires_grad=False)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.centre.lerp_(outputs.mean(0), 0.2)
        return loss_fn(outputs - self.centre.clone(), labels)


def weights_of_a_pipeline_module_itself_are_as_before(_: Path) -> None:
    """A centre that is a weight of the module had moved in the runs that were made to measure."""
    data, losses = batches(3), []
    for method, config in ((cut(), {}), ("madpipe", planned(cut()))):
        engine, _, _ = start(mlp(), method, config, optimizer=two_groups, module_class=OwnCentre)
        losses.append(train(engine, data))
    same(losses[1], losses[0])


CASES = [
    what_follows_weights_is_as_before, gradients_of_a_loss_are_as_before,
    weights_of_a_pipeline_module_itself_are_as_before,
]  # fmt: skip
