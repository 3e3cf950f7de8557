"""Moving layers between the ranks of a pipeline, and rebuilding its module in place."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from deepspeed_partition.engine.pipeline.module import place_layers
from deepspeed_partition.engine.pipeline.stages import StagesModule, allocation_of, owner
from deepspeed_partition.engine.pipeline.tied_copies import forms_of, own_copies
from deepspeed_partition.engine.repartition.optimizer_state import TrainingState
from deepspeed_partition.engine.runtime.collectives import (
    gather_objects,
    raised_together,
    receive_bytes,
    send_bytes,
)
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.profiling.attributes import attributes_of

OF_DEEPSPEED = (
    "grad_accum", "param_idx_in_group", "get_full_hp_", "set_full_hp_", "load_hp_checkpoint_state",
)  # fmt: skip
"""How names begin of attributes that DeepSpeed sets on parameters, besides ``ds_`` and ``_``."""
KNOWN = ("deepspeed.", "deepspeed_partition.", "lightning_madpipe.")
OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
LOSS = "loss_fn"
"""The name of a loss function that is a module among the parts of a pipeline."""


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule of the pipeline that a rank holds if it runs one of its layers."""

    name: str
    """The part's name in the pipeline: ``"3"``, or ``"tied_modules.embed"`` for layers that share one module."""
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
    attributes: dict[str, Any]
    """What a program has set on it, such as ``no_decay``."""
    hooks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartInfo:
    """What a receiver must know about a part that it is sent."""

    tensors: list[TensorInfo]
    hooks: tuple[str, ...]
    """The hooks of the part's modules."""
    attributes: dict[str, dict[str, Any]]
    """The other attributes of the part's modules, by the path of the module and the name of the attribute."""


def parts_of(module: PipelineModule) -> list[Part]:
    """Everything with weights in the whole pipeline, in the order of the layers; functions have none."""
    parts = [Part(form.part_name, form.layers, form.spec) for form in forms_of(module._layer_specs)]
    parts += [
        Part(str(index), (index,), spec)
        for index, spec in enumerate(module._layer_specs)
        if isinstance(spec, LayerSpec | nn.Module) and not isinstance(spec, TiedLayerSpec)
    ]
    return sorted(parts, key=lambda part: part.layers)


def loss_part_of(module: PipelineModule) -> Part | None:
    """The loss function, if it has weights or buffers: it belongs to the rank that runs the last layer.

    DeepSpeed registers it on every rank, where the other ones never use it.
    """
    loss_fn = module.loss_fn
    if not isinstance(loss_fn, nn.Module) or not tensors_by_name(loss_fn):
        return None
    return Part(LOSS, (module._num_layers - 1,), loss_fn)


def _all_that_moves(module: PipelineModule) -> list[Part]:
    loss = loss_part_of(module)
    return [*parts_of(module), *([] if loss is None else [loss])]


def held_modules(module: PipelineModule) -> dict[str, nn.Module]:
    """The parts that this rank holds now, by their global names."""
    # Not named_children(), which names a module once that the user listed as several layers.
    held = {name: child for name, child in module._modules.items() if name.isdigit() and child is not None}
    if isinstance(module.loss_fn, nn.Module):
        held[LOSS] = module.loss_fn
    held.update({copy.form.part_name: module.tied_modules[copy.registered] for copy in own_copies(module)})
    return held


def parts_with_parameters(module: PipelineModule) -> list[str]:
    """The parts of this rank that have parameters, whose names begin so, in the order of the layers."""
    held = held_modules(module)
    found = (part.name for part in _all_that_moves(module) if part.name in held)
    return [name for name in found if any(True for _ in held[name].parameters())]


def in_words(names: Sequence[str]) -> str:
    """Names of parts: ``layers 3, 4 and tied_modules.embed``."""
    *others, last = [*names[:8], *(["..."] if len(names) > 8 else [])]
    return ("layers " + ", ".join(others) + " and " if others else "layer ") + last


def trainable_parameters(module: PipelineModule) -> list[int]:
    """Count each layer's trainable parameters; tied ones count wherever they stand. Collective."""
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

    described: dict[str, PartInfo]
    """Descriptions of all parts that somebody will be sent, as their owners have them."""
    built: dict[str, nn.Module]


