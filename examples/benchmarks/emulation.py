"""Layers that sleep instead of computing, so that every stage has a device of its own on any machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition import Chain


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, seconds: tuple[float, float], output_numel: int) -> Tensor:
        ctx.backward_seconds, ctx.shape = seconds[1], x.shape
        time.sleep(seconds[0])
        return torch.zeros(x.shape[0], output_numel) + anchor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.backward_seconds)
        return torch.zeros(ctx.shape), gradients[0].sum().reshape(1), None, None


class SleepingLayer(nn.Module):
    """Sleeps for its forward and backward and hands on a tensor of the given size.

    ``num_parameters`` only weigh in cuts that count parameters.
    """

    def __init__(
        self, forward_seconds: float, backward_seconds: float, output_numel: int, num_parameters: int
    ) -> None:
        super().__init__()
        self.seconds = (forward_seconds, backward_seconds)
        self.output_numel = output_numel
        self.anchor = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(max(0, num_parameters - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.anchor, self.seconds, self.output_numel)


def sleeping_layers(chain: Chain, *, time_scale: float = 1.0, most_parameters: int = 1000) -> list[SleepingLayer]:
    """A layer for each of the chain: its times, its boundary, its parameters in proportion."""
    heaviest = max(layer.num_trainable_parameters or 0 for layer in chain.layers) or 1
    return [
        SleepingLayer(
            layer.forward_seconds * time_scale,
            layer.backward_seconds * time_scale,
            max(1, layer.output_bytes // 4),
            1 + round((layer.num_trainable_parameters or 0) / heaviest * most_parameters),
        )
        for layer in chain.layers
    ]
