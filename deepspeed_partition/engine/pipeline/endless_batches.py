"""What one run without a drain keeps of its batches: whether a rank still computes, and buffers to be put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from deepspeed_partition.engine.pipeline.batch_attempt import Batch, Failure
from deepspeed_partition.engine.pipeline.before_step import Buffers


class EndlessAttempt(Batch):
    """A run in which some rank may fail, and none then computes any more."""

    @property
    def has_failed(self) -> bool:
        return not self._computes

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def told_failure(self) -> Failure | None:
        """What this rank has met, for the others."""
        return self._failure and self._portable(self._failure)

    def go_without(self) -> None:
        """Compute no more."""
        self._compute_no_more()

    def forget(self, stage: int, number: int) -> None:
        """Forget a micro-batch that has had its backward on a stage."""
        self._input_shapes.pop((stage, number), None)


class BuffersOfStages:
    """Buffers of each stage as they were before its forwards on a batch that may be given up."""

    def __init__(self, module: Any, stages: list[int], num_ahead: int) -> None:
        self._restore: dict[int, dict[int, Callable[[], None]]] = {stage: {} for stage in stages}
        self._num_kept = num_ahead + 1 if num_ahead else 0
        self._buffers: dict[int, list[Buffers]] = {}
        for stage in stages:
            layers = nn.ModuleList([each for each in module._functions[stage] if isinstance(each, nn.Module)])
            has_any = any(True for _ in layers.buffers())
            self._buffers[stage] = [Buffers(layers) for _ in range(self._num_kept + 1 if has_any else 0)]

    def begin(self, stage: int, batch: int) -> None:
        """Note the buffers of a stage before its first forward on a batch."""
        copies = self._buffers[stage]
        if copies and self._num_kept:
            kept = self._restore[stage]
            kept.pop(batch - len(copies), None)
            kept[batch] = copies[batch % len(copies)].before_step(all_of_them=False)

    def put_back(self, batch: int) -> None:
        """Let the forwards of a batch, and of those behind it, not have been."""
        for kept in self._restore.values():
            if batch in kept:
                kept[batch]()
