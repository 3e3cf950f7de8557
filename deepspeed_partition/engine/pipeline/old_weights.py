"""What is said where weights are read while a pipeline goes on that never drains.

One rank alone may read them, so the pipeline cannot be brought to rest for it, which all ranks do together.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from deepspeed_partition.engine.runtime.environment import warn_here

OLD_WEIGHTS = (
    "{what} is read while the pipeline runs on between the calls of train_batch (weight_versions {mode!r}): the "
    "updates of the last batches are not all done, and stages have weights of different updates. Call "
    "engine.come_to_rest() on every rank before; this is said once"
)


def tell_reads_of_optimizer(engine: Any) -> None:
    """Let a ``state_dict()`` of torch's optimizer say where updates are not done; once for an engine."""
    optimizer, module = engine.basic_optimizer, engine.module
    if isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "register_state_dict_pre_hook"):
        optimizer.register_state_dict_pre_hook(functools.partial(_tell_of_optimizer, module))


def _tell_of_optimizer(module: Any, _: Any) -> None:
    tell_old_weights(module, "the state of the optimizer")


def tell_old_weights(module: Any, what: str) -> None:
    """Say that something is read whose updates are not all done, if it is so and was not said.

    Args:
        what: subject of the sentence.
    """
    mode, module.has_old_weights = module.has_old_weights, None
    if mode is not None:
        module.has_told_old_weights = True
        warn_here(OLD_WEIGHTS.format(what=what, mode=mode))
