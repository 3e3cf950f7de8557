"""Chains computed from operations and bytes, for a device that nobody has to have.

The profiler runs the layers on tensors without contents, and a clock that is moved by every operator stands in
the place of the real one: the time that its floating-point operations take at the device's peak, or its
operands at the bandwidth of the device's memory, whichever is longer (a roofline). Sizes, and what autograd
keeps, are those of a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from vision_networks import NETWORKS

from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.profiling.boundaries import bytes_of
from deepspeed_partition.profiling.isolation import training_conditions
from deepspeed_partition.profiling.measure import measure_layers
from deepspeed_partition.profiling.parts_of_loss import PartsOfLoss
from deepspeed_partition.profiling.run import Conditions, Loss
from deepspeed_partition.profiling.sources import layer_sources
from deepspeed_partition.profiling.stash import layer_profiles

MICRO_BATCH_SIZE = 8
MOVES_NOTHING = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "lift_fresh", "permute",
    "select", "slice", "split", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """A device as its data sheet describes it, and the share of both peaks that programs reach."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    efficiency: float = 1.0


class _OperatorClock(TorchDispatchMode):
    """The time since the beginning, if ``device`` had run all operators so far."""

    def __init__(self, device: Roofline) -> None:
        super().__init__()
        self.device = device
        self.seconds = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if func.namespace == "aten" and packet.__name__ not in MOVES_NOTHING:
            operands = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            moved = sum(tensor.numel() * tensor.element_size() for tensor in operands)
            count: Callable[..., int] | None = flop_registry.get(packet)
            flops = count(*args, **kwargs, out_val=result) if count is not None else 0
            seconds = max(flops / self.device.flops_per_second, moved / self.device.bytes_per_second)
            self.seconds += seconds / self.device.efficiency
        return result


@dataclass(frozen=True, kw_only=True)
class _ComputedConditions(Conditions):
    clock: _OperatorClock

    def now(self) -> float:
        return self.clock.seconds


def computed_chain(name: str, network: Callable[[int], Any], micro_batch_size: int, device: Roofline) -> Chain:
    """The chain of ``network`` on ``device``."""
    clock = _OperatorClock(device)
    conditions = _ComputedConditions(device=torch.device("cpu"), warm_up=1, repeats=1, clock=clock)
    with FakeTensorMode(), training_conditions(conditions.device), clock:
        layers, (images, labels), loss_fn = network(micro_batch_size)
        measured, _ = measure_layers(
            layer_sources(layers), images, conditions, Loss(loss_fn, labels, PartsOfLoss.of(loss_fn))
        )
        input_bytes = bytes_of(images)
    return Chain(
        name=name,
        input_bytes=input_bytes,
        layers=tuple(layer_profiles(measured)),
        micro_batch_size=micro_batch_size,
        hardware=f"computed: {device.name}",
    )


def computed_chains(names: Iterable[str] = NETWORKS) -> list[Chain]:
    """The paper's networks, on a device of 12 TFLOP/s and 900 GB/s."""
    device = Roofline("12 TFLOP/s, 900 GB/s", flops_per_second=12e12, bytes_per_second=900e9)
    return [computed_chain(name, NETWORKS[name], MICRO_BATCH_SIZE, device) for name in names]
