"""Where a pipeline that never drains comes to rest under Lightning.

Batches follow one another, and their updates come later. Whoever looks at the model between two of them, such as
validation, a checkpoint or the end of an epoch, is to find one version of it, with the updates of all batches
so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, empty

from deepspeed_partition.engine import MadPipeEngine
from lightning_madpipe.steps.batches import map_children


class Rests:
    """Brings the pipeline of a fit to rest before validation, and knows which step an update belongs to.

    Args:
        trainer: Lightning's.
        engine: The pipeline's engine.
    """

    def __init__(self, trainer: Any, engine: MadPipeEngine) -> None:
        self._trainer, self._engine = trainer, engine
        self._given: deque[Any] = deque(maxlen=2 * (engine.module._num_layers + 1))
        """The shapes of the last batches, of more than have updates to come, however layers are cut."""
        self._loop = trainer.fit_loop.epoch_loop
        self._is_validation_due = self._loop._should_check_val_fx
        # A method of Lightning's loop (2.5 to 2.6), which it asks before the first of the hooks around validation.
        self._loop._should_check_val_fx = self._before_validation

    def end(self) -> None:
        """Let Lightning's loop go."""
        vars(self._loop).pop("_should_check_val_fx", None)

    def _before_validation(self, *arguments: Any) -> bool:
        is_due = bool(self._is_validation_due(*arguments))
        if getattr(self._trainer, "_val_check_time_interval", None) is not None:  # by the clock of each rank
            is_due = self._trainer.strategy.broadcast(is_due)
        if is_due and not self._engine.is_at_rest:
            number = self._loop.batch_progress.current.ready
            self._engine.leave(f"has come to validation after {number} batches of the epoch")
            self._engine.come_to_rest()
        return is_due

    def is_given(self, batch: Any) -> None:
        """Note a batch, the last one of its window, whose loss is known, and whose update may come later."""
        self._given.append(shapes_alone(batch))

    @contextmanager
    def step_of_update(self) -> Iterator[None]:
        """Let ``trainer.global_step`` be that of the update whose hooks run, which belongs to an earlier batch.

        What they log counts as much as that batch in a mean of an epoch.
        """
        steps = self._loop.automatic_optimization.optim_progress.optimizer.step.total
        results, behind = self._loop._results, self._engine.steps_behind
        before = results.batch, results.batch_size
        steps.completed -= behind
        if behind:
            results.batch, results.batch_size = self._given[-behind], None
        try:
            yield
        finally:
            steps.completed += behind
            if behind:
                results.batch, results.batch_size = before


def shapes_alone(batch: Any) -> Any:
    """A batch in which Lightning finds the same weight, without the memory of its tensors."""
    return empty(batch.shape, device="meta") if isinstance(batch, Tensor) else map_children(batch, shapes_alone)
