"""Steps in which stages keep some micro-batches and recompute others: exact where they are small, never slower."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deepspeed_partition import Chain, Platform, make_plan, replay
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.planning.problems import problem_of, with_recomputation
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import CyclicRoad, Orders, retimed
from deepspeed_partition.planner.solvers.pattern.kept_and_recomputed import kept_and_recomputed
from deepspeed_partition.planner.solvers.step import micro_batch_step
from deepspeed_partition.planner.solvers.step.micro_batch_orders import StepRoad
from deepspeed_partition.planner.solvers.step.micro_batch_program import MicroBatchProgram
from tests.exhaustive import is_exhaustive, some
from tests.planner.instances import FREE, chain

KNOWN = [
    (2, 1, 2, 1, 2, 9), (2, 1, 3, 1, 2, 12), (2, 1, 4, 1, 2, 15), (2, 1, 5, 1, 2, 19), (3, 1, 3, 1, 2, 15),
    (3, 1, 4, 1, 2, 18), (3, 2, 3, 1, 2, 15), (3, 2, 4, 1, 2, 18), (3, 2, 14, 1, 1, 34),
]  # fmt: skip
"""Stages, slots, micro-batches, forward, backward, and the shortest step, as other programs have proved it."""


def identical(num_stages: int, slots: int, forward: int, backward: int) -> tuple[Chain, Platform]:
    made = chain([float(forward)] * num_stages, [float(backward)] * num_stages, stash=[1] * num_stages)
    return made, Platform(num_devices=num_stages, memory_bytes=slots, bandwidth=FREE)


@pytest.mark.parametrize(("num_stages", "slots", "m", "forward", "backward", "seconds"), KNOWN)
def test_the_program_proves_the_known_optima(num_stages, slots, m, forward, backward, seconds):
    """Red if a recomputation held nothing, if a forward that keeps nothing held a slot, if orders were fixed."""
    pytest.importorskip("ortools")
    made, platform = identical(num_stages, slots, forward, backward)
    problem = with_recomputation(problem_of(made, replace(platform, comm_buffers=2 * m), m), "block")
    road = StepRoad(problem, Placement.contiguous(tuple(range(num_stages + 1))))
    solved = MicroBatchProgram(road, m).solve(2**62, 120)
    assert solved.is_optimal and solved.orders
    assert road.fits(solved.orders)
    assert problem.times.clock.seconds(solved.bound) == seconds
    assert road.run(solved.orders) == solved.bound
    if m < 14 or is_exhaustive():
        plan = make_plan(made, platform, "contiguous", recompute="micro-batch", num_micro_batches=m)
        assert plan.step_seconds == seconds
        assert replay(plan, made).violations == ()


def random_case(seed: int) -> tuple[Chain, Platform, int]:
    pick = random.Random(seed)
    size = pick.randint(2, 4)
    stash = [pick.randint(2, 4) for _ in range(size)]
    made = chain(
        [pick.uniform(1, 2) for _ in range(size)], [pick.uniform(1, 4) for _ in range(size)],
        weights=[pick.randint(0, 2) for _ in range(size)], outputs=[pick.randint(0, 1) for _ in range(size)],
        stash=stash, transient=[pick.randint(0, 1) for _ in range(size)],
    )  # fmt: skip
    platform = Platform(
        num_devices=size,
        memory_bytes=pick.randint(max(stash), 2 * max(stash)) + 11,
        bandwidth=pick.choice([2.0, 8.0]),
    )
    return made, platform, pick.randint(2, 9)


def test_a_step_is_never_slower_and_does_what_it_promises(monkeypatch):
    """Not than one that keeps all, recomputes all, or by stage and block, in 1F1B of any depth or another order.

    Red if a device could run what is not there, if memory were counted by another order, if the shorter one lost.
    """
    monkeypatch.setattr(micro_batch_step, "MOST_SECONDS", 0.3)
    monkeypatch.setattr(micro_batch_step, "MOST_CHANGES", 40)
    shorter = 0
    for seed in range(some(24)):
        made, platform, m = random_case(seed)
        how = {"num_micro_batches": m, "time_limit_seconds": 2}
        alike = make_plan(made, platform, "contiguous", recompute="block", **how)
        plan = make_plan(made, platform, "contiguous", recompute="micro-batch", **how)
        assert replay(plan, made).violations == (), seed
        assert plan.step_seconds <= alike.step_seconds * (1 + 1e-12), seed
        assert plan.step_seconds >= plan.step_lower_bound_seconds * (1 - 1e-12), seed
        shorter += plan.step_seconds < alike.step_seconds * (1 - 1e-9)
    assert shorter


def test_without_the_program_steps_get_shorter_too(monkeypatch):
    """By lists and changes alone: 5 stages with room for 3, 15 micro-batches."""
    monkeypatch.setattr(micro_batch_step, "is_installed", lambda: False)
    made, platform = identical(5, 3, 1, 2)
    how = {"num_micro_batches": 15, "time_limit_seconds": 3}
    plan = make_plan(made, platform, "contiguous", recompute="micro-batch", **how)
    alike = make_plan(made, platform, "contiguous", recompute="block", **how)
    assert (alike.step_seconds, plan.step_seconds) == (64, 60)
    assert replay(plan, made).violations == ()
    names = {name[0] for order in plan.step.order for name, _ in order}
    assert names == set("FfRB")
    assert not plan.treats_all_alike


@pytest.mark.parametrize(
    ("num_stages", "slots", "m", "seconds"), [(5, 3, 15, 60), (5, 3, 60, 213), (8, 4, 32, 130), (4, 2, 30, 114)]
)
def test_the_middle_of_a_long_step_is_the_optimal_pattern(num_stages, slots, m, seconds):
    """15 more micro-batches of 5 stages with 3 slots take 51 more. Red if windows were cut by forwards."""
    made, platform = identical(num_stages, slots, 1, 2)
    problem = with_recomputation(problem_of(made, replace(platform, comm_buffers=2 * m), m), "block")
    road = StepRoad(problem, Placement.contiguous(tuple(range(num_stages + 1))))
    length, number, begins = kept_and_recomputed(num_stages, slots, 2)
    orders = Orders(length, number, begins, [1] * num_stages, [2] * num_stages)
    pattern = retimed(CyclicRoad(problem, road.placement, number), orders)
    ticks = [road.run(each) for each in micro_batch_step._windows(pattern, m) if road.fits(each)]
    assert problem.times.clock.seconds(min(ticks)) == seconds


@pytest.mark.parametrize("seed", [8, 15, 22])
def test_patterns_with_halves_begin_a_step_too(seed):
    """Red if a window looked for whole backwards alone, an IndexError, or if second halves came twice."""
    made, platform, m = random_case(seed)
    layers = []
    for place, layer in enumerate(made.layers):
        first = 0.4 * layer.backward_seconds if place else 0.0
        second = layer.backward_seconds - first
        layers.append(replace(layer, backward_input_seconds=first, backward_weight_seconds=second))
    made = replace(made, layers=tuple(layers))
    how = {"num_micro_batches": m, "time_limit_seconds": 1, "split_backward": True}
    plan = make_plan(made, platform, "contiguous", recompute="micro-batch", **how)
    assert replay(plan, made).violations == ()
    names = [name for order in plan.step.order for name in order]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("least_gap", [None, 0.5])
def test_halves_of_orders_that_have_halves_come_once(least_gap):
    """Red if second halves that orders have, those of a pattern, stood beside the ones that are put in."""
    made, platform = identical(2, 2, 1, 2)
    halves = {"backward_input_seconds": 1.0, "backward_weight_seconds": 1.0}
    made = replace(made, layers=tuple(replace(layer, **halves) for layer in made.layers))
    problem = replace(problem_of(made, platform, 2), splits_backward=True)
    road = StepRoad(problem, Placement.contiguous((0, 1, 2)))
    orders = tuple(tuple((kind, number) for number in range(2) for kind in "FB") for _ in range(2))
    once = micro_batch_step._in_halves(road, orders, None)
    again = micro_batch_step._in_halves(road, once, least_gap)
    assert [sorted(order) for order in again] == [sorted(order) for order in once]
    assert [sorted(order) for order in once] == [[(kind, number) for kind in "FIW" for number in range(2)]] * 2