def build_arriving(module: PipelineModule, allocation: Allocation) -> Arriving:
    """Build what a move to ``allocation`` brings to this rank. Collective over each pipeline; moves nothing.

    Raises:
        RuntimeError: a layer is not what its specification builds; on all ranks.
    """
    with _whole_in_reach(module):
        held = held_modules(module)
        described = _descriptions(module, held, allocation)
        return Arriving(described, _build_missing(module, held, described, allocation))


def check_that_layers_can_move(module: PipelineModule) -> None:
    """Refuse now what a move of any layer would refuse later. Collective over each pipeline; moves nothing.

    Each rank builds its layers once more, one at a time, where they come from specifications.

    Raises:
        RuntimeError: a layer is not what its specification builds; on all ranks.
    """
    if module.num_stages == 1:
        return
    with _whole_in_reach(module), preserved_random_state():
        ranks = module.mpu().get_pipe_parallel_group()
        described = gather_objects(raised_together(lambda: _checked_here(module), ranks), ranks)
        existing = {name: info for infos in described for name, info in infos.items()}
        raised_together(lambda: _check_existing(module, existing), ranks)


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
    with _whole_in_reach(module):
        held = held_modules(module)
        _let_go(module)
        _exchange(module, held, arriving, allocation, training_state)
        _rebuild(module, held, allocation)
    getattr(module, "when_layers_moved", _nothing)()


def _nothing() -> None:
    """Do nothing after a move, where no host asks for more."""


def _whole_in_reach(module: PipelineModule) -> AbstractContextManager[None]:
    """A context in which the tensors of layers that are not here can be read: a host may hide them otherwise."""
    return getattr(module, "whole_in_reach", nullcontext)()


def _descriptions(
    module: PipelineModule, held: dict[str, nn.Module], allocation: Allocation
) -> dict[str, PartInfo]:
    """Gather descriptions of all parts that somebody will be sent. Collective over the pipeline."""
    grid, current = module.mpu(), allocation_of(module)
    sent = {}
    for part in _all_that_moves(module):
        before = part.owners(current)
        if before[0] == grid.get_stage_id() and set(part.owners(allocation)) - set(before):
            sent[part.name] = _only_what_changed(part, _describe(held[part.name]))
    described: dict[str, PartInfo] = {}
    for descriptions in gather_objects(sent, grid.get_pipe_parallel_group()):
        described.update(descriptions)
    return described


def _checked_here(module: PipelineModule) -> dict[str, PartInfo]:
    """Check the parts of this rank that are built, and describe those that exist on every rank."""
    grid, held = module.mpu(), held_modules(module)
    existing = {}
    for part in _all_that_moves(module):
        if part.owners(allocation_of(module))[0] == grid.get_stage_id():
            there = _describe(held[part.name])
            if _is_built(part.spec):
                built = _build_spec(part.spec)
                _check_alike(part, _only_what_changed(part, there, built), _describe(built), module.global_rank)
            else:
                existing[part.name] = _only_what_changed(part, there)
    return existing


def _check_existing(module: PipelineModule, existing: dict[str, PartInfo]) -> None:
    """Compare modules that every rank has with those of the ranks that run them."""
    grid, current = module.mpu(), allocation_of(module)
    for part in _all_that_moves(module):
        owners = part.owners(current)
        if part.name in existing and grid.get_stage_id() not in owners:
            here = _describe(_build_spec(part.spec))
            _check_alike(part, existing[part.name], here, grid.stage_to_global(stage_id=owners[0]))


