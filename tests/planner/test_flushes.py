"""Steps whose backwards wait for all forwards of their batch, because its loss is computed once on all outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product

import pytest

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, replay
from deepspeed_partition.planner.plan import StepPlan
from deepspeed_partition.planner.schedule import Order
from tests.planner.instances import FREE, chain
from tests.planner.instances import plan_without_recomputation as make_plan

ROOMY = 10**9


def random_chain(generator: random.Random, num_layers: int) -> Chain:
    def some(most: int) -> list[int]:
        return [generator.randint(1, most) for _ in range(num_layers)]

    return chain(
        some(4), some(6), weights=some(5), outputs=some(6), stash=some(8), input_bytes=3, transient=some(3)
    )


def is_flushed(plan: Plan, flushes: Sequence[int]) -> bool:
    last = len(plan.stages) - 1
    assert plan.step is not None
    [order] = [order for order in plan.step.order if (f"F{last}", 0) in order]
    place = {operation: index for index, operation in enumerate(order)}
    ends = list(accumulate(flushes))
    return all(
        max(place[f"F{last}", number] for number in range(end - size, end))
        < min(place[f"B{last}", number] for number in range(end - size, end))
        for end, size in zip(ends, flushes, strict=True)
    )


def orders_of(stage: int, m: int) -> Iterator[Order]:
    """All orders of one stage in which micro-batches follow one another and a backward its forward."""
    for places in combinations(range(2 * m), m):
        order, counts = [], {"F": 0, "B": 0}
        for place in range(2 * m):
            kind = "F" if place in places else "B"
            order.append((f"{kind}{stage}", counts[kind]))
            counts[kind] += 1
            if counts["B"] > counts["F"]:
                break
        else:
            yield tuple(order)


def shortest(made: Chain, platform: Platform, flushes: Sequence[int]) -> float | None:
    """Of all contiguous cuts and all orders, those with room, by the replay."""
    m, found = sum(flushes), []
    for count in range(platform.num_devices):
        for inner in combinations(range(1, made.num_layers), count):
            cuts = [0, *inner, made.num_layers]
            large = replace(platform, memory_bytes=ROOMY)
            plan = make_plan(made, large, cuts, num_micro_batches=m)
            idle: tuple[Order, ...] = ((),) * (platform.num_devices - count - 1)
            for orders in product(*(list(orders_of(stage, m)) for stage in range(count + 1))):
                step = StepPlan(
                    num_micro_batches=m, step_seconds=1.0, blocking_step_seconds=None, order=(*orders, *idle)
                )
                tried = replace(plan, step=step)
                if not is_flushed(tried, flushes):
                    continue
                run = replay(tried, made)
                if run.step_seconds is None or max(use.total for use in run.memory) > platform.memory_bytes:
                    continue  # the orders wait for each other, or there is no room
                found.append(run.step_seconds)
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("flushes", [(2,), (3,), (1, 2), (2, 1)])
def test_a_step_with_flushes_is_that_of_brute_force(seed: int, flushes: tuple[int, ...]) -> None:
    """Of one batch exactly; of several, whose forwards may begin during the backwards before, nearly."""
    generator = random.Random(seed)
    made = random_chain(generator, 3)
    memory = generator.choice([40, 60, 80, ROOMY])
    platform = Platform(
        num_devices=2, memory_bytes=memory, bandwidth=generator.choice([1, 3, FREE]), weight_copies=1
    )
    best = shortest(made, platform, flushes)
    try:
        plan = make_plan(made, platform, "contiguous", num_micro_batches=sum(flushes), flushes=flushes)
    except InfeasibleError as refusal:
        assert best is None
        assert refusal.smallest_memory_bytes is not None and refusal.smallest_memory_bytes > memory
        enough = replace(platform, memory_bytes=refusal.smallest_memory_bytes)
        make_plan(made, enough, "contiguous", num_micro_batches=sum(flushes), flushes=flushes)
        return
    assert best is not None and plan.step is not None
    assert is_flushed(plan, flushes) and replay(plan, made).violations == ()
    assert max(plan.peak_memory_bytes) <= memory
    if len(flushes) == 1:
        assert plan.step.step_seconds == pytest.approx(best)
    else:
        assert 1 - 1e-9 <= plan.step.step_seconds / best <= 1.2


@pytest.mark.parametrize("seed", range(6))
def test_any_allocation_is_not_worse_than_contiguous_ones_and_keeps_the_batch_in_flight(seed: int) -> None:
    made = random_chain(random.Random(seed), 6)
    platform = Platform(num_devices=3, memory_bytes=ROOMY, bandwidth=2.0)
    flushes = (4, 4)
    plans = [
        make_plan(made, platform, algorithm, num_micro_batches=8, flushes=flushes, time_limit_seconds=20)
        for algorithm in ("madpipe", "contiguous", "uniform")
    ]
    for plan in plans:
        assert is_flushed(plan, flushes) and replay(plan, made).violations == ()
        assert all(stage.in_flight >= 4 for stage in plan.stages)
    seconds = [plan.step.step_seconds for plan in plans if plan.step is not None]
    assert seconds == sorted(seconds)


def test_a_flush_costs_memory_and_never_gains_time() -> None:
    made = random_chain(random.Random(3), 6)
    platform = Platform(num_devices=3, memory_bytes=ROOMY, bandwidth=2.0)
    free, flushed = (
        make_plan(made, platform, "contiguous", num_micro_batches=8, flushes=flushes) for flushes in (None, (8,))
    )
    assert free.step is not None and flushed.step is not None
    assert free.step.step_seconds <= flushed.step.step_seconds


def test_wrong_flushes_are_refused() -> None:
    made = random_chain(random.Random(3), 4)
    platform = Platform(num_devices=2, memory_bytes=ROOMY, bandwidth=2.0)
    for flushes, sentence in (
        ((3,), "3 micro-batches in all, and num_micro_batches is 4"),
        ((2, 0, 2), "numbers of micro-batches of batches"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_plan(made, platform, num_micro_batches=4, flushes=flushes)
    with pytest.raises(ValueError, match="in one pipeline"):
        make_plan(made, platform, num_micro_batches=4, flushes=(4,), num_stages=2)


def test_no_room_says_what_would_do() -> None:
    made = chain([1, 1], [1, 1], outputs=[1, 1], stash=[10, 10], input_bytes=1)
    platform = Platform(num_devices=2, memory_bytes=50, bandwidth=FREE)
    with pytest.raises(InfeasibleError, match="keeps its 8 micro-batches in flight") as refusal:
        make_plan(made, platform, num_micro_batches=8, flushes=(8,))
    assert refusal.value.smallest_memory_bytes == 8 * 10 + 2  # with two tensors at the cut
    assert make_plan(made, platform, num_micro_batches=8).step is not None
