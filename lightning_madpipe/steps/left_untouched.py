"""What a step may not change: the optimizer's settings and the weights.

A step runs on the last stage, once for each micro-batch, and up to its call of ``forward`` on the first one. A
rate that it sets reaches that rank's optimizer alone, and one that it multiplies is multiplied for each
micro-batch; weights that it clamps are those of the last stage. A hook does these once, on every rank.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def left_untouched(module: Any, step: str, error: Callable[[str], Exception]) -> Iterator[None]:
    """Refuse a step that changes the settings of an optimizer or weights of this rank.

    Raises:
        error: it has; the sentence names the setting or the weight, and the way out.
    """
    optimizers = module.trainer.optimizers
    settings = list(_settings(optimizers))
    weights = {name: (weight, weight._version) for name, weight in module.named_parameters()}
    try:
        yield
    finally:
        # Also where the step ends at its call of the layers, and where a trial comes before the step itself.
        changed = [old for old, new in zip(settings, _settings(optimizers), strict=False) if old != new]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for number, name, value in changed:
            if not isinstance(groups[number][name], Tensor):
                groups[number][name] = value
    if changed:
        number, name, value = changed[0]
        raise error(
            f"{step} changes {name!r} of parameter group {number} of the optimizer (it was {value}), and in a "
            "pipeline a step runs on some ranks, once per micro-batch: change it in a hook, such as "
            "on_train_batch_start, or by a schedule that configure_optimizers returns"
        )
    written = next((name for name, (weight, version) in weights.items() if weight._version != version), None)
    if written is not None:
        raise error(
            f"{step} changes {written} in place, and in a pipeline it has the weights of one stage only, once per "
            "micro-batch: change them in a hook, such as on_train_batch_end, over self.parameters()"
        )


def _settings(optimizers: Any) -> Iterator[tuple[int, str, Any]]:
    for number, group in enumerate(each for optimizer in optimizers for each in optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                yield number, name, float(value)
            elif isinstance(value, numbers.Number | str | tuple):
                yield number, name, value
