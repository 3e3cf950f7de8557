"""How long the stages of this rank compute in a step, and how long it waits for messages, at hardly any cost.

The watch of this process (``watch.py``) takes the time when an instruction begins, asked or not. Here these stamps
are kept: each instruction lasts until the next one. They become seconds per stage and link when the step is over,
all at once. On a GPU stamps are events of the stream that computes, at forwards, backwards and messages that are
waited for alone; they are read when the next step is over, for nobody waits for the device then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray

from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.planner.report.step_figures import RankSteps
from deepspeed_partition.schedule.instructions import Compute, Instruction

Note = Callable[[Instruction], None]


class Step(NamedTuple):
    """One step of this rank."""

    seconds: float
    """Seconds from its first instruction to the end of its last one."""
    computing_seconds: float
    """Seconds of the forwards and backwards of all stages."""


class StepClock:
    """Times the instructions of steps, between :meth:`begin` and :meth:`end`.

    Args:
        device: of this rank.
        device_number: its number in the pipeline, which messages name.
    """

    def __init__(self, device: torch.device, device_number: int) -> None:
        self._has_streams = device.type != "cpu"
        self._device_number = device_number
        self._layout: _Layout | None = None
        self._stamps: list[Any] = []
        self._ended: tuple[_Layout, list[Any]] | None = None
        """The step before, whose events are not read yet."""
        self.clear()

    def clear(self) -> None:
        """Forget all steps: another plan begins, or their figures were taken."""
        self._num_steps = 0
        self._seconds = 0.0
        self._sums: dict[Place, float] = {}

    def begin(self, instructions: Sequence[Instruction]) -> Note:
        """Begin a step.

        Args:
            instructions: of this rank, in order.

        Returns:
            What to call with each instruction when it begins, in the place of ``watch.runs``.
        """
        layout = self._layout
        if layout is None or layout.instructions is not instructions:
            layout = self._layout = _Layout(instructions, self._device_number, only_timed=self._has_streams)
        stamps: list[Any] = []
        self._stamps = stamps
        return _on_device(stamps.append, layout.begins) if self._has_streams else watch.runs_into(stamps)

    def end(self) -> Step | None:
        """End the step; return what it took, or on a GPU what the step before took, if there was one."""
        layout, stamps = self._layout, self._stamps
        assert layout is not None, "a step has begun"
        if not self._has_streams:
            stamps.append(time.monotonic())
            return self._add(layout, np.diff(stamps))
        stamps.append(_event())
        before, self._ended = self._ended, (layout, stamps)
        if before is None or not before[1][-1].query():
            return None
        events = before[1]
        return self._add(before[0], np.array([one.elapsed_time(other) / 1e3 for one, other in pairwise(events)]))

    def _add(self, layout: _Layout, lasted: NDArray[np.float64]) -> Step:
        sums = np.bincount(layout.place_of, weights=lasted, minlength=len(layout.places) + 1)
        seconds = float(lasted.sum())
        self._num_steps += 1
        self._seconds += seconds
        computing = 0.0
        for place, each in zip(layout.places, sums.tolist(), strict=False):
            self._sums[place] = self._sums.get(place, 0.0) + each
            if isinstance(place, int):
                computing += each
        return Step(seconds, computing)

    def take(self, peak_bytes: int | None = None) -> RankSteps | None:
        """Return the mean of the steps since the last call; None where there were none."""
        number = self._num_steps
        if not number:
            return None
        steps = mean_of(number, self._seconds, self._sums, peak_bytes)
        self.clear()
        return steps


Place = int | tuple[int, int]
"""What takes time: a stage, by its number, or waiting because of a link, by the devices at its ends."""


def mean_of(
    num_steps: int, seconds: float, seconds_of: Mapping[Place, float], peak_bytes: int | None
) -> RankSteps:
    """Return the mean of some steps of a rank.

    Args:
        num_steps: how many, at least one.
        seconds: of all of them.
        seconds_of: of these, those of each stage and each link, summed.
        peak_bytes: the most bytes that the rank held; None: they were not counted.
    """
    means = {place: each / num_steps for place, each in seconds_of.items()}
    return RankSteps(
        num_steps=num_steps,
        step_seconds=seconds / num_steps,
        stage_seconds={place: each for place, each in means.items() if isinstance(place, int)},
        waiting_seconds={place: each for place, each in means.items() if not isinstance(place, int)},
        peak_bytes=peak_bytes,
    )


class _Layout:
    """What each interval between two stamps of a list of instructions is for.

    Args:
        only_timed: stamps are taken where something that is timed begins or ends, and nowhere else.
    """

    def __init__(self, instructions: Sequence[Instruction], device: int, *, only_timed: bool) -> None:
        self.instructions = instructions
        self.places: list[Place] = []
        number_of: dict[Place, int] = {}
        numbers: list[int] = []
        self.begins: list[bool] = []
        """Whether a stamp is taken where each instruction begins."""
        was_timed = True  # the first one begins the step
        for instruction in instructions:
            place = place_of(instruction, device)
            takes = not only_timed or was_timed or place is not None
            self.begins.append(takes)
            was_timed = place is not None
            if not takes:
                continue
            if place is not None and place not in number_of:
                number_of[place] = len(self.places)
                self.places.append(place)
            numbers.append(-1 if place is None else number_of[place])
        others = len(self.places)
        self.place_of = np.array([others if each < 0 else each for each in numbers], dtype=np.intp)


def place_of(instruction: Any, device: int) -> Place | None:
    """Return what an instruction takes time for; None where it neither computes nor waits."""
    if isinstance(instruction, Compute):
        return instruction.stage
    if instruction.kind == "W":
        return instruction.peer, device
    return (device, instruction.peer) if instruction.kind == "D" else None


def _event() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _on_device(append: Callable[[Any], None], begins: Sequence[bool]) -> Note:
    takes, runs = iter(begins), watch.runs

    def note(instruction: Instruction) -> None:
        if next(takes):
            append(_event())
        runs(instruction)

    return note
