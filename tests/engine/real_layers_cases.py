"""Cases: the models of the examples, with plans that recompute single micro-batches, or have backwards in halves.

Several layers are one here, so that a stage is recomputed as a whole or not at all: with more of them the planner
recomputes a part of each micro-batch instead. Bytes are those that the profiler measures; times are told, so that
a plan is the same on any machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from deepspeed_partition import Chain, Plan, Platform, make_plan
from deepspeed_partition.engine.runtime.collectives import broadcast_object
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.profiling import profile_chain
from tests.engine import plans
from tests.engine.pipelines import BASE_SEED, Whole
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    all_tensors,
    divides_backwards,
    recomputes_on_a_cpu,
    same,
    start,
    train,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

NUM_STEPS = 3
PLENTY = 10**9
"""Bytes of memory in which everything fits."""


class OfDigits(nn.Sequential):
    """Some layers of the network of ``train_lightning.py``, which has batch normalization, and dropout."""

    def __init__(self, first: int, last: int) -> None:
        from train_lightning import Digits

        super().__init__(*Digits(1).net[first:last], nn.Dropout(0.2 if last < 12 else 0.0))


class OfGPT(nn.Sequential):
    """Some blocks of the network of ``train_deepspeed.py``, and dropout."""

    def __init__(self, num_blocks: int) -> None:
        from train_deepspeed import Block

        super().__init__(nn.Dropout(0.1), *(Block() for _ in range(num_blocks)), nn.Dropout(0.1))


def digits() -> tuple[list[Any], list[float], list[list[Any]], Any]:
    """Layers, their parts of the time, the micro-batches of each step, and the loss."""
    from sklearn.datasets import load_digits
    from torch.nn import functional as F

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False).split(32)
    batches = list(zip(images, torch.tensor(data.target).split(32), strict=True))
    specs = [LayerSpec(OfDigits, 0, 6), LayerSpec(OfDigits, 6, 12)]
    return specs, [1.0, 1.0], in_steps(batches), F.cross_entropy


def gpt() -> tuple[list[Any], list[float], list[list[Any]], Any]:
    """The same for a GPT, whose first and last layers share their weights."""
    from train_deepspeed import CONTEXT, VOCABULARY, Embedding, loss_of, micro_batches, unembed

    drawn = torch.randint(VOCABULARY, (4 * CONTEXT,), generator=torch.Generator().manual_seed(0))
    data = micro_batches(drawn, seed=1)
    batches = [next(data) for _ in range(NUM_STEPS * NUM_MICRO_BATCHES)]
    first, last = (TiedLayerSpec("tokens", Embedding, forward_fn=function) for function in (None, unembed))
    return (
        [first, LayerSpec(OfGPT, 5), LayerSpec(OfGPT, 1), last],
        [0.1, 1.0, 1.0, 0.1],
        in_steps(batches),
        loss_of,
    )


def in_steps(micro_batches: Sequence[Any]) -> list[list[Any]]:
    return [list(micro_batches[NUM_MICRO_BATCHES * step :][:NUM_MICRO_BATCHES]) for step in range(NUM_STEPS)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam, which makes whole steps of rounding: a bias before a batch normalization has no other gradient."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_in_one_process(specs: list[Any], data: list[list[Any]], loss_of: Any) -> tuple[list[float], nn.Module]:
    """The losses, and the model behind them; each layer is seeded as ``seed_layers`` seeds it."""
    model = Whole(specs)
    optimizer = sgd(model)
    losses, number = [], 0
    for batch in data:
        optimizer.zero_grad()
        total = 0.0
        for passed, labels in batch:
            number += 1
            for place, layer in enumerate(model.functions):
                set_random_seed(BASE_SEED * (number + 1) + place)
                passed = layer(passed)
            loss = loss_of(passed, labels) / len(batch)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, model


def chain_of(specs: list[Any], times: Sequence[float], data: list[list[Any]], loss_of: Any) -> Chain:
    """The bytes that are measured, and these times; half of each backward is the gradient of the input."""
    chain = profile_chain(specs, data[0][0], loss_fn=loss_of, warm_up=1, repeats=1, progress=False)
    layers = []
    for place, (layer, time) in enumerate(zip(chain.layers, times, strict=True)):
        first_half = time if place else 0.0
        layers.append(
            replace(
                layer, forward_seconds=time, backward_seconds=2 * time, backward_input_seconds=first_half,
                backward_weight_seconds=2 * time - first_half,
            )
        )  # fmt: skip
    return replace(chain, layers=tuple(layers))


def plan_of(chain: Chain, memory_bytes: int, **how: Any) -> Plan:
    """The first rank's plan; the search may end elsewhere on another one."""
    how = {"num_micro_batches": NUM_MICRO_BATCHES, "every_device_trains": True, "time_limit_seconds": 5, **how}
    platform = Platform(num_devices=2, memory_bytes=memory_bytes, bandwidth=1e9)
    plan = make_plan(chain, platform, "contiguous", **how) if dist.get_rank() == 0 else None
    found: Plan = broadcast_object(plan, 0)
    return found


