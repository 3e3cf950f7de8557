"""What a fit shows while it trains: its phase in the progress bar, and figures of its steps in the loggers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.collectives import from_rank_0
from deepspeed_partition.engine.runtime.environment import announce


class Phase:
    """The phase of a run (``warm-up``, ``planning``) among the metrics of Lightning's progress bar.

    Args:
        trainer: Lightning's, whose bar may be its own, another one, or none.
        watched: Makes a context in which the bar's own ``get_metrics`` is run.
    """

    def __init__(self, trainer: Any, watched: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._trainer, self._watched = trainer, watched
        self._bar = trainer.progress_bar_callback
        self._now = ""
        self._own = None if self._bar is None else vars(self._bar).get("get_metrics")
        if self._bar is not None:
            self._shown = self._bar.get_metrics
            self._bar.get_metrics = self._with_phase

    def tell(self, phase: str) -> None:
        """Show a phase from now on; an empty one is none."""
        self._now = phase
        bar, trainer = self._bar, self._trainer
        if bar is None or not getattr(bar, "is_enabled", True):
            return
        # The bar asks again when the next batch has ended, which is after planning.
        if getattr(bar, "_update_metrics", None) is not None:  # rich
            bar._update_metrics(trainer, trainer.lightning_module)
            bar.refresh()
        elif getattr(bar, "_train_progress_bar", None) is not None:  # tqdm
            bar.train_progress_bar.set_postfix(bar.get_metrics(trainer, trainer.lightning_module))

    def end(self) -> None:
        """Leave the bar as it was."""
        if self._bar is not None:
            vars(self._bar).pop("get_metrics", None)
            if self._own is not None:
                self._bar.get_metrics = self._own

    def _with_phase(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        with self._watched():
            metrics: dict[str, Any] = self._shown(*arguments, **options)
        return {"madpipe": self._now, **metrics} if self._now else metrics


ROWS = (
    "metrics.csv has rows and columns of its own for madpipe/step_seconds and other figures, every {every} steps: "
    "pandas.read_csv(path).dropna(subset=['madpipe/step_seconds']) are these, and a dropna() of a column of yours "
    "leaves them out"
)
"""What the file of Lightning's CSVLogger has beside that of one process."""


class LoggedFigures:
    """Figures of a fit's steps for its loggers, every ``log_every_n_steps`` steps. Made together by all ranks.

    Where rank 0 has no logger nothing is timed, and nothing sent.

    Args:
        trainer: Lightning's.
        engine: of the fit.
    """

    def __init__(self, trainer: Any, engine: MadPipeEngine) -> None:
        self._trainer, self._engine = trainer, engine
        self._tells_of_rows = True
        self._every: int = from_rank_0(lambda: trainer.log_every_n_steps if _has_loggers(trainer) else 0)
        if self._every:
            engine.watch_steps()

    def after_step(self) -> None:
        """Log what the steps since the last time took, if it is time for it. Collective then."""
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        if not self._every or (step + 1) % self._every:
            return
        figures = self._engine.figures_of_steps()
        if figures is None or not self._trainer.is_global_zero:
            return
        if self._tells_of_rows and any(type(logger).__name__ == "CSVLogger" for logger in self._trainer.loggers):
            self._tells_of_rows = False
            announce(ROWS.format(every=self._every))
        for logger in self._trainer.loggers:
            logger.log_metrics(figures.named(), step=step)


def _has_loggers(trainer: Any) -> bool:
    return bool(trainer.loggers) and not trainer.fast_dev_run
