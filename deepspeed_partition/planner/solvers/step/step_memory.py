"""Peak memory of a simulated step, for each device.

Method: all that comes and goes on a device is sorted by time and summed up once; a transient counts with the most
that is there while its operation runs. The definitions are those of the planner's README, section "Memory". An
operation that takes no time is there for its instant: instants are counted double, and such an operation lasts one
half of a tick.

Cost: O(n log n) time and O(n) memory for the n operations and transfers of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, StepRun

Instants = NDArray[Any]
"""Instants in half ticks, in order: 64-bit integers, or Python's where a step is too long for these."""
LONGEST_IN_64_BITS = 2**60
"""Ticks up to which instants are held in 64 bits."""


def peaks(engine: StepEngine, run: StepRun) -> list[int]:
    """Return the peak bytes of each device, exactly as the file formats define them."""
    kind: type = np.int64 if run.ticks < LONGEST_IN_64_BITS else object

    def doubled(every: Sequence[Sequence[int]]) -> list[Instants]:
        return [2 * np.array(each, dtype=kind) for each in every]

    spans = StepSpans(engine, doubled(run.begins), doubled(run.ends), doubled(run.sends))
    return [max(spans.peak(place), engine.floor[place]) for place in range(engine.num_devices)]


@dataclass(slots=True)
class _Bytes:
    """Bytes of a device over time: those at the beginning, and by how much they change when."""

    first: int
    when: list[Instants] = field(default_factory=list)
    change: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, when: Instants, num_bytes: int) -> None:
        self.when.append(when)
        self.change.append(np.full(len(when), num_bytes, dtype=np.int64))

    def span(self, begins: Instants, ends: Instants, num_bytes: int) -> None:
        """Count bytes from each beginning to its end; what ends at an instant is gone."""
        if num_bytes:
            self.add(begins, num_bytes)
            self.add(ends, -num_bytes)

    def levels(self) -> tuple[Instants, NDArray[np.int64]]:
        """Return the instants of changes, each once and in order, and the bytes from each of them on."""
        when = np.concatenate(self.when)
        order = np.argsort(when, kind="stable")
        when = when[order]
        total = self.first + np.cumsum(np.concatenate(self.change)[order])
        last = np.append(when[1:] != when[:-1], True).astype(bool)
        return when[last], total[last]


class StepSpans:
    """Instants of one step, by position; in half ticks."""

    def __init__(
        self, engine: StepEngine, begins: Sequence[Instants], ends: Sequence[Instants], sends: Sequence[Instants]
    ) -> None:
        self.engine, self.begins, self.ends, self.sends = engine, begins, ends, sends
        self.size = len(engine.ticks)

    def peak(self, place: int) -> int:
        """Return the most bytes of a device, transients included."""
        engine = self.engine
        stages = engine.stages_of[place]
        held = _Bytes(engine.kept[place] - sum(engine.late_gradients[stage] for stage in stages))
        for stage in stages:
            for begins, ends, num_bytes in self.hold(stage):
                held.add(begins, num_bytes)
                held.add(ends, -num_bytes)
            if engine.late_gradients[stage]:
                held.add(self.gradients_come(stage), engine.late_gradients[stage])
        for boundary, num_bytes in enumerate(engine.crossing_bytes):
            self._count_buffers(held, boundary, place, num_bytes)
        when, levels = held.levels()
        most = int(levels.max())
        padded = np.append(levels, 0)  # an operation may end with the step
        for begins, ends, needs in (each for stage in stages for each in self.running(stage)):
            if needs.any():
                ranges = np.empty(2 * len(begins), dtype=np.intp)
                ranges[::2] = when.searchsorted(begins, "right") - 1
                ranges[1::2] = when.searchsorted(ends, "left")
                most = max(most, int((np.maximum.reduceat(padded, ranges)[::2] + needs).max()))
        return most

    def hold(self, stage: int) -> list[tuple[Instants, Instants, int]]:
        """Return what a stage holds of its micro-batches: from when, until when, and the bytes of each."""
        begins = self.begins[stage]
        ends = np.maximum(self.ends[self.size - 1 - stage], begins + 1)
        return [(begins, ends, self.engine.stash[stage])]

    def gradients_come(self, stage: int) -> Instants:
        """Return when the first backward of a stage has ended, as one instant."""
        return self.ends[self.size - 1 - stage][:1]

    def running(self, stage: int) -> list[tuple[Instants, Instants, NDArray[np.int64]]]:
        """Return when operations of a stage run, and the bytes that each needs only then."""
        back = self.size - 1 - stage
        found = [
            self.runs(self.begins[each], self.ends[each], self.engine.transient[each]) for each in (stage, back)
        ]
        if self.engine.ticks[back]:
            # One that takes no time has brought its gradients at its instant.
            found[1][2][:1] = self.engine.first_backward[stage]
        return found

    @staticmethod
    def runs(begins: Instants, ends: Instants, num_bytes: int) -> tuple[Instants, Instants, NDArray[np.int64]]:
        """Return operations that need so many bytes each; one that takes no time is there for its instant."""
        return begins, np.maximum(ends, begins + 1), np.full(len(begins), num_bytes, dtype=np.int64)

    def _count_buffers(self, held: _Bytes, boundary: int, place: int, num_bytes: int) -> None:
        """Count the tensors of a boundary that are kept on a device."""
        engine = self.engine
        # The positions before the activation and before the gradient.
        down, up = boundary, self.size - 2 - boundary
        if engine.link[down] < 0:
            if engine.device[down] == place:
                for before in (down, up):
                    held.span(self.ends[before], self.begins[before + 1], num_bytes)
            return
        for sender, receiver in ((down, up), (up, down)):
            if engine.device[sender] != place:
                continue
            reserved = engine.platform.comm_buffers
            waiting = _Bytes(0)
            waiting.span(self.ends[sender], self.sends[sender] + 2 * (engine.send[sender] or 0), 1)
            waiting.span(self.sends[receiver], self.begins[receiver + 1], 1)
            held.first += reserved * num_bytes
            when, count = waiting.levels()
            above = np.maximum(count, reserved)
            if above.max() > reserved:
                held.when.append(when)
                held.change.append(np.diff(above, prepend=reserved) * num_bytes)
