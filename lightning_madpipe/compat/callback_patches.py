"""Callbacks that look on see the whole model and its pipelines, though each rank has a part of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.module import PipelineCall


def whole_module(module: Any, call: PipelineCall) -> Any:
    """What ``module`` is on one device, to be looked at after its layers left; None if some are built later.

    It shares the layers. It knows no example input, for its layers end up on different devices.
    """
    if len(list(call.existing_modules())) != sum(not _is_function(layer) for layer in call.layers):
        return None
    whole = copy.copy(module)
    whole._modules = dict(module._modules)
    whole.example_input_array = None
    return whole


def _is_function(layer: Any) -> bool:
    return not hasattr(layer, "build") and not hasattr(layer, "parameters")


def show_whole_to_callbacks(strategy: Any, trainer: Any, lightning: Lightning) -> None:
    """Let callbacks that show the model see the whole."""
    callbacks, whole = lightning.module("callbacks"), strategy.pipeline.whole_module()
    for callback in trainer.callbacks:
        if whole is not None and isinstance(callback, callbacks.ModelSummary):
            summarize_whole(strategy, whole, callback, lightning.module("utilities.model_summary").summarize)


def show_samples_once(strategy: Any, trainer: Any, lightning: Lightning) -> None:
    """Let callbacks that count samples count each once, in training and in evaluation."""
    callbacks, num_stages = lightning.module("callbacks"), strategy.pipeline.num_stages
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.ThroughputMonitor):
            count_pipelines(callback, num_pipelines=strategy.world_size // num_stages, num_stages=num_stages)


def summarize_whole(strategy: Any, whole: Any, callback: Any, summarize: Callable[..., Any]) -> None:
    """Let a ``ModelSummary`` callback show ``whole`` where it would show this rank's layers."""
    # A method of Lightning's (2.5 to 2.6) on the instance: nothing public comes between it and the module.
    callback._summary = partial(_summary, strategy, whole, callback, summarize)
    # It counts parameters while it shows them.
    callback.on_fit_start = partial(_begin_fit, strategy, callback)


def _begin_fit(strategy: Any, callback: Any, trainer: Any, module: Any) -> None:
    shown = strategy.pipeline.elsewhere.lifted() if trainer.strategy is strategy else nullcontext()
    with shown:
        type(callback).on_fit_start(callback, trainer, module)


def _summary(strategy: Any, whole: Any, callback: Any, summarize: Callable[..., Any], *called_with: Any) -> Any:
    trainer, _ = called_with
    if trainer.strategy is not strategy:  # the callback went on to another Trainer
        return type(callback)._summary(callback, *called_with)
    whole._trainer = trainer
    try:
        return summarize(whole, max_depth=callback._max_depth)
    finally:
        whole._trainer = None


def count_pipelines(monitor: Any, *, num_pipelines: int, num_stages: int) -> None:
    """Let a ``ThroughputMonitor`` count each sample once, and not on every stage that it passes.

    What it calls a device is then a pipeline, whose devices it takes together.
    """
    # Attributes of Lightning (2.5 to 2.6), set in its setup hook, which knows the number of processes only.
    for throughput in monitor._throughputs.values():
        throughput.world_size = num_pipelines
        if throughput.available_flops is not None:
            throughput.available_flops *= num_stages
