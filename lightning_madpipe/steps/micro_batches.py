"""A part of a Lightning batch on its way through the pipeline, and what the step made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_madpipe.steps.recorded_calls import Call

LogCall = dict[str, Any]
"""The arguments of one ``self.log`` call, by name."""


@dataclass(eq=False, slots=True, kw_only=True)
class MicroBatch:
    """A part of a Lightning batch on its way through the pipeline, in the place of the labels.

    DeepSpeed converts tensors and tuples that it is given as labels and hands on any other object, so
    the last stage finds here what the user's step needs. Each run of the step overwrites what the one
    before left: a profiler may repeat it.
    """

    step: str
    """``training_step``, ``validation_step``, ``test_step`` or ``predict_step``."""
    data: Any
    size: int
    """The number of samples in the micro-batch."""
    arguments: tuple[Any, ...]
    """What Lightning passes to the step after the batch: batch_idx, dataloader_idx."""
    seed: int
    """The seed of the step's own random numbers, which both ends of the pipeline must draw alike."""
    batch_seed: int
    """The seed of its batch: what is drawn once for a batch, all its micro-batches draw alike."""
    draws_alike: bool = False
    """Whether that holds for torch's common generator; else micro-batches draw each sample's numbers from it."""
    place: int = 0
    """The number of the micro-batch in the Lightning batch."""
    is_last: bool = True
    """Whether the Lightning batch ends with it."""
    keeps_returned: bool = False
    """Whether somebody will read what the step returns."""
    loss_scale: float = 1.0
    """The share of its loss in that of the optimizer step, times the number that DeepSpeed divides by."""
    share: float | None = None
    """The factor of its loss in that of the Lightning batch, where each has a loss; None: its samples."""
    progress: Any = None
    """How far Lightning's loop was with its batch, where the step runs later; None: where the loop is then."""
    stops: bool = False
    """Whether the step has set ``trainer.should_stop``."""
    is_untried: bool = False
    """Whether its loss shows a sign of being another one than those that were tried."""
    is_retried: bool = False
    """Whether its batch was given up for what this micro-batch alone has shown, which is no sign any more."""
    loss: Tensor | None = None
    """What the step returned, unscaled; None where it returned no loss."""
    returned: Any = None
    """What the step returned, where somebody reads it."""
    changed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """The tensors of ``data`` that the step has changed in place, in a copy or itself, by their places, each with
    what the step has left."""
    contents: list[Any] = field(default_factory=list)
    """What the step has put into its batch, taken out and replaced, where somebody may read it."""
    log_calls: list[LogCall] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """The calls of loggers and of ``self.print`` that the step made."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its Lightning batch."""
        return self.place == 0 and self.is_last
