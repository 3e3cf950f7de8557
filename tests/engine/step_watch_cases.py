"""What somebody who asks is told of steps, and that nobody else pays; run by ``timeline_multiproc.py``."""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from deepspeed_partition import Plan, make_plan
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime import step_watch
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.step_clock import Step, StepClock
from deepspeed_partition.engine.warmup import replanning
from deepspeed_partition.planner.report.planned_run import busy
from deepspeed_partition.planner.report.step_figures import StepFigures
from deepspeed_partition.planner.report.timeline import MeasuredTimeline
from tests.engine.any_plan_multiproc import begin, plan_for
from tests.engine.pipelines import mlp
from tests.engine.running import NUM_MICRO_BATCHES, batches, mine, planned, raised, same, start, train


def figures_are_those_of_the_timeline(folder: Path, specs: list[Any]) -> None:
    """Each stage computes as long as the recorder saw, which stamps within the clock's stamps; the rest waits."""
    path = folder / "timeline.json"
    plan = plan_for((0, 1, 0), [0, 3, 6, 8])
    config = {"pipeline": {"madpipe": {"save_timeline": str(path)}}}
    engine, _, _ = begin(specs, plan, config)
    engine.watch_steps()
    assert engine.figures_of_steps() is None
    found: list[StepFigures] = []
    for batch in batches(6):
        engine.train_batch(mine(engine, [batch]))
        figures = engine.figures_of_steps()
        assert figures is not None and figures.num_steps == 1
        found.append(figures)
    dist.barrier()
    steps = MeasuredTimeline.load(path).steps
    shares = []
    for figures, step in zip(found, steps, strict=True):
        assert figures.planned_step_seconds == plan.step_seconds
        # From its first instruction to its last a rank is there for as long as all of its operations.
        assert figures.step_seconds >= max(
            max(each.end_seconds for each in own) - min(each.start_seconds for each in own)
            for device in (0, 1)
            if (own := [each for each in step.operations if each.device == device])
        )
        for stage, seconds in figures.stage_seconds.items():
            own = [each for each in step.operations if each.operation in (f"F{stage}", f"B{stage}")]
            recorded = sum(each.duration_seconds for each in own)
            assert seconds >= recorded
            shares.append(seconds / recorded)
        worked = sum(figures.stage_seconds.values())
        assert figures.bubble_share == pytest.approx(1 - worked / (2 * figures.step_seconds))
        waited = sum(figures.waiting_seconds.values())
        assert set(figures.waiting_seconds) >= {(0, 1), (1, 0)} and waited + worked <= 2 * figures.step_seconds
    assert statistics.median(shares) < 1.1, shares
    # A mean over steps, and evaluation is none.
    train(engine, batches(3))
    engine.eval_batch(mine(engine, batches(1)), num_micro_batches=NUM_MICRO_BATCHES)
    figures = engine.figures_of_steps()
    assert figures is not None and figures.num_steps == 3
    engine.micro_batches = NUM_MICRO_BATCHES // 2
    engine.train_batch(mine(engine, batches(1)))
    figures = engine.figures_of_steps()
    assert figures is not None and figures.planned_step_seconds is None


def a_monitor_gets_figures_and_who_has_none_pays_nothing(folder: Path) -> None:
    """Every ``steps_per_print`` steps; without a monitor nothing is timed, gathered or made."""
    logs = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}, "steps_per_print": 2}
    engine, _, _ = begin(mlp(), plan_for((0, 1, 0), [0, 3, 6, 8]), logs)
    with patch.object(step_watch, "gather_objects", wraps=gather_objects) as gathers:
        train(engine, batches(5))
    assert gathers.call_count == 2
    dist.barrier()
    written = {path.stem: list(csv.reader(path.open())) for path in (folder / "job").glob("madpipe_*.csv")}
    assert {"madpipe_step_seconds", "madpipe_planned_step_seconds", "madpipe_bubble_share"} < set(written)
    assert {f"madpipe_stage_{stage}_seconds" for stage in range(3)} < set(written)
    assert {"madpipe_link_0_to_1_waiting_seconds", "madpipe_link_1_to_0_waiting_seconds"} < set(written)
    samples = [row[0] for row in written["madpipe_step_seconds"]]
    assert samples == ["step", *(str(engine.train_batch_size() * step) for step in (2, 4))]
    with patch.object(StepClock, "begin", side_effect=AssertionError):
        engine, _, _ = begin(mlp(), plan_for((0, 1, 0), [0, 3, 6, 8]))
        train(engine, batches(2))
    assert engine.step_watch is None and engine.figures_of_steps() is None


