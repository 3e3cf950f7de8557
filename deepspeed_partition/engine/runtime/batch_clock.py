"""How long batches take in a pipeline that never drains, and what this rank does meanwhile.

A batch lasts from the end of the call before to the end of its own: from one loss to the next. Operations of other
batches run in that time, as many of each stage as a batch has, so what a rank computes and waits in it is that of
one batch. The first batches behind a rest fill the pipeline, and are not counted; nor is a batch with a rest.

On a GPU this rank's clock sees when a loss is known, and not how long operations last: there are no other times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from deepspeed_partition.engine.runtime.step_clock import Place, mean_of, place_of
from deepspeed_partition.planner.report.step_figures import RankSteps
from deepspeed_partition.schedule.instructions import Update


class BatchClock:
    """Times batches between two rests.

    Args:
        device: of this rank.
        device_number: its number in the pipeline, which messages name.
    """

    def __init__(self, device: torch.device, device_number: int) -> None:
        self._sees_operations, self._device_number = device.type == "cpu", device_number
        self._ended: float | None = None
        """When the batch before ended, if the pipeline was full and has not rested since."""
        self._meanwhile: dict[Place, float] = {}
        self._place: Place | None = None
        self._since = 0.0
        self._clear()

    def _clear(self) -> None:
        self._num_batches, self._seconds = 0, 0.0
        self._sums: dict[Place, float] = {}
        self._versions: dict[int, int] = {}

    def runs(self, instruction: object) -> None:
        """Note that an instruction begins, or, with None, that none does."""
        if not self._sees_operations:
            return
        now = time.monotonic()
        if self._place is not None:
            self._meanwhile[self._place] = self._meanwhile.get(self._place, 0.0) + now - self._since
        is_none = instruction is None or isinstance(instruction, Update)
        self._place, self._since = None if is_none else place_of(instruction, self._device_number), now

    def batch_ended(self, versions_held: Mapping[int, int], *, is_full: bool) -> None:
        """Note the end of a call.

        Args:
            versions_held: the most versions of its weights that each stage of this rank has held since the rest.
            is_full: whether the pipeline was full when the call ended.
        """
        now = time.monotonic()
        if self._ended is not None:
            self._num_batches += 1
            self._seconds += now - self._ended
            for place, seconds in self._meanwhile.items():
                self._sums[place] = self._sums.get(place, 0.0) + seconds
        for stage, number in versions_held.items():
            self._versions[stage] = max(number, self._versions.get(stage, 0))
        self._ended = now if is_full else None
        self._meanwhile.clear()

    def rests(self) -> None:
        """Note that the pipeline comes to rest."""
        self._ended = None

    def take(self, peak_bytes: int | None = None) -> RankSteps | None:
        """Return the mean of the batches since the last call; None where there were none."""
        number = self._num_batches
        if not number:
            return None
        steps = replace(mean_of(number, self._seconds, self._sums, peak_bytes), versions_held=self._versions)
        self._clear()
        return steps
