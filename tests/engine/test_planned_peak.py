"""The line about a step that needed more than planned, and the correction after a warm-up; one process."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
import torch

from deepspeed_partition import Platform
from deepspeed_partition.engine.runtime import planned_peak
from deepspeed_partition.engine.runtime.planned_peak import MICRO_BATCHES, OPTIMIZER, REDUCTION, PlannedPeak
from deepspeed_partition.engine.warmup.run_plan import _corrected
from deepspeed_partition.planner.plan import MemoryUse
from deepspeed_partition.planner.warm_up_report import TrialRun
from deepspeed_partition.profiling import limit_memory

MIB = 2**20
USE = MemoryUse(weights=4 * MIB, stash=8 * MIB, buffers=0, transient=4 * MIB)


def mebibytes(number):
    return torch.empty(number * MIB, dtype=torch.uint8)


def said_in_steps(*, weights=4, stash=8, transient=4, after=4):
    """What is said in two steps of these mebibytes; each reads 3 more, and loads them all with the forward."""
    plan, peak = SimpleNamespace(memory=(USE,)), PlannedPeak(torch.device("cpu"), 5)
    with limit_memory(1000 * MIB), patch.object(planned_peak, "warn_here") as warn:
        kept = [mebibytes(weights)]
        for _ in range(2):
            with peak.step(plan, 0):
                data = mebibytes(3)
                peak.data_was_read()
                held = mebibytes(stash)
                peak.computed(1.0, forward=True, loads_inputs=True)
                mebibytes(transient)
                peak.computed(1.0, forward=False, loads_inputs=True)
                del held, data
                peak.ended(MICRO_BATCHES)
                peak.ended(REDUCTION)
                mebibytes(after)
                peak.ended(OPTIMIZER)
        del kept
    return [call.args[0] for call in warn.call_args_list]


def test_what_was_planned_is_silent():
    assert said_in_steps() == []


@pytest.mark.parametrize(
    ("more", "part", "term"),
    [
        ({"weights": 9}, "micro-batches", "weights, with all that is there"),
        ({"stash": 14}, "micro-batches", "stash, with buffers at cuts (14.7 MB, planned 8.39 MB"),
        ({"transient": 10}, "micro-batches", "transient (10.5 MB, planned 4.19 MB"),
        ({"after": 20}, "optimizer step", "transient (21 MB, planned 12.6 MB"),
    ],
)  # fmt: skip
def test_the_term_that_grew_is_said_once(more, part, term):
    [sentence] = said_in_steps(**more)
    assert sentence.startswith("rank 5 needed ") and "its plan says 16.8 MB" in sentence
    assert f"it was in the {part}, and what grew is {term}" in sentence


@pytest.mark.parametrize(
    ("found", "fixed", "said"),
    [
        ((90, 80), 7, False), ((101, 130), 37, False), ((None, 101), 8, False), ((None, None), 7, False),
        ((100, 65_636), 65_543, False), ((100, 65_637), 65_544, True), ((10**8 + 10**5, 100), 100_007, False),
        ((10**8 + 10**5 + 1, 100), 100_008, True),
    ],
)  # fmt: skip
def test_what_the_planner_counted_too_little_is_added(found, fixed, said):
    platform = Platform(num_devices=2, memory_bytes=1000, bandwidth=1.0, fixed_bytes=7)
    run = TrialRun(
        boundaries=(0, 1, 2), num_steps=3, optimizer_seconds=(None, None), peak_bytes=found,
        planned_peak_bytes=(10**8 if (found[0] or 0) > 10**6 else 100, 100),
    )  # fmt: skip
    with patch("deepspeed_partition.engine.warmup.run_plan.announce") as announce:
        assert _corrected(platform, run) == replace(platform, fixed_bytes=fixed)
    assert announce.call_count == said
