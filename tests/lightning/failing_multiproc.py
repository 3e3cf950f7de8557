"""A fit that fails on one rank only: in a layer, or in backward. The job is to end with the reason.

python failing_multiproc.py WHAT, under torchrun, or alone: then Lightning starts the second process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from torch import nn  # noqa: E402

from tests.lightning import lightning_cases as cases  # noqa: E402


class Fails(nn.Module):
    """In the fifth batch, as a layer whose input is out of its range does."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training and torch.is_grad_enabled()
        if self.num_calls > 100:
            raise RuntimeError("the layer's own error")
        return x


class Infinite(nn.Module):
    """Its backward gives NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x.detach().abs() * 0 + (x - x.detach()) * 0)


class Failing(cases.Classifier):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.failing = layer

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, self.failing, torch.tanh, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the pipeline runs the layers")


if __name__ == "__main__":
    what = sys.argv[1]
    host = cases.Host(Path(), num_processes=2, pipelined=True)
    layer = {"layer": Fails, "anomaly": Infinite}[what]()
    trainer = host.trainer(max_epochs=20, detect_anomaly=what == "anomaly")
    trainer.fit(Failing(layer), cases.loader(54))
    print("the job reached its end")
