"""The peak of memory of the steps of a plan, held against what the plan says of it.

A GPU's allocator knows its peak. On a CPU torch has none, so there a peak is known within ``limit_memory`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_partition.engine.runtime.environment import warn_here
from deepspeed_partition.planner.plan import MemoryUse, Plan
from deepspeed_partition.planner.units import format_bytes
from deepspeed_partition.profiling.allocator import counter_with_limit

ALLOWED_SHARE, ALLOWED_BYTES = 0.01, 2**20
"""How far beyond its plan a rank may be before it says so: losses and headers of messages are in no plan."""
MICRO_BATCHES, REDUCTION, OPTIMIZER = "micro-batches", "reduction of gradients", "optimizer step"


class PlannedPeak:
    """Says once, on each rank, that a step of a plan needed more memory than planned, and which term grew.

    Args:
        device: of this rank.
        rank: in the whole job, for the line.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._plan: Plan | None = None
        self._use: MemoryUse | None = None
        """What the plan says of this rank; None where nothing is to be said any more."""
        self._read: Callable[[], tuple[int, int]] | None = None
        """What returns the bytes in use now, and the peak; None between steps, and where nobody knows."""
        self._at_start = self._most_held = self._data_bytes = self._peak = 0
        self._unread = 0.0
        self.is_wanted = False
        """Whether peaks are read where nothing is to be said of them, too: somebody logs them."""
        self._most_bytes: int | None = None

    @contextmanager
    def step(self, plan: Plan | None, rank_in_pipeline: int) -> Iterator[None]:
        """Watch a step of ``plan``; where its peak was said, or is not known, this does nothing."""
        if plan is not self._plan:
            self._plan, self._use = plan, None if plan is None else plan.memory[rank_in_pipeline]
            self._most_bytes = None
            if plan is not None and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)  # once for each plan: what was before is not its
        if self._use is None and not (self.is_wanted and self._device.type == "cpu"):
            yield
            return
        with _reader(self._device) as self._read:
            self._data_bytes = self._most_held = self._peak = 0
            self._at_start = 0 if self._read is None else self._read()[0]
            try:
                yield
            finally:
                self._read = None

    @property
    def is_possible(self) -> bool:
        """Whether peaks can be known here: on a GPU, and on a CPU within ``limit_memory``."""
        return self._device.type == "cuda" or counter_with_limit() is not None

    @property
    def peak_bytes(self) -> int | None:
        """The peak of memory of the steps so far of the plan that runs, in bytes; None where nobody knows it."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._most_bytes

    @property
    def is_read(self) -> bool:
        """Whether a step is watched now."""
        return self._read is not None

    def data_was_read(self) -> None:
        """Note what the data of a batch takes: no plan counts it, and a GPU has none before it is loaded."""
        if self._read is not None and self._device.type == "cpu":
            self._data_bytes, self._unread = max(0, self._read()[0] - self._at_start), 1.0

    def computed(self, unread: float, *, forward: bool, loads_inputs: bool) -> None:
        """Note a forward or a backward that has ended.

        Args:
            unread: share of the micro-batches of the batch that were read and not loaded.
            forward: after it all is held that is kept for backwards, and no layer runs.
            loads_inputs: this rank has the first stage, so that what it loads stays.
        """
        if self._read is None:
            return
        current, peak = self._read()
        self._peak = max(self._peak, peak - int(self._data_bytes * (unread if loads_inputs else self._unread)))
        self._unread = unread
        if forward:
            self._most_held = max(self._most_held, current - int(self._data_bytes * unread))

    def ended(self, part: str) -> None:
        """Say it if the step has needed more than planned until the end of this part of it, and was not said."""
        if self._read is None:
            return
        peak, use = max(self._peak, self._read()[1]), self._use
        self._most_bytes = max(peak, self._most_bytes or 0)
        if use is None or peak <= use.total * (1 + ALLOWED_SHARE) + ALLOWED_BYTES:
            return
        self._use = None
        term, planned, found = self._term(use, part, peak)
        warn_here(
            f"rank {self._rank} needed {format_bytes(peak)} in a step and its plan says "
            f"{format_bytes(use.total)}: it was in the {part}, and what grew is {term} ({format_bytes(found)}, "
            f"planned {format_bytes(planned)}). What else this process has there counts, too; "
            "this is said once"
        )

    def _term(self, use: MemoryUse, part: str, peak: int) -> tuple[str, int, int]:
        """Return the term of the plan's memory that grew, its bytes in the plan, and those that were found."""
        kept = use.weights + use.fixed
        if self._at_start > kept + ALLOWED_BYTES:
            return "weights, with all that is there between two steps", kept, self._at_start
        held = kept + use.stash + use.buffers
        if part == MICRO_BATCHES and self._most_held > held:
            return "stash, with buffers at cuts", use.stash + use.buffers, self._most_held - kept
        beside = held if part == MICRO_BATCHES else kept
        return "transient", use.total - beside, peak - beside


@contextmanager
def _reader(device: torch.device) -> Iterator[Callable[[], tuple[int, int]] | None]:
    """Yield what returns the bytes in use and their peak, or None; on a CPU, the peak since the last call."""
    if device.type == "cuda":
        yield lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
        return
    counter: Any = counter_with_limit() if device.type == "cpu" else None
    if counter is None:
        yield None
        return
    with counter.phase() as counted:

        def read() -> tuple[int, int]:
            found = counted.current_bytes, counted.peak_bytes
            counted.reset_peak()
            return found

        yield read
