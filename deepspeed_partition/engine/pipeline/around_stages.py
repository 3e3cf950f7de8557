"""What a program puts around the pipeline module itself, and what therefore runs for each stage of a plan."""

from __future__ import annotations

from torch import nn

from deepspeed_partition.engine.pipeline.optimizers_in_parts import is_of_library, name_of_function
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.module_hooks import MODULE_HOOKS

_CALLED = ("forward", "__call__")


def around_stages(module: nn.Module) -> list[str]:
    """What the program has put around the forward of a pipeline module, in words: hooks, and other functions."""
    own = vars(module)
    found = [
        f"the {kind} hook {name_of_function(hook)}"
        for table, kind in MODULE_HOOKS.items()
        for hook in own[table].values()
        if not is_of_library(hook)
    ]
    tables = [own, *map(vars, type(module).__mro__)]
    functions = [table[name] for table in tables for name in _CALLED if name in table]
    return found + [f"the method {name_of_function(each)}" for each in functions if not is_of_library(each)]


class AroundStages:
    """A look before each step at what a program has put around a pipeline module."""

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()

    def tell(self, module: nn.Module, num_stages: int, num_ranks: int) -> None:
        """Say once what of a program runs for each stage and micro-batch, if there are several stages."""
        own = vars(module)
        seen = (
            type(module), num_stages, num_ranks, own.get("forward"), own.get("__call__"),
            *[hook for table in MODULE_HOOKS for hook in own[table].values()],
        )  # fmt: skip
        if seen != self._seen:
            self._seen = seen
            _tell_what_runs_for_each_stage(module, num_stages, num_ranks)


def _tell_what_runs_for_each_stage(module: nn.Module, num_stages: int, num_ranks: int) -> None:
    for written in around_stages(module) if num_stages > 1 else ():
        warn_once(
            f"around stages/{written}",
            f"{written} of the pipeline module runs for each stage and micro-batch, with that stage's inputs and "
            f"outputs: what it does depends on the plan, now {num_stages} stages on {num_ranks} ranks (in plain "
            "DeepSpeed on the cut, one stage per rank). Let a layer do it, also by a hook that its __init__() "
            "registers, or loss_fn",
        )
