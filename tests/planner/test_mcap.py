"""mCAP: its predictor, and its three searches, which agree with brute force over sums written out here."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest

from deepspeed_partition import Chain, ChainFormatError, Platform, make_plan, replay
from deepspeed_partition.planner.mcap_profile import McapProfile
from deepspeed_partition.planner.solvers.contiguous import mcap_search
from deepspeed_partition.planner.solvers.contiguous.mcap import MemoryBalanced
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS
from tests.planner.instances import chain


def profile_of(seed: int, num_layers: int, largest: int = 2) -> McapProfile:
    """Statistics with few different numbers, so that many partitions are equal."""
    rng = random.Random(seed)

    def numbers(least: int) -> tuple[int, ...]:
        return tuple(rng.randint(least, largest) for _ in range(num_layers))

    return McapProfile(
        isolated_bytes=numbers(0), isolated_bytes_per_more=numbers(0), added_bytes=numbers(-1),
        added_bytes_per_more=numbers(-1), num_runs=1,
    )  # fmt: skip


def peaks_by_hand(profile: McapProfile, cuts: tuple[int, ...], most: int) -> list[int]:
    """Listing 1.1, with the micro-batches of 1F1B in flight: the first layer alone, the others one by one."""
    peaks = []
    for index, (start, stop) in enumerate(pairwise(cuts)):
        further = min(len(cuts) - 1 - index, most) - 1
        peak = profile.isolated_bytes[start] + further * profile.isolated_bytes_per_more[start]
        for layer in range(start + 1, stop):
            peak += profile.added_bytes[layer] + further * profile.added_bytes_per_more[layer]
        peaks.append(peak)
    return peaks


def best_by_hand(profile: McapProfile, num_stages: int, most: int) -> tuple[int, ...]:
    """The smallest peak; then, without the fullest device, the smallest again; then the first boundaries."""
    every = [
        (0, *inner, profile.num_layers) for inner in combinations(range(1, profile.num_layers), num_stages - 1)
    ]
    return min(every, key=lambda cuts: (sorted(peaks_by_hand(profile, cuts, most), reverse=True), cuts))


def profiled(profile: McapProfile) -> Chain:
    return replace(chain([1] * profile.num_layers, [0] * profile.num_layers), mcap=profile)


PLENTY = Platform(num_devices=4, memory_bytes=10**9, bandwidth=1e9)


@pytest.mark.parametrize("num_micro_batches", [None, 2])
@pytest.mark.parametrize("seed", range(40))
def test_searches_find_the_best_partition_ties_included(seed, num_micro_batches):
    profile = profile_of(seed, num_layers=4 + seed % 7)
    expected = list(best_by_hand(profile, 4, num_micro_batches or 4))
    for algorithm in ("mcap", "mcap-bf"):
        plan = make_plan(profiled(profile), PLENTY, algorithm, num_micro_batches=num_micro_batches)
        assert plan.boundaries == expected, algorithm
        assert not replay(plan, profiled(profile)).violations


def test_ties_are_common_in_these_instances():
    """Else the test above would say nothing of them: most have several partitions with the smallest peak."""
    tied = 0
    for seed in range(40):
        profile = profile_of(seed, num_layers=4 + seed % 7)
        every = [(0, *inner, profile.num_layers) for inner in combinations(range(1, profile.num_layers), 3)]
        peaks = [max(peaks_by_hand(profile, cuts, 4)) for cuts in every]
        tied += peaks.count(min(peaks)) > 1
    assert tied > 20


def test_the_table_is_the_predictor():
    profile = profile_of(3, num_layers=9, largest=1000)
    for in_flight in (1, 4):
        table = profile.peaks(in_flight)
        for start, stop in combinations(range(10), 2):
            by_hand = peaks_by_hand(profile, (start, stop), 1)[0] if in_flight == 1 else None
            assert table[start, stop] == profile.peak_bytes(start, stop, in_flight)
            assert by_hand is None or by_hand == table[start, stop]


def test_forbidden_stages_are_in_no_answer():
    table = np.full((6, 6), NOTHING_FITS)
    for stage in [(0, 2), (2, 5), (0, 3), (3, 5)]:
        table[stage] = 10 if stage != (3, 5) else 9
    for search in (mcap_search.exact, mcap_search.brute_force):
        assert search([table, table]) == (0, 3, 5), "10 and 9; not 10 and 10"
        assert search([table, table, table]) is None


def test_a_long_chain_is_no_matter_for_the_exact_search():
    """C(299, 7) is about 4e13 partitions; the answer has the smallest peak, or fewer parts could have less."""
    rng = np.random.default_rng(0)
    added = rng.integers(1, 1000, 300)
    sizes, nothing = tuple(map(int, added)), (0,) * 300
    profile = McapProfile(
        isolated_bytes=sizes, isolated_bytes_per_more=nothing, added_bytes=sizes, added_bytes_per_more=nothing,
        num_runs=1,
    )  # fmt: skip
    cuts = mcap_search.exact([profile.peaks(1)] * 8)
    largest = max(added[start:stop].sum() for start, stop in pairwise(cuts))
    parts, room = 1, largest - 1  # greedily, with one byte less there are more than 8 parts
    for layer in added:
        if layer > room:
            parts, room = parts + 1, largest - 1
        room -= layer
    assert parts > 8
    with pytest.raises(ValueError, match="have 39494993171634 partitions"):
        mcap_search.brute_force([profile.peaks(1)] * 8)
    assert comb(299, 7) == 39494993171634


def test_bayesian_optimization_comes_close():
    pytest.importorskip("bayes_opt")
    profile = profile_of(1, num_layers=20, largest=1000)
    made = profiled(profile)
    found = make_plan(made, PLENTY, "mcap-bo").boundaries
    best = max(peaks_by_hand(profile, best_by_hand(profile, 4, 4), 4))
    peaks = sorted(
        max(peaks_by_hand(profile, (0, *inner, 20), 4)) for inner in combinations(range(1, 20), 3)
    )  # fmt: skip
    of_found = max(peaks_by_hand(profile, tuple(found), 4))
    assert best == peaks[0] <= of_found <= peaks[len(peaks) // 20], "among the best twentieth"


def test_the_same_seed_gives_the_same_answer(monkeypatch):
    pytest.importorskip("bayes_opt")
    monkeypatch.setattr(mcap_search, "ITERATIONS", mcap_search.FIRST_ITERATIONS + 2)
    made = profiled(profile_of(1, num_layers=20, largest=1000))
    solver = MemoryBalanced("mcap-bo", "bayesian")
    assert make_plan(made, PLENTY, solver).boundaries == make_plan(made, PLENTY, "mcap-bo").boundaries


def test_without_the_package_there_is_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(ValueError, match=r"pip install 'madpipe\[bayesian\]', or use mcap"):
        make_plan(profiled(profile_of(0, 8)), PLENTY, "mcap-bo")


def test_a_chain_keeps_its_profile(tmp_path):
    made = profiled(profile_of(0, 8))
    made.save(tmp_path / "chain.json")
    loaded = Chain.load(tmp_path / "chain.json")
    assert loaded == made and loaded.mcap == made.mcap
    assert loaded.digest() == replace(made, mcap=None).digest(), "plans of the same layers suit both"


def test_a_malformed_profile_is_refused():
    data = profiled(profile_of(0, 8)).to_dict()
    data["mcap"]["added_bytes"][3] = "5"
    with pytest.raises(ChainFormatError, match=r"mcap\.added_bytes\[3\]"):
        Chain.from_dict(data)
    data["mcap"]["added_bytes"] = [1] * 7
    with pytest.raises(ChainFormatError, match="each list has one for every layer"):
        Chain.from_dict(data)
    with pytest.raises(ValueError, match="mcap is of 8 layers and the chain has 3"):
        replace(chain([1] * 3, [0] * 3), mcap=profile_of(0, 8))
    with pytest.raises(ValueError, match="not a whole number"):
        replace(profile_of(0, 8), isolated_bytes=(1.5,) * 8)
