"""Factories of models for incremental profiling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LINEAR = (0, 4, 5, 6)
"""The layers of the model that have weights."""


def linear_and_relu(micro_batch_size: int) -> tuple[list[Any], Any, Any]:
    """Four linear layers of 1 MiB, and three ReLUs, which have no weights."""
    layers = [nn.Linear(512, 512, bias=False) if index in LINEAR else nn.ReLU() for index in range(7)]
    x = torch.randn(micro_batch_size, 512)
    return layers, (x, torch.zeros_like(x)), F.mse_loss
