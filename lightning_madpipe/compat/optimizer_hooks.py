"""Code of the user's that an optimizer runs: the hooks of its step, and a function put in the place of its step.

The engine of a pipeline steps the optimizer when it has the gradients, on each rank with the parameters of its own
layers. One process calls ``optimizer.step(closure)``, which runs the hooks before the step first of all, then the
closure (``training_step`` and its backward), then the step and the hooks behind it. So the hooks before the step
are called where Lightning comes to the optimizer, and not where the engine does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.running_code import OTHERS
from lightning_madpipe.compat.unsupported import is_of_library, name_of_function

Watch = Callable[[str, str], AbstractContextManager[Any]]
"""Watches what code computes meanwhile, of a name (``the step post hook shrink``) and an owner (``SGD``)."""

BEFORE, BEHIND = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
"""The attributes in which torch (2.4 to 2.13) keeps the hooks of an optimizer's step."""
OF_ALL = {BEFORE: "_global_optimizer_pre_hooks", BEHIND: "_global_optimizer_post_hooks"}
"""The names under which it keeps those of all optimizers."""
KINDS = {BEFORE: "the step pre hook", BEHIND: "the step post hook"}

STATE_OF_A_PART = (
    "state_dict() of the optimizer is asked for, which has the states of this rank's parameters only, by their "
    "places among these: another optimizer would take them for those of other parameters. "
    "trainer.save_checkpoint(folder) writes the states of all ranks, and fit(ckpt_path=folder) goes on with them"
)
STOPS_STEP = (
    "{name} of {kind} gives other arguments for the optimizer's step, and the engine of a pipeline makes the step "
    "by itself, with none: let it return None"
)


class OptimizerHooks:
    """The hooks of an optimizer that a pipeline's engine steps, watched while they run.

    Args:
        optimizer: The user's.
        watch: Watches what a hook computes, where ranks have other layers; None: nobody needs to.
        closure_is_first: Whether one process runs the closure before it comes to the optimizer (fp16).
        refusal: Makes the error that says a sentence.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watch: Watch | None,
        *,
        closure_is_first: bool,
        refusal: Callable[[str], Exception],
    ) -> None:
        self._optimizer, self._watch, self._refusal = optimizer, watch, refusal
        self._closure_is_first = closure_is_first
        self._put_back: list[Callable[[], object]] = []

    def run_before_closure(self) -> None:
        """Run the hooks before the step, as one process does before it has the gradients."""
        self._take_over()
        if self._closure_is_first:
            return
        for table in self._tables(BEFORE):
            for hook in list(table.values()):
                if isinstance(hook, _Hook):
                    hook.run(self._optimizer, (self._optimizer,), {})

    def end(self) -> None:
        """Let the optimizer have its hooks again."""
        for put_back in reversed(self._put_back):
            put_back()
        self._put_back = []

    def _tables(self, kind: str) -> list[Any]:
        return [getattr(torch_optimizer, OF_ALL[kind], {}), getattr(self._optimizer, kind, {})]

    def _take_over(self) -> None:
        """Stand in the place of hooks, and of a replaced step, that the user has set until now."""
        for kind in (BEFORE, BEHIND):
            waits = kind == BEFORE and not self._closure_is_first
            for table in self._tables(kind):
                for key, hook in list(table.items()):
                    if not isinstance(hook, _Hook) and not is_of_library(hook):
                        table[key] = _Hook(hook, KINDS[kind], self._optimizer, self._watched, self._refusal, waits)
                        self._put_back.append(functools.partial(_restore, table, key, hook))
        step = vars(self._optimizer).get("step")
        behind = getattr(step, "__wrapped__", step)  # a schedule's counter of steps is around it
        if step is None or self._watch is None or isinstance(step, _Step) or is_of_library(behind):
            return
        self._optimizer.step = _Step(step, self._optimizer, self._watch)  # type: ignore[method-assign]
        self._put_back.append(lambda: vars(self._optimizer).update(step=step))

    def _watched(self, name: str, owner: str) -> AbstractContextManager[Any] | None:
        return None if self._watch is None else self._watch(name, owner)


class _Hook:
    """A hook of a step.

    Args:
        waits: Whether it does nothing where the engine steps, since it has run before.
    """

    def __init__(self, hook: Any, kind: str, optimizer: Any, watched: Any, refusal: Any, waits: bool) -> None:
        self.hook, self._optimizer, self._watched, self._refusal = hook, optimizer, watched, refusal
        self._name, self._waits = f"{kind} {name_of_function(hook)}", waits

    def __call__(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        if optimizer is not self._optimizer:
            return self.hook(optimizer, arguments, keywords)
        return None if self._waits else self.run(optimizer, arguments, keywords)

    def run(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        kind = type(optimizer).__name__
        context = self._watched(self._name, kind)
        if context is None:
            result = self.hook(optimizer, arguments, keywords)
        else:
            with context:
                result = self.hook(optimizer, arguments, keywords)
        if result is not None:
            raise self._refusal(STOPS_STEP.format(name=self._name, kind=kind))


class _Step:
    """A function that the user has put in the place of an optimizer's step."""

    def __init__(self, step: Any, optimizer: Any, watch: Watch) -> None:
        functools.update_wrapper(self, step)
        self._step, self._optimizer, self._watch = step, optimizer, watch

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with self._watch("step", type(self._optimizer).__name__):
            return self._step(*arguments, **keywords)


def _restore(table: Any, key: int, hook: Any) -> None:
    if key in table:  # else its user has removed it
        table[key] = hook


def tell_of_states(optimizer: Any) -> None:
    """Say once, where a program asks for the optimizer's states, that they are those of a rank's parameters."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer):  # one of DeepSpeed's is around it
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            return
    # Of torch (2.4 to 2.13), by register_state_dict_pre_hook; a wrapper may not have called super().__init__().
    tables = getattr(inner, "_optimizer_state_dict_pre_hooks", None)
    if tables is not None and _tell not in tables.values():
        inner.register_state_dict_pre_hook(_tell)


def _tell(optimizer: Any) -> None:
    for package in _packages():
        if package != "torch":
            if package not in OTHERS:
                warn_once("states of an optimizer", STATE_OF_A_PART)
            return


def _packages() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield (frame.f_globals.get("__name__") or "").partition(".")[0]
        frame = frame.f_back  # type: ignore[assignment]
