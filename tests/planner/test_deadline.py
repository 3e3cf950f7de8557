"""A deadline ends by the clock, by hand, or with the one it is part of."""

from __future__ import annotations

import math

import pytest

from deepspeed_partition import Platform, make_plan, replay
from deepspeed_partition.planner import deadline as module
from deepspeed_partition.planner.deadline import Deadline
from tests.planner.instances import chain


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(module.time, "monotonic", lambda: Clock.now)
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
