"""What a script changes in the whole model on rank 0 alone, given to the ranks that run it.

After a run with ``whole_model="rank_zero"`` each rank has its own layers, and rank 0 has copies of all
(:class:`LayersOnRankZero`). Before the first run, and after one with ``"every_rank"``, each rank has all layers
(:func:`take_from_rank_zero`). A script that changes the model under ``if trainer.is_global_zero:`` does what it
would do in one process. So what it changes counts wherever the layers are used next.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
    broadcast_object,
    gather_objects,
    receive_bytes,
    refused_together,
    send_bytes,
)
from deepspeed_partition.tensor_values import bytes_view, has_memory, is_computed
from lightning_madpipe.module import PIPELINE

BESIDE = "beside"
"""The name, in the place of a layer's, of the tensors that the LightningModule has beside its layers."""

MODULE = "module"
"""The name, in the place of a layer's, of the LightningModule."""

MOST_NAMED = 3

BROUGHT = (
    "{what} was changed on rank 0 alone, where whole_model='rank_zero' had brought it: its {name} is {there} "
    "there and {here} on rank {rank}, which runs it. Call trainer.strategy.gather_model() on every rank, and "
    "change layers on every rank"
)
EVERYWHERE = (
    "{what} was changed on one rank alone: its {name} is {there} on rank 0 and {here} on rank {rank}. Change "
    "layers on every rank; values of weights, as by load_state_dict(), may be changed on rank 0 alone"
)
IN_PARTS = (
    "{what} has other values on rank 0 than on rank {rank} in its {name}, which is sparse or quantized, and such "
    "values are not sent: change it alike on every rank"
)


class TensorInfo(NamedTuple):
    """What a receiver must know about a tensor that it is sent."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    """False of a result, such as a buffer that a step has computed with gradients, which no other rank has."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
        """Describe a tensor, in another type if one is given."""
        has_gradient = tensor.requires_grad and not is_computed(tensor)
        return cls(name, tensor.shape, dtype or tensor.dtype, has_gradient)

    def mark(self, tensor: Tensor) -> None:
        """Let a tensor, which has arrived, have gradients or not as where it comes from."""
        if tensor.requires_grad != self.requires_grad and not is_computed(tensor):
            tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class NotedState:
    """How the tensors and modes of a layer were."""

    tensors: list[TensorInfo]
    checksums: dict[str, int]
    of_parts: dict[str, int]
    """Checksums of sparse and quantized tensors, whose values lie in several others."""
    modes: dict[str, bool]

    @classmethod
    def of(cls, layer: nn.Module) -> NotedState:
        """Note how ``layer`` is now."""
        tensors = _own_tensors(layer)
        return cls(
            _infos(layer),
            {name: _checksum(tensor) for name, tensor in tensors.items() if _has_bytes(tensor)},
            {name: _checksum(*parts) for name, tensor in tensors.items() if (parts := _parts_of(tensor))},
            {path: part.training for path, part in layer.named_modules() if not _is_of_host(path)},
        )


@dataclass(frozen=True, slots=True)
class NotedLayer:
    """How a layer was on rank 0 when all of its values had come."""

    state: NotedState
    attributes: Fingerprints

    @classmethod
    def of(cls, layer: nn.Module) -> NotedLayer:
        """Note how ``layer`` is now."""
        return cls(NotedState.of(layer), fingerprints_of(layer))

    def changes_of(self, layer: nn.Module) -> ChangedLayer | None:
        """Tell what of ``layer`` has changed since; None if nothing has."""
        found = changed_attributes(layer, self.attributes)
        attributes = {path: changed for path, changed in found.items() if changed}
        return ChangedLayer.between(self.state, NotedState.of(layer), attributes)


