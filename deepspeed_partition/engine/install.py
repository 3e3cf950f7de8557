"""Teaching DeepSpeed's own classes ``partition_method="madpipe"``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from typing import Any

import deepspeed.pipe
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine.engine import MadPipeEngine
from deepspeed_partition.engine.pipeline.drawn_weights import tell_of_drawn_weights
from deepspeed_partition.engine.pipeline.module import Cut, asks_for_plan, partition_layers
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.environment import (
    announce,
    planning_is_off,
    prepare_cpu,
    without_lines_of_hosts,
)


def install() -> None:
    """Let DeepSpeed's ``PipelineModule``, every subclass of it and ``deepspeed.initialize`` plan.

    Call it once before the pipeline module is built; calling it again changes nothing. DeepSpeed's own
    partition methods stay DeepSpeed's, except that ``parts`` holds Python integers. A subclass with a
    ``_partition_layers`` of its own keeps its cut, unless the configuration asks for a plan.

    DeepSpeed's classes keep their names: who makes a ``PipelineEngine``, as ``deepspeed.initialize`` does, gets
    a :class:`MadPipeEngine`, which is one. Subclasses of it, the user's or DeepSpeed's own for DualPipeV, are
    made as they are and do not plan.
    """
    prepare_cpu()
    # The method is replaced on the class: subclasses, and modules that imported the class before, have it too.
    original = deepspeed.pipe.PipelineModule._partition_layers
    if getattr(original, "by_madpipe", False):
        return

    def _partition_layers(self, method="uniform"):
        partition_layers(self, method, lambda own: original(self, method=own))

    stock_init = deepspeed.pipe.PipelineModule.__init__
    place = [*inspect.signature(stock_init).parameters].index("partition_method") - 1  # without self

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        accelerator.before_communication()
        given = kwargs.get("partition_method", args[place] if len(args) > place else None)
        with without_lines_of_hosts() if asks_for_plan(given) else contextlib.nullcontext():
            stock_init(self, *args, **kwargs)
        tell_of_drawn_weights(self)

    _partition_layers.by_madpipe = True  # type: ignore[attr-defined]
    deepspeed.pipe.PipelineModule._partition_layers = _partition_layers
    deepspeed.pipe.PipelineModule.__init__ = __init__
    PipelineEngine.__new__ = _new_engine


def _new_engine(cls: type, *positional: Any, **named: Any) -> Any:
    """``PipelineEngine.__new__``. Python then calls the ``__init__`` of the class that was chosen here."""
    if cls is PipelineEngine:
        cls = MadPipeEngine
    if issubclass(cls, MadPipeEngine):
        return object.__new__(cls)
    given = [*positional, *named.values()]
    module: Any = next((each for each in given if isinstance(each, deepspeed.pipe.PipelineModule)), None)
    config: Any = next((each for each in given if isinstance(each, DeepSpeedConfig)), None)
    cut = getattr(module, "madpipe_cut", None)
    derive = "derive it from deepspeed_partition.engine.MadPipeEngine"
    if cut is not None and not allocation_of(module).is_contiguous:
        raise ValueError(
            f"{cls.__name__} is an engine of your own, and DeepSpeed's schedule does not run a plan with several "
            f"stages on a rank, or stages out of order: {derive}"
        )
    # Such an engine does not read the method in the configuration, where a module that is cut already has it.
    configured = None if config is None else config.pipeline.get("partition_method")
    asked = isinstance(configured, list | tuple) or (asks_for_plan(configured) and not planning_is_off())
    if module is not None and (cut == Cut("trial") or asked):
        announce(
            f"{cls.__name__} is an engine of your own and does not plan, so the layers stay cut at "
            f"{module.parts}: {derive}",
            logging.WARNING,
        )
    return object.__new__(cls)
