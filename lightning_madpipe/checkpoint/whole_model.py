"""The module as its user wrote it, again, when fit, validate, test or predict has returned.

While a pipeline runs, each rank has the trained values of its own layers alone, and the engine keeps these as it
needs them: as views of flat buffers, in half precision beside fp32 master weights. Afterwards every layer has its
trained values on every rank, in the type that one device would have, in the very ``Parameter`` objects that the
user holds. The engine stays beside them, for ``trainer.save_checkpoint`` after ``fit``, until the next run begins.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from deepspeed_partition.engine.pipeline.parts import held_modules, parts_of, tensors_by_name
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.repartition.buffer_tables import BufferPlaces, buffers_of
from deepspeed_partition.engine.repartition.one_memory import lay_together, memories_of, take_apart
from deepspeed_partition.engine.repartition.part_descriptions import (
    SentTensor,
    Unsendable,
    attributes_of_tensor,
    changed_attributes,
    remember_attributes,
    say_what_stays,
    set_attributes,
    tensors_in,
)
from deepspeed_partition.engine.repartition.shared_tensors import with_present
from deepspeed_partition.engine.runtime.collectives import gather_objects, receive_bytes, send_bytes
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.warmup.run_platform import machine_memory_bytes
from deepspeed_partition.planner.units import format_bytes
from deepspeed_partition.profiling.sources import users_names
from deepspeed_partition.tensor_values import bytes_view
from lightning_madpipe.checkpoint.layers_on_rank_zero import LayersOnRankZero, TensorInfo, places_of_buffers
from lightning_madpipe.compat.unsupported import hooks_of_weight, name_of_function
from lightning_madpipe.module import TiedModule
from lightning_madpipe.steps.list_in_words import some

PLACES = ("every_rank", "rank_zero", "none")
"""The places where the whole model can be put when a run has ended."""

SHARE_OF_FREE_MEMORY = 0.8
"""The share of a machine's free memory that the whole model may take there on all its ranks."""

OF_ENGINES = (
    "_dp_group", "_hp_grad", "_hp_mapping", "_index_in_param_group", "_zero_optimizer", "get_full_hp_grad",
    "get_full_hp_param", "grad_accum", "load_hp_checkpoint_state", "param_idx_in_group", "set_full_hp_grad",
    "set_full_hp_param",
)  # fmt: skip
"""What DeepSpeed (0.19) hangs on a parameter, which could not be copied with it."""


class Loan(NamedTuple):
    """What an engine needs a tensor to be, while the user has it otherwise."""

    tensor: Tensor
    data: Tensor
    attributes: dict[str, Any]


class Before(NamedTuple):
    """How the user has a tensor."""

    tensor: Tensor
    dtype: torch.dtype
    value: Tensor | None
    """The user's values of the tensor, where an engine rounds it and has no finer one; None elsewhere."""


class Group(NamedTuple):
    """A parameter group of the user's optimizer."""

    settings: dict[str, Any]
    given: list[Any]
    """The user's parameters, of all layers."""
    of_engine: list[Any]
    """What the engine has in their place: those of this rank, or a flat tensor of them."""


