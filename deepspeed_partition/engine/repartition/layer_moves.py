"""Moving layers between the ranks of a pipeline, and rebuilding its module in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from deepspeed_partition.engine.pipeline.asked_ranks import ranks_told_in_build
from deepspeed_partition.engine.pipeline.module import (
    Cut,
    check_every_rank_trains,
    check_same_model,
    place_layers,
    trial_boundaries,
)
from deepspeed_partition.engine.pipeline.parts import (
    Part,
    all_that_moves,
    held_modules,
    parts_of,
    tensors_by_name,
    trainable_and_frozen_parameters,
)
from deepspeed_partition.engine.pipeline.stages import StagesModule, allocation_in_words, allocation_of
from deepspeed_partition.engine.pipeline.tied_copies import own_copies
from deepspeed_partition.engine.repartition.buffer_tables import put_buffer
from deepspeed_partition.engine.repartition.one_memory import (
    lay_together,
    leave_others,
    say_what_lies_outside,
    take_apart,
)
from deepspeed_partition.engine.repartition.optimizer_state import TrainingState
from deepspeed_partition.engine.repartition.part_descriptions import (
    PartInfo,
    SentTensor,
    Unsendable,
    attributes_of_tensor,
    check_alike,
    describe,
    hidden_in,
    let_none_move,
    modules_of,
    only_what_changed,
    remember_attributes,
    say_what_stays,
    take_attributes,
    take_modules,
    tensors_in,
)
from deepspeed_partition.engine.repartition.tensor_forms import can_be_filled, emptied, receive_tensor, send_tensor
from deepspeed_partition.engine.runtime.collectives import (
    gather_objects,
    raised_together,
)
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.given_modules import built_aside, put_back_as_given
from deepspeed_partition.hidden_modules import hidden_tensors
from deepspeed_partition.planner.allocation import Allocation


@dataclass(frozen=True, slots=True)
class Arriving:
    """The parts that are to come to this rank, built but for the values of their tensors."""

    described: dict[str, PartInfo]
    """Descriptions of all parts that somebody will be sent, as their owners have them."""
    built: dict[str, nn.Module]
    hidden: dict[str, dict[str, torch.Tensor]]
    """The tensors of modules that these hide, by the parts and their names as they were built."""


def build_arriving(module: PipelineModule, allocation: Allocation) -> Arriving:
    """Build what a move to ``allocation`` brings to this rank. Collective over each pipeline; moves nothing.

    Raises:
        RuntimeError: a layer is not what its specification builds; on all ranks.
    """
    with _whole_in_reach(module):
        held = held_modules(module)
        described = _descriptions(module, held, allocation)
        return _build_missing(module, held, described, allocation)


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
    ranks = grid.get_pipe_parallel_group()

    def describe_mine() -> dict[str, PartInfo]:  # this runs code of the program, which may raise
        sent = {}
        for part in all_that_moves(module):
            before = part.owners(current)
            if before[0] == grid.get_stage_id() and set(part.owners(allocation)) - set(before):
                with _another(module, part, held[part.name]) as build:
                    sent[part.name] = only_what_changed(part, held[part.name], build)
        if sent:
            layers = {name: tensors_in(each) for name, each in held.items()}
            say_what_lies_outside(layers, sent, let_none_move(current))
        return sent

    described: dict[str, PartInfo] = {}
    for descriptions in gather_objects(raised_together(describe_mine, ranks), ranks):
        described.update(descriptions)
    say_what_stays(info.attributes for info in described.values())
    return described


def _checked_here(module: PipelineModule) -> dict[str, PartInfo]:
    """Check the parts of this rank that are built, and describe those that exist on every rank."""
    grid, held = module.mpu(), held_modules(module)
    existing = {}
    for part in all_that_moves(module):
        if part.owners(allocation_of(module))[0] == grid.get_stage_id():
            with _another(module, part, held[part.name]) as build:
                there = only_what_changed(part, held[part.name], build)
                if _is_built(part.spec):
                    check_alike(part, there, describe(build()), module.global_rank, allocation_of(module))
                else:
                    existing[part.name] = there
    return existing


def _check_existing(module: PipelineModule, existing: dict[str, PartInfo]) -> None:
    """Compare modules that every rank has with those of the ranks that run them."""
    grid, current = module.mpu(), allocation_of(module)
    for part in all_that_moves(module):
        owners = part.owners(current)
        if part.name in existing and grid.get_stage_id() not in owners:
            here = describe(_build_spec(module, part))
            check_alike(part, existing[part.name], here, grid.stage_to_global(stage_id=owners[0]), current)


def _build_missing(
    module: PipelineModule,
    held: dict[str, nn.Module],
    described: dict[str, PartInfo],
    allocation: Allocation,
) -> Arriving:
    """Build what this rank will be sent, as its owner has it; its own tensors take no room yet. Collective."""
    grid, current = module.mpu(), allocation_of(module)
    rank = grid.get_stage_id()
    arriving = Arriving(described, {}, {})
    kept = _users_of_tensors(held)

    def build() -> None:
        for part in all_that_moves(module):
            before = part.owners(current)
            if rank in part.owners(allocation) and rank not in before:
                sender = grid.stage_to_global(stage_id=before[0])
                _build(module, part, arriving, sender)
                if arriving.built[part.name] is not part.spec:
                    _empty(arriving.built[part.name], kept)

    with ranks_told_in_build(module._layer_specs):
        raised_together(build, grid.get_pipe_parallel_group())
    return arriving


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
    for part in all_that_moves(module):
        before, after = part.owners(current), part.owners(allocation)
        receivers = [destination for destination in after if destination not in before]
        moves.append((part, before[0], receivers, rank not in after))
    for part, source, receivers, leaves in moves:
        for destination in receivers:
            if rank == source:
                _send_part(
                    held[part.name], arriving.described[part.name], grid.stage_to_global(stage_id=destination)
                )
                if training_state is not None:
                    training_state.send(part.name, grid.stage_to_global(stage_id=destination))
            elif rank == destination:
                sender = grid.stage_to_global(stage_id=source)
                held[part.name] = arriving.built[part.name]
                _receive(part.name, arriving, sender, users)
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
            tensor.data = emptied(tensor)


def _send_part(part: nn.Module, description: PartInfo, rank: int) -> None:
    """Send the tensors of a part, and then those of modules that it hides."""
    for tensor in tensors_by_name(part).values():
        _send(tensor, rank)
    if description.hidden:
        tensors = hidden_tensors(hidden_in(part))
        for name in description.hidden:
            send_tensor(tensors[name], rank)


def _send(tensor: torch.Tensor, rank: int) -> None:
    """Send a parameter or a buffer, and the tensors among its attributes."""
    send_tensor(tensor, rank)
    for name, value in sorted(attributes_of_tensor(tensor).items()):
        if isinstance(value, SentTensor):
            send_tensor(vars(tensor)[name], rank)


def _build_spec(module: PipelineModule, part: Part) -> nn.Module:
    """Build a part, or find it where it exists on each rank.

    What it draws goes by the seed that DeepSpeed gives it with ``seed_layers``: so all ranks build the same, and
    where that is what its owner has, nothing has to be sent.
    """
    spec: Any = part.spec
    if not _is_built(spec):
        return spec if isinstance(spec, nn.Module) else spec.build()
    put_back_as_given(spec)
    seed_fn = module.seed_fn if module.seed_layers else None
    (seed_fn or set_random_seed)(module.base_seed + part.layers[0])
    return spec.build()


@contextmanager
def _another(module: PipelineModule, part: Part, held: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    """A function that builds a part once more, beside ``held``, which trains and is as before afterwards.

    Until it is called that one can be looked at: both may have modules that their specification is given.
    """
    with ExitStack() as stack:

        def build() -> nn.Module:
            return stack.enter_context(built_aside(part.spec, partial(_build_spec, module, part), held))

        yield cache(build)


def _build(module: PipelineModule, part: Part, arriving: Arriving, rank: int) -> None:
    """Build a part as its owner has it, but for the values."""
    built, description = _build_spec(module, part), arriving.described[part.name]
    check_alike(part, description, describe(built), rank, allocation_of(module))
    remember_attributes([built])
    take_modules(part, built, description, rank, allocation_of(module))
    arriving.built[part.name], arriving.hidden[part.name] = built, hidden_tensors(hidden_in(built))
    take_attributes(built, description)


def _receive(name: str, arriving: Arriving, rank: int, users: Counter[int]) -> None:
    """Fill a part that was built with what its owner sends.

    Args:
        name: The part.
        arriving: What was built.
        rank: The owner.
        users: The tensors of parts here by their ``id``, which a part that hides one of them does not write to.
    """
    built, description = arriving.built[name], arriving.described[name]
    device = torch.device(get_accelerator().current_device_name())
    tensors = tensors_by_name(built)
    leave_others(tensors_in(built))
    take_apart(tensors_in(built), description.memories)
    for info in description.tensors:
        tensor = tensors[info.name]
        values = receive_tensor(info.form, device, rank)
        if values.layout is tensor.layout:
            tensor.data = values
        else:
            put_buffer(modules_of(built), description.buffers, info.name, values)
            tensor = values
        tensor.grad = None  # of the time when this rank ran the layer, or trained it alone
        tensor.requires_grad_(info.requires_grad)
        for key, value in sorted(info.attributes.items()):
            if isinstance(value, SentTensor):
                vars(tensor)[key] = receive_tensor(value.form, torch.device(value.device_type), rank)
            elif not isinstance(value, Unsendable):
                vars(tensor)[key] = value
    for place, sent in description.hidden.items():
        values = receive_tensor(sent.form, torch.device(sent.device_type), rank)
        tensor = arriving.hidden[name][place]
        if users[id(tensor)]:
            continue
        if values.layout is not tensor.layout:
            put_buffer(modules_of(built), description.buffers, place, values)
        elif can_be_filled(tensor) and _is_like(tensor, values):
            tensor.data.copy_(values)  # others may have it, too
        else:
            tensor.data = values
    if description.memories:
        lay_together(tensors_in(built), description.memories)


def _is_like(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (values.shape, values.dtype, values.device)


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


def begin_anew_if_changed(module: PipelineModule) -> None:
    """Cut ``module`` as before its first plan, where it trains other layers than a run before has planned for.

    Collective over each pipeline, while no engine runs on ``module``. A plan or boundaries that a user built it
    with stay.

    Raises:
        ValueError: fewer layers with trainable parameters than stages, or none at all.
    """
    cut = getattr(module, "madpipe_cut", None)
    if cut is None or not cut.is_where_runs_plan:
        return
    present, (trainable, frozen) = allocation_of(module), trainable_and_frozen_parameters(module)
    try:
        if cut.plan is not None:
            check_same_model(cut.plan, trainable)
        check_every_rank_trains(present, trainable)
    except ValueError:
        allocation = Allocation.contiguous(trial_boundaries(trainable, module.num_stages, frozen))
        if allocation != present:
            with preserved_random_state():
                move_layers(module, allocation, build_arriving(module, allocation))
        module.madpipe_cut = Cut("trial")
        announce(
            f"other weights train now than in the run before, {sum(trainable):,} parameters in all: its cut "
            f"{allocation_in_words(present)} is given up, and the layers, now cut at "
            f"{allocation_in_words(allocation)}, are measured and planned again"
        )


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
