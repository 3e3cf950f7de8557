"""Whether a module has made all that gradients go through which its code takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_partition.capture.recording import Call, Value
from deepspeed_partition.capture.structure import flatten

TAKE_GRADIENTS = (torch.autograd.grad, torch.Tensor.backward, torch.autograd.backward)
"""The functions by which code takes gradients."""
_PLACE_OF_INPUTS = 4
"""The place of the argument ``inputs`` of ``Tensor.backward()``, counted from the tensor itself, which is 0."""
RUN_BACKWARD = "_engine_run_backward"
"""The name in ``torch.autograd`` of the function that ``grad()`` and ``backward()`` call.

Torch before 2.13 shows no mode a call of ``torch.autograd.backward()``."""


def ends_of(function: str, *args: Any, **named: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a call of ``grad()`` or ``backward()`` takes gradients of, and for what; none: for all leaves."""
    place = 1 if function == "grad" else _PLACE_OF_INPUTS
    outputs = named.get("outputs", named.get("tensors", args[0] if args else None))
    return tensors_in(outputs), tensors_in(named.get("inputs", args[place] if len(args) > place else None))


def holds_all_between(
    scope: Call,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    values: Sequence[Value],
    number_of: Callable[[torch.Tensor], int | None],
    is_weight: Callable[[torch.Tensor], bool],
) -> bool:
    """Whether a module has made all that gradients of outputs go through to inputs; without any, to leaves.

    Args:
        scope: The module's call.
        values: The tensors of the recording.
        number_of: A tensor's number among them.
        is_weight: Whether a tensor is a weight or a buffer.
    """

    def is_made_here(tensor: torch.Tensor) -> bool:
        number = number_of(tensor)
        return number is not None and scope.time in values[number].scopes

    if not all(map(is_made_here, outputs)):
        return False
    from_outside = [each for each in inputs if not is_made_here(each)]
    if inputs and not from_outside:
        return True  # what is between was made since
    given = {ref for ref in scope.given.refs() if values[ref].requires_grad}
    return given == {number_of(each) for each in from_outside if not is_weight(each)}


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]
