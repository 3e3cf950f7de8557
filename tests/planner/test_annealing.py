"""The random walk among allocations: what it proposes, and what it finds that no other search does."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from deepspeed_partition import Chain, Platform
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.step import annealing
from deepspeed_partition.planner.solvers.step.annealing import Annealing
from deepspeed_partition.planner.solvers.step.step_search import StepSearch
from tests.planner.instances import chain, problem_of
from tests.planner.instances import plan_without_recomputation as make_plan

MEMORY = 40
"""Bytes in which not all micro-batches fit."""


def uneven(seed: int, num_layers: int) -> Chain:
    """Layers of 3 to 27 s whose tensors take 1 to 6 s at a byte per second."""
    pick = random.Random(seed)
    forward = [pick.randint(1, 9) for _ in range(num_layers)]
    return chain(
        forward,
        [2 * each for each in forward],
        weights=[1] * num_layers,
        outputs=[pick.randint(1, 6) for _ in range(num_layers - 1)] + [0],
        stash=[1] * num_layers,
    )


def search_of(made: Chain, platform: Platform, m: int) -> StepSearch:
    search = StepSearch(replace(problem_of(made, platform), num_micro_batches=m))
    search.search_contiguous((0, 4, 8, made.num_layers))
    return search


def test_each_proposal_is_an_allocation():
    """Boundaries rise, devices are numbered as the chain reaches them, and no two stages in a row share one."""
    made = uneven(0, 14)
    walk = Annealing(search_of(made, Platform(num_devices=4, memory_bytes=10**9, bandwidth=1), 4))
    present, kinds = Placement.contiguous((0, 4, 8, 14)), set()
    for _ in range(3000):
        proposal = walk._proposal(present)
        if proposal is None:
            continue
        cuts, devices = proposal.cuts, proposal.devices
        assert cuts[0] == 0
        assert cuts[-1] == 14
        assert all(left < right for left, right in pairwise(cuts))
        assert proposal == Placement.of(cuts, devices)
        assert set(devices) == set(range(max(devices) + 1))
        assert 2 <= max(devices) + 1 <= 4
        kinds.add((len(devices) - len(present.devices), proposal.is_contiguous))
        present = proposal
    assert {change for change, _ in kinds} >= {-1, 0, 1}
    assert {contiguous for _, contiguous in kinds} == {False, True}


def test_what_the_walk_remembers_fits_and_is_what_a_simulation_says(monkeypatch):
    """In tight memory: a step of the walk that would not fit, or is another one, would mislead the search."""
    monkeypatch.setattr(annealing, "MOST_STEPS", 2000)
    made = uneven(1, 14)
    search = search_of(made, Platform(num_devices=3, memory_bytes=MEMORY, bandwidth=2), 6)
    walk = Annealing(search)
    walk.run(lambda: 0)
    assert len(walk.walk.found) > 5
    most = []
    for placement, found in walk.walk.found.items():
        engine = search.engine(placement)
        run = engine.run(6, found.rule.choice(engine, 6))
        assert run is not None
        assert run.ticks == found.estimate
        most.append(max(engine.peaks(run)))
    assert max(most) == MEMORY  # so that it kept some out


def test_no_other_search_meets_the_step_that_the_walk_finds():
    """358 s without the walk: eight stages in turn. It has thirteen."""
    plan = make_plan(uneven(0, 14), Platform(num_devices=4, memory_bytes=10**9, bandwidth=2), num_micro_batches=4)
    assert plan.step_seconds is not None
    assert plan.step_seconds <= 354


def test_the_same_walk_in_each_run():
    made, platform = uneven(2, 14), Platform(num_devices=3, memory_bytes=10**9, bandwidth=1)
    plans = [make_plan(made, platform, num_micro_batches=3) for _ in range(2)]
    assert plans[0].step == plans[1].step
    assert plans[0].stages == plans[1].stages


def test_a_search_that_is_near_its_bound_does_not_walk():
    search = search_of(uneven(3, 14), Platform(num_devices=3, memory_bytes=10**9, bandwidth=1), 3)
    walk = Annealing(search)
    walk.run(lambda: int(search.best))
    assert not walk.walk.found
