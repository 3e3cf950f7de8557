"""Steps that an optimizer counts in one parameter of each group, told to all of them.

DeepSpeed's ``FusedAdam``, which it takes for ``{"type": "Adam"}`` on a GPU, and ``FusedLion`` correct the bias
of all moments of a group by ``state["step"]`` of the last parameter, and count in that one alone: those of the
others stay 0. On another rank, or under another optimizer, any of the others may be the one that is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion

STEP = "step"
"""The entry of a parameter's state with the number of its steps."""


def count_in_every_parameter(optimizer: Any) -> None:
    """Let each parameter of ``optimizer`` have as many steps as its group has made.

    Of an optimizer that counts for each parameter, as torch's do, nothing changes: one that has a state has made a
    step.

    Args:
        optimizer: What steps itself, and not DeepSpeed's wrapper around it; anything else is left alone.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    counts_in_one = isinstance(optimizer, FusedAdam | FusedLion)
    for group in optimizer.param_groups:
        kept = [optimizer.state[weight] for weight in group["params"] if weight in optimizer.state]
        count_in_every_state(kept, counts_in_one=counts_in_one)


def go_on_from_other_optimizer(optimizer: Any) -> None:
    """Let ``optimizer``, which has loaded the state of one of another class, make its next step.

    Such as that of torch's Adam, which runs here where DeepSpeed's would be compiled for a CPU, and of
    DeepSpeed's on a GPU. Settings that the other one has not are those that ``optimizer`` was made with.
    """
    count_in_every_parameter(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            for name, setting in optimizer.defaults.items():
                group.setdefault(name, setting)


def count_in_every_state(states: Sequence[Any], *, counts_in_one: bool) -> None:
    """Let the states of the parameters of one group have as many steps as the one with the most of them.

    Args:
        states: Changed in place; what is no dict, or has no number of steps, is left alone.
        counts_in_one: Whether the optimizer is known to count in one of them, with an ``int``. Else they change
            where one has a state and no step, which no optimizer leaves that counts for each parameter.
    """
    counted = [state for state in states if isinstance(state, MutableMapping) and _steps(state) is not None]
    steps = [number for number in map(_steps, counted) if number is not None]
    if not counts_in_one and (0 not in steps or not any(steps)):
        return
    for state in counted:
        is_tensor = torch.is_tensor(state[STEP]) and not counts_in_one
        state[STEP] = torch.full_like(state[STEP], max(steps)) if is_tensor else max(steps)


def _steps(state: Mapping[Any, Any]) -> int | None:
    """The number of steps in a state; None of one that has none."""
    steps = state.get(STEP)
    if type(steps) is int:
        return steps
    if torch.is_tensor(steps) and steps.numel() == 1 and steps.device.type != "meta":
        return int(steps)
    return None
