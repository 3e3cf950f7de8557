"""Schemes of parallel training: the scheduler against the source's own outputs, its table and small cases."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import gcd

import pytest

from deepspeed_partition.planner.schemes.scheme import (
    Scheme,
    backward_first,
    ddp,
    fsdp,
    fslpp,
    fslpp_even,
    gpipe,
    lpp,
    oldest_first,
)
from deepspeed_partition.planner.schemes.scheme_simulator import SchemeRun, SchemeStage, Wires, simulate
from deepspeed_partition.planner.schemes.scheme_table import scheme_table

FOUR = [SchemeStage()] * 4


@pytest.mark.parametrize(
    ("scheme", "latency", "activations"), [(ddp(8), 12, 4), (gpipe(), 33, 8), (lpp(2, 2), 28, 6)]
)
def test_outputs_of_the_source(scheme: Scheme, latency: float, activations: int) -> None:
    """The source's notebook prints these at S = 4, B = 8, with the oldest micro-batch first."""
    run = simulate(scheme, FOUR, 8)
    assert (run.latency_seconds, max(run.peak_activations)) == (latency, activations)


@pytest.mark.parametrize(
    ("s", "b", "g", "r"),
    [
        (4, 8, 2, 2), (4, 8, 8, 1), (4, 8, 1, 4), (6, 6, 2, 3), (6, 6, 3, 2), (8, 4, 2, 4), (3, 3, 3, 3),
        (1, 2, 2, 1), (2, 8, 4, 2),
    ],
)  # fmt: skip
def test_corrected_table_holds(s: int, b: int, g: int, r: int) -> None:
    broken = [entry for entry in scheme_table(s, b, g, r) if not entry.holds]
    assert not broken


def test_table_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="3 groups of 2 workers, 8 micro-batches and 4 stages"):
        scheme_table(4, 8, 3, 2)


def test_printed_table_breaks_where_the_source_says_otherwise() -> None:
    entries = {(each.scheme, each.quantity): each for each in scheme_table(4, 8, 2, 2)}
    latency = entries["LPP 2x2", "latency"]
    assert (latency.printed, latency.corrected, latency.simulated) == (21, 27, 28)
    run = simulate(lpp(2, 2), FOUR, 8)
    assert run.busy_seconds == (24, 24, 24, 24)  # the work alone is more than what is printed
    assert entries["GPipe", "activations received"].simulated == 16
    assert entries["FSDP", "weights received"].simulated == 8
    assert entries["FSLPP 2x2", "weights kept"].simulated == 2
    assert max(simulate(fslpp(4, 3), [SchemeStage()] * 12, 4).weights_stored) == 1  # no common divisor


def test_gpipe_keeps_less_with_a_limit_in_the_same_time() -> None:
    run = simulate(replace(gpipe(), most_in_flight=lambda stage: 4 - stage), FOUR, 8)
    assert (run.latency_seconds, run.peak_activations) == (33, (4, 3, 2, 1))


def _rho_and_bound(run: SchemeRun, num_stages: int, num_micro_batches: int) -> tuple[float, float]:
    jobs = num_stages * num_micro_batches * 3  # a forward and a backward take 3
    rho = jobs / (run.latency_seconds * len(run.busy_seconds))
    return rho, max(run.peak_activations) / num_stages


def test_theorem_holds_in_neither_direction() -> None:
    rho, bound = _rho_and_bound(simulate(gpipe(), FOUR, 8), 4, 8)
    assert rho == pytest.approx(8 / 11) and bound == 2  # the end of the proof says rho >= M / S
    place = (0, 1, 1)
    scheme = Scheme(lambda s, b, d: place[s], lambda s, b: place[s], backward_first, lambda stage: 2)
    rho, bound = _rho_and_bound(simulate(scheme, [SchemeStage()] * 3, 6), 3, 6)
    assert rho == pytest.approx(9 / 13) and rho > bound == pytest.approx(2 / 3)


def test_backward_on_another_worker_than_its_forward_wins() -> None:
    """One stage, three micro-batches, two workers: 5 units, and 6 where both are on one worker, tried all."""
    place = {(0, "F"): 0, (0, "B"): 0, (1, "F"): 1, (1, "B"): 0, (2, "F"): 1, (2, "B"): 1}
    run = simulate(Scheme(lambda s, b, d: place[b, d], lambda s, b: 0), [SchemeStage()], 3)
    assert run.latency_seconds == 5
    assert run.activations_received == (1, 0)  # what micro-batch 1 kept moves to worker 0
    together = [
        simulate(Scheme(lambda s, b, d, on=on: on[b], lambda s, b: 0, order), [SchemeStage()], 3).latency_seconds
        for on in itertools.product(range(2), repeat=3)
        for order in (oldest_first, backward_first)
    ]
    assert min(together) == 6