def _build_missing(
    module: PipelineModule,
    held: dict[str, nn.Module],
    described: dict[str, PartInfo],
    allocation: Allocation,
) -> dict[str, nn.Module]:
    """Build what this rank will be sent, as its owner has it; its own tensors take no room yet. Collective."""
    grid, current = module.mpu(), allocation_of(module)
    rank = grid.get_stage_id()
    built: dict[str, nn.Module] = {}
    kept = _users_of_tensors(held)

    def build() -> None:
        for part in _all_that_moves(module):
            before = part.owners(current)
            if rank in part.owners(allocation) and rank not in before:
                sender = grid.stage_to_global(stage_id=before[0])
                built[part.name] = _build(part, described[part.name], sender)
                if built[part.name] is not part.spec:
                    _empty(built[part.name], kept)

    raised_together(build, grid.get_pipe_parallel_group())
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
    users = _users_of_tensors(held)
    moves = []
    for part in _all_that_moves(module):
        before, after = part.owners(current), part.owners(allocation)
        receivers = [destination for destination in after if destination not in before]
        moves.append((part, before[0], receivers, rank not in after))
    for part, source, receivers, leaves in moves:
        for destination in receivers:
            if rank == source:
                for tensor in tensors_by_name(held[part.name]).values():
                    _send(tensor, grid.stage_to_global(stage_id=destination))
                if training_state is not None:
                    training_state.send(part.name, grid.stage_to_global(stage_id=destination))
            elif rank == destination:
                sender = grid.stage_to_global(stage_id=source)
                held[part.name] = arriving.built[part.name]
                _receive(held[part.name], arriving.described[part.name], sender)
                users.update(map(id, tensors_by_name(held[part.name]).values()))
                if training_state is not None:
                    training_state.receive(part.name, source, sender)
        if leaves and part.name in held:
            if training_state is not None:
                training_state.drop(part.name)
            gone = held.pop(part.name)
            users.subtract(map(id, tensors_by_name(gone).values()))
            if gone is part.spec:  # a module that the user built: DeepSpeed keeps it for its specification
                gone.to("cpu")
            else:
                _empty(gone, users)


def _users_of_tensors(held: dict[str, nn.Module]) -> Counter[int]:
    """Count, for each tensor by its ``id``, the parts of ``held`` that have it: tied parts share some."""
    return Counter(id(tensor) for part in held.values() for tensor in tensors_by_name(part).values())


def _empty(gone: nn.Module, users: Counter[int]) -> None:
    """Free the tensors of a part that left, or comes, except those that parts on this rank use, too."""
    for tensor in tensors_by_name(gone).values():
        if users[id(tensor)] == 0:
            # DeepSpeed makes its methods attributes of parameters: that circle outlives the last use.
            tensor.data = tensor.data.new_empty(0)