class LayersOfUser:
    """The tensors of a pipeline's layers, in the form that the user has them in, and in the engine's.

    Args:
        pipeline: Its layers.
    """

    def __init__(self, pipeline: PipelineModule) -> None:
        self._pipeline = pipeline
        self._before: dict[int, Before] = {}
        self._loans: list[Loan] = []
        self._groups: list[Group] = []
        self._fitting = False
        self.on_rank_zero = LayersOnRankZero(pipeline)
        """The layers of other ranks that rank 0 has, too."""
        self.are_with_engine = False
        """Whether the tensors of this rank's layers are as an engine needs them."""

    def hand_over(self, *, low: bool, fitting: bool) -> None:
        """Remember, before an engine starts, how the user has each tensor, of any layer.

        Args:
            low: Whether the engine works in half precision, and rounds what it is given.
            fitting: Whether it trains, with fp32 master weights.
        """
        self._loans, self._groups, self.are_with_engine, self._fitting = [], [], True, fitting
        # Each with the tensor itself, so that no other one gets its number.
        self._before = {
            id(tensor): Before(tensor, tensor.dtype, tensor.data if low and tensor.is_floating_point() else None)
            for layer in self.layers().values()
            for tensor in tensors_by_name(layer).values()
        }
        if fitting:
            # As the first zero_grad() of a fit does on one device: an engine adds to what it finds.
            for before in self._before.values():
                before.tensor.grad = None

    def refine_masters(self) -> None:
        """Let an engine's fp32 masters be what it has rounded, when it has started. Collective on a stage."""
        for tensor in self._own():
            before = self._before.get(id(tensor))
            if hasattr(tensor, "_hp_mapping") and before is not None and before.value is not None:
                safe_set_full_fp32_param(tensor, before.value.float())
        for key, before in self._before.items():
            if self._fitting and before.tensor.requires_grad:  # whose values are the master weights from now on
                self._before[key] = before._replace(value=None)

    def remember_groups(self, given: Sequence[tuple[dict[str, Any], list[Any]]]) -> None:
        """Keep the parameters in each group of the user's optimizer; the engine has those of this rank."""
        self._groups = [Group(group, parameters, group["params"]) for group, parameters in given]

    def given_to_optimizer(self) -> set[Tensor]:
        """The parameters, of all layers and of none, that the user's optimizer was given."""
        return {weight for group in self._groups for weight in group.given}

    def take_back(self, *, has_masters: bool = True) -> None:
        """Give this rank's tensors the user's form. Collective among the replicas of a stage.

        Args:
            has_masters: Whether the engine is still there, with its master weights.
        """
        if not self.are_with_engine:
            return
        for tensor in self._own():
            attributes = {} if has_masters else _without_engines_attributes(tensor)
            value = self._users_value(tensor)
            attributes |= _without_engines_attributes(tensor)
            if attributes or value is not None:
                self._loans.append(Loan(tensor, tensor.data, attributes))
            if value is not None:
                tensor.data = value
        for layer in self.layers().values():  # those that were here, and left
            for tensor in tensors_by_name(layer).values():
                _without_engines_attributes(tensor)
        self._groups = [group._replace(of_engine=group.settings["params"]) for group in self._groups]
        for group in self._groups:
            group.settings["params"] = group.given
        self.are_with_engine = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the engine have its tensors meanwhile, as the user has changed them. Collective on a stage."""
        if self.are_with_engine:
            yield
            return
        for group in self._groups:
            group.settings["params"] = group.of_engine
        loans, self._loans = self._loans, []
        for tensor, data, attributes in loans:
            users, tensor.data = tensor.data, data
            vars(tensor).update(attributes)
            if "_hp_mapping" in attributes:
                # The master weights may be finer than what the user has.
                masters = safe_get_full_fp32_param(tensor)
                if not torch.equal(masters.to(users), users):
                    safe_set_full_fp32_param(tensor, users.to(masters))
            tensor.data.copy_(users)
        self.are_with_engine = True
        try:
            yield
        finally:
            self.take_back()

    def gather(self, place: str) -> str | None:
        """Bring each layer from the rank that trains it to all others, or to rank 0 alone. Collective.

        One tensor at a time is on its way. What the layer has set on itself, such as a counter, and what a program
        has set on a tensor, comes with it; objects that no other process can have are named.

        Args:
            place: ``"every_rank"`` or ``"rank_zero"``.

        Returns:
            None, or why nothing was brought: memory is short; alike on all ranks.
        """
        grid, allocation = self._pipeline.mpu(), allocation_of(self._pipeline)
        stage, group = grid.get_stage_id(), grid.get_pipe_parallel_group()
        layers = self.layers()
        # What only a LayerSpec knows has no place on ranks that don't run it.
        parts = [part for part in parts_of(self._pipeline) if _module_of(part.spec) is not None]
        owners = {part.name: part.owners(allocation) for part in parts}
        own = {name: layers[name] for name in owners if owners[name][0] == stage}
        mine = {
            name: (
                self._described(layer),
                {own: attributes_of_tensor(tensor) for own, tensor in tensors_by_name(layer).items()},
                changed_attributes(layer),
                memories_of(tensors_in(layer)),
                hooks_on_weights(layer),
                buffers_of(dict(layer.named_modules())),
            )
            for name, layer in own.items()
        }
        everyone = {name: infos for theirs in gather_objects(mine, group) for name, infos in theirs.items()}
        described = {name: info for name, (info, *_) in everyone.items()}
        receives = place == "every_rank" or dist.get_rank() == 0
        arriving = {name: receives and stage not in owners[name] for name in owners}
        coming = [name for name in owners if arriving[name]]
        on_tensors = {name: there for name, (_, there, *_) in everyone.items()}
        made = [each for name in coming for each in _registered(layers[name], everyone[name][-1])]
        reason = _why_no_room(self._bytes_to_allocate(coming, described, on_tensors))
        if reason is not None:
            for module, key in made:  # a layer may ask whether it has one already
                delattr(module, key)
            return reason
        self.take_back()
        stay: list[tuple[str, str]] = []
        for name in owners:
            source, tensors = grid.stage_to_global(stage_id=owners[name][0]), tensors_by_name(layers[name])
            _, set_on_tensors, changed, memories, hooks, _ = everyone[name]
            arrives = arriving[name]
            pass_on = partial(passed_on, source=source, group=group, place=place, arrives=arrives)
            buffers = places_of_buffers(layers[name]) if arrives else {}
            if arrives:
                for gone in tensors.keys() - {info.name for info in described[name]}:
                    table, key = buffers[gone]
                    table[key] = None
                take_apart(tensors_in(layers[name]), memories)
            for info in described[name]:
                # A buffer that a layer has made where it runs may not be there on others.
                tensor, is_source = tensors.get(info.name), dist.get_rank() == source
                value = pass_on(tensor if is_source else None, info)
                if arrives:
                    tensor = _arrived(tensor, value, info, buffers)
                set_there = set_on_tensors[info.name]
                for key, sent in sorted(set_there.items()):
                    if isinstance(sent, SentTensor):
                        value = vars(tensor)[key] if is_source else None
                        set_there[key] = pass_on(value, TensorInfo(key, sent.form.shape, sent.form.dtype, False))
                if arrives and tensor is not None:
                    _set_on_tensor(tensor, info.name, set_there)
            if arrives:
                set_attributes(layers[name], changed)
                lay_together(tensors_in(layers[name]), memories)
                owner = users_names.get(layers[name], "a layer")
                missing = Counter(hooks) - Counter(hooks_on_weights(layers[name]))
                stay += [(hook, f"{owner}.{weight}") for hook, weight in missing]
        say_hooks_that_stay(stay)
        say_what_stays(changed for _, _, changed, *_ in everyone.values())
        if place == "every_rank":
            remember_attributes(layers.values(), again=True)
        return None

    def layers(self) -> dict[str, nn.Module]:
        """All layers that this rank knows, by their names in the pipeline, also those that others run."""
        held = held_modules(self._pipeline)
        # Not `or`: a container without layers is false.
        known = {part.name: held.get(part.name, _module_of(part.spec)) for part in parts_of(self._pipeline)}
        return {name: layer for name, layer in known.items() if layer is not None}

    def _own(self) -> list[Tensor]:
        found = {
            id(tensor): tensor
            for layer in held_modules(self._pipeline).values()
            for tensor in tensors_by_name(layer).values()
        }
        return list(found.values())

    def in_users_form(self, tensor: Tensor) -> Tensor:
        """What the user is to have in the place of a tensor without master weights, such as a frozen one."""
        value = self._users_value(tensor) if self.are_with_engine else None
        return tensor if value is None else value

    def type_of(self, tensor: Tensor) -> torch.dtype:
        """The type that the user has ``tensor`` in."""
        before = self._before.get(id(tensor))
        return tensor.dtype if before is None else before.dtype

    def _users_value(self, tensor: Tensor) -> Tensor | None:
        """What the user is to have in the place of an engine's tensor; None where it stays."""
        before = self._before.get(id(tensor))
        dtype = tensor.dtype if before is None else before.dtype
        if hasattr(tensor, "_hp_mapping"):
            return _off_the_device(safe_get_full_fp32_param(tensor).to(dtype))
        if tensor.dtype == dtype:
            return None
        rounded = None if before is None or before.value is None else before.value.to(tensor)
        if rounded is not None and rounded.shape == tensor.shape and torch.equal(rounded, tensor):
            assert before is not None
            return before.value  # which nobody has changed
        return _off_the_device(tensor.data.to(dtype))

    def _described(self, layer: nn.Module) -> list[TensorInfo]:
        """The tensors of a layer in the user's form."""
        return [
            TensorInfo.of(name, tensor, self.type_of(tensor)) for name, tensor in tensors_by_name(layer).items()
        ]

    def _bytes_to_allocate(
        self,
        arriving: Sequence[str],
        described: Mapping[str, list[TensorInfo]],
        set_on_tensors: Mapping[str, Mapping[str, Mapping[str, Any]]],
    ) -> int:
        layers = self.layers()
        needed = 0
        for name in arriving:
            tensors = tensors_by_name(layers[name])
            if (
                not tensors.keys() ^ {info.name for info in described[name]}
                <= places_of_buffers(layers[name]).keys()
            ):
                raise RuntimeError(
                    f"layer {name!r} has other tensors on the rank that runs it than on this one: change layers "
                    "before fit, and not in it"
                )
            needed += sum(
                _bytes_of(info)
                for info in described[name]
                if info.name not in tensors or not _fits_into(tensors[info.name], info)
            )
            needed += sum(
                sent.form.shape.numel() * sent.form.dtype.itemsize
                for there in set_on_tensors[name].values()
                for sent in there.values()
                if isinstance(sent, SentTensor)
            )
        if self.are_with_engine:
            for tensor in self._own():
                if hasattr(tensor, "_hp_mapping") or tensor.dtype != self.type_of(tensor):
                    needed += tensor.numel() * self.type_of(tensor).itemsize
        return needed


