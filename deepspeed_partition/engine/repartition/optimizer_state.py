"""What the optimizer keeps for each parameter, taken out by name, moved between ranks and laid in again.

DeepSpeed's wrapping optimizers train flat tensors in which the parameters of a group lie one after the other, and
each replica a range of them. Layers that come and go shift all of it. So the flat tensors are taken apart by
parameters; what belongs to parameters that leave follows them, from each replica to the same one of their new
stage; and DeepSpeed starts on the parameters that are there now, as on any. What it then holds is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_partition.engine.pipeline.tied_copies import parameter_names
from deepspeed_partition.engine.repartition.counted_steps import count_in_every_parameter
from deepspeed_partition.engine.repartition.part_descriptions import sendable
from deepspeed_partition.engine.repartition.tensor_forms import (
    TensorForm,
    form_of,
    receive_tensor,
    send_tensor,
)
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once

Key: TypeAlias = str | None
"""What an optimizer names an entry of a parameter's state, or ``MASTER``."""
MASTER: Key = None
"""The key of the master weight, which wrapping optimizers keep beside the weight."""
FLAT = {
    DeepSpeedZeroOptimizer: ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"),
    BF16_Optimizer: ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
    FP16_Optimizer: ("fp16_groups", "fp16_groups_flat", "fp32_groups_flat"),
}
"""Attributes of wrapping optimizers: parameters by group, the flat tensor that they lie in, its trained part."""
OF_THE_LOSS_SCALE = (
    "loss_scaler", "loss_scale_config", "custom_loss_scaler", "external_loss_scale", "torch_autocast_gradscaler",
    "cur_scale", "cur_iter", "last_overflow_iter", "overflow", "_global_grad_norm",
)  # fmt: skip
"""What a wrapping optimizer learns beside the states of parameters; each wrapper has some of it."""

OF_NO_PARAMETER = (
    "{kind} keeps state[{key}], which is of no parameter, and ranks have other ones there: each goes on with its "
    "own, for the layers that have come, too. Let it depend on what all ranks have alike, such as the number of "
    "steps, or keep it for each parameter in self.state[p], which goes with that"
)


@dataclass(frozen=True, slots=True)
class Share:
    """The elements of one parameter that this rank trains: consecutive ones of the flattened parameter."""

    name: str
    """The name of the parameter in the whole pipeline."""
    first: int
    num_elements: int
    """The number of elements in the share; 0 where other replicas train all of the parameter."""
    place: int
    """The place of the first element of the share in the tensor that is trained."""

    def contains(self, other: Share) -> bool:
        """Whether the elements of ``other``, of the same parameter, are among these."""
        stop, other_stop = self.first + self.num_elements, other.first + other.num_elements
        return not other.num_elements or (self.first <= other.first and other_stop <= stop)


@dataclass(frozen=True, slots=True)
class Trained:
    """A tensor that the base optimizer trains."""

    tensor: torch.Tensor
    parameters: list[nn.Parameter]
    """The parameters that make up the tensor: itself, one of its shape, or all those in a flat tensor."""
    shares: list[Share]
    """The share of each of these parameters."""
    is_flat: bool


