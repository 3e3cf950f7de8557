"""Factories of models for incremental profiling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LINEAR = (0, 4, 5, 6)
"""The layers of the model that have weights."""


class Precise(nn.Module):
    """Returns fp32 whatever the precision, as norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Rounding(nn.Module):
    """Takes fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32
        return self.linear(x.to(self.linear.weight.dtype))


def words(micro_batch_size: int) -> tuple[list[Any], Any, Any]:
    """Words, whose vectors have the type of the weights, and a layer that returns fp32."""
    layers = [nn.Embedding(12, 16), nn.Linear(16, 16), Precise(), Rounding(), nn.Linear(16, 12)]
    return layers, (torch.arange(micro_batch_size), torch.arange(micro_batch_size)), loss_of_words


def loss_of_words(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.float(), labels)


def linear_and_relu(micro_batch_size: int) -> tuple[list[Any], Any, Any]:
    """Four linear layers of 1 MiB, and three ReLUs, which have no weights."""
    layers = [nn.Linear(512, 512, bias=False) if index in LINEAR else nn.ReLU() for index in range(7)]
    x = torch.randn(micro_batch_size, 512)
    return layers, (x, torch.zeros_like(x)), F.mse_loss
