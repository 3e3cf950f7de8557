"""What steps and hooks log, count and write, where it depends on the rank or on how often a step runs.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytorch_lightning.callbacks import Callback

from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import Host, seeded


class LogsLayers(cases.Classifier):
    """It logs a number of each of its layers, by steps and by epochs, in training and validation."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, weight in self.named_parameters():
            self.log(f"norm/{name}", weight.grad.norm())
            self.log(f"both/{name}", weight.grad.norm(), on_step=True, on_epoch=True)
            self.log(f"mean/{name}", weight.grad.norm(), on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        for name, weight in self.named_parameters():
            self.log(f"weight/{name}", weight.norm())


class Shown(Callback):
    """Notes the numbers of layers that Lightning shows, after each batch and each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        shown = {**trainer.callback_metrics, **trainer.logged_metrics, **trainer.progress_bar_metrics}
        self.rows.append({name: float(value) for name, value in shown.items() if "/" in name})

    on_train_epoch_end = on_train_batch_end


def numbers_of_layers(host: Host) -> dict[str, Any]:
    found = {}
    for name, strategy in (("epochs", {}), ("steps", {"warmup_steps": 2, "algorithm": [0, 5, 8]})):
        shown = Shown()
        trainer = host.trainer(shown, max_epochs=3, strategy={"algorithm": [0, 6, 8], **strategy})
        trainer.fit(seeded(LogsLayers), cases.loader(64), cases.loader(16, seed=3))
        found[name] = shown.rows
    return found


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [numbers_of_layers], 4: []}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [], 4: []}
