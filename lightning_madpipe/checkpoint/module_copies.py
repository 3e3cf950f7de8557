"""Copies of layers as modules, such as ``copy.deepcopy(self.net)`` of the best epoch, made whole after a run.

A copy that a hook makes on every rank has on each what that rank had then, and hides the rest as its original did.
When a run has ended, each rank that gets the whole model gets the rest of the copies from ranks that had it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.checkpoint.layers_on_rank_zero import TensorInfo
from lightning_madpipe.checkpoint.whole_model import lay_into, passed_on
from lightning_madpipe.compat.elsewhere import TABLES, HiddenTensors

MADE_HERE_ALONE = (
    "{place} is a copy of layers that a hook has made on rank {rank} while they lay on several, and no other "
    "rank has made one there: it lacks what other ranks had then, such as {name}. Copy on every rank, without a "
    "condition on the rank, or copy when the run has ended"
)


class Slot(NamedTuple):
    """Where a copy has a tensor: the same on all ranks that have made the copy."""

    place: str
    path: str
    table: str
    name: str


def copies_in(
    module: nn.Module, held: Iterable[tuple[str, Any]], of_layers: Iterable[nn.Module]
) -> dict[tuple[str, str], nn.Module]:
    """The modules that may be parts of copies, by their places in the program and their paths there.

    Args:
        module: The LightningModule, which registers the copies that a hook sets on it.
        held: What the program holds elsewhere, with its places.
        of_layers: The modules of the layers, which are no copies.
    """
    known = set(map(id, of_layers))
    found: dict[tuple[str, str], nn.Module] = {}
    children = ((f"self.{name}", child) for name, child in module.named_children())
    for place, value in (*children, *held):
        if isinstance(value, nn.Module):
            for path, part in value.named_modules():
                if id(part) not in known:
                    found.setdefault((place, path), part)
    return found


def complete(parts: Mapping[tuple[str, str], nn.Module], group: Any, place: str) -> None:
    """Give copies what they hide, from the ranks that had it when the copies were made. Collective over ``group``.

    Args:
        parts: The parts of copies, see :func:`copies_in`.
        group: The ranks of a pipeline.
        place: Where copies are to be whole: ``"every_rank"`` or ``"rank_zero"``.
    """
    hidden = {slot for key, part in parts.items() for slot in _hidden_in(key, part)}
    wanted = sorted(set().union(*gather_objects(hidden, group)))
    if not wanted:
        return
    mine = {slot: tensor for slot in wanted if (tensor := _tensor_at(parts, slot)) is not None}
    everyone = gather_objects({slot: _info_of(slot, tensor) for slot, tensor in mine.items()}, group)
    receives = place == "every_rank" or dist.get_rank() == 0
    whole: set[Slot] = set()
    for slot in wanted:
        owner = next((rank for rank, theirs in enumerate(everyone) if slot in theirs), None)
        if owner is None:
            if slot in hidden:
                _say_that_it_lacks(slot)
            continue
        arrives, info = receives and slot in hidden, everyone[owner][slot]
        source = dist.get_global_rank(group, owner)
        value = passed_on(
            mine[slot] if dist.get_rank() == source else None, info, source, group, place, arrives=arrives
        )
        if arrives:
            lay_into(vars(parts[slot.place, slot.path])[slot.table].whole[slot.name], value, info)
            whole.add(slot)
    for key, part in parts.items():
        _show(key, part, whole)


def _hidden_in(key: tuple[str, str], part: nn.Module) -> Iterator[Slot]:
    for table in TABLES:
        names = vars(part).get(table)
        if isinstance(names, HiddenTensors):
            yield from (Slot(*key, table, name) for name in names.hidden)


def _tensor_at(parts: Mapping[tuple[str, str], nn.Module], slot: Slot) -> Tensor | None:
    """What a copy has on this rank; None if it hides it, or if there is no such copy."""
    part = parts.get((slot.place, slot.path))
    names = {} if part is None else vars(part).get(slot.table, {})
    tensor = dict.get(names, slot.name)
    return tensor if isinstance(tensor, Tensor) else None


def _info_of(slot: Slot, tensor: Tensor) -> TensorInfo:
    return TensorInfo(slot.name, tensor.shape, tensor.dtype, tensor.requires_grad)


def _say_that_it_lacks(slot: Slot) -> None:
    name = ".".join(filter(None, (slot.path, slot.name)))
    warn_once(f"copy/{slot.place}", MADE_HERE_ALONE.format(place=slot.place, rank=dist.get_rank(), name=name))


def _show(key: tuple[str, str], part: nn.Module, whole: set[Slot]) -> None:
    for table in TABLES:
        names = vars(part).get(table)
        if isinstance(names, HiddenTensors):
            left = {name: said for name, said in names.hidden.items() if Slot(*key, table, name) not in whole}
            vars(part)[table] = HiddenTensors(names.whole, left) if left else names.whole
