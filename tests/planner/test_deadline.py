"""A deadline ends by the clock, by hand, or with the one it is part of."""

from __future__ import annotations

import math
import random
import sys
from contextlib import contextmanager
from dataclasses import replace

import pulp
import pytest

from deepspeed_partition import Platform, make_plan, replay
from deepspeed_partition.planner import deadline as module
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.planning.problems import with_recomputation
from deepspeed_partition.planner.recomputation import _Extension
from deepspeed_partition.planner.solvers.contiguous.recomputing import best_recomputing_partition
from deepspeed_partition.planner.solvers.non_contiguous.many_special_devices import SeveralSearch
from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import SpecialSearch, best_special
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from tests.planner.instances import chain, problem_of


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(module.time, "thread_time", lambda: Clock.now)
    return Clock


def test_the_clock_ends_it(clock):
    deadline = Deadline(5)
    clock.now = 104
    assert (deadline.passed(), deadline.remaining_seconds()) == (False, 1)
    clock.now = 105
    assert deadline.passed()
    assert not deadline.stopped, "the clock did it"


def test_it_can_be_ended_from_outside(clock):
    deadline = Deadline()
    assert (deadline.passed(), deadline.remaining_seconds()) == (False, math.inf)
    deadline.stop()
    assert (deadline.passed(), deadline.stopped, deadline.remaining_seconds()) == (True, True, 0)


def test_a_part_ends_with_the_whole_and_not_the_whole_with_a_part(clock):
    whole = Deadline(10)
    part = Deadline(3, within=whole)
    assert (part.remaining_seconds(), Deadline(30, within=whole).remaining_seconds()) == (3, 10)
    part.stop()
    assert part.passed()
    assert not whole.passed()
    other = Deadline(within=whole)
    whole.stop()
    assert other.passed()
    assert other.stopped


def test_a_share_of_what_is_left_may_be_nothing(clock):
    whole = Deadline(10)
    part = whole.part(0.5)
    clock.now = 104
    assert (part.remaining_seconds(), part.part(0.5).remaining_seconds()) == (1, 0.5)
    clock.now = 105
    assert part.part(0.5).passed() and not whole.passed()
    assert Deadline().part(0.5).remaining_seconds() == math.inf
    whole.stop()
    assert part.stopped


def test_deep_within_a_search_it_is_raised(clock):
    deadline = Deadline(1)
    deadline.check()
    clock.now = 101
    with pytest.raises(DeadlinePassed):
        deadline.check()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_is_in_the_future(seconds):
    with pytest.raises(ValueError, match="more than 0"):
        Deadline(seconds)


def test_an_exact_search_that_is_stopped_gives_what_it_has_and_proves_nothing():
    made = chain([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], outputs=[1] * 8)
    platform = Platform(num_devices=3, memory_bytes=1000, bandwidth=1e6)
    best = make_plan(made, platform, "contiguous")
    assert (best.proved, best.proved_class) == (True, "contiguous")
    stopped = Deadline()
    stopped.stop()
    plan = make_plan(made, platform, "contiguous", deadline=stopped)
    assert (plan.proved, plan.proved_class) == (False, None)
    assert plan.period_seconds > best.period_seconds
    assert replay(plan, made).violations == ()
    limited = make_plan(made, platform, "contiguous", time_limit_seconds=1e-9)
    assert limited.period_seconds == best.period_seconds, "the clock does not end what is exact"
    assert limited.proved


def test_whoever_watches_the_whole_hears_of_its_parts():
    heard: list[str] = []
    Deadline(1, within=Deadline(watch=heard.append)).tell("half way")
    assert heard == ["half way"]


