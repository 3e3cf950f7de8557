"""Which optimizer group each parameter belongs to, kept while parameters move between ranks."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from deepspeed_partition.engine.pipeline.parts import all_that_moves
from deepspeed_partition.engine.pipeline.tied_copies import parameter_names
from deepspeed_partition.engine.repartition.plain_data import (
    HostTensor,
    off_the_device,
    onto_the_device,
    with_data,
)
from deepspeed_partition.engine.runtime.collectives import gather_objects

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""What tells one object from another of its kind on the same rank alone."""
OF_PARAMETERS = ("params", "param_names")
"""What a parameter group says about single parameters; the rest of it are settings."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One parameter group as one rank has it."""

    names: tuple[str, ...]
    """Global names of its parameters on that rank."""
    key: str
    """The text that tells the group from others, where ranks have other groups."""
    settings: dict[str, Any]
    """Learning rate, weight decay and the rest."""
    live: bool
    """Whether the optimizer uses it. DeepSpeed drops groups without parameters."""
    first: float = math.inf
    """The place in the pipeline of the first layer that the group has a parameter of on that rank."""


class ParameterGroups:
    """The groups of an optimizer as the user made them, before DeepSpeed drops empty ones or flattens them.

    So that a parameter finds its group on another rank, groups are the same by their place where all ranks have
    made them with the same settings. Where they have not, as with a rate for each layer, a group is told by its
    settings.

    Args:
        before: Those of the same optimizer before layers moved, which ranks have brought together.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: PipelineModule, before: ParameterGroups | None = None
    ) -> None:
        self._module = module
        names = parameter_names(module)
        self.groups: list[dict[str, Any]] = list(optimizer.param_groups)
        """The dictionaries themselves, those that DeepSpeed drops included."""
        self._names = [
            tuple(names[parameter] for parameter in group["params"] if parameter in names) for group in self.groups
        ]
        self._keys = _keys(self.groups)
        self.are_reordered = False
        """Whether ranks have made the same groups in different orders, and some rank has another one now."""
        self._are_common = False
        if before is not None and before._are_common and len(before._keys) == len(self._keys):
            # Settings may be others by now on ranks that had no parameters in a group.
            self._keys, self._are_common, self.are_reordered = before._keys, True, before.are_reordered

    def gather(self, optimizer: EveryGroup, pipe_group: dist.ProcessGroup) -> None:
        """Learn every stage's groups, and bring this rank's list to the union of them.

        Collective over the pipeline.
        """
        self.groups = optimizer.param_groups
        added, names_here = self.groups[len(self._names) :], parameter_names(self._module)
        if added:  # by a script, between two steps
            of_each = (
                tuple(names_here[each] for each in group["params"] if each in names_here) for group in added
            )
            self._names = [*self._names, *of_each]
            # Not made anew: the settings of a group that DeepSpeed dropped are old ones.
            self._keys = [*self._keys, *(f"{key}, added" for key in _keys(self.groups)[len(self._keys) :])]
        in_use = optimizer.in_use
        firsts = self._first_layers()
        mine = [
            GroupInfo(names, key, with_data(_settings(group), off_the_device), id(group) in in_use, first)
            for group, names, key, first in zip(self.groups, self._names, self._keys, firsts, strict=True)
        ]
        by_stage = gather_objects(mine, pipe_group)
        places = _places(by_stage)
        self.are_reordered |= any(of_stage != sorted(of_stage) for of_stage in places)
        own = dict(zip(places[dist.get_rank(pipe_group)], self.groups, strict=True))
        members: dict[int, list[GroupInfo]] = {}
        for stage_places, infos in zip(places, by_stage, strict=True):
            for place, info in zip(stage_places, infos, strict=True):
                members.setdefault(place, []).append(info)
        self.groups, self._names, self._keys, self._are_common = [], [], [], True
        for place, infos in sorted(members.items()):
            group = own.get(place, {"params": []})
            if id(group) not in in_use:
                # A group that DeepSpeed dropped here missed what schedulers have set since.
                _give(group, next((info for info in infos if info.live), infos[0]).settings)
            self.groups.append(group)
            self._names.append(tuple(name for info in infos for name in info.names))
            self._keys.append(infos[0].key)

    def gather_added(self, optimizer: EveryGroup, pipe_group: dist.ProcessGroup) -> None:
        """:meth:`gather` if a script has added groups on some rank since. Collective over the pipeline."""
        if any(gather_objects(len(optimizer.param_groups) > len(self._names), pipe_group)):
            self.gather(optimizer, pipe_group)
            optimizer.follow(self.groups)

    def _first_layers(self) -> list[float]:
        """The place of the first layer that each group has a parameter of; infinite without one."""
        places = {part.name: part.layers[0] for part in all_that_moves(self._module)}

        def place_of(name: str) -> float:
            beginnings = itertools.accumulate(name.split("."), "{}.{}".format)
            return next((places[each] for each in beginnings if each in places), math.inf)

        return [min(map(place_of, names), default=math.inf) for names in self._names]

    def take_settings(
        self,
        optimizer: EveryGroup,
        settings_of: Callable[[str], dict[str, Any] | None],
        pipe_group: dist.ProcessGroup,
    ) -> None:
        """Give every group the settings that its parameters had when they were saved.

        Collective over the pipeline: a group that is empty here has parameters on another rank.

        Args:
            settings_of: of the group that a parameter was saved in, by its name; None if it was in none.
        """
        found = [next(filter(None, map(settings_of, names)), {}) for names in self._names]
        sent = (with_data(settings, off_the_device) for settings in found)
        mine = [GroupInfo((), key, settings, True) for key, settings in zip(self._keys, sent, strict=True)]
        by_stage = gather_objects(mine, pipe_group)
        places = _places(by_stage)
        settings_at: dict[int, dict[str, Any]] = {}
        for stage_places, infos in zip(places, by_stage, strict=True):
            for place, info in zip(stage_places, infos, strict=True):
                settings_at[place] = settings_at.get(place) or info.settings
        for place, group in zip(places[dist.get_rank(pipe_group)], optimizer.param_groups, strict=True):
            _give(group, settings_at[place])

    def place_of(self) -> dict[str, int]:
        """The place of the group of each parameter of the whole pipeline, after :meth:`gather`."""
        return {name: place for place, names in enumerate(self._names) for name in names}

    def assign(self, optimizer: torch.optim.Optimizer, module: PipelineModule) -> None:
        """Fill ``optimizer`` with the parameters that ``module`` has now, each in its group, without states."""
        for group, names in zip(self.groups, self._names, strict=True):
            wanted = set(names)
            members = [(name, member) for member, name in parameter_names(module).items() if name in wanted]
            group["params"][:] = [member for _, member in members]  # a script may hold the list
            if "param_names" in group:
                group["param_names"] = [name for name, _ in members]
        optimizer.param_groups[:] = self.groups
        optimizer.state.clear()


class NotOfWeightsError(TypeError):
    """An optimizer's class makes none of weights and settings: it may take another optimizer, or more."""


