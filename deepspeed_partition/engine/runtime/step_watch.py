"""What somebody has asked to know of the steps of a run: figures for loggers, a rank that is slow, a plan left.

Where nobody asks an engine has no ``StepWatch``, and nothing is timed. Ranks tell each other what they have found
with what they agree on at the end of a batch anyway; figures are gathered where they are logged, and only there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepspeed_partition.engine.runtime.batch_clock import BatchClock
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce, warn_here
from deepspeed_partition.engine.runtime.step_clock import Note, Step, StepClock
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.report.planned_run import busy
from deepspeed_partition.planner.report.slowdown import LeftPlan, Slow, Slowdown
from deepspeed_partition.planner.report.step_figures import RankSteps, StepFigures
from deepspeed_partition.planner.units import format_seconds
from deepspeed_partition.schedule.instructions import Instruction
from deepspeed_partition.schedule.shared_ports import shared_step_seconds

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine


class StepWatch:
    """Times the steps of one rank, holds them against the plan, and gathers their figures.

    Args:
        engine: which runs lists of instructions.
        peak_bytes: returns the peak of memory of the steps so far, in bytes; None where nobody knows it.
    """

    def __init__(self, engine: MadPipeEngine, peak_bytes: Callable[[], int | None]) -> None:
        self._engine, self._peak_bytes = engine, peak_bytes
        self._clock = StepClock(engine.device, engine.stage_id)
        self.batches = BatchClock(engine.device, engine.stage_id)
        """The clock of batches, where the pipeline never drains."""
        self._plan: Plan | None = None
        self._slowdown: Slowdown | None = None
        self._recovery: Slowdown | None = None
        self._left: LeftPlan | None = None
        self._planned_seconds = 0.0
        self.has_found = False
        """Whether this rank has found something that the others are to hear with the end of this batch."""
        self.some_rank_is_slow = False
        """Whether some rank has found since the plan was made, or since this was set back, that it is slow, or as
        fast again as before: alike on all ranks between two steps."""

    # A step

    def begin(self, instructions: Sequence[Instruction]) -> Note:
        """Begin a step; return what to call with each instruction when it begins."""
        plan = self._engine.plan
        if plan is not self._plan:
            self._follow(plan)
        return self._clock.begin(instructions)

    def end(self, num_micro_batches: int) -> None:
        """End a step, before its ranks agree on how it went."""
        step, plan = self._clock.end(), self._plan
        if step is not None and plan is not None and plan.num_micro_batches == num_micro_batches:
            self._look_at(step)

    def hear(self) -> None:
        """Note, on all ranks, that some of them have found something."""
        self.has_found, self.some_rank_is_slow = False, True

    @property
    def busy_seconds(self) -> tuple[float, float] | None:
        """Seconds that the layers of this rank take in a step, in the last steps, and by the plan."""
        measured = None if self._slowdown is None else self._slowdown.median_seconds
        return None if measured is None else (measured, self._planned_seconds)

    def _follow(self, plan: Plan | None) -> None:
        self._plan, self.has_found, self.some_rank_is_slow = plan, False, False
        self._slowdown = self._recovery = self._left = None
        self._clock.clear()
        if plan is None or plan.step_seconds is None:
            return
        device = self._engine.stage_id
        self._planned_seconds = next(each.seconds for each in busy(plan) if each.place == f"device {device}")
        if self._planned_seconds > 0:
            self._slowdown = Slowdown(self._planned_seconds)
            if plan.platform.speed_of(device) < 1:
                self._recovery = Slowdown(1 / self._planned_seconds)
        # Where messages share ports, which a plan lets them through in turn, steps are no longer than that.
        self._left = LeftPlan(max(plan.step_seconds, shared_step_seconds(plan) or 0.0))

    def _look_at(self, step: Step) -> None:
        found = None if self._slowdown is None else self._slowdown.see(step.computing_seconds)
        if found is not None:
            self.has_found = True
            warn_here(self._slow_in_words(found))
        if self._recovery is not None and self._recovery.see(1 / max(step.computing_seconds, 1e-9)) is not None:
            self.has_found = True
            warn_here(f"rank {self._engine.global_rank} is faster again than the plan counts with")
        median = None if self._left is None else self._left.see(step.seconds)
        # A slow rank has said so itself, which is why steps take longer.
        if median is not None and self._engine.global_rank == 0 and not self.some_rank_is_slow:
            announce(self._left_in_words(median), logging.WARNING)

    def _slow_in_words(self, found: Slow) -> str:
        engine, plan = self._engine, self._plan
        assert plan is not None
        own = [stage for stage, each in enumerate(plan.stages) if each.device == engine.stage_id]
        stages = f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        way_out = (
            "the plan is made again for the speeds as they are"
            if engine.options.replan == "when_slow"
            else "with replan='when_slow' layers would move to the other ranks"
        )
        return (
            f"rank {engine.global_rank} ({stages}) has become slow: its layers take {found.factor:.2f} times as "
            f"long as before, {format_seconds(found.seconds)} of a step (planned: "
            f"{format_seconds(found.planned_seconds)}). "
            f"Another job on its device, or heat? {way_out}"
        )

    def _left_in_words(self, median: float) -> str:
        plan, measured = self._plan, self.busy_seconds
        assert plan is not None and plan.step_seconds is not None
        computing = (
            ""
            if measured is None
            else f"; rank 0 computes for {format_seconds(measured[0])}, planned {format_seconds(measured[1])}"
        )
        return (
            f"steps take {format_seconds(median)} and were planned to take {format_seconds(plan.step_seconds)}"
            f"{computing}. The plan was made from other times than these: let a run make a new plan on this "
            "machine while nothing else runs there; save_timeline shows where the time goes"
        )

    # Figures

    def figures(self) -> StepFigures | None:
        """Gather the figures of the steps since the last call, on every rank. Collective over the job.

        Returns:
            None where there was no step that is over.
        """
        engine = self._engine
        endless = engine.endless_program
        clock = self._clock if endless is None else self.batches
        told: list[RankSteps | None] = gather_objects(clock.take(self._peak_bytes()))
        found = [each for each in told if each is not None]
        if len(found) < len(told):
            return None
        pipelines = [[found[rank] for rank in ranks] for ranks in engine._pipelines()]
        seconds = None if endless is None else endless.batch_seconds
        return StepFigures.of(pipelines, engine.plan, engine.micro_batches, seconds)

    def planned_and_measured(self) -> list[float] | None:
        """Return, for each device of a pipeline, how many times as long as planned its layers take. Collective.

        Returns:
            Of several pipelines the slowest counts at each place. None where some rank does not know it yet.
        """
        told = gather_objects(self.busy_seconds)
        pipelines = self._engine._pipelines()
        factors = []
        for ranks in zip(*pipelines, strict=True):
            seen = [told[rank] for rank in ranks]
            if any(each is None for each in seen):
                return None
            factors.append(max(measured / planned for each in seen if each for measured, planned in [each]))
        return factors
