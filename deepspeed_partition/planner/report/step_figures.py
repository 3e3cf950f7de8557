"""What the steps of a run took, in figures for loggers: per stage, per link and per rank, beside the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_partition.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """What one rank of a pipeline measured, per step: means over the same steps on all ranks."""

    num_steps: int
    step_seconds: float
    """Seconds from its first instruction to its last, without the optimizer."""
    stage_seconds: Mapping[int, float]
    """Seconds of forwards and backwards, by stage."""
    waiting_seconds: Mapping[tuple[int, int], float]
    """Seconds in which nothing ran here because of a message, by the link that it takes: (from, to). A receiver
    waits until it is there, a sender until it has left."""
    peak_bytes: int | None = None
    """Peak of memory, in bytes; None where nobody knows it."""
    versions_held: Mapping[int, int] = field(default_factory=dict)
    """Most versions of the weights, by stage, in a pipeline that never drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Steps of a whole run: of several pipelines, for each place the one that took longest."""

    num_steps: int
    """Number of steps whose mean the figures are."""
    step_seconds: float
    """Seconds of a step without the optimizer."""
    planned_step_seconds: float | None
    """Seconds of the plan's step; None where no plan runs, or a step has another number of micro-batches."""
    stage_seconds: Mapping[int, float]
    """Seconds of the forwards and backwards of a step, by stage."""
    bubble_share: float
    """Part (0 to 1) of the step, over all ranks, in which no stage computes."""
    waiting_seconds: Mapping[tuple[int, int], float]
    """Seconds of a step in which a rank waits for a message, by link: (from, to)."""
    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    """Peak of memory in bytes, by rank of a pipeline; without ranks where nobody knows it."""
    planned_peak_bytes: Mapping[int, int] = field(default_factory=dict)
    versions_held: Mapping[int, int] = field(default_factory=dict)
    """Most versions of the weights, by stage, in a pipeline that never drains; without stages in one that does."""
    planned_versions: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pipelines: Sequence[Sequence[RankSteps]],
        plan: Plan | None,
        num_micro_batches: int,
        batch_seconds: float | None = None,
    ) -> StepFigures:
        """Return the figures of what all ranks measured.

        Args:
            pipelines: of each pipeline its ranks, by device.
            plan: the plan that runs, if one does.
            num_micro_batches: of a step.
            batch_seconds: planned seconds from one batch to the next, of a pipeline that never drains.
        """
        ranks = [rank for ranks in pipelines for rank in ranks]
        shares = []
        for pipeline in pipelines:
            whole = max(rank.step_seconds for rank in pipeline) * len(pipeline)
            worked = sum(sum(rank.stage_seconds.values()) for rank in pipeline)
            shares.append(1 - worked / whole if whole else 0.0)
        peaks: dict[int, int] = {}
        for pipeline in pipelines:
            for device, rank in enumerate(pipeline):
                if rank.peak_bytes is not None:
                    peaks[device] = max(rank.peak_bytes, peaks.get(device, 0))
        planned = dict(enumerate(plan.peak_memory_bytes)) if plan is not None else {}
        fits = plan is not None and plan.num_micro_batches == num_micro_batches
        of_step = plan.step_seconds if fits and plan is not None else None
        versions: dict[int, int] = {}
        for rank in ranks:
            for stage, number in rank.versions_held.items():
                versions[stage] = max(number, versions.get(stage, 0))
        rule = None if plan is None or not versions else plan.versions
        return cls(
            num_steps=min(rank.num_steps for rank in ranks),
            step_seconds=max(rank.step_seconds for rank in ranks),
            planned_step_seconds=of_step if batch_seconds is None else batch_seconds,
            stage_seconds=_longest(rank.stage_seconds for rank in ranks),
            bubble_share=max(0.0, *shares),
            waiting_seconds=_most_waited([_waited_in(pipeline) for pipeline in pipelines]),
            peak_bytes=peaks,
            planned_peak_bytes={device: planned[device] for device in peaks if device in planned},
            versions_held=versions,
            planned_versions={} if rule is None else {stage: rule.num_held(stage) for stage in versions},
        )

    def named(self) -> dict[str, float]:
        """Return each figure under the name that a logger gets, such as ``madpipe/stage_0_seconds``."""
        named = {"step_seconds": self.step_seconds}
        if self.planned_step_seconds is not None:
            named["planned_step_seconds"] = self.planned_step_seconds
        if self.stage_seconds:
            named["bubble_share"] = self.bubble_share
        named |= {f"stage_{stage}_seconds": seconds for stage, seconds in sorted(self.stage_seconds.items())}
        for (source, target), seconds in sorted(self.waiting_seconds.items()):
            named[f"link_{source}_to_{target}_waiting_seconds"] = seconds
        for rank, peak in sorted(self.peak_bytes.items()):
            named[f"rank_{rank}_peak_bytes"] = float(peak)
        for rank, peak in sorted(self.planned_peak_bytes.items()):
            named[f"rank_{rank}_planned_peak_bytes"] = float(peak)
        for stage, number in sorted(self.versions_held.items()):
            named[f"stage_{stage}_versions_held"] = float(number)
        for stage, number in sorted(self.planned_versions.items()):
            named[f"stage_{stage}_planned_versions"] = float(number)
        return {f"madpipe/{name}": value for name, value in named.items()}


def _longest(each: Iterable[Mapping[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for seconds in each:
        for stage, lasted in seconds.items():
            found[stage] = max(lasted, found.get(stage, 0.0))
    return found


def _waited_in(pipeline: Sequence[RankSteps]) -> dict[tuple[int, int], float]:
    """Return the seconds waited because of each link of a pipeline, at both of its ends together."""
    found: dict[tuple[int, int], float] = {}
    for rank in pipeline:
        for link, seconds in rank.waiting_seconds.items():
            found[link] = found.get(link, 0.0) + seconds
    return found


def _most_waited(pipelines: Sequence[Mapping[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    links = {link for each in pipelines for link in each}
    return {link: max(each.get(link, 0.0) for each in pipelines) for link in links}
