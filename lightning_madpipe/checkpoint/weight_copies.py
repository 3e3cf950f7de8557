"""Copies of the weights that a callback or the LightningModule keeps, such as a moving average of them.

In hooks each rank sees the weights of its own layers. A dict that a hook fills by their names, or a list in their
order, has the values for these alone. When layers move, their values move with them; when the whole model is put
on every rank, these are whole, too. A dict or list that was made before the layers were spread loses what other
ranks have. In a checkpoint the first rank of a pipeline writes them whole, and each rank that reads it gets those
of its layers. Nothing of this takes time in a step: it happens where layers move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from deepspeed_partition.code_names import LIBRARIES
from deepspeed_partition.engine.pipeline.parts import tensors_by_name
from deepspeed_partition.engine.runtime.collectives import gather_objects
from lightning_madpipe.checkpoint.whole_model import TensorInfo, passed_on
from lightning_madpipe.compat.elsewhere import HiddenTensors
from lightning_madpipe.module import PIPELINE, outside_pipeline

DEPTH = 3
"""How many attributes deep, from a callback or the module, copies are looked for."""

COPIES = "madpipe_weight_copies"
"""The key in a checkpoint under which is noted of which weights it has copies, on the rank that wrote it."""

NOT_COPIES = ("state_dict", "optimizer_states", "loops", "lr_schedulers", COPIES)
DEPTH_OF_STATE = 5

WAY_OUT = (
    "keep the averages in a dict that a hook fills, on_fit_start or a later one, `{name: weight.detach().clone() "
    "for name, weight in pl_module.named_parameters()}`, which follows its layers"
)


@dataclass(frozen=True, slots=True)
class Values:
    """A dict or list with a tensor for each of some weights."""

    container: dict[str, Any] | list[Any]
    names: tuple[str, ...]
    """The full names of the weights in the LightningModule, in the container's order."""
    prefix: str
    """What the keys of a dict leave out of these names: those of a submodule begin there."""
    only_trained: bool = False
    """Whether a list leaves out what is frozen."""

    def by_name(self) -> dict[str, Any]:
        values = self.container.values() if isinstance(self.container, dict) else self.container
        return dict(zip(self.names, values, strict=True))