SLOW_FROM = 46


def a_slow_rank_is_told_and_layers_leave_it(_: Path) -> None:
    """Within 20 steps, by one line of that rank; the losses are those of a run that never moved."""
    with raised(ValueError, "'replan'", "leave one of the two out"):
        start(mlp(), "madpipe", planned([0, 4, 8], replan="when_slow"))
    data = batches(SLOW_FROM + 24)
    for replan in ("never", "when_slow"):
        engine, _, _ = start(mlp(), "madpipe", planned("contiguous", replan=replan))
        engine.watch_steps()
        losses = train(engine, data[:1])  # before which the plan is made
        as_if_measured(engine, 0.01)
        before = engine.plan
        # So few micro-batches gain little by it, and the move is what is looked at here.
        gains = patch.object(replanning, "MIN_GAIN", -1.0)
        with warned_of() as said, slow_on_rank_1(before, SLOW_FROM), gains:
            losses += train(engine, data[1 : SLOW_FROM + 19])
        [(rank, line)] = [each for each in said if "has become slow" in each[1]]
        assert rank == 1 and line.startswith("rank 1 (stage") and "1.50 times as long as before" in line
        if replan == "never":
            assert engine.plan is before and "with replan='when_slow' layers would move" in line
            continue
        assert engine.plan is not before
        assert [engine.plan.platform.speed_of(each) for each in (0, 1)] == [1.0, pytest.approx(2 / 3, rel=0.01)]
        work = [0.0, 0.0]
        for stage in engine.plan.stages:
            work[stage.device] += sum(each.compute_seconds for each in engine.chain.layers[slice(*stage.layers)])
        assert work[1] < 0.9 * work[0]
        losses += train(engine, data[SLOW_FROM + 19 :])
        engine, _, _ = start(mlp(), [0, 4, 8])
        same(losses, train(engine, data))


def as_if_measured(engine: MadPipeEngine, seconds: float) -> None:
    """Let the plan of a run be the one for layers that all take so long forward, and twice as long backward."""
    alike = [replace(each, forward_seconds=seconds, backward_seconds=2 * seconds) for each in engine.chain.layers]
    engine.chain = replace(engine.chain, layers=tuple(alike), warm_up=None)
    plan = make_plan(
        engine.chain, engine.plan.platform, "contiguous", num_micro_batches=NUM_MICRO_BATCHES, recompute="never"
    )
    engine.recut_to_plan_of_run(plan)


def slow_on_rank_1(plan: Plan, first: int) -> Any:
    """A clock by which the layers of each rank take what was planned, and on rank 1 half more from a step on."""
    numbers = itertools.count(2)
    seconds = next(each.seconds for each in busy(plan) if each.place == f"device {dist.get_rank()}")

    def end(_: StepClock) -> Step:
        is_slow = next(numbers) >= first and dist.get_rank() == 1
        return Step(2 * seconds, seconds * (1.5 if is_slow else 1.0))

    return patch.object(StepClock, "end", end)


@contextmanager
def warned_of() -> Iterator[list[tuple[int, str]]]:
    """The warnings of steps on all ranks, each with its rank, on every rank."""
    said: list[tuple[int, str]] = []
    with patch.object(step_watch, "warn_here") as warn:
        yield said
    mine = [(dist.get_rank(), str(call.args[0])) for call in warn.call_args_list]
    said += [each for told in gather_objects(mine) for each in told]
