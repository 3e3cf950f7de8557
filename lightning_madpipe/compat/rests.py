"""Where a pipeline that never drains comes to rest under Lightning.

Batches follow one another, and their updates come later. Whoever looks at the model between two of them, such as
validation, a checkpoint or the end of an epoch, is to find one version of it, with the updates of all batches
so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_partition.engine import MadPipeEngine


class Rests:
    """Brings the pipeline of a fit to rest before validation, and knows which step an update belongs to.

    Args:
        trainer: Lightning's.
        engine: The pipeline's engine.
        batch_size: Gives the number of samples of the last batch.
    """

    def __init__(self, trainer: Any, engine: MadPipeEngine, batch_size: Callable[[], int | None]) -> None:
        self._trainer, self._engine, self._batch_size = trainer, engine, batch_size
        self._loop = trainer.fit_loop.epoch_loop
        self._is_validation_due = self._loop._should_check_val_fx
        # A method of Lightning's loop (2.5 to 2.6), which it asks before the first of the hooks around validation.
        self._loop._should_check_val_fx = self._before_validation

    def end(self) -> None:
        """Let Lightning's loop go."""
        vars(self._loop).pop("_should_check_val_fx", None)

    def _before_validation(self, *arguments: Any) -> bool:
        is_due = bool(self._is_validation_due(*arguments))
        if is_due and not self._engine.is_at_rest:
            number = self._loop.batch_progress.current.ready
            self._engine.leave(f"has come to validation after {number} batches of the epoch")
            self._engine.come_to_rest()
        return is_due

    @contextmanager
    def step_of_update(self) -> Iterator[None]:
        """Let ``trainer.global_step`` be that of the update whose hooks run, which belongs to an earlier batch.

        What they log between two batches counts as much as what they log during one of the same size.
        """
        steps = self._loop.automatic_optimization.optim_progress.optimizer.step.total
        results, behind = self._loop._results, self._engine.steps_behind
        is_between = results.batch is None and results.batch_size is None
        steps.completed -= behind
        if is_between:
            results.batch_size = self._batch_size()
        try:
            yield
        finally:
            steps.completed += behind
            if is_between:
                results.batch_size = None