@dataclass(slots=True)
class ParameterState:
    """What this rank's optimizer keeps for one parameter, by the optimizer's keys."""

    share: Share
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Tensors of the parameter's state. From flat tensors: this rank's elements, in one dimension. Else: any
    shape, one dimension or more."""
    values: dict[Key, Any] = field(default_factory=dict)
    """Tensors without dimensions, such as ``step``, and what is no tensor."""


@dataclass(frozen=True, slots=True)
class StateInfo:
    """A :class:`ParameterState` as another rank must know it."""

    share: Share
    tensors: dict[Key, SentState]
    values: dict[Key, tuple[Any, str | None]]
    """The value, on the CPU if it is a tensor, and the type of device that it is used on. A tensor in a list
    or a dict is a :class:`SentState` there, and sent."""


@dataclass(frozen=True, slots=True)
class SentState:
    """A tensor of a parameter's state, as another rank must know it.

    It lies there in memory as it lies here: fused optimizers take the elements of a parameter and of its state in
    the order of memory.
    """

    form: TensorForm
    device_type: str


class TrainingState:
    """The optimizer's state on this rank, on its way from one cut to another.

    Made before a move, and used for it once: :meth:`take_out`, then :meth:`send`, :meth:`receive` and :meth:`drop`
    part by part, then :meth:`lay_into`. Making it is collective over each pipeline and changes nothing that the
    optimizer's next step depends on.

    Args:
        group_of: the place of each parameter's group, by its name.

    Raises:
        RuntimeError: on every rank of the pipeline alike: an unknown optimizer, or a state that DeepSpeed keeps
            for a flat tensor and that cannot be told apart by parameters.
    """

    def __init__(self, optimizer: Any, module: PipelineModule, group_of: Mapping[str, int]) -> None:
        grid = module.mpu()
        self._pipe_rank: int = grid.get_stage_id()
        self._given = group_of.keys()
        self._trained = trained_by(optimizer, module)
        count_in_every_parameter(base_of(optimizer))
        states = base_of(optimizer).state
        self._of_no_parameter = {key: value for key, value in states.items() if not torch.is_tensor(key)}
        self._entries = [dict(states.get(trained.tensor, {})) for trained in self._trained]
        self._states: dict[str, ParameterState] = {}
        self._loss_scale = {name: vars(optimizer)[name] for name in OF_THE_LOSS_SCALE if name in vars(optimizer)}
        mine: dict[str, StateInfo] = {}
        message = ""
        for trained, entries in zip(self._trained, self._entries, strict=True):
            mine.update(_describe(trained, entries))
            message = message or _why_inseparable(trained, entries)
        gathered = gather_objects((mine, message), grid.get_pipe_parallel_group())
        of_ranks = gather_objects(marks_of(self._of_no_parameter), grid.get_pipe_parallel_group())
        tell_what_differs(type(base_of(optimizer)).__name__, of_ranks)
        self._infos = [infos for infos, _ in gathered]
        messages = [message for _, message in gathered]
        if type(optimizer) in FLAT:
            messages.append(_disagreement(self._infos, group_of))
        if any(messages):
            raise RuntimeError(next(filter(None, messages)))

    def turned_of(self, module: PipelineModule) -> list[nn.Parameter]:
        """Parameters of the groups in ``module`` that were frozen, or unfrozen, since the optimizer started."""
        known = {name for infos in self._infos for name in infos}
        names = parameter_names(module).items()
        return [each for each, name in names if name in self._given and (name in known) != each.requires_grad]

    # Out of the optimizer

    def take_out(self) -> None:
        """Take the flat tensors apart, one after the other.

        Where nothing else refers to them, each is freed before the next is taken apart.
        """
        while self._trained:
            trained, entries = self._trained.pop(), self._entries.pop()
            shares, is_flat = trained.shares, trained.is_flat
            if trained.tensor is not trained.parameters[0]:
                entries = {MASTER: trained.tensor.detach(), **entries}
            del trained
            for share in shares:
                self._states[share.name] = ParameterState(share)
            for key in list(entries):
                value = entries.pop(key)
                for share in shares:
                    state = self._states[share.name]
                    if not has_dimensions(value):
                        state.values[key] = value
                    elif is_flat:
                        state.tensors[key] = value.narrow(0, share.place, share.num_elements).clone()
                    else:
                        state.tensors[key] = value
                del value

    # Between ranks

    def send(self, part: str, rank: int) -> None:
        """Send what is kept for the parameters of ``part`` to ``rank``, which calls :meth:`receive`."""
        for name, info in self._infos_of(part, self._pipe_rank):
            for key in info.tensors:
                send_tensor(self._states[name].tensors[key], rank)
            for key in info.values:
                for inner in _tensors_within(self._states[name].values[key]):
                    send_tensor(inner, rank)

    def receive(self, part: str, pipe_rank: int, rank: int) -> None:
        """Take over what the ``pipe_rank``-th rank of this pipeline, which is ``rank``, keeps for ``part``."""
        for name, info in self._infos_of(part, pipe_rank):
            state = self._states[name] = ParameterState(info.share)
            for key, sent in info.tensors.items():
                state.tensors[key] = _received(sent, rank)
            for key, (value, used_on) in info.values.items():
                if torch.is_tensor(value):
                    state.values[key] = value.to(used_on)
                else:
                    state.values[key] = tree_map_only(SentState, partial(_received, rank=rank), value)

    def drop(self, part: str) -> None:
        """Forget the parameters of ``part``, which left."""
        for name, _ in self._infos_of(part, self._pipe_rank):
            self._states.pop(name, None)

    def _infos_of(self, part: str, pipe_rank: int) -> Iterator[tuple[str, StateInfo]]:
        return ((name, info) for name, info in self._infos[pipe_rank].items() if name.startswith(f"{part}."))

    # Into the optimizer

    def lay_into(self, optimizer: Any, module: PipelineModule) -> None:
        """Let ``optimizer``, started on the parameters that ``module`` has now, go on with their states.

        Collective over the data-parallel replicas of a stage.
        """
        lay_states(self._states, optimizer, module)
        base_of(optimizer).state.update(self._of_no_parameter)
        vars(optimizer).update(self._loss_scale)


def marks_of(of_no_parameter: Mapping[Any, Any]) -> dict[str, bytes | None]:
    """What tells the entries of an optimizer's state that are of no parameter from those of another rank."""
    return {repr(key): _mark_of(value) for key, value in of_no_parameter.items()}