def _registered(layer: nn.Module, there: BufferPlaces) -> list[tuple[nn.Module, str]]:
    """Register, without values, the buffers that a layer has registered in a forward on another rank.

    Returns:
        Their modules, with their names there.
    """
    modules, made = dict(layer.named_modules()), []
    for name, place in there.items():
        path, _, key = name.rpartition(".")
        if path in modules and key not in modules[path]._buffers and not hasattr(modules[path], key):
            modules[path].register_buffer(key, None, persistent=place.is_persistent)
            made.append((modules[path], key))
    return made


def can_be_whole(pipeline: PipelineModule) -> bool:
    """Whether every rank knows every layer; nobody but its own rank knows what a ``LayerSpec`` builds."""
    return all(_module_of(part.spec) is not None for part in parts_of(pipeline))


def _module_of(spec: Any) -> nn.Module | None:
    if isinstance(spec, TiedModule):
        return spec.module
    return spec if isinstance(spec, nn.Module) else None


def _without_engines_attributes(tensor: Tensor) -> dict[str, Any]:
    return {name: vars(tensor).pop(name) for name in OF_ENGINES if name in vars(tensor)}


def _off_the_device(value: Tensor) -> Tensor:
    """Copy a tensor to the CPU, where Lightning has the module after a run: the device has no room for both."""
    return value.to("cpu")


