"""The cases of the table: what is trained, with what, on which cut."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations, groupby, pairwise, product

from models import MODELS

from deepspeed_partition import Chain, Plan, Platform, make_plan, replay
from deepspeed_partition.planner.allocation import Rematerialize
from deepspeed_partition.planner.plan import PlannedStage
from deepspeed_partition.planner.schedule import Order
from tests.engine import plans

PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("SGD", "momentum", "Adam", "AdamW")
CUTS = ("planned", "uniform", "bad", "several")
RECOMPUTE = ("none", "stage")
PLANNING_SECONDS = 5.0
BAD_SHARES = {2: (0.8,), 4: (0.1, 0.25, 0.9)}
"""Where a bad cut has its boundaries, as shares of the layers: most of them are on one rank."""


@dataclass(frozen=True, order=True)
class Group:
    """What one measurement serves: cases that differ in nothing but their cut and what they recompute."""

    model: str
    precision: str
    optimizer: str
    zero: int

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}, {self.optimizer}, ZeRO {self.zero}"


@dataclass(frozen=True, order=True)
class Case:
    """One training run."""

    group: Group
    cut: str
    recompute: str

    def __str__(self) -> str:
        return f"{self.group}, {self.cut}, recompute {self.recompute}"


def all_cases(zero: Sequence[int]) -> list[Case]:
    """Return all cases for a number of processes, those of one group one after the other."""
    groups = [Group(*each) for each in product(MODELS, PRECISIONS, OPTIMIZERS, zero)]
    return [Case(group, cut, recompute) for group, cut, recompute in product(groups, CUTS, RECOMPUTE)]


def chosen(cases: list[Case], only: Sequence[str], sample: int | None) -> list[Case]:
    """Return the cases that have all of the words ``only`` in their names, and a sample of ``sample`` of them.

    In a sample, always the same, is every pair of values of two factors, as long as it has room: it takes the case
    with the most pairs that are not there yet, and the rest by chance.
    """
    found = [case for case in cases if all(word in str(case) for word in only)]
    if sample is None or sample >= len(found):
        return found
    random.Random(0).shuffle(found)
    pairs = {
        case: set(combinations(enumerate((*astuple(case.group), case.cut, case.recompute)), 2)) for case in found
    }
    missing = {pair for each in pairs.values() for pair in each}
    taken: list[Case] = []
    while len(taken) < sample:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        missing -= pairs.pop(best)
        taken.append(best)
    return sorted(taken)


def plan_of(case: Case, chain: Chain, platform: Platform, num_micro_batches: int) -> Plan:
    """Return the plan that a case runs, with the memory that the planner's own accounting gives it."""
    num_devices = platform.num_devices
    if case.cut == "several":
        cuts = _training_cuts(chain, [place / (2 * num_devices) for place in range(1, 2 * num_devices)])
        devices = [*range(num_devices)] * 2
        orders = plans.depth_first(devices, num_micro_batches, num_devices + 1)
        recomputed = _whole_stages(chain, cuts) if case.recompute == "stage" else {}
        plan = _by_hand(chain, platform, cuts, devices, orders, recomputed)
        return _with_its_memory(plan, chain)
    plan = make_plan(
        chain, platform, "madpipe" if case.cut == "planned" else boundaries(case.cut, chain, num_devices),
        num_micro_batches=num_micro_batches, every_device_trains=True, time_limit_seconds=PLANNING_SECONDS,
    )  # fmt: skip
    if case.recompute == "none":
        return plan
    assert plan.step is not None
    devices = [stage.device for stage in plan.stages]
    recomputed = _whole_stages(chain, plan.boundaries)
    plan = _by_hand(chain, platform, plan.boundaries, devices, plan.step.order, recomputed)
    return _with_its_memory(plan, chain)


def _whole_stages(chain: Chain, cuts: Sequence[int]) -> dict[int, Rematerialize]:
    """Return what each stage recomputes: all of its layers, in as many blocks as those leave that cannot."""
    recomputed: dict[int, Rematerialize] = {}
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        runs = groupby(range(start, stop), lambda layer: chain.layers[layer].recomputable)
        ranges = [list(layers) for may, layers in runs if may]
        recomputed[stage] = tuple((layers[0], layers[-1] + 1) for layers in ranges)
    return recomputed


def _by_hand(
    chain: Chain,
    platform: Platform,
    cuts: Sequence[int],
    devices: Sequence[int],
    orders: Sequence[Order],
    recomputed: Mapping[int, Rematerialize],
) -> Plan:
    """Return a plan of these orders; its period is ample, for a step's memory does not depend on it."""
    seconds = chain.compute_seconds + sum(platform.transfer_seconds(layer.output_bytes) for layer in chain.layers)
    # Operations a little apart: where one begins when another ends, rounding would let them overlap.
    return plans.plan_of(
        chain, platform, cuts, devices, 8 * seconds, orders, recomputed, waits=lambda: seconds / 1000
    )


def boundaries(cut: str, chain: Chain, num_devices: int) -> list[int]:
    """Return a uniform cut, with as many layers everywhere, or a bad one."""
    uniform = [place / num_devices for place in range(1, num_devices)]
    return _training_cuts(chain, uniform if cut == "uniform" else BAD_SHARES[num_devices])


def _training_cuts(chain: Chain, shares: Sequence[float]) -> list[int]:
    """Return boundaries at these shares of the layers, or the next ones with which every stage trains."""
    trains = [bool(layer.num_trainable_parameters) for layer in chain.layers]
    cuts = [0]
    for place, share in enumerate(shares):
        cut = max(round(share * chain.num_layers), cuts[-1] + 1)
        while not any(trains[cuts[-1] : cut]):
            cut += 1
        cuts.append(min(cut, chain.num_layers - len(shares) + place))
    cuts.append(chain.num_layers)
    assert all(any(trains[slice(*stage)]) for stage in pairwise(cuts)), cuts
    return cuts


def _with_its_memory(plan: Plan, chain: Chain) -> Plan:
    """Return a plan by hand with what the planner says of its memory, and of the model."""
    memory = replay(plan, chain).memory
    stages = [
        PlannedStage(
            layers=stage.layers, device=stage.device, rematerialize=stage.rematerialize, in_flight=stage.in_flight
        )
        for stage in plan.stages
    ]
    return replace(plan, memory=memory, peak_memory_bytes=tuple(use.total for use in memory), stages=tuple(stages))
