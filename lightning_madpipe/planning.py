"""When a fit makes its plan, and where it is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from deepspeed_partition.engine.runtime.collectives import from_rank_0
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.units import counted


class WarmUpOfFit:
    """The warm-up of one fit, in epochs or in optimizer steps.

    Args:
        trainer: Lightning's.
        num_epochs: 0 where steps are counted.
        num_steps: 0 where epochs are counted.
    """

    def __init__(self, trainer: Any, *, num_epochs: int, num_steps: int) -> None:
        self._trainer, self._num_epochs, self._num_steps = trainer, num_epochs, num_steps
        self._is_left_out: bool | None = None

    @property
    def length(self) -> str:
        """The length of the warm-up in words."""
        return counted(self._num_epochs, "epoch") if self._num_epochs else counted(self._num_steps, "step")

    def is_over(self) -> bool:
        """Whether the warm-up is over, alike on all ranks, before a step. Collective when it is asked first."""
        if self._is_left_out is None:
            # Ranks may have loaders of other lengths.
            reason = from_rank_0(lambda: why_left_out(self._trainer, self._num_epochs, self._num_steps))
            self._is_left_out = reason is not None
            if reason is not None:
                announce(f"there is no warm-up of {self.length}, because {reason}")
        return self._is_left_out or _is_over(self._trainer, self._num_epochs, self._num_steps)

    def say_that_no_plan_was_made(self) -> None:
        """Say, at the end of a fit that was still warming up, that no plan was made."""
        announce(
            f"the run has ended within its warm-up of {self.length}, and no plan was made: train longer, or plan "
            "sooner, with warmup_steps=20 or, before the first step, with warmup_epochs=0"
        )


def why_left_out(trainer: Any, num_epochs: int, num_steps: float) -> str | None:
    """Why a fit has no use for its warm-up, right before its first step; None where it has, as far as is known."""
    if _is_over(trainer, num_epochs, num_steps):
        done = counted(trainer.current_epoch, "epoch") if num_epochs else counted(trainer.global_step, "step")
        return f"the run goes on after {done}"
    for trial in ("fast_dev_run", "overfit_batches"):
        if getattr(trainer, trial):
            return f"{trial} only tries the model out"
    num_batches, max_epochs, max_steps = trainer.num_training_batches, trainer.max_epochs, trainer.max_steps
    if num_epochs and 0 <= max_epochs <= num_epochs:
        return f"max_epochs is {max_epochs}, and nothing would be trained after it"
    has_length = math.isfinite(num_batches)
    if num_epochs and max_epochs == -1 and not has_length:
        return "neither max_epochs nor the length of the data says when an epoch ends"
    per_epoch = math.ceil(num_batches / trainer.accumulate_grad_batches) if has_length else math.inf
    num_steps = num_steps or num_epochs * per_epoch
    if 0 <= max_steps <= num_steps < math.inf:
        return f"max_steps is {max_steps}, and nothing would be trained after it"
    if 0 <= max_epochs * per_epoch <= num_steps < math.inf:
        return f"the run has {max_epochs * per_epoch} steps, and nothing would be trained after it"
    return None


def _is_over(trainer: Any, num_epochs: int, num_steps: float) -> bool:
    return trainer.current_epoch >= num_epochs if num_epochs else trainer.global_step >= num_steps


def note_on_resuming(trainer: Any, first_batch: int) -> str | None:
    """What a run must be told that goes on within an epoch; None where its data go on there, too.

    Args:
        first_batch: The number, within its epoch, of the first batch that is trained on now.
    """
    loaders = trainer.fit_loop._combined_loader.flattened
    if all(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders):
        return None  # Lightning has given it its state
    num_batches = trainer.num_training_batches
    left = "the rest" if math.isinf(num_batches) else f"its last {num_batches - first_batch:g} batches"
    return (
        f"training goes on within epoch {trainer.current_epoch}, at batch {first_batch}, but the data loader "
        f"begins that epoch from its start: its first batches are trained on again in the place of {left}, as "
        "Lightning does without this strategy, and losses are not those of an unbroken run. Resume from the end "
        "of an epoch, or give the loader state_dict() and load_state_dict(), as torchdata's StatefulDataLoader has"
    )


def folder_of_logs(trainer: Any) -> str | None:
    """Return this rank's directory of the run's logs by its first logger, as ``ModelCheckpoint`` has it."""
    if not trainer.loggers:
        return None
    logger = trainer.loggers[0]
    folder, version = logger.save_dir, logger.version
    if folder is None or "://" in str(folder):
        return None
    version = version if isinstance(version, str) else f"version_{version}"
    return str(Path(folder) / str(logger.name) / version)
