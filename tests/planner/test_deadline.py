"""A deadline ends by the clock, by hand, or with the one it is part of."""

from __future__ import annotations

import math

import pytest

from deepspeed_partition.planner import deadline as module
from deepspeed_partition.planner.deadline import Deadline


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
