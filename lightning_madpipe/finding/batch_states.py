"""States that a step keeps from batch to batch and gives its model, such as a recurrent one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from deepspeed_partition.capture.structure import flatten

FROM_THE_FIRST = (
    "a state that begins as None is to be a tensor from the first step on, made in the step for the samples that "
    "it is given: `if self.h is None: self.h = torch.zeros(len(x), ...)`"
)


def state_of_other_size(module: nn.Module, given: Iterable[Any]) -> str | None:
    """Say which state of the module has another number of samples than the other tensors it is given with.

    Args:
        given: What the module is called with, for a micro-batch.
    """
    names = {
        id(leaf): name
        for name, value in (*vars(module).items(), *module._buffers.items())
        for leaf in flatten(value)[0]
        if isinstance(leaf, Tensor)
    }
    tensors = [leaf for leaf in flatten(list(given))[0] if isinstance(leaf, Tensor) and leaf.ndim]
    samples = next((len(tensor) for tensor in tensors if id(tensor) not in names), None)
    if samples is None:
        return None
    for tensor in tensors:
        if id(tensor) in names and samples not in tensor.shape:
            return (
                f"self.{names[id(tensor)]}, of shape {tuple(tensor.shape)}, is given with {samples} samples, "
                "because a pipeline cuts batches: make a state in the step for the samples that it is given, `if "
                "self.h is None: self.h = torch.zeros(len(x), ...)`, or let batches be whole, "
                "MadPipeStrategy(num_micro_batches=1)"
            )
    return None