def another_like(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings for other parameters, or groups of them.

    Raises:
        NotOfWeightsError: the class takes something else.
    """
    accepted = inspect.signature(type(optimizer).__init__).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    try:
        return type(optimizer)(parameters, **settings)
    except (AttributeError, TypeError) as error:
        written = ", ".join(["weights", *(f"{name}=..." for name in settings)])
        name = type(optimizer).__name__
        raise NotOfWeightsError(
            f"{name}({written}) makes none: {error}. It seems to be made of something else, such as an optimizer"
        ) from error


class EveryGroup:
    """An optimizer as schedulers must see it: with the groups that have no parameters on this rank.

    DeepSpeed's optimizers that wrap it drop those, and a scheduler counts on all groups that it was made for.
    Groups are told by their place, for loading a state replaces them.
    """

    _opt_called = True
    """Whether the optimizer has stepped: torch warns where it has not, and this object does not see its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self.follow(groups)

    def follow(self, groups: Sequence[dict[str, Any]]) -> None:
        """Show ``groups`` from now on; those that the optimizer has are shown as it has them."""
        in_use = {id(group) for group in self._optimizer.param_groups}
        self._groups = list(groups)
        self._places = [place for place, group in enumerate(groups) if id(group) in in_use]

    def stands_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it shows the groups of this very optimizer: scripts may configure another one later."""
        return optimizer is self._optimizer

    def show_to(self, scheduler: Any) -> None:
        """Let ``scheduler`` set the rates of every group."""
        scheduler.optimizer = self
        for part in getattr(scheduler, "_schedulers", ()):  # of a SequentialLR or ChainedScheduler
            self.show_to(part)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        every, present = list(self._groups), self._optimizer.param_groups
        for place, group in zip(self._places, present, strict=False):
            every[place] = group
        return every + present[len(self._places) :]  # those that a script has added

    @property
    def in_use(self) -> set[int]:
        """The ``id`` of each group that the optimizer has itself."""
        return {id(group) for group in self._optimizer.param_groups}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    # Callers look for the optimizer of a scheduler, and name what they log after its class.

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._optimizer

    def __hash__(self) -> int:
        return hash(self._optimizer)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._optimizer)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OF_PARAMETERS}


def _give(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Let a group have the settings of another rank; a tensor lies where that of the group did."""
    for name, value in settings.items():
        own, sent = group.get(name), value.value if isinstance(value, HostTensor) else value
        if isinstance(own, torch.Tensor) and isinstance(sent, torch.Tensor):
            group[name] = sent.to(own.device)
        else:
            group[name] = with_data(value, onto_the_device)


def _keys(groups: list[dict[str, Any]]) -> list[str]:
    """The settings as text; equal ones are numbered.

    Of a rate that a schedule has set the first one counts: the present one may be of the rank's own parameters.
    """
    keys: list[str] = []
    for group in groups:
        # A tensor's text has the number of its rank's device.
        settings = with_data(_settings(group), lambda each: each.tolist() if torch.is_tensor(each) else each)
        settings["lr"] = settings.get("initial_lr", settings.get("lr"))
        text = ADDRESS.sub("", repr(sorted(settings.items())))
        keys.append(f"{text} #{sum(key.startswith(text) for key in keys)}")
    return keys


def _places(by_stage: list[list[GroupInfo]]) -> list[list[int]]:
    """Find, for each stage, the global place of each of its groups.

    Users give the same groups on every rank, some of them empty. Where a rank has other ones, its script has left
    empty groups out, or given each layer its own, and groups are told apart by their settings.
    """
    if len({tuple(info.key for info in infos) for infos in by_stage}) == 1:
        return [list(range(len(infos))) for infos in by_stage]
    first: dict[str, float] = {}
    for info in itertools.chain(*by_stage):
        first[info.key] = min(info.first, first.get(info.key, math.inf))
    left = [[info.key for info in infos] for infos in by_stage]
    known: list[str] = []
    while any(left):  # schedules go by the order: that of each stage, and of the layers
        heads = list(dict.fromkeys(keys[0] for keys in left if keys))
        free = [key for key in heads if not any(key in keys[1:] for keys in left)]
        known.append(min(free or heads, key=first.__getitem__))
        left = [[key for key in keys if key != known[-1]] for keys in left]
    return [[known.index(info.key) for info in infos] for infos in by_stage]