def tensors_by_name(part: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a part, or of a layer, by their names there."""
    return {**dict(part.named_parameters()), **dict(part.named_buffers())}


def _describe(part: nn.Module) -> PartInfo:
    tensors = [
        TensorInfo(
            name,
            tensor.shape,
            tensor.dtype,
            tensor.requires_grad,
            _attributes(tensor),
            tuple(_hooks(tensor, OF_TENSORS)),
        )
        for name, tensor in tensors_by_name(part).items()
    ]
    hooks = (hook for name, module in part.named_modules() for hook in _hooks(module, OF_MODULES, name))
    attributes = {name: _module_attributes(module) for name, module in part.named_modules()}
    return PartInfo(tensors, tuple(hooks), attributes)


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A generator of random numbers, as another process can have it."""

    state: torch.Tensor


def _module_attributes(module: nn.Module) -> dict[str, Any]:
    """What the class or a program has set on a module, as it can be sent; else the class of what cannot."""
    return {name: _sendable(value) for name, value in attributes_of(module).items() if not _is_known(value)}


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor that is an attribute of a parameter, such as its running average, and is sent after it."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str


def _send(tensor: torch.Tensor, rank: int) -> None:
    """Send a parameter or a buffer, and the tensors among its attributes."""
    send_bytes(tensor, rank)
    device = get_accelerator().current_device_name()
    for name, value in sorted(_attributes(tensor).items()):
        if isinstance(value, SentTensor):
            send_bytes(vars(tensor)[name].to(device), rank)


def _sendable(value: Any) -> Any:
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return GeneratorState(value.get_state())
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().cpu()
    return value if _is_plain(value) else Unsendable(type(value).__name__)


def _only_what_changed(part: Part, there: PartInfo, built: nn.Module | None = None) -> PartInfo:
    """Leave out the attributes that a layer has when it is built: those may name the rank, or its device."""
    if isinstance(part.spec, nn.Module):  # a program sets what it sets on every rank; one of them runs the loss
        return there if part.name == LOSS else replace(there, attributes={})
    built = part.spec.build() if built is None else built
    own = {name: _module_attributes(module) for name, module in built.named_modules()}
    changed = {
        path: {name: value for name, value in found.items() if not _is_alike(own.get(path, {}), name, value)}
        for path, found in there.attributes.items()
    }
    return replace(there, attributes=changed)


def _is_alike(own: dict[str, Any], name: str, value: Any) -> bool:
    if name not in own or type(own[name]) is not type(value):
        return False
    if isinstance(value, GeneratorState):
        return torch.equal(own[name].state, value.state)
    if isinstance(value, torch.Tensor):
        # Where a layer draws it, it need not be what a layer of the same specification has drawn.
        return own[name].shape == value.shape and torch.equal(own[name], value)
    return bool(own[name] == value)


def _take_attributes(built: nn.Module, there: PartInfo) -> None:
    for path, found in there.attributes.items():
        here = vars(built.get_submodule(path))
        for name, value in found.items():
            if isinstance(value, GeneratorState):
                here.setdefault(name, torch.Generator()).set_state(value.state)
            elif isinstance(value, torch.Tensor):
                here[name] = value.to(get_accelerator().current_device_name())
            elif not isinstance(value, Unsendable):
                here[name] = value


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a program, and not DeepSpeed, has set. What cannot be sent is replaced by its class."""
    found = {
        name: value
        for name, value in vars(tensor).items()
        if not name.startswith(("_", "ds_", *OF_DEEPSPEED)) and not _is_known(value)
    }
    return {name: _of_a_tensor(value) for name, value in found.items()}


def _of_a_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return SentTensor(value.shape, value.dtype, value.device.type)
    return value if _is_plain(value) else Unsendable(type(value).__name__)


@dataclass(frozen=True, slots=True)
class Unsendable:
    """An attribute that another process cannot have, such as a function."""

    type_name: str


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(member) for key, member in value.items())
    return value is None or isinstance(value, str | bytes | int | float | complex | torch.dtype | enum.Enum)


def _hooks(owner: Any, kinds: Iterable[str], name: str = "") -> Iterator[str]:
    """The hooks that a program has registered, in words that are the same in each process."""
    for kind in kinds:
        for hook in (getattr(owner, kind, None) or {}).values():
            if not _is_known(hook):
                function = getattr(hook, "__qualname__", type(hook).__qualname__)
                yield f"{hook.__module__}.{function} ({kind.strip('_')}{f' of {name}' if name else ''})"


def _is_known(function: Any) -> bool:
    """Whether DeepSpeed or this package has made it."""
    return f"{getattr(function, '__module__', '')}.".startswith(KNOWN)


def _check_what_was_added(part: Part, there: PartInfo, here: PartInfo, rank: int) -> None:
    """Refuse to leave behind what no other process can have.

    Raises:
        RuntimeError: a hook that the specification does not register, or an attribute that cannot be sent.
    """
    own = {info.name: info for info in here.tensors}
    added = Counter(there.hooks) - Counter(here.hooks)
    for info in there.tensors:
        added += Counter(f"{hook} on {info.name}" for hook in info.hooks) - Counter(
            f"{hook} on {info.name}" for hook in own[info.name].hooks
        )
    if added:
        raise RuntimeError(
            f"layer {part.name!r} cannot be moved: on rank {rank} it has the hook {next(iter(added))}, which "
            "would stay behind: register it where the layer is built, in its __init__; or give the cut as "
            "boundaries or a plan, so that no layer moves; or remove it, and register it again after the move"
        )
    attributes = [(info.name, info.attributes, own[info.name].attributes) for info in there.tensors]
    attributes += [
        (path or "module", {name: value for name, value in found.items() if name[0] != "_"}, here.attributes[path])
        for path, found in there.attributes.items()
    ]
    for owner_name, found, known in attributes:
        for name, value in found.items():
            if isinstance(value, Unsendable) and name not in known:
                raise RuntimeError(
                    f"layer {part.name!r} cannot be moved: on rank {rank} its {owner_name} has the attribute "
                    f"{name!r}, a {value.type_name}, which no other process can have: set it where the layer is "
                    "built, in its __init__; or give the cut as boundaries or a plan, so that no layer moves"
                )


def _build_spec(spec: Any) -> nn.Module:
    return spec if isinstance(spec, nn.Module) else spec.build()


def _build(part: Part, description: PartInfo, rank: int) -> nn.Module:
    """Build a part as its owner has it, but for the values."""
    built = _build_spec(part.spec)
    _check_alike(part, description, _describe(built), rank)
    _take_attributes(built, description)
    return built


def _check_alike(part: Part, description: PartInfo, here: PartInfo, rank: int) -> None:
    """Refuse a part that is not what its specification builds.

    Raises:
        RuntimeError: other parameters or buffers; a hook or an attribute that cannot be sent.
    """
    tensors = {info.name for info in here.tensors}
    if tensors != {info.name for info in description.tensors}:
        raise RuntimeError(
            f"layer {part.name!r} cannot be moved: its specification builds {sorted(tensors)} and rank {rank} "
            f"has {sorted(info.name for info in description.tensors)}; change layers in their specification, "
            "not after they are built (weight normalization or LoRA go into the __init__ of a layer, or of a "
            "module that wraps it); or give the cut as boundaries or a plan, so that no layer moves"
        )
    _check_what_was_added(part, description, here, rank)


def _receive(built: nn.Module, description: PartInfo, rank: int) -> None:
    """Fill a part that was built with what its owner sends."""
    device = torch.device(get_accelerator().current_device_name())
    tensors = tensors_by_name(built)
    for info in description.tensors:
        tensor = tensors[info.name]
        tensor.data = receive_bytes(info.shape, info.dtype, device, rank)
        tensor.requires_grad_(info.requires_grad)
        for name, value in sorted(info.attributes.items()):
            if isinstance(value, SentTensor):
                vars(tensor)[name] = receive_bytes(value.shape, value.dtype, device, rank).to(value.device_type)
            elif not isinstance(value, Unsendable):
                vars(tensor)[name] = value


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
    for copy in own_copies(module):
        module.tied_modules[copy.registered] = held[copy.form.part_name]
        module.tied_weight_attrs[copy.registered] = copy.form.spec.tied_weight_attr
    # DeepSpeed registers a module that stands in the place of its specification as it is.
    module._layer_specs = [held.get(str(index), spec) for index, spec in enumerate(specs)]
    try:
        module._build()
    finally:
        module._layer_specs = specs
    module.to(get_accelerator().current_device_name())
    module.tied_comms = module._index_tied_modules()
    module.is_checkpointable_results_interval = None


def has_layers(module: PipelineModule, layers: Sequence[Any]) -> bool:
    """Whether ``layers`` are those of ``module``: the same modules in the same places; functions may be new."""
    return len(layers) == len(module._layer_specs) and all(
        _identity(old) == _identity(new) for old, new in zip(module._layer_specs, layers, strict=True)
    )


def exchange_layers(module: PipelineModule, layers: Sequence[Any]) -> None:
    """Let ``module`` run ``layers`` in the places of its own; see :func:`has_layers`. Collective."""
    if all(old is new for old, new in zip(module._layer_specs, layers, strict=True)):
        return
    held = held_modules(module)
    _let_go(module)
    module._layer_specs = list(layers)
    for part in parts_of(module):
        if part.name in held and not _is_built(part.spec):
            held[part.name] = part.spec if isinstance(part.spec, nn.Module) else part.spec.build()
    _rebuild(module, held, allocation_of(module))


def _is_built(spec: Any) -> bool:
    """Whether what ``spec`` builds is there on its rank alone."""
    return isinstance(spec, LayerSpec) and not isinstance(getattr(spec, "module", None), nn.Module)


def _identity(spec: Any) -> Any:
    """What stays of a layer that is listed again."""
    spec = getattr(spec, "_orig_mod", spec)  # torch.compile wraps it anew
    if isinstance(spec, TiedLayerSpec):
        return spec.key, id(getattr(spec, "module", spec.typename))
    if isinstance(spec, LayerSpec):
        return spec.typename, repr(spec)
    return id(spec) if isinstance(spec, nn.Module) else callable(spec)
