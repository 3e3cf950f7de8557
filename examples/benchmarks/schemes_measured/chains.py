"""Three chains of sleeping layers with real tensors, on each of which another scheme is to win."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition import Chain, LayerProfile

MICRO_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A chain of identical layers, and the memory of each device that is allowed."""

    name: str
    megabits: float
    """Rate of the links, in Mbit/s."""
    num_layers: int
    forward_seconds: float
    weight_numbers: int
    output_numbers: int
    rounds: int
    """Steps that count, after one that does not."""
    optimizer: str = "SGD"
    fixed_bytes: int = 0
    """What a process takes besides: two tensors of a layer's size that Adam makes in passing, and buffers."""
    memory_bytes: int = 10**12

    @property
    def weight_copies(self) -> int:
        """Return what training keeps of the weights: them, their gradients, and two states of Adam, in fp32."""
        return 4 if self.optimizer == "Adam" else 2

    @property
    def chain(self) -> Chain:
        """Return the chain; a backward takes twice as long as a forward, weights and outputs are in fp32."""
        layer = LayerProfile(
            name="sleeping", forward_seconds=self.forward_seconds, backward_seconds=2 * self.forward_seconds,
            weight_bytes=4 * self.weight_numbers, output_bytes=4 * self.output_numbers,
            num_trainable_parameters=self.weight_numbers, stash_bytes=4,
        )  # fmt: skip
        return Chain(
            name=self.name, input_bytes=4 * self.output_numbers, layers=(layer,) * self.num_layers,
            micro_batch_size=1,
        )  # fmt: skip

    def layers(self) -> list[nn.Module]:
        """Return the layers."""
        return [
            SleepingBlock(self.forward_seconds, self.weight_numbers, self.output_numbers)
            for _ in range(self.num_layers)
        ]


CASES = (
    Case(
        name="light weights", megabits=100, rounds=7, num_layers=9, forward_seconds=0.02, weight_numbers=6_250,
        output_numbers=62_500,
    ),
    Case(
        name="heavy weights", megabits=100, rounds=3, num_layers=8, forward_seconds=0.02, weight_numbers=250_000,
        output_numbers=1_000,
    ),
    # Five layers do not divide by four devices, and ZeRO-2 and what has more do not fit.
    Case(
        name="little memory", megabits=1000, rounds=1, num_layers=5, forward_seconds=0.4, weight_numbers=1_500_000,
        output_numbers=1_000, optimizer="Adam", fixed_bytes=40_000_000,
        memory_bytes=93_000_000,
    ),
)  # fmt: skip


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: SleepingBlock) -> Tensor:
        begin = time.perf_counter()
        ctx.block, ctx.weights = block, weight.shape
        output = torch.zeros(x.shape[0], block.output_numbers) + weight[0]
        _sleep_until(begin + block.seconds)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        begin = time.perf_counter()
        # An expanded number would be no tensor of real size.
        of_weight = torch.zeros(ctx.weights)
        of_input = torch.zeros(gradients[0].shape)
        _sleep_until(begin + 2 * ctx.block.seconds)
        return of_input, of_weight, None


class SleepingBlock(nn.Module):
    """Layer that sleeps for its forward, twice as long for its backward, and has weights of real size."""

    def __init__(self, seconds: float, weight_numbers: int, output_numbers: int) -> None:
        super().__init__()
        self.seconds, self.output_numbers = seconds, output_numbers
        self.weight = nn.Parameter(torch.zeros(weight_numbers))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self)


def _sleep_until(instant: float) -> None:
    time.sleep(max(0.0, instant - time.perf_counter()))
