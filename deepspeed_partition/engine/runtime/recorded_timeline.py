"""Records when each operation of a step runs, in the terms of the plan, in a file that can be laid over it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.tracing import DeviceTrace, Execute, moves_of, recorded
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.report.timeline import (
    MeasuredTimeline,
    TimedOperation,
    TimedStep,
    steps_in_words,
)

NUM_STEPS = 10
"""The number of training steps that are recorded, from the first one on; comparisons take their median."""


class Recorder:
    """Records the first training steps of the job's first pipeline, and writes them to a file.

    The file is whole after each step. Where it cannot be written the training goes on, and a warning says so. It
    has the steps of one plan, the last one, and of one number of micro-batches, that of its first step.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._num_left = NUM_STEPS
        self._plan: Plan | None = None
        self._num_micro_batches = 0
        self._steps: list[TimedStep] = []
        self._part: DeviceTrace | None = None
        """What this rank recorded of a step of which nobody knows yet whether it went well."""

    @property
    def wants_more(self) -> bool:
        return self._num_left > 0

    @contextmanager
    def step(self, transfers: Transfers, execute: Execute) -> Iterator[Execute]:
        """Record a step of all ranks of a pipeline: yield what to call in the place of ``execute``."""
        if 0 not in transfers.ranks:
            self._num_left = 0
            yield execute
            return
        with recorded(transfers, self._device, execute) as step:
            yield step.execute
        self._part = step.part

    def forget(self) -> None:
        """Forget a step that was recorded and given up."""
        self._part = None

    def keep(self, plan: Plan, transfers: Transfers) -> None:
        """Write the step that was recorded, if one was: no rank has given it up. Collective over the pipeline."""
        part, self._part = self._part, None
        if part is None:
            return
        self._num_left -= 1
        parts = _gather(part, transfers)
        if dist.get_rank() == 0:
            self._write(plan, parts)

    def _write(self, plan: Plan, parts: list[DeviceTrace]) -> None:
        devices = tuple(stage.device for stage in plan.stages)
        num_micro_batches = sum(name in ("F0", "f0") for part in parts for name, *_ in part.computed)
        if plan is not self._plan:
            self._plan, self._num_micro_batches = plan, num_micro_batches
            self._steps.clear()
        if num_micro_batches == self._num_micro_batches:
            step = TimedStep(
                step=NUM_STEPS - self._num_left - 1,
                clock_error_seconds=tuple(part.clock_error_seconds for part in parts),
                operations=merged(parts, devices),
            )
            self._steps.append(step)
        timeline = MeasuredTimeline(
            chain=plan.chain,
            devices=devices,
            num_micro_batches=self._num_micro_batches,
            steps=tuple(self._steps),
        )
        try:
            timeline.save(self._path)
        except OSError as error:
            announce(f"the timeline in {self._path}: {error.strerror}", logging.WARNING)
            return
        if not self.wants_more:
            planned = timeline.compare(plan).planned_step_seconds
            announce(f"{self._path}: {steps_in_words([step.seconds for step in timeline.steps], planned)}")


def _gather(part: DeviceTrace, transfers: Transfers) -> list[DeviceTrace]:
    """Gather the parts of all devices on the first one."""
    first = transfers.ranks[0]
    parts: list[Any] | None = [None] * len(transfers.ranks) if dist.get_rank() == first else None
    dist.gather_object(part, parts, dst=first, group=transfers.cpu_group)
    return parts or []


def merged(parts: list[DeviceTrace], devices: tuple[int, ...]) -> tuple[TimedOperation, ...]:
    """The operations of a step, by their start; of each transfer what its two ends saw."""
    zero = min(start for part in parts for _, _, start, _ in part.computed)

    def placed(name: str, micro_batch: int, start: float, end: float, **place: Any) -> TimedOperation:
        start = max(start - zero, 0.0)
        return TimedOperation(
            operation=name,
            micro_batch=micro_batch,
            start_seconds=start,
            duration_seconds=max(end - zero - start, 0.0),
            **place,
        )

    operations = [
        placed(name, micro_batch, start, end, device=device)
        for device, part in enumerate(parts)
        for name, micro_batch, start, end in part.computed
    ]
    for message, start, arrived, _ in moves_of(parts, devices):
        link = devices[message.boundary], devices[message.boundary + 1]
        operations.append(placed(f"S{message.channel}", message.micro_batch, start, arrived, link=link))
    return tuple(sorted(operations, key=lambda each: (each.start_seconds, each.operation)))