class WeightCopies:
    """Lets the copies of weights that a program keeps have the layers that the rank has.

    Args:
        module: The LightningModule.
        owners: Gives the callbacks and the module, with their names.
        ignored: Attributes of the module that its user does not set.
        whole: A context in which all layers can be read.
    """

    def __init__(
        self,
        module: nn.Module,
        owners: Callable[[], Mapping[str, Any]],
        ignored: Collection[str],
        whole: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._module, self._owners, self._ignored = module, owners, frozenset(ignored)
        with whole():
            self._all = _weights_of(module)
        self._own = self._all
        around = [f"{path}." for path, _ in outside_pipeline(module) if path]
        self._prefixes = ["", *around]

    def follow(self, group: Any) -> None:
        """Give each copy what the layers of this rank are now. Collective over ``group``, a pipeline."""
        before, self._own = self._own, _weights_of(self._module)
        found = dict(self._found(before))
        have = {place: set(values.names) & before.keys() for place, values in found.items()}
        mine = have, {place: set(self._own) - set(values.names) for place, values in found.items()}
        everyone = gather_objects(mine, group)
        for place in dict.fromkeys(place for have, _ in everyone for place in have):
            owners: dict[str, int] = {}
            for rank, (theirs, _) in enumerate(everyone):
                for name in theirs.get(place, ()):
                    owners.setdefault(name, rank)
            wanted = {name for _, wants in everyone for name in wants.get(place, ()) if name in owners}
            arrived = self._exchange(found.get(place), wanted, owners, group)
            if place in found:
                self._lay(found[place], {**found[place].by_name(), **arrived}, self._own)

    # Copies in the state of a checkpoint

    def saved(self, state: dict[str, Any], group: Any) -> dict[str, Any]:
        """``state`` of callbacks and hooks for a checkpoint: the copies in it are whole on the group's first rank.

        On the others they stay as they are. Which weights each has is noted under ``COPIES``. Collective over
        ``group``, a pipeline.
        """
        own = _weights_of(self._module)
        found = {
            place: values
            for place, container in _containers(state)
            if (values := self._as_values(container, own)) is not None
        }
        everyone = gather_objects({place: values.names for place, values in found.items()}, group)
        is_first = torch.distributed.get_rank(group) == 0
        names = {"/".join(place): list(values.names) for place, values in found.items()}
        for place in dict.fromkeys(place for theirs in everyone for place in theirs):
            owners = _owners_of(place, everyone)
            values = found.get(place)
            arrived = self._exchange(
                values, [n for n, rank in owners.items() if rank], owners, group, keeps=is_first
            )
            if is_first and values is not None:
                by_name = {**values.by_name(), **arrived}
                whole = {name: by_name[name] for name in self._all if name in by_name}
                cut = len(values.prefix)
                is_list = isinstance(values.container, list)
                laid = list(whole.values()) if is_list else {name[cut:]: value for name, value in whole.items()}
                state = _with(state, place, laid)
                names["/".join(place)] = list(whole)
        return {**state, COPIES: names} if names else state

    def loaded(self, state: dict[str, Any], group: Any) -> None:
        """Let the copies in the state of a checkpoint have the layers of this rank. Collective over ``group``.

        Args:
            state: What :meth:`saved` returned on this rank, or on the first one; or an older one, in which dicts
                by name are found. It is changed in place.
        """
        own = _weights_of(self._module)
        noted = state.pop(COPIES, None)
        found: dict[tuple[str, ...], Values] = {}
        for place, container in _containers(state):
            names = (noted or {}).get("/".join(place))
            if names is not None and len(names) == len(container):
                prefix = "" if isinstance(container, list) else names[0].removesuffix(next(iter(container)))
                found[place] = Values(container, tuple(names), prefix)
            elif (
                noted is None and isinstance(container, dict) and (values := self._as_dict(container)) is not None
            ):
                found[place] = values
        everyone = gather_objects({place: values.names for place, values in found.items()}, group)
        wants = gather_objects({place: set(own) - set(values.names) for place, values in found.items()}, group)
        for place in dict.fromkeys(place for theirs in everyone for place in theirs):
            owners = _owners_of(place, everyone)
            wanted = {name for theirs in wants for name in theirs.get(place, ()) if name in owners}
            arrived = self._exchange(found.get(place), wanted, owners, group)
            if place in found:
                self._lay(found[place], {**found[place].by_name(), **arrived}, own)

    def _exchange(
        self,
        values: Values | None,
        wanted: Collection[str],
        owners: Mapping[str, int],
        group: Any,
        *,
        keeps: bool = True,
    ) -> dict[str, Tensor]:
        """The values of ``wanted``, each from the rank that had its layer; on a rank that ``keeps`` them."""
        rank, arrived = torch.distributed.get_rank(group), {}
        own = {} if values is None else values.by_name()
        names = sorted(wanted)
        sent = {name: own[name] for name in names if owners[name] == rank}
        mine = [TensorInfo(name, t.shape, t.dtype, t.requires_grad) for name, t in sent.items()]
        described = {info.name: info for theirs in gather_objects(mine, group) for info in theirs}
        for name in names:
            source = torch.distributed.get_global_rank(group, owners[name])
            value = passed_on(sent.get(name), described[name], source, group, "every_rank", arrives=True)
            if value is not None and name not in own and keeps:
                arrived[name] = value.to(next((t.device for t in own.values()), value.device))
        return arrived

    @staticmethod
    def _lay(values: Values, by_name: Mapping[str, Any], own: Collection[str]) -> None:
        """Let a container have what this rank has, in the order of the module's weights."""
        kept = {name: by_name[name] for name in own if name in by_name}
        if isinstance(values.container, list):
            values.container[:] = kept.values()
            return
        cut = len(values.prefix)
        values.container.clear()
        values.container.update({name[cut:]: value for name, value in kept.items()})

    # What is found

    def modules(self) -> list[str]:
        """The copies of the module that average its weights in an order, or that hide what other ranks have."""
        return [
            f"{place} ({type(value).__name__})" for place, value in self._walk() if is_copy(value, self._module)
        ]

    def _found(self, own: Mapping[str, Weight]) -> Iterator[tuple[str, Values]]:
        for place, value in self._walk():
            values = self._as_values(value, own)
            if values is not None:
                yield place, values

    def _walk(self) -> Iterator[tuple[str, Any]]:
        yield from walk(self._owners(), {id(self._module)}, self._ignored)

    def _as_values(self, value: Any, own: Mapping[str, Weight]) -> Values | None:
        if isinstance(value, dict):
            return self._as_dict(value)
        return self._as_list(value, own) if isinstance(value, list) else None

    def _as_dict(self, value: dict[Any, Any]) -> Values | None:
        if not value or not all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items()):
            return None
        for prefix in self._prefixes:
            if all(self._is_weight(prefix + name, tensor) for name, tensor in value.items()):
                return Values(value, tuple(prefix + name for name in value), prefix)
        return None

    def _is_weight(self, name: str, tensor: Tensor) -> bool:
        known = self._all.get(name) or self._own.get(name)
        return name.startswith(f"{PIPELINE}.") or (known is not None and known.shape == tensor.shape)

    def _as_list(self, value: list[Any], own: Mapping[str, Weight]) -> Values | None:
        if not value or not all(isinstance(tensor, Tensor) for tensor in value):
            return None
        shapes = [tensor.shape for tensor in value]
        for prefix in self._prefixes:
            for only_trained in (False, True):
                names = [
                    name
                    for name, weight in own.items()
                    if name.startswith(prefix) and weight.is_listed and weight.trains >= only_trained
                ]
                if [own[name].shape for name in names] == shapes:
                    return Values(value, tuple(names), prefix, only_trained)
        return None