def test_links_and_weights_take_time() -> None:
    """Two stages on two workers, one micro-batch: F0 1, message 3, F1 1, B1 2, message 3, B0 2."""
    three = Wires(transfer_seconds=lambda source, destination, size: 3.0 * size)
    assert simulate(gpipe(), [SchemeStage()] * 2, 1, three).latency_seconds == 12
    # Each worker stores one of two stages, and fetches the other one for its forward and its backward.
    run = simulate(fsdp(2), [SchemeStage()] * 2, 2, Wires(lambda a, b, size: 3.0 * size, prefetch=0))
    assert run.weights_received == (2, 2) and run.gradients_sent == (1, 1)
    assert run.peak_fetched == (1, 1)


def test_prefetch_hides_a_fetch_behind_the_job_before() -> None:
    """Worker 0 computes three stages and stores the first: fetches of one unit hide behind jobs of one or more."""
    stages, wires = [SchemeStage()] * 3, Wires(lambda source, destination, size: 1.0 * size)
    scheme = Scheme(lambda s, b, d: 0, lambda s, b: s)
    assert simulate(scheme, stages, 1, wires).latency_seconds == 9
    assert simulate(scheme, stages, 1, replace(wires, prefetch=0)).latency_seconds == 13  # four fetches
    assert simulate(scheme, stages, 1, wires).peak_fetched[0] == 2


def test_messages_of_one_link_go_one_after_the_other() -> None:
    """Both micro-batches are forwarded at once, on workers 0 and 2, and worker 1 gets both outputs over links."""
    scheme = Scheme(lambda s, b, d: 1 if s else 2 * b, lambda s, b: 1 if s else 2 * b)
    wires = Wires(lambda source, destination, size: 4.0)
    own_links = simulate(scheme, [SchemeStage()] * 2, 2, wires)
    assert own_links.latency_seconds == 1 + 4 + 1 + 2 + 3 + 4 + 2
    one_link = Scheme(lambda s, b, d: s, lambda s, b: s)
    # F0 0-1, 1-2; on the link 1-5, 5-9; F1 B1 5-8, back 9-13; F1 B1 9-12, back 13-17; B0 17-19
    assert simulate(one_link, [SchemeStage()] * 2, 2, wires).latency_seconds == 19


def test_faster_worker_and_unlike_stages() -> None:
    stages = [SchemeStage(forward_seconds=0.1, backward_seconds=0.2, stash_bytes=7, output_bytes=3)] * 2
    run = simulate(gpipe(), stages, 1, Wires(speed=lambda worker: 1 + worker))
    assert run.latency_seconds == pytest.approx(0.3 + 0.15)
    assert run.activation_bytes_received == (3, 3) and run.peak_activation_bytes == (7, 7)


def test_refuses_what_is_no_worker() -> None:
    with pytest.raises(ValueError, match=r"w_compute\(0, 0, 'F'\) is -1: it must be the number of a worker"):
        simulate(Scheme(lambda s, b, d: -1, lambda s, b: 0), FOUR, 1)
    with pytest.raises(ValueError, match="0 stages and 1 micro-batches"):
        simulate(gpipe(), [], 1)


@pytest.mark.parametrize(("num_groups", "group_size"), [(2, 2), (4, 1), (2, 4), (3, 2), (4, 2)])
def test_even_fslpp_stores_one_stage_on_each_worker(num_groups: int, group_size: int) -> None:
    """The source's owner, h(s, s), does so only where both have no common divisor."""
    size = num_groups * group_size
    stages = [SchemeStage()] * size
    run = simulate(fslpp_even(num_groups, group_size), stages, 2 * num_groups)
    assert run.weights_stored == (1,) * size
    # Each worker computes G stages for 2 micro-batches, both ways, and fetches all but its own.
    assert run.weights_received == (2 * 2 * (num_groups - 1),) * size
    theirs = simulate(fslpp(num_groups, group_size), stages, 2 * num_groups)
    assert theirs.latency_seconds == run.latency_seconds
    assert (theirs.weights_stored == run.weights_stored) == (gcd(num_groups, group_size) == 1)