@dataclass(frozen=True, slots=True)
class ChangedLayer:
    """What a layer is on rank 0, where that is not what was noted, or what another rank has."""

    tensors: list[TensorInfo]
    unlike: list[str]
    """The names of the tensors that are otherwise."""
    sent: list[str]
    """The names of those whose values follow."""
    in_parts: list[str]
    """The names of sparse and quantized ones whose values are others."""
    attributes: dict[str, dict[str, Any]]
    modes: dict[str, bool]

    @classmethod
    def between(
        cls, other: NotedState, there: NotedState, attributes: dict[str, dict[str, Any]]
    ) -> ChangedLayer | None:
        """Tell what rank 0 has, ``there``, that ``other`` has not; None if both are the same."""
        sent = [name for name, checksum in there.checksums.items() if other.checksums.get(name) != checksum]
        others = set(other.tensors)
        unlike = [info.name for info in there.tensors if info not in others or info.name in sent]
        modes = {path: mode for path, mode in there.modes.items() if other.modes.get(path) != mode}
        both = there.of_parts.keys() & other.of_parts.keys()
        in_parts = sorted(name for name in both if there.of_parts[name] != other.of_parts[name])
        if there.tensors == other.tensors and not (sent or in_parts or attributes or modes):
            return None
        return cls(there.tensors, unlike, sent, in_parts, attributes, modes)

    def parts(self) -> list[str]:
        """The paths of the modules that are otherwise, or the name of a tensor that is not in one of them."""
        return list(dict.fromkeys([*(name.rpartition(".")[0] or name for name in self.unlike), *self.modes]))


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
        mine = {name: noted.changes_of(layers[name]) for name, noted in self._noted.items()}
        [changed, *_] = gather_objects({name: each for name, each in mine.items() if each is not None})
        if not changed:
            return
        users = self._users()
        _hand_over(
            [
                {name: each for name, each in changed.items() if rank in users[name]}
                for rank in range(dist.get_world_size())
            ],
            layers,
            BROUGHT,
        )
        if dist.get_rank() == 0:
            self._noted |= {name: NotedLayer.of(layers[name]) for name in changed}
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


def take_from_rank_zero(modules: Mapping[str, nn.Module]) -> list[dict[str, ChangedLayer]]:
    """Let tensors and modes of rank 0 count in modules that every rank has as a whole. Collective.

    Each rank reads all tensors once, for their checksums; only those that differ are sent.

    Args:
        modules: The same modules on every rank, by name.

    Returns:
        What each rank has taken, by the name of the module; alike on all ranks.

    Raises:
        ValueError: rank 0 has other tensors than another rank; on every rank.
    """
    mine = {name: NotedState.of(module) for name, module in modules.items()}
    there = broadcast_object(mine, 0)
    nothing = NotedState([], {}, {}, {})
    found = {name: ChangedLayer.between(mine[name], there.get(name, nothing), {}) for name in modules}
    taken = gather_objects({name: each for name, each in found.items() if each is not None})
    if any(taken):
        _hand_over(taken, modules, EVERYWHERE)
    return taken


def taken_in_words(taken: Sequence[Mapping[str, ChangedLayer]]) -> str | None:
    """The sentence on what ranks have taken from rank 0; None if they have taken nothing."""
    ranks = [rank for rank, changed in enumerate(taken) if changed]
    if not ranks:
        return None
    parts = {
        ".".join(filter(None, ("self", path))) if name == MODULE else _named(name): None
        for changed in taken
        for name, each in changed.items()
        for path in each.parts()
    }
    named, num_more = ", ".join([*parts][:MOST_NAMED]), len(parts) - MOST_NAMED
    more = f" and {num_more} more" if num_more > 0 else ""
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return (
        f"{who} other weights, buffers, modes or requires_grad in {named}{more} than rank 0: "
        "those of rank 0 count on every rank, as its weights and buffers do under ddp"
    )


def _hand_over(taken: Sequence[Mapping[str, ChangedLayer]], layers: Mapping[str, nn.Module], refusal: str) -> None:
    """Send what rank 0 has to each rank that takes it. Collective.

    Args:
        taken: What each rank takes, by the name of the layer.
        layers: The layers, as this rank has them.
        refusal: The sentence of an exception.

    Raises:
        ValueError: rank 0 has other tensors of a layer than a rank that takes it; on every rank.
    """
    rank = dist.get_rank()
    refused_together(lambda: _check(taken[rank], layers, refusal))
    device = torch.device(get_accelerator().current_device_name())
    for receiver, changed in enumerate(taken):
        for name, each in changed.items():
            if rank == 0:
                tensors = _own_tensors(layers[name])
                for sent in each.sent:
                    send_bytes(tensors[sent].to(device), receiver)
            elif rank == receiver:
                _take(layers[name], each, device)


