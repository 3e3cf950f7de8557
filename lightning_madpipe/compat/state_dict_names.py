"""What the weights of a pipeline are called in the state dict that the module has on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from lightning_madpipe.module import PIPELINE, PipelineCall


@dataclass(frozen=True, kw_only=True)
class OneDeviceNames:
    """The state dict of a LightningModule before its layers were spread over stages.

    The pipeline calls the weights of its layers ``"3.linear.weight"`` and ``"tied_modules.embed.weight"``.
    """

    order: tuple[str, ...]
    """All names on one device, as ``state_dict()`` orders them."""
    of_layers: Mapping[str, tuple[str, ...]]
    """Each name in the pipeline with those on one device: several where modules share a tensor."""

    def of(self, name: str) -> tuple[str, ...]:
        """The names on one device of the pipeline's ``name``.

        A layer that only the pipeline has, such as one from a LayerSpec, keeps the name that it has there.
        """
        return self.of_layers.get(name) or (f"{PIPELINE}.{name}",)

    def is_outside(self, name: str) -> bool:
        """Whether ``name`` of one device's state is not of the pipeline's layers."""
        return not name.startswith(f"{PIPELINE}.") and name not in self._inside

    @cached_property
    def _inside(self) -> frozenset[str]:
        return frozenset(alias for aliases in self.of_layers.values() for alias in aliases)

    def in_order(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state``, by names on one device, as one device orders it; what it does not know comes last."""
        return {name: state[name] for name in (*self.order, *state) if name in state}


def one_device_names(module: nn.Module, call: PipelineCall) -> OneDeviceNames:
    """The names of ``module``, whose layers are still its own, and which tensors of them each layer has."""
    # By the tensors themselves: wrappers, hooks and parametrizations then name what they name on one device.
    # That of a class of the user's may lack some, or have copies: checkpoints here are not made by it.
    whole = nn.Module.state_dict(module, keep_vars=True)
    named: dict[int, list[str]] = defaultdict(list)
    for name, value in whole.items():
        named[id(value)].append(name)
    of_layers: dict[str, tuple[str, ...]] = {}
    for owner, layer in call.existing_modules():
        prefix = owner if isinstance(owner, int) else f"tied_modules.{owner}"
        for name, value in layer.state_dict(keep_vars=True).items():
            of_layers[f"{prefix}.{name}"] = tuple(named.get(id(value), ()))
    return OneDeviceNames(order=tuple(whole), of_layers=of_layers)


def expanded(names: OneDeviceNames, state: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A pipeline's state by the names of one device, a shared tensor under each of its names."""
    return {alias: value for name, value in state for alias in names.of(name)}