def least_memory(chain: Chain) -> int:
    """The fewest bytes of a device in which nothing is recomputed: one micro-batch at a time."""
    try:
        platform = Platform(num_devices=2, memory_bytes=1, bandwidth=1e9)
        make_plan(chain, platform, "contiguous", recompute="never", every_device_trains=True)
    except InfeasibleError as error:
        return error.smallest_memory_bytes or 0
    raise AssertionError("a byte is no memory for a network")


IN_HALVES = {"recompute": "never", "split_backward": True}
ONE_BY_ONE = {"recompute": "micro-batch"}


def plans_of_gpt(chain: Chain) -> list[tuple[Plan, str]]:
    """Plans, and the kinds of operations that each must have; room for one stash of the first stage."""
    tight = int(1.5 * least_memory(chain))
    found = [(plan_of(chain, tight, **ONE_BY_ONE), "FfRB")]
    if divides_backwards():
        found.append((plan_of(chain, tight, **ONE_BY_ONE, split_backward=True), "FfRIW"))
        found.append((plan_of(chain, PLENTY, **IN_HALVES), "FIW"))
    return found


def plans_of_digits(chain: Chain) -> list[tuple[Plan, str]]:
    """The planner recomputes a stage of it always or never: orders that recompute some are made by hand."""
    orders = plans.some_recomputed(plans.depth_first((0, 1), NUM_MICRO_BATCHES, 3), seed=2, share=0.75)
    how = {"chain": plans.chain_of(2), "platform": plans.platform_of(2), "cuts": [0, 1, 2], "devices": (0, 1)}
    found = [(plans.plan_of(**how, orders=orders), "FfRB")]
    if divides_backwards():
        both = plans.some_in_halves(orders, seed=1, share=0.75)
        found.append((plans.plan_of(**how, orders=both), "FfRIW"))
        found.append((plan_of(chain, PLENTY, **IN_HALVES), "FIW"))
    return found


def real_layers(_: Path) -> None:
    """GPT and digits equal the model as it is, with dropout and batch statistics, and without recomputation."""
    if not recomputes_on_a_cpu():
        return
    for make, plans_for in ((digits, plans_of_digits), (gpt, plans_of_gpt)):
        specs, times, data, loss_of = make()
        expected, alone = train_in_one_process(specs, data, loss_of)
        buffers = dict(alone.named_buffers())
        for plan, needed in plans_for(chain_of(specs, times, data, loss_of)):
            assert plan.step is not None
            kinds = {name[0] for order in plan.step.order or () for name, _ in order}
            assert set(needed) <= kinds, (make.__name__, needed, plan.step.order)
            engine, _, _ = start(specs, None, num_stages=2, plan=plan, loss_fn=loss_of, optimizer=sgd)
            same(train(engine, data), expected)
            found = {name: tensor for name, tensor in all_tensors(engine).items() if "running" in name}
            assert len(found) == (10 if make is digits else 0)
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, buffers[name], rtol=1e-4, atol=1e-5, msg=f"{needed}: {name}")


CASES = (real_layers,)
