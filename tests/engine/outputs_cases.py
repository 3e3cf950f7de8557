"""Cases: outputs of layers whose form or memory is not that of a plain tensor of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_partition import Plan
from tests.engine import plans
from tests.engine.pipelines import MICRO_BATCH_SIZE as NUM_SAMPLES
from tests.engine.pipelines import WIDTH, loss_fn, train_alone
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    adam,
    batches,
    divides_backwards,
    mine,
    recomputes_on_a_cpu,
    same,
    start,
    train,
)

# Tuples of one tensor


class One(nn.Module):
    """A layer as in Hugging Face's models, which returns a tuple though it has one output."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, given: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = given
        return (torch.tanh(self.linear(x)),)


def loss_of_first(outputs: tuple[Tensor], labels: Tensor) -> Tensor:
    (logits,) = outputs
    return loss_fn(logits, labels)


def plan_of(cuts: list[int], devices: tuple[int, ...], orders: Any = None, **more: Any) -> Plan:
    orders = orders or plans.depth_first(devices, NUM_MICRO_BATCHES, 3)
    return plans.plan_of(plans.chain_of(cuts[-1]), plans.platform_of(2), cuts, devices, orders=orders, **more)


def tuples_of_one_tensor(_: Path) -> None:
    """They stay tuples where layers run again, or in halves: ``t[0]`` was the first sample of the micro-batch."""
    if not recomputes_on_a_cpu():
        return
    specs = [LayerSpec(One, 8, WIDTH), *(LayerSpec(One, WIDTH, WIDTH) for _ in range(6)), LayerSpec(One, WIDTH, 4)]
    data = [[((x,), y) for x, y in batch] for batch in batches(2)]
    expected = train_alone(specs, data, adam, loss_fn=loss_of_first)
    cuts, devices = [0, 4, 8], (0, 1)
    orders = plans.depth_first(devices, NUM_MICRO_BATCHES, 3)
    found = [
        plan_of(cuts, devices, recomputed={0: [(0, 2)], 1: [(5, 7)]}),
        plan_of(cuts, devices, recomputed={0: True, 1: True}),
        plan_of(cuts, devices, plans.some_recomputed(orders, 1)),
    ]
    if divides_backwards():
        halves = plans.some_in_halves(orders, 2, share=0.75)
        found += [plan_of(cuts, devices, halves)]
        found += [plan_of(cuts, devices, halves, recomputed={0: [(1, 3)], 1: True})]
    for plan in found:
        engine, _, _ = start(specs, None, num_stages=2, plan=plan, optimizer=adam, loss_fn=loss_of_first)
        same(train(engine, data), expected)


# Memory that a layer keeps


class Keeping(nn.Module):
    """Returns memory of its own, which its next forward writes: a buffer, a part of one, and attributes."""

    def __init__(self, num_rows: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.zeros(NUM_SAMPLES, WIDTH))
        self.register_buffer("codes", torch.zeros(2 + num_rows, WIDTH))
        self.is_large, self.numbers = torch.zeros(NUM_SAMPLES, dtype=torch.bool), {"of": torch.arange(NUM_SAMPLES)}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        given = x.detach()
        self.mask.copy_(given > 0)
        self.codes[1:] = given.mean(0)
        torch.gt(given.sum(1), 0, out=self.is_large)
        self.numbers["of"].copy_((given.amax(1) * 100).long())
        return self.linear(x), self.mask, self.codes[1:], self.is_large, self.numbers["of"]


class Using(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        x, mask, codes, is_large, numbers = given
        return self.linear(x * mask + codes.mean(0)) * (1 + is_large[:, None]) + numbers[:, None] / 100


def outputs_that_their_layer_writes_again(_: Path) -> None:
    """A stage gets what its micro-batch has made, however many the stage before has run meanwhile."""
    first, last = LayerSpec(nn.Linear, 8, WIDTH), LayerSpec(nn.Linear, WIDTH, 4)
    for num_rows, devices, cuts in ((1, (0, 0, 1), [0, 2, 3, 4]), (2**17, (0, 1), [0, 2, 4])):
        specs = [first, LayerSpec(Keeping, num_rows), LayerSpec(Using), last]
        data = batches(2)
        expected = train_alone(specs, data, adam)
        plan = plan_of(cuts, devices, plans.gpipe(devices, NUM_MICRO_BATCHES))
        engine, _, _ = start(specs, None, num_stages=2, plan=plan, optimizer=adam)
        same(train(engine, data), expected)
        engine.eval_batch(mine(engine, data))


class Positions(nn.Module):
    """Makes its table of positions when it first runs, which may be in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH)
        return x, self.table


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, table = given
        return torch.tanh(self.linear(x) + table)


def a_table_that_an_evaluation_makes(_: Path) -> None:
    """A buffer made in inference mode has no count of changes: the first step after the evaluation ended."""
    specs = [
        LayerSpec(nn.Linear, 8, WIDTH),
        LayerSpec(Positions),
        LayerSpec(Placed),
        LayerSpec(nn.Linear, WIDTH, 4),
    ]
    data = batches(2)
    expected = train_alone(specs, data, adam)
    plans_of_cuts = [plan_of([0, 2, 4], (0, 1))]
    if recomputes_on_a_cpu():
        plans_of_cuts.append(plan_of([0, 3, 4], (0, 1), recomputed={0: [(1, 2), (2, 3)]}))
    for plan in plans_of_cuts:
        engine, _, _ = start(specs, None, num_stages=2, plan=plan, optimizer=adam)
        with torch.inference_mode():
            engine.eval_batch(mine(engine, data))
        same(train(engine, data), expected)


CASES: tuple[Callable[[Path], None], ...] = (
    tuples_of_one_tensor, outputs_that_their_layer_writes_again, a_table_that_an_evaluation_makes,
)  # fmt: skip
