"""Steps of many partitions at once (``many_cuts.py``), and the search with them (``group_search.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
import pytest

from deepspeed_partition import Chain, Platform
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step import group_search
from deepspeed_partition.planner.solvers.step.group_search import GroupSearch
from deepspeed_partition.planner.solvers.step.many_cuts import ManyCuts
from deepspeed_partition.planner.solvers.step.orders import DepthRule, FixedRule, GroupRule, Rule, megatron_limits
from deepspeed_partition.planner.solvers.step.step_search import StepSearch, step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import Positions, StepRun, WaitInCircleError
from tests.planner.instances import chain, problem_of

M = 6


def uneven(seed: int, num_layers: int = 14) -> Chain:
    draw = Random(seed)
    return chain(
        [draw.randint(1, 9) for _ in range(num_layers)],
        [draw.randint(1, 18) for _ in range(num_layers)],
        weights=[draw.randint(1, 5) for _ in range(num_layers)],
        outputs=[draw.randint(1, 6) for _ in range(num_layers - 1)] + [0],
        stash=[draw.randint(1, 9) for _ in range(num_layers)],
    )


def problem(seed: int, num_devices: int, bandwidth: float, memory: int = 10**9, duplex: str = "half") -> Problem:
    platform = Platform(num_devices=num_devices, memory_bytes=memory, bandwidth=bandwidth, duplex=duplex)
    return replace(problem_of(uneven(seed), platform), num_micro_batches=M)


def random_placement(draw: Random, devices: tuple[int, ...], num_layers: int = 14) -> Placement:
    inner = sorted(draw.sample(range(1, num_layers), len(devices) - 1))
    return Placement((0, *inner, num_layers), devices)


def ran(made: Problem, placement: Placement, rule: Rule) -> StepRun:
    engine = step_engine(made, placement)
    run = engine.run(M, rule.choice(engine, M))
    assert run is not None
    return run


def rules(made: Problem, placement: Placement) -> Iterator[tuple[Rule, StepRun]]:
    """Yield rules of each kind that run, and their steps."""
    devices = placement.devices
    size, num_devices = len(devices), max(devices) + 1
    for rule in (
        DepthRule("furthest", (M,) * size),
        DepthRule("oldest", tuple(range(size, 0, -1))),
        GroupRule(3, tuple(limit + 4 for limit in megatron_limits(devices, 3)), alternates=True),
        GroupRule(2, (2 * M,) * num_devices, alternates=False),
    ):
        with suppress(WaitInCircleError):
            yield rule, ran(made, placement, rule)


DEVICES = [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 0), (0, 1, 2, 0, 1, 2), (0, 1, 0)]


@pytest.mark.parametrize("duplex", ["half", "full"])
@pytest.mark.parametrize("devices", DEVICES)
def test_a_partition_among_many_takes_what_its_own_simulation_says(devices: tuple[int, ...], duplex: str):
    """Slow links, too: which tensor goes first, and who waits for a slot, is as in the simulation."""
    draw = Random(len(devices))
    for seed in range(6):
        made = problem(seed, max(devices) + 1, draw.choice((0.3, 1, 4)), duplex=duplex)
        placement = random_placement(draw, devices)
        for _, run in rules(made, placement):
            many = ManyCuts(made, step_engine(made, placement), run)
            others = [random_placement(draw, devices).cuts for _ in range(3)]
            ticks = many.ticks(np.array([others[0], placement.cuts, *others[1:]]))
            assert ticks[1] == run.ticks


@pytest.mark.parametrize("devices", DEVICES)
def test_other_partitions_take_what_the_same_orders_take(devices: tuple[int, ...]):
    """Where links are fast; but where boundaries share a link, tensors go over it in the order of another step."""
    draw = Random(len(devices))
    for seed in range(6):
        made = problem(seed, max(devices) + 1, 10**9, duplex="full")
        placement = random_placement(draw, devices)
        for _, run in rules(made, placement):
            orders: tuple[Positions, ...] = tuple(map(tuple, run.orders))
            many = ManyCuts(made, step_engine(made, placement), run)
            others = [random_placement(draw, devices) for _ in range(4)]
            expected = [ran(made, other, FixedRule(orders)).ticks for other in others]
            ticks = many.ticks(np.array([other.cuts for other in others]))
            assert (ticks >= np.array(expected) * (1 - 1e-6)).all()
            assert (ticks <= np.array(expected) * (1 + 1e-6 if len(devices) == 3 else 1.1)).all()


@pytest.mark.parametrize("devices", DEVICES)
def test_what_has_room_is_not_left_out(devices: tuple[int, ...]):
    draw, told = Random(len(devices)), set()
    for seed in range(8):
        made = problem(seed, max(devices) + 1, 2, memory=draw.choice((150, 220, 300)))
        placement = random_placement(draw, devices)
        for _, run in rules(made, placement):
            many = ManyCuts(made, step_engine(made, placement), run)
            for _ in range(4):
                other = random_placement(draw, devices)
                orders: tuple[Positions, ...] = tuple(map(tuple, run.orders))
                engine = step_engine(made, other)
                fits = max(engine.peaks(ran(made, other, FixedRule(orders)))) <= made.platform.memory_bytes
                told.add(bool(many.fit(np.array([other.cuts]))[0]))
                assert many.fit(np.array([other.cuts]))[0] or not fits
    assert told == {False, True}


def search_of(made: Problem) -> StepSearch:
    search = StepSearch(made)
    search.search_contiguous((0, 4, 8, 14))
    return search


def test_what_the_search_remembers_fits_and_is_what_a_simulation_says(monkeypatch):
    monkeypatch.setattr(group_search, "MOST_STEPS", 800)
    made = problem(1, 3, 2, memory=210)
    search = search_of(made)
    before, best = set(search.found), search.best
    GroupSearch(search).run(lambda: 0)
    assert len(set(search.found) - before) > 5
    assert search.best < best
    peaks = []
    for placement, found in search.found.items():
        run = ran(made, placement, found.rule)
        assert run.ticks == found.estimate
        peaks.append(max(step_engine(made, placement).peaks(run)))
    assert 190 < max(peaks) <= 210


def test_the_same_search_in_each_run():
    found = []
    for _ in range(2):
        search = search_of(problem(2, 3, 1))
        GroupSearch(search).run(lambda: 0)
        found.append([(each, search.found[each]) for each in search.leaders()])
    assert found[0] == found[1]


def test_a_search_that_is_near_its_bound_ends():
    search = search_of(problem(3, 3, 1))
    before = dict(search.found)
    GroupSearch(search).run(lambda: int(search.best))
    assert search.found == before


def test_a_search_that_is_stopped_ends():
    search = search_of(problem(1, 3, 2))
    before, group = dict(search.found), GroupSearch(search)
    search.deadline = Deadline()
    search.deadline.stop()
    group.run(lambda: 0)
    assert search.found == before
    made, placement = search.problem, search.leaders()[0]
    many = ManyCuts(made, step_engine(made, placement), ran(made, placement, search.found[placement].rule))
    assert group._walk(many, placement, 10**9, 0.01) is None  # would take days


@pytest.mark.parametrize("memory", [10**9, 200])
@pytest.mark.parametrize("seed", range(4))
def test_where_partitions_are_few_the_best_of_all_is_found(seed: int, memory: int) -> None:
    """Of the partitions that have room, estimated one by one; none is drawn at random."""
    made = problem(seed, 2, 4, memory)
    search = GroupSearch(StepSearch(made))
    start, rule = Placement((0, 4, 9, 14), (0, 1, 0)), GroupRule(2, (2 * M,) * 2, alternates=False)
    many = ManyCuts(made, step_engine(made, start), ran(made, start, rule))
    every = many.every(78)
    assert every is not None and many.every(77) is None  # of 13 boundaries two
    assert {tuple(each) for each in every.tolist()} == {(0, *cuts, 14) for cuts in combinations(range(1, 14), 2)}
    fits = [bool(many.fit(each[None])[0]) for each in every]
    assert any(fits) and all(fits) == (memory > 200)
    least = min(int(many.ticks(each[None])[0]) for each, has_room in zip(every, fits, strict=True) if has_room)
    found = search._walk(many, start, 30, 0.01)
    assert found is not None and many.fit(many.state(found)[None])[0]
    assert int(many.ticks(many.state(found)[None])[0]) == least