def passed_on(
    value: Tensor | None, info: TensorInfo, source: int, group: Any, place: str, *, arrives: bool
) -> Tensor | None:
    """``value`` of the rank ``source``, where it arrives. Collective in ``group`` for every rank."""
    device = torch.device(get_accelerator().current_device_name())
    if not info.shape.numel():
        return torch.empty(info.shape, dtype=info.dtype)
    if place == "every_rank":
        # As bytes: not every backend knows every type.
        sent = torch.empty(info.shape, dtype=info.dtype, device=device) if value is None else value.detach()
        sent = sent.to(device).contiguous()
        dist.broadcast(bytes_view(sent), src=source, group=group)
        return sent
    if dist.get_rank() == 0:
        return receive_bytes(info.shape, info.dtype, device, source) if arrives else None
    ranks = dist.get_process_group_ranks(group)
    if value is not None and 0 in ranks and source != 0:
        send_bytes(value.detach().to(device), 0)
    return None


def lay_into(tensor: Tensor, value: Tensor | None, info: TensorInfo) -> None:
    """Give a tensor the values that have arrived, and what goes with them."""
    assert value is not None, "it arrives here"
    if _fits_into(tensor, info):
        tensor.data.copy_(value)
    else:
        tensor.data = value.to("cpu")
    info.mark(tensor)


