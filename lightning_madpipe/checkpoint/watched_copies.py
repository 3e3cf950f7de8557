"""Whole copies of layers beside the LightningModule, which may not change while each rank has its own layers.

A hook that averages weights by ``zip(copy.parameters(), module.parameters())`` would take one layer's weights for
another's. So copies are looked at before the first steps, and seldom after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from deepspeed_partition.engine.pipeline.parts import tensors_by_name
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.kept_weights import marks_of
from deepspeed_partition.tensor_values import has_memory
from lightning_madpipe.checkpoint.held_objects import roots, walk
from lightning_madpipe.compat.elsewhere import HiddenTensors

WAY_OUT = (
    "keep the averages in a dict that a hook fills, on_fit_start or a later one, `{name: weight.detach().clone() "
    "for name, weight in pl_module.named_parameters()}`, which follows its layers"
)

LOOKS_AT_ALL = 4
"""How many calls, from the first one, look at whether a copy has changed; later ones do at the powers of two."""
CHANGED = (
    "{places} is a copy of layers, made when they were all on this rank, and something has changed its weights "
    "since, as an average does: in hooks each rank has the weights of its own layers, so that "
    "zip(copy.parameters(), module.parameters()) takes those of one layer for those of another, and others keep "
    "what they were: {way_out}"
)
"""What is said of a copy that changes."""

Marks: TypeAlias = list[tuple[torch.dtype, Any]]


class WatchedCopies:
    """Finds the copies of layers that have changed.

    Args:
        module: The LightningModule, whose layers have just been spread.
        pipeline: Its layers, with ``elsewhere``, which hides those of other ranks.
        objects: Gives what callbacks, the module and globals of their code keep, with its places.
    """

    def __init__(self, module: nn.Module, pipeline: Any, objects: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._module, self._pipeline, self._objects = module, pipeline, objects
        found = list(self._alike_in_form())
        self._alike = {place: value for place, value, _ in found}
        """The modules beside this one with the forms of layers that are elsewhere, which may be copies of them."""
        self._equal = {place for place, _, is_equal in found if is_equal}
        self._marks = self._marks_now()
        """How those modules were when all ranks had the same, or when the layers were spread."""
        self._num_calls = 0

    def have_changed(self) -> bool:
        """Whether copies of layers, made before these were spread, may have changed: a hook averages them, say.

        It is called before each step. A look takes a pass over the copies, so that after the first calls they are
        few.
        """
        self._num_calls += 1
        if self._num_calls > LOOKS_AT_ALL and self._num_calls & (self._num_calls - 1):
            return False
        return bool(self._changed_here(self._marks_now()))

    def unlike(self, group: Any) -> list[str]:
        """The copies that have changed, and are not the same on all ranks: each has its own layers in hooks.

        Where all ranks have loaded the same, nothing is wrong; nor where each rank has had another module of that
        form all the time, such as a probe, which is none of the layers. Collective over ``group``, a pipeline.
        """
        if not self._num_calls:  # no rank has trained
            return []
        now = self._marks_now()
        everyone = gather_objects((self._marks, now, self._changed_here(now), self._equal), group)
        unlike = []
        for place in sorted({place for _, _, changed, _ in everyone for place in changed}):
            was_alike = all(marks.get(place) == self._marks.get(place) for marks, *_ in everyone)
            is_copy = any(place in equal for *_, equal in everyone)
            is_alike = all(marks.get(place) == now.get(place) for _, marks, *_ in everyone)
            if not is_alike and (was_alike or is_copy):
                unlike.append(place)
        self._marks.update({place: marks for place, marks in now.items() if place not in unlike})
        return unlike

    def _marks_now(self) -> dict[str, Marks]:
        return {place: _marks_of(value) for place, value in self._alike.items()}

    def _changed_here(self, now: Mapping[str, Marks]) -> list[str]:
        return [place for place, marks in self._marks.items() if _has_changed(marks, now[place])]

    def _alike_in_form(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Modules beside this one that have the class and the forms of layers, and whether their values, too."""
        parts: dict[type, list[nn.Module]] = {}
        here = {id(weight) for weight in self._module.parameters()}
        with self._pipeline.elsewhere.lifted():
            for part in self._module.modules():
                if any(id(weight) not in here for weight in part.parameters()):
                    parts.setdefault(type(part), []).append(part)
            own, found = set(map(id, self._module.modules())), set[int]()
            for place, value in self._objects() if parts else ():
                if not isinstance(value, nn.Module) or id(value) in own | found:
                    continue
                alike = [part for part in parts.get(type(value), ()) if _shapes_of(part) == _shapes_of(value)]
                if alike:
                    found.update(map(id, value.modules()))
                    yield place, value, any(_are_equal(value, part) for part in alike)


def _shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.named_parameters()}


def _are_equal(value: nn.Module, part: nn.Module) -> bool:
    """Whether two modules of one form have the same values, on whatever devices, in the type of the second one."""
    pairs = list(zip(value.parameters(), part.parameters(), strict=True))
    return all(map(has_memory, itertools.chain(*pairs))) and all(
        torch.equal(one.detach().cpu().to(other.dtype), other.detach().cpu()) for one, other in pairs
    )


def _marks_of(module: nn.Module) -> Marks:
    weights = list(module.parameters())
    return [(weight.dtype, mark[-1]) for weight, mark in zip(weights, marks_of(weights), strict=True)]


def _has_changed(before: Marks, now: Marks) -> bool:
    """Whether weights have other values, and not only another type, or another device."""
    return any(kind == other and was != mark for (kind, was), (other, mark) in zip(before, now, strict=False))


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
        *walk(roots(module, owners), {id(module)}),
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
