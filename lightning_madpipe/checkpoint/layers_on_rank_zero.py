"""What a script changes in the whole model on rank 0, where no other rank has it, given to the ranks that run it.

After a run with ``whole_model="rank_zero"`` each rank has its own layers, and rank 0 has copies of all. A script
that goes on with the model there, under ``if trainer.is_global_zero:``, does what it would do in one process. So
what it changes counts wherever the layers are used next.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from deepspeed_partition.engine.pipeline.parts import parts_of, tensors_by_name
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.repartition.part_descriptions import (
    Fingerprints,
    changed_attributes,
    fingerprints_of,
    say_what_stays,
    set_attributes,
)
from deepspeed_partition.engine.runtime.collectives import (
    gather_objects,
    receive_bytes,
    refused_together,
    send_bytes,
)
from deepspeed_partition.tensor_values import bytes_view

BESIDE = "beside"
"""The name, in the place of a layer's, of the tensors that the LightningModule has beside its layers."""


class TensorInfo(NamedTuple):
    """What a receiver must know about a tensor that it is sent."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class NotedLayer:
    """How a layer was on rank 0 when all of its values had come."""

    tensors: list[TensorInfo]
    checksums: dict[str, int]
    attributes: Fingerprints
    modes: dict[str, bool]

    @classmethod
    def of(cls, layer: nn.Module) -> NotedLayer:
        """Note how ``layer`` is now."""
        checksums = {name: _checksum(tensor) for name, tensor in tensors_by_name(layer).items()}
        return cls(_infos(layer), checksums, fingerprints_of(layer), _modes(layer))


@dataclass(frozen=True, slots=True)
class ChangedLayer:
    """What a layer is now, where that is not what was noted."""

    tensors: list[TensorInfo]
    sent: list[str]
    """The names of the tensors whose values follow."""
    attributes: dict[str, dict[str, Any]]
    modes: dict[str, bool]

    @classmethod
    def of(cls, layer: nn.Module, noted: NotedLayer) -> ChangedLayer | None:
        """Tell what of ``layer`` has changed; None if nothing has."""
        infos, tensors = _infos(layer), tensors_by_name(layer)
        sent = [name for name, tensor in tensors.items() if _checksum(tensor) != noted.checksums.get(name)]
        found = changed_attributes(layer, noted.attributes)
        attributes = {path: changed for path, changed in found.items() if changed}
        modes = {path: mode for path, mode in _modes(layer).items() if noted.modes.get(path) != mode}
        if infos == noted.tensors and not sent and not attributes and not modes:
            return None
        return cls(infos, sent, attributes, modes)


class LayersOnRankZero:
    """Copies of all layers on rank 0, of which other ranks run some.

    Args:
        pipeline: Its layers.
    """

    def __init__(self, pipeline: PipelineModule) -> None:
        self._pipeline = pipeline
        self._noted: dict[str, NotedLayer] | None = None

    @property
    def is_there(self) -> bool:
        """Whether rank 0 has all layers, and no other rank; alike on all ranks."""
        return self._noted is not None

    def note(self, layers: Mapping[str, nn.Module] | None) -> None:
        """Note how layers are when rank 0 has got them all.

        Args:
            layers: All layers, by name, and what is :data:`BESIDE` them. None: rank 0 has no copies of them any
                more that a script may change.
        """
        is_here = layers is not None and dist.get_rank() == 0
        there = layers or {}
        self._noted = None if layers is None else {}
        if is_here:
            users = self._users()
            self._noted = {name: NotedLayer.of(layer) for name, layer in there.items() if users.get(name)}

    def hand_back(self, layers: Mapping[str, nn.Module]) -> None:
        """Give what rank 0 has changed to the ranks that run it. Collective.

        Args:
            layers: The same, as they are now.

        Raises:
            ValueError: rank 0 has other tensors of a layer than a rank that runs it; on every rank.
        """
        if self._noted is None:
            return
        mine = {name: ChangedLayer.of(layers[name], noted) for name, noted in self._noted.items()}
        [changed, *_] = gather_objects({name: each for name, each in mine.items() if each is not None})
        if not changed:
            return
        users, rank = self._users(), dist.get_rank()
        own = {name: each for name, each in changed.items() if rank in users[name]}
        refused_together(lambda: _check(own, layers))
        device = torch.device(get_accelerator().current_device_name())
        for name, each in changed.items():
            if rank == 0:
                tensors = tensors_by_name(layers[name])
                for receiver in users[name]:
                    for sent in each.sent:
                        send_bytes(tensors[sent].to(device), receiver)
                self._noted[name] = NotedLayer.of(layers[name])
            elif name in own:
                _take(layers[name], each, device)
        say_what_stays(each.attributes for each in changed.values())

    def _users(self) -> dict[str, list[int]]:
        """The ranks of the job other than 0 that run each layer."""
        grid, allocation = self._pipeline.mpu(), allocation_of(self._pipeline)
        ranks_of_stage = {
            stage: [rank for rank in range(dist.get_world_size()) if _stage_of(grid, rank) == stage]
            for stage in range(self._pipeline.num_stages)
        }
        users = {
            part.name: [rank for stage in part.owners(allocation) for rank in ranks_of_stage[stage] if rank != 0]
            for part in parts_of(self._pipeline)
        }
        return {**users, BESIDE: list(range(1, dist.get_world_size()))}


def _stage_of(grid: Any, rank: int) -> int:
    return int(grid._topo.get_coord(rank).pipe)


def _check(changed: Mapping[str, ChangedLayer], layers: Mapping[str, nn.Module]) -> None:
    """Compare the form of tensors on rank 0 with what is here.

    Raises:
        ValueError: they are others.
    """
    for name, each in changed.items():
        here = {info.name: info for info in _infos(layers[name])}
        there = {info.name: info for info in each.tensors}
        unlike = next((key for key in {**there, **here} if _form(there.get(key)) != _form(here.get(key))), None)
        if unlike is not None:
            raise ValueError(
                f"{_named(name)} changed on rank 0 alone, where whole_model='rank_zero' had brought it: its "
                f"{unlike} is {_words(there.get(unlike))} there and {_words(here.get(unlike))} on rank "
                f"{dist.get_rank()}, which runs it. Call trainer.strategy.gather_model() on every rank, and "
                "change layers on every rank"
            )


def _named(name: str) -> str:
    return "what the module has beside its layers was" if name == BESIDE else f"layer {name!r} was"


def _form(info: TensorInfo | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if info is None else (info.shape, info.dtype)


def _words(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{tuple(info.shape)} of {str(info.dtype).removeprefix('torch.')}"


def _take(layer: nn.Module, changed: ChangedLayer, device: torch.device) -> None:
    tensors, modules = tensors_by_name(layer), dict(layer.named_modules())
    infos = {info.name: info for info in changed.tensors}
    for name in changed.sent:
        tensors[name].data.copy_(receive_bytes(infos[name].shape, infos[name].dtype, device, 0))
    for name, info in infos.items():
        if isinstance(tensors[name], nn.Parameter):
            tensors[name].requires_grad_(info.requires_grad)
    set_attributes(layer, changed.attributes)
    for path, mode in changed.modes.items():
        if path in modules:
            modules[path].training = mode


def _infos(layer: nn.Module) -> list[TensorInfo]:
    return [
        TensorInfo(name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in tensors_by_name(layer).items()
    ]


def _modes(layer: nn.Module) -> dict[str, bool]:
    return {path: part.training for path, part in layer.named_modules()}


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(bytes_view(tensor.detach().cpu()).numpy().data)