def tell_what_differs(kind: str, of_ranks: Sequence[Mapping[str, bytes | None]]) -> None:
    """Say which entries that are of no parameter are other ones on other ranks.

    Args:
        kind: The class of the optimizer.
        of_ranks: :func:`marks_of` what each rank has.
    """
    for key in dict.fromkeys(key for marks in of_ranks for key in marks):
        marks = [of_rank.get(key) for of_rank in of_ranks]
        if None in marks or len(set(marks)) > 1:
            warn_once(f"state of no parameter/{key}", OF_NO_PARAMETER.format(kind=kind, key=key))


def _mark_of(value: Any) -> bytes | None:
    """What is the same on each rank that has this value; None of what cannot be compared between ranks."""
    found = sendable(value).mark
    return found if isinstance(found, bytes) else None


def lay_states(states: dict[str, ParameterState], optimizer: Any, module: PipelineModule) -> None:
    """Let ``optimizer``, started on the parameters of ``module``, go on with ``states``, which this empties.

    Collective over the data-parallel replicas of a stage. A parameter that has no place in a wrapping optimizer
    leaves its state behind; one that it had not before has none, and begins with its weight.

    Args:
        states: By the parameters' names, of the same ones on every replica; each replica has any share of them,
            and together they have everything.
    """
    replicas = module.mpu().get_data_parallel_group()
    trained = trained_by(optimizer, module)
    new = {share.name: share for one in trained for share in one.shares}
    shares = gather_objects(
        {name: (state.share, new[name]) for name, state in states.items() if name in new}, replicas
    )
    kept = base_of(optimizer).state
    for one in trained:
        entries = _laid_out(one, states, shares, replicas) if one.is_flat else _handed_over(one, states)
        kept.pop(one.tensor, None)
        if entries:
            kept[one.tensor] = entries
    if kept and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def lay_states_given(given: torch.optim.Optimizer, optimizer: Any, module: PipelineModule) -> None:
    """Let ``optimizer`` go on with the states that ``given``, which it wraps now, was given with. Collective.

    DeepSpeed's wrapping optimizers train flat tensors, and leave behind what was kept for the parameters.

    Raises:
        RuntimeError: on every rank: a state that cannot lie in a flat tensor beside others.
    """
    names = parameter_names(module)
    left = {name: given.state.pop(parameter) for parameter, name in names.items() if parameter in given.state}
    if not any(gather_objects(bool(left))):
        return
    states = {
        share.name: _state_of(share, left[share.name])
        for one in trained_by(optimizer, module)
        for parameter, whole in zip(one.parameters, one.shares, strict=True)
        if one.tensor is not parameter and whole.name in left
        for share in [Share(whole.name, 0, parameter.numel(), 0)]
    }
    messages = gather_objects(_why_not_in_flat_tensors(states, trained_by(optimizer, module)))
    if any(messages):
        raise RuntimeError(next(filter(None, messages)))
    lay_states(states, optimizer, module)


def _state_of(share: Share, entries: Mapping[Key, Any]) -> ParameterState:
    tensors = {key: value for key, value in entries.items() if has_dimensions(value)}
    return ParameterState(share, tensors, {key: value for key, value in entries.items() if key not in tensors})