class Looks(Deadline):
    """Passes when it was looked at so often; counts the calls of functions between two looks."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()
        self.left = most
        self.after = 0
        self.calls = [0]

    def _left(self, worked: float, now: float) -> float:
        self.calls.append(0)
        self.left -= 1
        self.after += self.left < 0
        return math.inf if self.left >= 0 else 0.0

    @contextmanager
    def counting(self):
        def count(frame, event, argument):
            self.calls[-1] += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)


def tight(num_layers: int, num_devices: int, share: float):
    """A chain, and devices that have so much of the memory in which it is stored once."""
    pick = random.Random(num_layers)
    made = chain(
        [pick.randint(1, 20) for _ in range(num_layers)], [pick.randint(2, 40) for _ in range(num_layers)],
        outputs=[pick.randrange(10) for _ in range(num_layers)],
        stash=[pick.randint(1, 100) for _ in range(num_layers)],
    )  # fmt: skip
    stored = sum(layer.stash_bytes for layer in made.layers)
    return made, Platform(num_devices=num_devices, memory_bytes=int(share * stored), bandwidth=2)


def in_one_special(problem, period):
    assert len(SpecialSearch(problem, "peak").all(period, 10**6)) > 100


def in_several(problem, period):
    assert len(SeveralSearch(problem).all(period, 10**6)) > 100


def in_a_part_of_several(problem, period):
    assert SeveralSearch(problem).some(period, 500)


def in_the_best(problem, period):
    assert best_special(problem, "pair", period).placement is not None


def in_a_program(problem, period):
    size = problem.chain.num_layers
    road = Road(problem, Placement.of(range(size + 1), [index % 2 for index in range(size)]))
    assert ilp._Model(pulp, road, road.busiest, road.sequential, problem.deadline, single_slots=True).first


@pytest.mark.parametrize(
    ("work", "size", "num_devices", "share"),
    [
        (in_one_special, 14, 4, 0.8),
        (in_the_best, 30, 4, 0.4),
        (in_several, 10, 3, 1),
        (in_a_part_of_several, 14, 4, 0.8),
        (in_a_program, 20, 4, 1),
    ],
)
def test_it_is_looked_at_often(work, size, num_devices, share):
    """A search once went on for seconds after its end, with many thousands of allocations to be traced."""
    made, platform = tight(size, num_devices, share)
    deadline = Looks()
    problem = replace(problem_of(made, platform), deadline=deadline)
    period = problem.times.clock.ticks(made.compute_seconds * 0.6)
    with deadline.counting():
        work(problem, period)
    assert max(deadline.calls) < min(20_000, sum(deadline.calls) / 10)


@pytest.mark.parametrize("most", [1, 10, 50, 100, 200, 300, 400])
def test_wherever_it_passes_the_answer_comes_soon(most):
    made, platform = tight(16, 4, 0.4)
    contiguous = make_plan(made, platform, "contiguous").period_seconds
    deadline = Looks(most)
    plan = make_plan(made, platform, deadline=deadline)
    assert deadline.after < 20, "each step asks once, and hands on that it passed"
    assert plan.period_seconds <= contiguous
    assert plan.proved_class in (None, "contiguous")
    assert replay(plan, made).violations == ()


@pytest.mark.parametrize(("num_layers", "is_stopped"), [(80, False), (160, False), (160, True), (500, True)])
def test_what_needs_least_memory_is_known_soon(monkeypatch, num_layers, is_stopped):
    """When the time was over and nothing fitted, all ways to recompute all stages were made: 17 s, 80 layers."""
    clock = [100.0]

    def looked_at() -> float:
        clock[0] += 0.01
        return clock[0]

    made, platform = tight(num_layers, 8, 0.002)
    problem = with_recomputation(problem_of(made, platform), "auto")
    monkeypatch.setattr(module.time, "thread_time", looked_at)
    deadline = Deadline(0.001)
    if is_stopped:
        deadline.stop()
    ways, num_made = _Extension._candidates, []
    monkeypatch.setattr(_Extension, "_candidates", lambda *each: num_made.append(0) or ways(*each))
    with pytest.raises(InfeasibleError):
        make_plan(made, platform, "contiguous", deadline=deadline)
    assert len(num_made) < 700
    assert best_recomputing_partition(replace(problem, deadline=deadline)) is None
    assert len(num_made) < 1400, "of about 5,000"