def _arrived(
    tensor: Tensor | None, value: Tensor | None, info: TensorInfo, buffers: Mapping[str, tuple[Any, str]]
) -> Tensor:
    """Give a tensor the values that have arrived, or make the buffer that is not here; return it."""
    if tensor is not None:
        lay_into(tensor, value, info)
        return tensor
    assert value is not None, "it arrives here"
    table, key = buffers[info.name]
    table[key] = made = value.to("cpu")
    return made


def _set_on_tensor(tensor: Tensor, name: str, there: Mapping[str, Any]) -> None:
    """Let a tensor have the attributes that a program has set on it on another rank, and no others."""
    own = vars(tensor)
    for key in attributes_of_tensor(tensor).keys() - there.keys():
        del own[key]
    for key, value in there.items():
        present = own.get(key)
        if isinstance(value, Tensor):
            own[key] = with_present(value.to("cpu"), present)
        elif not isinstance(value, Unsendable):
            if type(present) is not type(value) or present != value:
                own[key] = value
        elif key not in own:
            warn_once(
                f"stays/{name}.{key}",
                f"the attribute {key} of the tensor {name} ({value.type_name}) is on the rank alone that ran its "
                "layer, for no other process can have it: set it before fit, or again when fit has returned",
            )


def hooks_on_weights(layer: nn.Module) -> list[tuple[str, str]]:
    """The hooks of a program on the gradients of a layer's weights: the name of each, and that of the weight."""
    return [
        (name_of_function(hook), name)
        for name, weight in layer.named_parameters()
        for hook in hooks_of_weight(weight).values()
    ]


def say_hooks_that_stay(stay: Sequence[tuple[str, str]]) -> None:
    """Name hooks on weights that only the ranks of their layers have, for a function can go nowhere."""
    for hook in dict.fromkeys(hook for hook, _ in stay):
        weights = [name for each, name in stay if each == hook]
        warn_once(
            f"hook stays/{hook}/{weights[0]}",
            f"the hook {hook} on {some(weights)} was registered while fit ran, and is on the ranks alone that ran "
            "these layers: register it before fit, or again when fit has returned",
        )


def _fits_into(tensor: Tensor, info: TensorInfo) -> bool:
    return tensor.shape == info.shape and tensor.dtype == info.dtype and not tensor.is_meta


def _bytes_of(info: TensorInfo) -> int:
    return info.shape.numel() * info.dtype.itemsize


def _why_no_room(needed: int) -> str | None:
    """Why the machines cannot take what their ranks need; None if they can. Collective over the job."""
    free = min(psutil.virtual_memory().available, machine_memory_bytes())
    everyone = gather_objects((socket.gethostname(), needed, free))
    for host in dict.fromkeys(name for name, _, _ in everyone):
        more = sum(needs for name, needs, _ in everyone if name == host)
        room = SHARE_OF_FREE_MEMORY * min(free for name, _, free in everyone if name == host)
        if more > room:
            return f"that takes {format_bytes(more)} more on {host}, which has {format_bytes(int(room))} to spare"
    return None
