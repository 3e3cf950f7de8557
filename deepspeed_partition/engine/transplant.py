"""Moving layers between the ranks of a pipeline, and rebuilding its module in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from deepspeed_partition.engine.collectives import gather_objects, portable, receive_bytes, send_bytes
from deepspeed_partition.engine.module import place_layers
from deepspeed_partition.engine.stages import StagesModule, allocation_of, owner
from deepspeed_partition.engine.training_state import TrainingState
from deepspeed_partition.planner.allocation import Allocation


def random_state() -> Callable[[], None]:
    """What puts every random generator that a layer may draw from back to where it is now."""
    accelerator = get_accelerator()
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if device is not None:
            accelerator.set_rng_state(device)

    return restore


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave every random generator that building a layer may draw from as it was."""
    restore = random_state()
    try:
        yield
    finally:
        restore()


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule of the pipeline that a rank holds if it runs one of its layers."""

    name: str
    """Its global name: ``"3"``, or ``"tied_modules.embed"`` for layers that share one module."""
    layers: tuple[int, ...]
    """The layers that run it; several where it is tied."""
    spec: LayerSpec | nn.Module

    def owners(self, allocation: Allocation) -> list[int]:
        """The ranks of the pipeline that hold it, in order."""
        return sorted({owner(allocation, layer) for layer in self.layers})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a receiver must know about a parameter or buffer that it is sent."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


def parts_of(module: PipelineModule) -> list[Part]:
    """Everything with weights in the whole pipeline, in the order of the layers; functions have none."""
    tied: dict[str, list[int]] = {}
    parts: dict[str, Part] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            tied.setdefault(spec.key, []).append(index)
            name = f"tied_modules.{spec.key}"
            first = parts[name].spec if name in parts else spec
            parts[name] = Part(name, tuple(tied[spec.key]), first)
        elif isinstance(spec, LayerSpec | nn.Module):
            parts[str(index)] = Part(str(index), (index,), spec)
    return list(parts.values())


def held_modules(module: PipelineModule) -> dict[str, nn.Module]:
    """The parts that this rank holds now, by their global names."""
    # Not named_children(), which names a module once that the user listed as several layers.
    held = {name: child for name, child in module._modules.items() if name.isdigit() and child is not None}
    held.update({f"tied_modules.{key}": child for key, child in module.tied_modules.items()})
    return held


def trainable_parameters(module: PipelineModule) -> list[int]:
    """How many each layer of the whole pipeline has; tied ones count wherever they stand. Collective."""
    held = held_modules(module)
    mine = {
        layer: sum(weight.numel() for weight in held[part.name].parameters() if weight.requires_grad)
        for part in parts_of(module)
        if part.name in held
        for layer in part.layers
    }
    counts: dict[int, int] = {}
    for theirs in gather_objects(mine, module.mpu().get_pipe_parallel_group()):
        counts.update(theirs)
    return [counts.get(layer, 0) for layer in range(len(module._layer_specs))]


@dataclass(frozen=True, slots=True)
class Arriving:
    """The parts that are to come to this rank, built but for the values of their tensors."""

    described: dict[str, list[TensorInfo]]
    """Of all parts that somebody will be sent, as their owners have them."""
    built: dict[str, nn.Module]


def build_arriving(module: PipelineModule, allocation: Allocation) -> Arriving:
    """Build what a move to ``allocation`` brings to this rank. Collective over each pipeline; moves nothing.

    Raises:
        RuntimeError: a layer is not what its specification builds; on all ranks.
    """
    held = held_modules(module)
    described = _descriptions(module, held, allocation)
    return Arriving(described, _build_missing(module, held, described, allocation))


def move_layers(
    module: PipelineModule,
    allocation: Allocation,
    arriving: Arriving,
    training_state: TrainingState | None = None,
) -> None:
    """Re-cut ``module``: move the layers whose rank changes, with their weights, and rebuild it in place.

    Collective over each pipeline; a data-parallel replica moves its own copies. The module keeps its
    process groups, and layers that stay keep their modules and ``Parameter`` objects. What the optimizer keeps for
    their parameters, in ``training_state``, goes with them. A rank lets go of each layer when it has sent it.
    """
    held = held_modules(module)
    _let_go(module)
    _exchange(module, held, arriving, allocation, training_state)
    _rebuild(module, held, allocation)


def _descriptions(
    module: PipelineModule, held: dict[str, nn.Module], allocation: Allocation
) -> dict[str, list[TensorInfo]]:
    """Of all parts that somebody will be sent."""
    grid, current = module.mpu(), allocation_of(module)
    sent = {}
    for part in parts_of(module):
        before = part.owners(current)
        if before[0] == grid.get_stage_id() and set(part.owners(allocation)) - set(before):
            sent[part.name] = _describe(held[part.name])
    described: dict[str, list[TensorInfo]] = {}
    for descriptions in gather_objects(sent, grid.get_pipe_parallel_group()):
        described.update(descriptions)
    return described


def _build_missing(
    module: PipelineModule,
    held: dict[str, nn.Module],
    described: dict[str, list[TensorInfo]],
    allocation: Allocation,
) -> dict[str, nn.Module]:
    """What this rank will be sent, built as its owner has it, whose own tensors take no room yet. Collective."""
    grid, current = module.mpu(), allocation_of(module)
    rank = grid.get_stage_id()
    built: dict[str, nn.Module] = {}
    flaw = None
    try:
        for part in parts_of(module):
            before = part.owners(current)
            if rank in part.owners(allocation) and rank not in before:
                sender = grid.stage_to_global(stage_id=before[0])
                built[part.name] = _build(part, described[part.name], sender)
                if built[part.name] is not part.spec:
                    _empty(built[part.name], held)
    except Exception as error:  # of the user's layers; every rank must hear of it
        flaw = portable(error)
    for found in gather_objects(flaw, grid.get_pipe_parallel_group()):
        if found is not None:
            raise found
    return built


def _exchange(
    module: PipelineModule,
    held: dict[str, nn.Module],
    arriving: Arriving,
    allocation: Allocation,
    training_state: TrainingState | None,
) -> None:
    """Bring ``held`` from the current allocation to the new one, one part after the other.

    All ranks go through the moves in the same order, so that the blocking transfers cannot deadlock.
    """
    grid, current = module.mpu(), allocation_of(module)
    rank = grid.get_stage_id()
    moves = []
    for part in parts_of(module):
        before, after = part.owners(current), part.owners(allocation)
        receivers = [destination for destination in after if destination not in before]
        moves.append((part, before[0], receivers, rank not in after))
    for part, source, receivers, leaves in moves:
        for destination in receivers:
            if rank == source:
                for tensor in _tensors(held[part.name]).values():
                    send_bytes(tensor, grid.stage_to_global(stage_id=destination))
                if training_state is not None:
                    training_state.send(part.name, grid.stage_to_global(stage_id=destination))
            elif rank == destination:
                sender = grid.stage_to_global(stage_id=source)
                held[part.name] = arriving.built[part.name]
                _receive(held[part.name], arriving.described[part.name], sender)
                if training_state is not None:
                    training_state.receive(part.name, source, sender)
        if leaves and part.name in held:
            if training_state is not None:
                training_state.drop(part.name)
            gone = held.pop(part.name)
            if gone is part.spec:  # a module that the user built: DeepSpeed keeps it for its specification
                gone.to("cpu")
            else:
                _empty(gone, held)


def _empty(gone: nn.Module, held: dict[str, nn.Module]) -> None:
    """Free the tensors of a part that left, or comes, but those that parts which are here have, too."""
    shared = {id(tensor) for part in held.values() for tensor in _tensors(part).values()}
    for tensor in _tensors(gone).values():
        if id(tensor) not in shared:
            # DeepSpeed makes its methods attributes of parameters: that circle outlives the last use.
            tensor.data = tensor.data.new_empty(0)


def _tensors(part: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(part.named_parameters()), **dict(part.named_buffers())}


def _describe(part: nn.Module) -> list[TensorInfo]:
    return [
        TensorInfo(name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in _tensors(part).items()
    ]


def _build(part: Part, description: list[TensorInfo], rank: int) -> nn.Module:
    """A part as its owner has it, but for the values."""
    built = part.spec if isinstance(part.spec, nn.Module) else part.spec.build()
    tensors = _tensors(built)
    if tensors.keys() != {info.name for info in description}:
        raise RuntimeError(
            f"layer {part.name!r} cannot be moved: its specification builds {sorted(tensors)} and rank {rank} "
            f"has {sorted(info.name for info in description)}; change layers in their specification, "
            "not after they are built"
        )
    return built


def _receive(built: nn.Module, description: list[TensorInfo], rank: int) -> None:
    """Fill a part that was built with what its owner sends."""
    device = torch.device(get_accelerator().current_device_name())
    tensors = _tensors(built)
    for info in description:
        tensor = tensors[info.name]
        tensor.data = receive_bytes(info.shape, info.dtype, device, rank)
        tensor.requires_grad_(info.requires_grad)


def _let_go(module: PipelineModule) -> None:
    """Take every layer out of ``module``, so that one that leaves this rank is freed."""
    for name in [name for name in module._modules if name.isdigit()]:
        delattr(module, name)
    if isinstance(module, StagesModule):
        module.let_go()
    module.forward_funcs = []
    module.fwd_map = {}
    module.tied_modules = nn.ModuleDict()
    module.tied_weight_attrs = {}
    for key in sorted(module.tied_comms):  # in one order on all ranks
        with suppress(ValueError):  # it has ended with all groups
            dist.destroy_process_group(module.tied_comms[key]["group"])
    module.tied_comms = {}


def _rebuild(module: PipelineModule, held: dict[str, nn.Module], allocation: Allocation) -> None:
    """Give ``module`` the layers of its new stages, built by DeepSpeed around the modules in ``held``."""
    place_layers(module, allocation)
    specs = module._layer_specs
    for layer, spec in enumerate(specs):
        here = owner(allocation, layer) == module.stage_id
        if here and isinstance(spec, TiedLayerSpec) and spec.key not in module.tied_modules:
            module.tied_modules[spec.key] = held[f"tied_modules.{spec.key}"]
            module.tied_weight_attrs[spec.key] = spec.tied_weight_attr
    # DeepSpeed registers a module that stands in the place of its specification as it is.
    module._layer_specs = [held.get(str(index), spec) for index, spec in enumerate(specs)]
    try:
        module._build()
    finally:
        module._layer_specs = specs
    module.to(get_accelerator().device_name(module.local_rank))
    module.tied_comms = module._index_tied_modules()
    module.is_checkpointable_results_interval = None
