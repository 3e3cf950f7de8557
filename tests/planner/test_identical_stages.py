"""The published bound for identical stages that keep or recompute each micro-batch: its values, and what reaches
it."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import ceil

import pytest

from deepspeed_partition import Platform
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.identical_stages import identical_stages_bound
from deepspeed_partition.planner.solvers.interface import Constraints, Problem
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from tests.exhaustive import some
from tests.planner.instances import FREE, chain, problem_of

pytest.importorskip("ortools", reason="the shortest steps are found with it")

from tests.planner.keep_or_recompute import shortest_step


@pytest.mark.parametrize(
    ("stages", "slots", "m", "forward", "backward", "bound"),
    [
        (5, 3, 15, 1, 2, Fraction(57)),  # the last device decides; the first one needs 51
        (5, 3, 60, 1, 2, Fraction(204)),
        (8, 4, 64, 1, 2, Fraction(5568, 25)),
        (16, 6, 256, 1, 2, Fraction(15616, 17)),
        (4, 2, 12, 1, 2, Fraction(45)),
        (8, 2, 32, 1, 1, Fraction(268, 3)),  # device 3 decides
        (6, 3, 100, 2, 3, Fraction(18500, 31)),
        (3, 2, 14, 1, 1, Fraction(98, 3)),
        (4, 4, 9, 1, 2, Fraction(36)),  # all may be kept: fill, work and drain
    ],
)
def test_values(stages: int, slots: int, m: int, forward: int, backward: int, bound: Fraction) -> None:
    assert identical_stages_bound(stages, slots, m, forward, backward) == bound


@pytest.mark.parametrize(
    ("stages", "slots", "m", "forward", "backward", "optimum"),
    [
        (2, 1, 4, 1, 1, 11),
        (2, 1, 6, 1, 2, 23),
        (3, 1, 4, 1, 1, 13),
        (3, 2, 6, 1, 1, 16),
        (3, 2, 8, 1, 2, 30),
        (4, 2, 6, 1, 1, 18),
    ],
)
def test_optima(stages: int, slots: int, m: int, forward: int, backward: int, optimum: int) -> None:
    """Whole numbers make steps whole, and these are the bound, rounded up."""
    assert shortest_step([forward] * stages, [backward] * stages, slots, m) == (optimum, True)
    assert ceil(identical_stages_bound(stages, slots, m, forward, backward)) == optimum


def test_an_optimum_above_the_bound() -> None:
    """Parts of micro-batches count in the bound, and none can be kept."""
    assert shortest_step([1] * 3, [1] * 3, num_slots=2, num_micro_batches=14) == (34, True)
    assert ceil(identical_stages_bound(3, 2, 14, 1, 1)) == 33


def one_layer_each(forward: list[int], backward: list[int], slots: int, m: int) -> Problem:
    """Stages of one layer on devices of their own, with room for so many micro-batches."""
    made = chain(forward, backward, stash=[1] * len(forward))  # type: ignore[arg-type]
    problem = problem_of(made, Platform(num_devices=len(forward), memory_bytes=slots, bandwidth=FREE))
    problem = replace(problem, constraints=Constraints(max_stages=len(forward), exactly=True), num_micro_batches=m)
    return replace(problem, recomputation=Recomputation(problem.times, "block"))


@pytest.mark.parametrize("seed", range(some(200)))
def test_no_step_that_keeps_or_recomputes_is_below_the_bounds(seed: int) -> None:
    """The shortest step of unequal stages: each keeps all micro-batches or none, or decides one by one."""
    pick = random.Random(seed)
    stages, slots, m = pick.randint(2, 3), pick.randint(1, 2), pick.randint(2, 4)
    forward = [pick.randint(1, 3) for _ in range(stages)]
    backward = [pick.randint(1, 4) for _ in range(stages)]
    problem = one_layer_each(forward, backward, slots, m)
    ways = product([True, False], repeat=stages)
    found = min(shortest_step(forward, backward, slots, m, keeps=keeps, seconds=2)[0] for keeps in ways)
    one_by_one, _ = shortest_step(forward, backward, slots, m, seconds=2)
    seconds = problem.times.clock.seconds
    assert seconds(step_lower_bound(problem, contiguous=True)) <= found
    assert seconds(step_lower_bound(problem, contiguous=False)) <= found
    free = replace(problem, per_micro_batch=True)
    assert seconds(step_lower_bound(free, contiguous=True)) <= one_by_one
    assert seconds(step_lower_bound(free, contiguous=False)) <= one_by_one
    assert identical_stages_bound(stages, slots, m, min(forward), min(backward)) <= one_by_one


@pytest.mark.parametrize(("stages", "slots", "m"), [(5, 3, 15), (5, 3, 60), (8, 4, 64), (4, 4, 9)])
def test_the_bound_of_steps_is_no_worse(stages: int, slots: int, m: int) -> None:
    """Whether stages decide once for all micro-batches or one by one, and devices have one stage or several."""
    problem = one_layer_each([1] * stages, [2] * stages, slots, m)
    for per_micro_batch, contiguous in product((True, False), repeat=2):
        given = replace(problem, per_micro_batch=per_micro_batch)
        bound = problem.times.clock.seconds(step_lower_bound(given, contiguous=contiguous))
        assert bound >= float(identical_stages_bound(stages, slots, m, 1, 2)) * (1 - 1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, 1, 1), "number of stages is 0"),
        ((1, 0, 1, 1, 1), "number of slots is 0"),
        ((1, 1, 0, 1, 1), "number of micro-batches is 0"),
        ((1, 1, 1, -1, 1), "forward takes -1"),
    ],
)
def test_what_is_no_problem_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identical_stages_bound(*arguments)
