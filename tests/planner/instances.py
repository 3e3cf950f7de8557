"""Chains and platforms for tests: by hand, at random, and from the file of solved cases."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from deepspeed_partition import Chain, LayerProfile, Platform, make_plan
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.solvers.interface import Constraints, Problem
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road

plan_without_recomputation = partial(make_plan, recompute="never")
"""For tests against programs that know no recomputation."""
FREE = 2.0**1000
"""A bandwidth at which transfers take no time."""


def chain(
    forward: list[float],
    backward: list[float],
    *,
    weights: list[int] | None = None,
    outputs: list[int] | None = None,
    input_bytes: int = 0,
    stash: list[int] | None = None,
    transient: list[int] | None = None,
) -> Chain:
    layers = []
    for index, (f, b) in enumerate(zip(forward, backward, strict=True)):
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                forward_seconds=f,
                backward_seconds=b,
                weight_bytes=weights[index] if weights else 0,
                output_bytes=outputs[index] if outputs else 0,
                stash_bytes=stash[index] if stash else None,
                transient_bytes=transient[index] if transient else 0,
            )
        )
    return Chain(input_bytes=input_bytes, layers=tuple(layers), name="test")


def three_layers(pick: random.Random) -> Chain:
    """Three layers, times so small that every pattern can be tried."""
    return chain(
        [1, pick.randint(1, 2), 1], [1, 1, pick.randint(1, 2)], weights=[pick.randint(0, 2) for _ in range(3)],
        outputs=[pick.choice([0, 2, 2]) for _ in range(3)], stash=[pick.randint(1, 9) for _ in range(3)],
        transient=[pick.choice([0, 0, 4]) for _ in range(3)],
    )  # fmt: skip


def solved_cases(kind: str) -> list[dict]:
    cases = json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]
    return [case for case in cases if case["kind"] == kind]


def of_case(case: dict, num_devices: int, memory: float) -> tuple[Chain, Platform]:
    costs = case["chain"]
    made = chain(
        costs["uF"], costs["uB"], weights=costs["W"], input_bytes=int(costs["a"][0]),
        outputs=[int(size) for size in costs["a"][1:]], stash=costs.get("stored"),
    )  # fmt: skip
    return made, Platform(num_devices=num_devices, memory_bytes=memory, bandwidth=costs["beta"] or FREE)


def boundaries_of(stages: list[list[int]]) -> list[int]:
    """Boundaries from the 1-based, closed stages of the case file."""
    return [0, *(last for _, last in stages)]


def random_instance(seed: int, most_layers: int = 7, most_devices: int = 4) -> tuple[Chain, Platform]:
    """Small whole numbers, so that every answer is exact; zero times and tight memory included."""
    pick = random.Random(seed)
    size = pick.randint(1, most_layers)
    made = chain(
        [pick.choice([0, 1, 2, 3, 5, 8]) for _ in range(size - 1)] + [1],
        [pick.choice([0, 1, 2, 4, 7]) for _ in range(size)],
        weights=[pick.randint(0, 4) for _ in range(size)],
        outputs=[pick.randint(0, 8) for _ in range(size)],
        input_bytes=pick.randint(0, 8),
        stash=[pick.randint(0, 9) for _ in range(size)] if pick.random() < 0.5 else None,
        transient=[pick.choice([0, 0, 5]) for _ in range(size)],
    )
    platform = Platform(
        num_devices=pick.randint(1, most_devices),
        memory_bytes=pick.choice([15, 25, 40, 60, 90, 200]),
        bandwidth=pick.choice([0.5, 1, 2, 4, FREE]),
        latency_seconds=pick.choice([0, 0, 0.5]),
        weight_copies=pick.choice([3, 1, 2.5]),
        comm_buffers=pick.choice([2, 2, 3]),
    )
    return with_measured_memory(made, platform, pick) if seed % 3 == 2 else (made, platform)


def with_measured_memory(made: Chain, platform: Platform, pick: random.Random) -> tuple[Chain, Platform]:
    """The instance with all that a run can say of memory, for some of the layers and terms."""
    tied = pick.sample(range(made.num_layers), min(2, made.num_layers)) if pick.random() < 0.5 else []
    layers = []
    for index, layer in enumerate(made.layers):
        kept = layer.stash_bytes or 0
        training = pick.choice([None, None, layer.weight_bytes, 3 * layer.weight_bytes + 1])
        running = pick.choice([None, kept, kept + 4, kept + pick.randint(0, 9)])
        layers.append(
            replace(
                layer,
                cut_stash_bytes=pick.choice([0, 0, 3, 6]),
                running_bytes=running,
                forward_running_bytes=pick.choice([None, pick.randint(0, running)]) if running else None,
                training_bytes=training,
                gradient_bytes=pick.randint(0, training or 0),
                first_backward_bytes=pick.choice([None, pick.randint(0, 9)]),
                reduction_bytes=pick.choice([0, 0, 3]),
                optimizer_transient_bytes=pick.choice([0, 2, 11]),
                shared_weights={"tied": layer.weight_bytes} if index in tied else {},
            )
        )
    return replace(made, layers=tuple(layers)), replace(
        platform, fixed_bytes=pick.choice([0, 1, 5]), optimizer_step=pick.choice(["largest", "sum"])
    )


def in_training_alone(made: Chain) -> Chain:
    """The chain without what comes behind the backwards of a step, and without shared weights.

    The searches beyond contiguous partitions leave the first to the check of each allocation that they find, and
    count the second on each stage.
    """
    layers = (
        replace(layer, reduction_bytes=0, optimizer_transient_bytes=0, shared_weights=()) for layer in made.layers
    )
    return replace(made, layers=tuple(layers))


def problem_of(made: Chain, platform: Platform) -> Problem:
    """What a solver is given for them."""
    return Problem(
        chain=made,
        platform=platform,
        constraints=Constraints(max_stages=platform.num_devices),
        times=TimedChain(made, platform),
        table=StageTable(made, platform),
    )


sizes = st.integers(0, 10**10)
times = st.floats(0, 10, allow_nan=False, allow_infinity=False)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Chain, Platform]:
    """Any floats and sizes; memory from far too little to plenty."""
    size = draw(st.integers(1, 9))
    made = chain(
        [draw(times) for _ in range(size - 1)] + [draw(st.floats(2e-6, 10))],
        [draw(times) for _ in range(size)],
        weights=[draw(sizes) for _ in range(size)],
        outputs=[draw(sizes) for _ in range(size)],
        input_bytes=draw(sizes),
        stash=[draw(sizes) for _ in range(size)],
        transient=[draw(sizes) for _ in range(size)],
    )
    platform = Platform(
        num_devices=draw(st.integers(1, 6)),
        memory_bytes=draw(st.integers(10**9, 3 * 10**11)),
        bandwidth=draw(st.floats(1e8, 1e12)),
        latency_seconds=draw(st.sampled_from([0.0, 1e-5, 0.1])),
        weight_copies=draw(st.sampled_from([3, 1, 2.5, 8])),
    )
    return made, platform


def shared_instance(seed):
    """Two or three stages on one device, others between them, and memory in which they must avoid one another."""
    pick = random.Random(seed)
    devices = pick.choice([(0, 1, 0), (0, 1, 2, 0), (0, 1, 0, 2), (1, 0, 2, 0), (0, 1, 2, 3, 0), (0, 1, 0, 2, 0)])
    size = len(devices)
    made = chain(
        [pick.randint(1, 9) for _ in range(size)], [pick.randint(1, 12) for _ in range(size)],
        outputs=[pick.choice([0, 1, 3]) for _ in range(size)], stash=[pick.randint(1, 20) for _ in range(size)],
        transient=[pick.choice([0, 0, 6, 12]) for _ in range(size)],
    )  # fmt: skip
    placement = Placement.of(range(size + 1), devices)
    free = Platform(num_devices=4, memory_bytes=10**4, bandwidth=pick.choice([1, 4]))
    smallest = max(device.bytes_for_one for device in Road(problem_of(made, free), placement).memory)
    return made, replace(free, memory_bytes=smallest + pick.randint(0, 25)), placement
