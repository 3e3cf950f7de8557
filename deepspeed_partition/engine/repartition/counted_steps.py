"""Steps that an optimizer counts in one parameter of each group, told to all of them.

DeepSpeed's ``FusedAdam``, which it takes for ``{"type": "Adam"}`` on a GPU, and ``FusedLion`` correct the bias
of all moments of a group by ``state["step"]`` of the last parameter, and count in that one alone: those of the
others stay 0. On another rank, or under another optimizer, any of the others may be the one that is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import FusedLion

STEP, MOMENT = "step", "exp_avg"
"""The entries of a parameter's state with the number of its steps, and with the mean of its gradients."""
ADAM = (FusedAdam, DeepSpeedCPUAdam, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that go on from each other's states."""


def count_in_every_parameter(optimizer: Any) -> None:
    """Let each parameter have as many steps as its group has made, where ``optimizer`` counts in one of them.

    Args:
        optimizer: What steps itself, and not DeepSpeed's wrapper around it. One that counts for each parameter, as
            torch's do, is left alone, and so is anything else.
    """
    if isinstance(optimizer, FusedAdam | FusedLion):
        for states in _states_of_groups(optimizer):
            _count_alike(states, as_int=True)


def count_in_states_of_others(states: Sequence[Any]) -> None:
    """Let the loaded states of the parameters of one group have the same steps, where one counted for all.

    A checkpoint does not say which optimizer wrote it. One that counts for each parameter leaves no moments that
    are not zero with a step that is.

    Args:
        states: Changed in place; what is no dict, or has no number of steps, is left alone.
    """
    if any(_steps(state) == 0 and _has_moments(state) for state in states if isinstance(state, Mapping)):
        _count_alike(states, as_int=False)


def go_on_from_other_optimizer(optimizer: Any) -> None:
    """Let ``optimizer``, which may have loaded the state of another class of Adam, make its next step.

    torch's runs here where DeepSpeed's would be compiled for a CPU, and DeepSpeed's on a GPU. Settings that the
    other one has not are those that ``optimizer`` was made with. Anything else is left alone, and fails as it does
    in one process.
    """
    if not isinstance(optimizer, ADAM):
        return
    for states in _states_of_groups(optimizer):
        count_in_states_of_others(states)
    count_in_every_parameter(optimizer)
    for state in optimizer.state.values() if isinstance(optimizer, DeepSpeedCPUAdam) else ():
        if torch.is_tensor(state.get(STEP)):
            state[STEP] = int(state[STEP])
    for group in optimizer.param_groups:
        for name, setting in optimizer.defaults.items() if "betas" in group else ():
            group.setdefault(name, setting)


def settings_that_lack(optimizer: Any, settings: Mapping[str, Any]) -> list[str]:
    """Name what ``optimizer`` needs and does not find among the settings of a group of another optimizer.

    What its class fills in where it loads a state, as torch's do for older versions, does not count.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or (isinstance(optimizer, ADAM) and "betas" in settings):
        return []
    needed = [name for name in optimizer.defaults if any(name in group for group in optimizer.param_groups)]
    if all(name in settings for name in needed):
        return []
    trial, groups = object.__new__(type(optimizer)), [{**settings, "params": []}]
    try:
        trial.__setstate__({"defaults": dict(optimizer.defaults), "state": {}, "param_groups": groups})
    except Exception:  # of a class that needs more than that; what is lacking ends its step, as in one process
        return []
    return [name for name in needed if name not in groups[0]]


def _states_of_groups(optimizer: torch.optim.Optimizer) -> Iterator[list[Any]]:
    for group in optimizer.param_groups:
        yield [optimizer.state[weight] for weight in group["params"] if weight in optimizer.state]


def _count_alike(states: Sequence[Any], *, as_int: bool) -> None:
    counted = [state for state in states if isinstance(state, MutableMapping) and _steps(state) is not None]
    most = max((number for number in map(_steps, counted) if number is not None), default=0)
    for state in counted:
        is_tensor = torch.is_tensor(state[STEP]) and not as_int
        state[STEP] = torch.full_like(state[STEP], most) if is_tensor else most


def _has_moments(state: Mapping[Any, Any]) -> bool:
    moments = state.get(MOMENT)
    return torch.is_tensor(moments) and bool(moments.any())


def _steps(state: Mapping[Any, Any]) -> int | None:
    """The number of steps in a state; None of one that has none."""
    steps = state.get(STEP)
    if type(steps) is int:
        return steps
    if torch.is_tensor(steps) and steps.numel() == 1 and steps.device.type != "meta":
        return int(steps)
    return None
