"""Settings of parameter groups that hooks choose by the parameters of a group, of which each rank has other ones.

A hook that looks for a parameter in a group, to give the group another learning rate, finds it on the rank that
has its layer. So what hooks and schedulers have changed is compared over the ranks before each step of the
optimizer. A group without parameters on a rank has the settings there that ranks with its parameters have, and
takes them along where layers move.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_partition.engine.runtime.collectives import any_bits, gather_objects
from deepspeed_partition.engine.runtime.environment import log_here
from lightning_madpipe.compat.optimizers import settings_of

UNLIKE = (
    "{name!r} of group {number} of the optimizer is {one} on rank {first} and {other} on rank {second}: a hook "
    "has changed it by what ranks do not have alike, such as the parameters in the group, and training differs "
    "from that of one process. Go by what they have alike, such as a name: "
    "{{'params': ..., 'name': 'head'}} in configure_optimizers, group['name'] == 'head' in the hook"
)
_MARK_BITS = 31

Settings = dict[tuple[int, str], Any]
"""Values by the number of the group and the name of the setting."""


class OfRank(NamedTuple):
    """What one rank has."""

    changed: set[tuple[int, str]]
    settings: Settings
    has_parameters: list[bool]
    """Whether each parameter group of the optimizers has parameters of this rank's layers, by number."""


class GroupSettings:
    """A look at what is changed between two steps of an optimizer, besides by its own step.

    Args:
        optimizers: Gives the optimizers.
    """

    def __init__(self, optimizers: Callable[[], Sequence[Any]]) -> None:
        self._optimizers = optimizers
        self._told: set[str] = set()
        self._known: Settings = {}
        self.note()

    def note(self) -> None:
        """Take the settings as they are for what all ranks have: the optimizer's step may have made them so."""
        self._known = settings_of(self._optimizers())

    def compare(self) -> None:
        """Let all ranks have the settings of the ranks with parameters of a group. Collective.

        Where these have changed a setting otherwise, one line says so once.
        """
        now = settings_of(self._optimizers())
        changed = {key: value for key, value in now.items() if self._known.get(key) != value}
        mark = zlib.crc32(repr(sorted(changed.items(), key=lambda item: item[0])).encode()) >> 1
        # A bit that is there both ways shows that two ranks have other marks.
        [said] = any_bits([mark | (mark ^ 2**_MARK_BITS - 1) << _MARK_BITS])
        if said & said >> _MARK_BITS:
            self._make_alike(OfRank(set(changed), now, [bool(group["params"]) for group in self._groups()]))
        self.note()

    def _make_alike(self, mine: OfRank) -> None:
        everyone = gather_objects(mine)
        for key in sorted(set[tuple[int, str]]().union(*(each.changed for each in everyone))):
            number, name = key
            holders = [
                rank
                for rank, each in enumerate(everyone)
                if number < len(each.has_parameters) and each.has_parameters[number]
            ]
            values = {rank: everyone[rank].settings.get(key) for rank in holders or range(len(everyone))}
            first = next(iter(values))
            unlike = next((rank for rank, value in values.items() if repr(value) != repr(values[first])), None)
            if unlike is not None:
                if dist.get_rank() == 0 and name not in self._told:
                    words = {"one": values[first], "other": values[unlike], "first": first, "second": unlike}
                    log_here(UNLIKE.format(name=name, number=number, **words), logging.WARNING)
                self._told.add(name)
            elif dist.get_rank() not in values and number < len(self._groups()):
                _set(self._groups()[number], name, values[first])

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers() for group in optimizer.param_groups]


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group.get(name), Tensor):
        with torch.no_grad():
            group[name].fill_(value)
    else:
        group[name] = value