def _owners_of(
    place: tuple[str, ...], everyone: Sequence[Mapping[tuple[str, ...], Collection[str]]]
) -> dict[str, int]:
    """The first rank that has each weight of a copy."""
    owners: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs.get(place, ()):
            owners.setdefault(name, rank)
    return owners


def _containers(state: Mapping[Any, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The dicts and lists of tensors in the state of a checkpoint, but for what is Lightning's."""
    for key, value in state.items():
        if not isinstance(key, str) or (not place and key in NOT_COPIES):
            continue
        if (isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value)) or (
            isinstance(value, dict) and value and all(isinstance(each, Tensor) for each in value.values())
        ):
            yield (*place, key), value
        elif isinstance(value, dict) and len(place) < DEPTH_OF_STATE:
            yield from _containers(value, (*place, key))


def _with(state: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """``state`` with another value at a place; the program's own dicts on the way there stay as they are."""
    key, *rest = place
    return {**state, key: _with(state[key], tuple(rest), value) if rest else value}


@dataclass(frozen=True, slots=True)
class Weight:
    """What tells a copy of a weight."""

    shape: torch.Size
    trains: bool
    is_listed: bool
    """Whether ``parameters()`` gives it, under this name; not so buffers and second names."""


def _weights_of(module: nn.Module) -> dict[str, Weight]:
    """The parameters and buffers that can be read, by all of their names, in the order of ``state_dict()``."""
    listed = {name for name, _ in module.named_parameters()}
    found = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for own, value in (*part._parameters.items(), *part._buffers.items()):
            if value is not None:
                name = f"{path}.{own}" if path else own
                found[name] = Weight(value.shape, value.requires_grad, name in listed)
    return found


def walk(owners: Mapping[str, Any], visited: set[int], ignored: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """The dicts, lists and modules that stand in attributes of ``owners`` and of what these have, by place."""
    for name, owner in owners.items():
        # What stands in a module as a child is no copy; its plain attributes may be.
        attributes = {key: value for key, value in vars(owner).items() if key not in ignored}
        for key, value in attributes.items():
            yield from _walk(f"{name}.{key}", value, DEPTH, visited)


def _walk(place: str, value: Any, depth: int, visited: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in visited or not depth:
        return
    visited.add(id(value))
    if isinstance(value, nn.Module):
        yield place, value
        return
    if isinstance(value, dict | list):
        yield place, value
    inner = value if isinstance(value, dict) else _attributes(value)
    for key, child in list(inner.items()):
        if not isinstance(child, Tensor):
            yield from _walk(f"{place}.{key}", child, depth - 1, visited)


def _attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of an object of the program; none of one that a library made, such as the Trainer."""
    own = type(value).__module__.partition(".")[0] not in LIBRARIES
    return vars(value) if own and hasattr(value, "__dict__") and not isinstance(value, type | Tensor) else {}


def is_copy(value: Any, module: nn.Module) -> bool:
    """Whether this is a module beside ``module`` that averages weights, or was copied while layers were spread."""
    if not isinstance(value, nn.Module) or any(value is part for part in module.modules()):
        return False
    return isinstance(value, AveragedModel) or any(
        isinstance(table, HiddenTensors) for part in value.modules() for table in vars(part).values()
    )


def refusals_of_averages(module: nn.Module, owners: Mapping[str, Any]) -> Iterator[str]:
    """Yield why averages of a module that exist before its layers are spread cannot run, one sentence each."""
    inside = ((f"self.{name}", part) for name, part in module.named_modules())
    for place, value in (
        *inside,
        *walk({name: owner for name, owner in owners.items() if owner is not module}, {id(module)}),
    ):
        if isinstance(value, AveragedModel) and _is_average_of(value, module):
            yield (
                f"{place} is an AveragedModel of all layers, of which each rank of a pipeline has a part, and it "
                f"would average one layer's weights with another's: {WAY_OUT}"
            )


def _is_average_of(average: AveragedModel, module: nn.Module) -> bool:
    own = {name: tensor.shape for name, tensor in tensors_by_name(average.module).items()}
    inside = set(average.modules())
    return any(
        type(part) is type(average.module)
        and part not in inside
        and own == {name: tensor.shape for name, tensor in tensors_by_name(part).items() if name in own}
        for part in module.modules()
    )
