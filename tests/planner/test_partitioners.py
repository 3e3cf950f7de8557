"""The partitioners of PipeDream and mCAP against every cut there is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from deepspeed_partition import Chain, InfeasibleError, Platform
from tests.planner import oracles
from tests.planner.instances import chain, random_instance
from tests.planner.instances import plan_without_recomputation as make_plan


def position_bytes(made: Chain, platform: Platform, cuts: tuple[int, ...], most: int = 10**6) -> int:
    """Of the largest stage, where the i-th from the end holds i micro-batches, or ``most``."""
    num_stages = len(cuts) - 1
    return max(
        math.ceil(oracles.memory(made, platform, start, stop, min(num_stages - stage, most)))
        for stage, (start, stop) in enumerate(pairwise(cuts))
    )


def plan_or_error(*arguments, **options):
    try:
        return make_plan(*arguments, **options)
    except InfeasibleError as error:
        return error


@pytest.mark.parametrize("seed", range(150))
def test_pipedream_takes_the_fastest_cut_that_passes_its_test(seed):
    made, platform = random_instance(seed)
    cuts = list(oracles.all_cuts(made.num_layers, platform.num_devices))
    needed = {each: position_bytes(made, platform, each) for each in cuts}
    passing = [each for each in cuts if needed[each] <= platform.memory_bytes]
    found = plan_or_error(made, platform, "pipedream")
    if not passing:
        assert isinstance(found, InfeasibleError)
        assert found.smallest_memory_bytes == min(needed.values())
        enough = replace(platform, memory_bytes=found.smallest_memory_bytes)
        assert make_plan(made, enough, "pipedream")
        return
    chosen = tuple(found.boundaries)
    assert chosen in passing
    assert max(oracles.loads(made, platform, chosen)) == min(
        max(oracles.loads(made, platform, c)) for c in passing
    )
    assert found.period_seconds == float(oracles.least_period(made, platform, chosen)), "1F1B* at its best"


@pytest.mark.parametrize("seed", range(150))
def test_the_blind_one_looks_at_time_alone(seed):
    made, platform = random_instance(seed)
    cuts = list(oracles.all_cuts(made.num_layers, platform.num_devices))
    fastest = min(max(oracles.loads(made, platform, each)) for each in cuts)
    plenty = replace(platform, memory_bytes=10**9)
    chosen = tuple(make_plan(made, plenty, "pipedream-blind").boundaries)
    assert max(oracles.loads(made, platform, chosen)) == fastest
    found = plan_or_error(made, platform, "pipedream-blind")
    period = oracles.least_period(made, platform, chosen)
    if period is None:
        assert isinstance(found, InfeasibleError)
        enough = replace(platform, memory_bytes=found.smallest_memory_bytes)
        assert tuple(make_plan(made, enough, "pipedream-blind").boundaries) == chosen
        with pytest.raises(InfeasibleError):
            make_plan(made, replace(enough, memory_bytes=enough.memory_bytes - 1), "pipedream-blind")
    else:
        assert found.period_seconds == float(period)


@pytest.mark.parametrize("num_micro_batches", [None, 1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_mcap_balances_memory_over_all_devices(seed, num_micro_batches):
    made, platform = random_instance(seed)
    most = num_micro_batches or 10**6
    num_stages = min(made.num_layers, platform.num_devices)
    whole = [c for c in oracles.all_cuts(made.num_layers, num_stages) if len(c) == num_stages + 1]
    smallest = min(position_bytes(made, platform, each, most) for each in whole)
    plenty = replace(platform, memory_bytes=10**9)
    chosen = tuple(make_plan(made, plenty, "mcap", num_micro_batches=num_micro_batches).boundaries)
    assert len(chosen) == num_stages + 1
    assert position_bytes(made, platform, chosen, most) == smallest


def test_by_hand():
    """Transfers count double; the first of two stages must hold two micro-batches."""
    made = chain([2, 2, 2, 2], [0, 0, 0, 0], outputs=[4, 8, 4, 0], stash=[10, 10, 1, 1])
    platform = Platform(num_devices=2, memory_bytes=1000, bandwidth=2)
    assert make_plan(made, platform, "pipedream-blind").boundaries == [0, 1, 4], "2 * 8 / 2 is more than 6"
    heavy = chain([2, 2], [0, 0], weights=[10, 10], stash=[5, 5])
    tight = replace(platform, memory_bytes=39)
    with pytest.raises(InfeasibleError, match="no cut passes the memory test of pipedream with 39 B") as raised:
        make_plan(heavy, tight, "pipedream")
    assert raised.value.smallest_memory_bytes == 40, "3 * 10 of weights, twice 5 of stash"
    assert make_plan(heavy, tight, "contiguous").boundaries == [0, 1, 2], "though one micro-batch in flight fits"
    uneven = chain([1, 1, 1], [0, 0, 0], stash=[4, 4, 7])
    assert make_plan(uneven, platform, "mcap").boundaries == [0, 1, 3], "2 * 4 and 4 + 7; not 2 * 8 and 7"
    assert make_plan(uneven, platform, "mcap", num_micro_batches=1).boundaries == [0, 2, 3], "8 and 7"