def _stage_of(grid: Any, rank: int) -> int:
    return int(grid._topo.get_coord(rank).pipe)


def _check(changed: Mapping[str, ChangedLayer], layers: Mapping[str, nn.Module], refusal: str) -> None:
    """Compare the form of tensors on rank 0 with what is here.

    Raises:
        ValueError: they are others. Buffers may have another form there, for layers make them, and let them grow.
    """
    for name, each in changed.items():
        if each.in_parts:
            raise ValueError(IN_PARTS.format(what=_named(name), name=each.in_parts[0], rank=dist.get_rank()))
        here = {info.name: info for info in _infos(layers[name])}
        there = {info.name: info for info in each.tensors}
        buffers = places_of_buffers(layers[name])
        unlike = (key for key in {**there, **here} if _form(there.get(key)) != _form(here.get(key)))
        key = next((key for key in unlike if key not in there or key not in buffers), None)
        if key is not None:
            words = {"there": _words(there.get(key)), "here": _words(here.get(key)), "rank": dist.get_rank()}
            raise ValueError(refusal.format(what=_named(name), name=key, **words))


def _named(name: str) -> str:
    found = {BESIDE: "what the module has beside its layers", MODULE: "the module"}
    return found.get(name, f"layer {name!r}")


def _form(info: TensorInfo | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if info is None else (info.shape, info.dtype)


def _words(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{tuple(info.shape)} of {str(info.dtype).removeprefix('torch.')}"


def _take(layer: nn.Module, changed: ChangedLayer, device: torch.device) -> None:
    tensors, modules, buffers = _own_tensors(layer), dict(layer.named_modules()), places_of_buffers(layer)
    infos = {info.name: info for info in changed.tensors}
    for name in changed.sent:
        value = receive_bytes(infos[name].shape, infos[name].dtype, device, 0)
        tensor = tensors.get(name)
        if tensor is None:  # a buffer that is None here, or one with another buffer
            table, key = buffers[name]
            table[key] = value.to("cpu")
        elif tensor.shape == value.shape and tensor.dtype == value.dtype:
            tensor.data.copy_(value)
        else:
            tensor.data = value.to(tensor.device)
    for name, tensor in tensors.items():
        if name in infos:
            infos[name].mark(tensor)
    set_attributes(layer, changed.attributes)
    for path, mode in changed.modes.items():
        if path in modules:
            modules[path].training = mode


def places_of_buffers(layer: nn.Module) -> dict[str, tuple[Any, str]]:
    """The table and the key there of each buffer, also of those that are None, by name."""
    return {
        f"{path}.{key}" if path else key: (part._buffers, key)
        for path, part in layer.named_modules()
        for key in part._buffers.keys()  # noqa: SIM118  a scripted module's table is no dict
    }


def _infos(layer: nn.Module) -> list[TensorInfo]:
    return [TensorInfo.of(name, tensor) for name, tensor in _own_tensors(layer).items() if _has_bytes(tensor)]


def _own_tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors_by_name(layer).items() if not _is_of_host(name)}


def _is_of_host(path: str) -> bool:
    """Whether something is in the child by which a LightningModule has layers of this rank without a name."""
    return path.partition(".")[0] == PIPELINE


def _has_bytes(tensor: Tensor) -> bool:
    """Whether the values of a tensor are there, one after the other."""
    return has_memory(tensor) and not tensor.is_quantized


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the values of a sparse or quantized one; none of any other."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_nested or is_traceable_wrapper_subclass(tensor):
        return []
    own = tensor.detach()
    if own.is_quantized:
        if own.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            return [own.int_repr(), own.q_per_channel_scales(), own.q_per_channel_zero_points()]
        return [own.int_repr(), torch.tensor([own.q_scale(), own.q_zero_point()], dtype=torch.float64)]
    if own.layout is torch.sparse_coo:
        own = own.coalesce()
        return [own.indices(), own.values()]
    if own.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [own.crow_indices(), own.col_indices(), own.values()]
    if own.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [own.ccol_indices(), own.row_indices(), own.values()]
    return []


def _checksum(*tensors: Tensor) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(bytes_view(tensor.detach().cpu()).numpy().data, checksum)
    return checksum