def _why_not_in_flat_tensors(states: Mapping[str, ParameterState], trained: Sequence[Trained]) -> str:
    """Why states of parameters cannot lie in flat tensors, where they are made flat; empty if they can."""
    for one in trained if states else ():
        if not one.is_flat:
            continue
        kept = [states[share.name] for share in one.shares if share.name in states]
        for state in kept:
            odd = [key for key, value in state.tensors.items() if value.numel() != state.share.num_elements]
            odd += [key for key, value in state.values.items() if not _alike(value, kept[0].values.get(key))]
            if odd or len(kept) < len(one.shares):
                what = f"whose {odd[0]!r}" if odd else "and not of all others of its group, which"
                return (
                    f"the optimizer is given with a state of {state.share.name!r} {what} cannot lie in the flat "
                    "tensor that DeepSpeed's ZeRO and bf16 optimizers make of a group: train in fp32 without "
                    "ZeRO, or give the optimizer without states"
                )
            state.tensors = {key: value.reshape(-1) for key, value in state.tensors.items()}
    return ""


def _alike(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if torch.is_tensor(one) and torch.is_tensor(other) else one == other


def _handed_over(trained: Trained, states: dict[str, ParameterState]) -> dict[Key, Any]:
    """Hand over the entries of one parameter: the tensors themselves."""
    state = states.pop(trained.shares[0].name, None)
    if state is None:
        return {}
    if MASTER in state.tensors:
        trained.tensor.data.copy_(state.tensors.pop(MASTER))
    return {**state.tensors, **state.values}


def _laid_out(
    trained: Trained,
    states: dict[str, ParameterState],
    shares: list[dict[str, tuple[Share, Share]]],
    replicas: dist.ProcessGroup,
) -> dict[Key, Any]:
    """Lay out the entries of a flat tensor, made of those of its parameters, which are freed on the way."""
    members = [
        (parameter, share)
        for parameter, share in zip(trained.parameters, trained.shares, strict=True)
        if share.name in states
    ]
    if not members:
        return {}
    some = states[members[0][1].name]
    entries: dict[Key, Any] = {**some.values}
    for key, dtype in {key: tensor.dtype for key, tensor in some.tensors.items()}.items():
        flat = trained.tensor.detach() if key is MASTER else torch.zeros_like(trained.tensor, dtype=dtype)
        if key is not MASTER:
            entries[key] = flat.requires_grad_(False)
        for parameter, share in members:
            elements = states[share.name].tensors.pop(key)
            _fill(flat, elements, parameter.numel(), [of[share.name] for of in shares], replicas)
    for _, share in members:
        del states[share.name]
    return entries


def _fill(
    flat: torch.Tensor,
    elements: torch.Tensor,
    num_elements: int,
    shares: list[tuple[Share, Share]],
    replicas: dist.ProcessGroup,
) -> None:
    """Bring one parameter's ``elements``, this rank's old share, to where its new share lies in ``flat``.

    Args:
        num_elements: of the whole parameter.
        shares: the old and the new one of each replica.
    """
    rank = dist.get_rank(replicas)
    old, new = shares[rank]
    first = old.first
    if not all(before.contains(after) for before, after in shares):
        whole = torch.empty(num_elements, dtype=elements.dtype, device=_here())
        for replica, (before, _) in enumerate(shares):
            if before.num_elements:
                range_ = whole.narrow(0, before.first, before.num_elements)
                if replica == rank:
                    range_.copy_(elements)
                source = dist.get_global_rank(replicas, replica)
                dist.broadcast(range_.view(torch.uint8), source, group=replicas)
        elements, first = whole, 0
    if new.num_elements:
        wanted = elements.narrow(0, new.first - first, new.num_elements)
        flat.narrow(0, new.place, new.num_elements).copy_(wanted)


def _here() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def has_dimensions(value: Any) -> bool:
    return torch.is_tensor(value) and value.ndim > 0


def base_of(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that a wrapping one steps; not always the one that it was given (Adagrad under ZeRO)."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def trained_by(optimizer: Any, module: PipelineModule) -> list[Trained]:
    """What ``optimizer`` trains on this rank, in the order of its groups.

    Raises:
        RuntimeError: an unknown optimizer.
    """
    replica = dist.get_rank(module.mpu().get_data_parallel_group())
    names = parameter_names(module)
    if type(optimizer) in FLAT:
        attributes = (getattr(optimizer, name) for name in FLAT[type(optimizer)])
        return [
            Trained(
                tensor,
                group,
                [_share(names[parameter], parameter, weights, tensor, replica) for parameter in group],
                is_flat=True,
            )
            for group, weights, tensor in zip(*attributes, strict=True)
        ]
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        pairs = [
            pair
            for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for pair in zip(group, masters, strict=True)
        ]
    elif isinstance(optimizer, torch.optim.Optimizer):
        pairs = [(parameter, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    else:
        raise RuntimeError(
            f"the state of {type(optimizer).__name__} cannot be moved between ranks: build a new engine on the cut"
        )
    return [
        Trained(tensor, [parameter], [Share(names[parameter], 0, parameter.numel(), 0)], is_flat=False)
        for parameter, tensor in pairs
        if parameter in names
    ]


def _share(
    name: str, parameter: nn.Parameter, weights: torch.Tensor, trained: torch.Tensor, replica: int
) -> Share:
    """Which elements of ``parameter``, a view of ``weights``, are in the part of it that is ``trained`` here."""
    place = int(parameter.storage_offset()) - int(weights.storage_offset())
    start = replica * trained.numel() if trained.numel() < weights.numel() else 0
    first, stop = max(place, start), min(place + parameter.numel(), start + trained.numel())
    if first >= stop:
        return Share(name, 0, 0, 0)
    return Share(name, first - place, stop - first, first - start)


def _describe(trained: Trained, entries: Mapping[str, Any]) -> Iterator[tuple[str, StateInfo]]:
    tensors: dict[Key, torch.Tensor] = {}
    values: dict[Key, tuple[Any, str | None]] = {}
    if trained.tensor is not trained.parameters[0]:
        tensors[MASTER] = trained.tensor
    for key, value in entries.items():
        if has_dimensions(value):
            tensors[key] = value
        elif torch.is_tensor(value):
            values[key] = value.detach().cpu(), value.device.type
        else:
            values[key] = tree_map_only(torch.Tensor, _sent_state, value), None
    for share in trained.shares:
        length = torch.Size([share.num_elements])
        infos = {
            key: SentState(TensorForm(length, tensor.dtype), tensor.device.type)
            if trained.is_flat
            else _sent_state(tensor)
            for key, tensor in tensors.items()
        }
        yield share.name, StateInfo(share, infos, values)


def _sent_state(tensor: torch.Tensor) -> SentState:
    return SentState(form_of(tensor), tensor.device.type)


def _received(sent: SentState, rank: int) -> torch.Tensor:
    return receive_tensor(sent.form, torch.device(sent.device_type), rank)


def _tensors_within(value: Any) -> list[torch.Tensor]:
    """The tensors in the lists and dicts of a value, which is no tensor itself."""
    return [] if torch.is_tensor(value) else [each for each in tree_leaves(value) if torch.is_tensor(each)]


def _why_inseparable(trained: Trained, entries: Mapping[str, Any]) -> str:
    """Why the state of a flat tensor cannot be taken apart; empty if it can."""
    for key, value in entries.items():
        if trained.is_flat and any(map(has_dimensions, _tensors_within(value))):
            return (
                f"the optimizer keeps tensors in {key!r}, a {type(value).__name__}, for {len(trained.shares)} "
                "parameters that DeepSpeed has flattened: no layer can take its part along, so the cut cannot "
                "change after the first step"
            )
        if trained.is_flat and has_dimensions(value) and value.shape != trained.tensor.shape:
            return (
                f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {len(trained.shares)} parameters "
                f"that DeepSpeed has flattened into {trained.tensor.numel()} elements: no layer can take its part "
                "along, so the cut cannot change after the first step"
            )
    return ""


def _disagreement(infos: Iterable[Mapping[str, StateInfo]], group_of: Mapping[str, int]) -> str:
    """Why the parameters of one group, which may come together in a flat tensor, cannot; empty if they can."""
    known: dict[tuple[int, Key], tuple[str, Any]] = {}
    for of_rank in infos:
        for name, info in of_rank.items():
            for key, (value, _) in info.values.items():
                first, agreed = known.setdefault((group_of[name], key), (name, value))
                same = torch.equal(value, agreed) if torch.is_tensor(value) else value == agreed
                if not same:
                    return (
                        f"the optimizer's {key!r} is {agreed} for {first!r} and {value} for {name!r}, which are "
                        "in one group: DeepSpeed keeps one for a group, so these cannot come together on a rank"
                    )
    return ""
