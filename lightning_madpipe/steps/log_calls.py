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
        self._signature = _signature_of_log(type(module), error)
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
        bound = self._signature.bind(self._module, *arguments, **keywords)
        log_call = {name: value for name, value in bound.arguments.items() if name != "self"}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                log_call |= log_call.pop(name, {})
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


def _signature_of_log(kind: type, error: type[Exception]) -> inspect.Signature:
    """The signature by which a call of ``self.log`` is taken apart: the module's own, or the host's.

    Args:
        kind: The class of the LightningModule, which may have a ``log()`` of its own that hands on to the host's.
        error: The host's exception for what cannot be logged from a pipeline.

    Raises:
        Exception: the module's own ``log()`` does not take ``name`` and ``value``, by which all ranks call it.
    """
    own = inspect.signature(kind.log)  # type: ignore[attr-defined]
    kinds = {parameter.kind for parameter in own.parameters.values()}
    if not {"name", "value"} <= own.parameters.keys() and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise error(
            f"{kind.__name__}.log() has no arguments of the names 'name' and 'value', by which every rank logs "
            "what a step has logged: give its first two these names"
        )
    if {"name", "value"} <= own.parameters.keys() and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return own
    host = [each for each in kind.__mro__ if "log" in vars(each)][-1]
    return inspect.signature(host.log)  # type: ignore[attr-defined]
