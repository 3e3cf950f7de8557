"""A schedule of learning rates out of a checkpoint of another cut: its lists are of the groups there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once

BASE_RATES = "base_lrs"
LAST_RATES = "_last_lr"
MADE = ("max_lrs", "min_lrs", "base_momentums", "max_momentums")
"""Lists of torch's schedulers that hold what their constructors were given."""


class ListsOfGroups:
    """The lists that a scheduler has for its parameter groups, as they are before its state is loaded.

    A rank may have other groups than the one that saved: those of its layers. Loaded as they are, the lists would
    give one group the rates of another.

    Args:
        scheduler: of this run; None where there is none.
    """

    def __init__(self, scheduler: Any) -> None:
        self._made = [
            (part, {name: list(value) for name in (BASE_RATES, LAST_RATES, *MADE) for value in _lists(part, name)})
            for part in _parts(scheduler)
        ]

    def stay_as_made(self, *, is_other_cut: bool) -> None:
        """Let lists be as they were made where those of the checkpoint are not of the groups that are here.

        Where no states are loaded, groups have the settings that they were made with.

        Args:
            is_other_cut: Whether it is known that ranks had other layers.
        """
        for part, made in self._made:
            loaded = {name: list(value) for name in made for value in _lists(part, name)}
            number = len(part.optimizer.param_groups)
            if is_other_cut or any(len(values) != number for values in loaded.values()):
                for name, values in made.items():
                    setattr(part, name, values)

    def belong_to_groups(self, ranks: Any) -> None:
        """Let the loaded lists be of the groups that are here, whose settings are loaded. Collective.

        Args:
            ranks: The process group of a pipeline.
        """
        mine = [
            (
                {name: list(value) for name in made for value in _lists(part, name)},
                [group.get("initial_lr") for group in part.optimizer.param_groups],
            )
            for part, made in self._made
        ]
        of_ranks = gather_objects(mine, ranks)
        for place, (part, made) in enumerate(self._made):
            of_part = [of_rank[place] for of_rank in of_ranks if place < len(of_rank)]
            initial = mine[place][1]
            known = {rate for _, rates in of_part for rate in rates}
            for name, loaded in mine[place][0].items():
                lists = [lists.get(name) for lists, _ in of_part]
                is_of_all = lists.count(loaded) == len(lists) and all(
                    len(rates) == len(loaded) for _, rates in of_part
                )
                if name == LAST_RATES:
                    setattr(part, name, [group["lr"] for group in part.optimizer.param_groups])
                elif name == BASE_RATES and loaded != made[name]:
                    if None in initial or (is_of_all and not known.issuperset(loaded)):
                        continue  # a script has set them, for the same groups everywhere
                    if not known.issuperset(loaded):
                        warn_once(
                            "base_lrs",
                            f"the {type(part).__name__} of the checkpoint has base_lrs {loaded}, which are not "
                            "the initial rates of its groups, and ranks had other groups there: it goes on from "
                            f"the groups' initial rates, {initial}",
                        )
                    setattr(part, name, initial)
                elif not is_of_all:
                    setattr(part, name, made[name])


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of, if they set the rates of groups."""
    if getattr(getattr(scheduler, "optimizer", None), "param_groups", None) is not None:
        yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):  # of a SequentialLR or ChainedScheduler
        yield from _parts(part)


def _lists(part: Any, name: str) -> Iterator[list[Any]]:
    value = getattr(part, "__dict__", {}).get(name)  # none of a class with slots
    if isinstance(value, list):
        yield value
