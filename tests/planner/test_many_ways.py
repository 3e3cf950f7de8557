"""Steps of many partitions at once whose stages recompute (``many_ways.py``), and the search with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from deepspeed_partition import Platform
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.planning.problems import with_recomputation
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step import group_search
from deepspeed_partition.planner.solvers.step.group_search import GroupSearch
from deepspeed_partition.planner.solvers.step.many_ways import ManyWays, WaysOfStages
from deepspeed_partition.planner.solvers.step.orders import FixedRule, GroupRule, megatron_limits
from deepspeed_partition.planner.solvers.step.step_search import StepSearch, step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import StepRun
from tests.planner.instances import chain, problem_of

M, NUM_LAYERS = 6, 14
DEVICES = [(0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 2)]


def problem(seed: int, num_devices: int, memory: int, bandwidth: float = 10**9) -> Problem:
    draw = Random(seed)
    made = chain(
        [draw.randint(1, 9) for _ in range(NUM_LAYERS)],
        [draw.randint(1, 18) for _ in range(NUM_LAYERS)],
        weights=[draw.randint(1, 5) for _ in range(NUM_LAYERS)],
        outputs=[draw.randint(1, 4) for _ in range(NUM_LAYERS - 1)] + [0],
        stash=[draw.randint(5, 30) for _ in range(NUM_LAYERS)],
        transient=[draw.choice((0, 0, 7)) for _ in range(NUM_LAYERS)],
    )
    if seed % 2:  # known gradients come with the first backward
        layers = (replace(each, training_bytes=12, gradient_bytes=4) for each in made.layers)
        made = replace(made, layers=tuple(layers))
    platform = Platform(num_devices=num_devices, memory_bytes=memory, bandwidth=bandwidth, duplex="full")
    return with_recomputation(replace(problem_of(made, platform), num_micro_batches=M), "block")


def random_placement(draw: Random, ways: WaysOfStages, devices: tuple[int, ...]) -> Placement:
    cuts = (0, *sorted(draw.sample(range(1, NUM_LAYERS), len(devices) - 1)), NUM_LAYERS)
    blocks = tuple(draw.choice(ways.blocks_of(stage)) for stage in pairwise(cuts))
    return Placement(cuts, devices).recomputing(blocks)


def ran(made: Problem, placement: Placement, rule: FixedRule | GroupRule) -> StepRun:
    engine = step_engine(made, placement)
    run = engine.run(M, rule.choice(engine, M))
    assert run is not None
    return run


def cases(memories: tuple[int, ...]) -> Iterator[tuple[Random, Problem, Placement, ManyWays, FixedRule]]:
    """Yield problems, an allocation of each that recomputes, and the many that run in its orders."""
    for devices in DEVICES:
        draw = Random(len(devices))
        for seed in range(2):
            made = problem(seed, max(devices) + 1, draw.choice(memories))
            ways = WaysOfStages(made)
            placement = random_placement(draw, ways, devices)
            group = draw.choice((2, 3))
            rule = GroupRule(group, tuple(each + 3 for each in megatron_limits(devices, group)), alternates=True)
            run = ran(made, placement, rule)
            many = ManyWays(ways, step_engine(made, placement), run)
            yield draw, made, placement, many, FixedRule(tuple(map(tuple, run.orders)))


def test_steps_are_what_simulations_say() -> None:
    """Red if what is recomputed did not make backwards longer."""
    for draw, made, placement, many, rule in cases((10**9,)):
        others = [random_placement(draw, many.ways, placement.devices) for _ in range(4)]
        every = [placement, *others]
        states = np.array([many.state(each) for each in every])
        assert [many.placement(state) for state in states] == every
        ticks = many.ticks(states)
        assert ticks[0] == ran(made, placement, rule).ticks
        assert ticks == pytest.approx([ran(made, each, rule).ticks for each in every], rel=0.05)


def test_what_has_room_is_not_left_out_and_hardly_anything_else_stays() -> None:
    """Red if a stash, what runs, weights or gradients were left out, or counted twice."""
    told, wrong = [], 0
    for draw, made, placement, many, rule in cases((450, 700)):
        others = [random_placement(draw, many.ways, placement.devices) for _ in range(12)]
        fit = many.fit(np.array([many.state(each) for each in others]))
        for each, says in zip(others, fit, strict=True):
            engine = step_engine(made, each)
            fits = max(engine.peaks(ran(made, each, rule))) <= made.platform.memory_bytes
            assert says or not fits
            wrong += bool(says) and not fits
            told.append(bool(says))
    assert 0.2 < np.mean(told) < 0.8
    assert wrong <= 0.05 * len(told)


def test_moves_lead_to_allocations_and_ways_that_exist() -> None:
    for _, _, placement, many, _ in cases((10**9,)):
        draws = np.random.default_rng(len(placement.devices))
        states = np.tile(many.state(placement), (64, 1))
        for _ in range(4):
            states, are_allocations = many.moved(states, draws)
            assert are_allocations.any()
            for state in states:
                moved = many.placement(state)
                stages = [stage for stage, _ in moved.stages]
                assert all(start < stop for start, stop in stages)
                ways = map(many.ways.blocks_of, stages)
                assert all(blocks in each for blocks, each in zip(moved.blocks, ways, strict=True))
        assert len({many.placement(state).blocks for state in states}) > 20


def test_a_search_with_ways_finds_shorter_steps_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_search, "MOST_STEPS", 1500)
    shorter = []
    for seed in range(2):
        made = problem(seed, 3, 330, bandwidth=2)
        plain = replace(made, recomputation=None)
        search = StepSearch(plain)
        search.search_contiguous((0, 4, 8, NUM_LAYERS))
        before, best = set(search.found), search.best
        GroupSearch(search, WaysOfStages(made)).run(lambda: 0)
        shorter.append(search.best / best)
        for placement in set(search.found) - before:
            known = search.found[placement]
            run = ran(plain, placement, known.rule)
            assert run.ticks == known.estimate
            assert max(step_engine(plain, placement).peaks(run)) <= made.platform.memory_bytes
        leader = search.leaders()[0]
        assert leader.recomputed
    assert max(shorter) < 0.95
