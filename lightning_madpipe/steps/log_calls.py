"""What a step gives to ``self.log``: checked where it runs, for the rank that logs is another one."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_madpipe.steps.hook_values import value_of, why_not_logged
from lightning_madpipe.steps.metrics import BatchMetrics, MetricValue, metrics_of
from lightning_madpipe.steps.micro_batches import LogCall, MicroBatch


class LogCalls:
    """Checks what the steps of a module log.

    Args:
        module: The LightningModule.
        error: The host's exception for what cannot be logged from a pipeline.
    """

    def __init__(self, module: Any, error: type[Exception]) -> None:
        self._module = module
        self._error = error
        self._signature = inspect.signature(type(module).log)
        self._metrics = BatchMetrics()

    def begin_batch(self) -> None:
        self._metrics.begin()

    def watching_metrics(self) -> AbstractContextManager[None]:
        """A context in which what a step does to its metrics is seen."""
        return self._metrics.watching(self._module)

    def checked(
        self,
        micro_batch: MicroBatch,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        leave_out: Callable[[str, str], object],
    ) -> LogCall | None:
        """The arguments of a call of ``self.log`` by their names, with values that can be sent.

        Args:
            leave_out: What is told the name of a value that is not logged, and why.

        Returns:
            None where the value is on another rank.

        Raises:
            Exception: it logs what is no number, or to a group of its own.
        """
        bound = self._signature.bind(self._module, *arguments, **keywords).arguments
        log_call = {name: value for name, value in bound.items() if name != "self"}
        key, step = log_call["name"], micro_batch.step
        why_not = why_not_logged(log_call["value"], step, key)
        if why_not is not None:
            leave_out(key, why_not)
            return None
        value = log_call["value"] = value_of(log_call["value"])
        if isinstance(value, Metric):
            log_call["value"] = self._metric_value(value, log_call, micro_batch)
        elif isinstance(value, Tensor) and value.numel() == 1:
            log_call["value"] = value.detach().reshape(())
        elif not isinstance(value, numbers.Real):
            raise self._error(
                f"{step} logs {key!r}, a {type(value).__name__}: with a pipeline self.log takes numbers, "
                "tensors of one element and torchmetrics metrics"
            )
        if log_call.get("sync_dist_group") is not None:
            raise self._error(
                f"{step} logs {key!r} with a sync_dist_group, which the strategy itself sets: leave it out"
            )
        return log_call

    def _metric_value(self, metric: Metric, log_call: LogCall, micro_batch: MicroBatch) -> MetricValue:
        path = next((path for path, child in metrics_of(self._module).items() if child is metric), None)
        if path is None:
            raise self._error(
                f"{micro_batch.step} logs {log_call['name']!r}, a {type(metric).__name__} that is no attribute of "
                f"the {type(self._module).__name__}: set it as one, so that the other ranks have it, too"
            )
        on_step = log_call.get("on_step")
        shown = micro_batch.step == "training_step" if on_step is None else on_step
        return MetricValue(path, self._metrics.value_of(metric) if shown and micro_batch.is_last else None)
