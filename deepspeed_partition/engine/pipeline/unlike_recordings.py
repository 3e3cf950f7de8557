"""Whether ranks have written a model's code down alike, where that reads what a program may change.

Each rank records the code again where a number that it reads has changed there. If ranks count otherwise, as
where a hook on one of them counts, their layers would be of different models. So ranks compare what they have
recorded at the end of a batch in which something has changed on some rank, and of the first one. In a pipeline
that never drains, batches have no end of their own: there they compare where it comes to rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deepspeed_partition.capture.model_layers import Recipe
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.first_failure import raised_by_all

_WATCHED: list[weakref.ref[Recipe]] = []
"""Recipes of the models whose layers a program has made, in that order, which is alike on all ranks."""
UNLIKE = (
    "{name} is {mine} on rank {rank} and {theirs} on rank {other}, and the code that reads it was cut into "
    "layers, which are of different models then: set it alike on all ranks, before the step, or let a module of "
    "its own read it"
)


def watch_recordings(recipe: Recipe) -> None:
    """Let ranks compare what they have recorded of a model."""
    _WATCHED.append(weakref.ref(recipe))


def has_changed() -> bool:
    """Whether something that captured code reads has changed on this rank since ranks compared it."""
    return any(_changes(recipe) for recipe in _recipes().values())


def refuse_unlike_recordings(pipeline: int, *, at_rest: bool = False) -> None:
    """Compare with the other ranks of a pipeline what they have recorded. Collective.

    Args:
        pipeline: The number of this rank's.
        at_rest: Whether something may have changed that some ranks have run nothing with yet.

    Raises:
        RuntimeError: some ranks of a pipeline have recorded other calls, on all ranks.
    """
    mine = {}
    for place, recipe in _recipes().items():
        if recipe.outside is not None and recipe.recorded:
            if at_rest:
                with suppress(Exception):  # which the layers' next run raises
                    recipe.record_changes()
            mine[place] = recipe.digests(), recipe.outside.changed
            recipe.outside.changed = {}
    all_ranks = gather_objects((pipeline, mine))
    for rank, (number, own) in enumerate(all_ranks):
        for other, (another, theirs) in enumerate(all_ranks[:rank]):
            for place in sorted(own.keys() & theirs.keys()) if number == another else ():
                (one, changes), (two, their_changes) = own[place], theirs[place]
                if any(one[state] != two[state] for state in one.keys() & two.keys()):
                    raise raised_by_all(RuntimeError(_in_words(rank, changes, other, their_changes)))


def values_read() -> dict[int, dict[str, Any]]:
    """What captured code reads now, for each model by its place."""
    return {place: each.outside.values() for place, each in _recipes().items() if each.outside is not None}


def set_since(values: Mapping[int, Mapping[str, Any]]) -> dict[str, list[str]]:
    """What captured code reads that is not what it was when :func:`values_read` was asked, by class of model."""
    found = {}
    for place, recipe in _recipes().items():
        names = recipe.outside.set_since(values.get(place, {})) if recipe.outside is not None else []
        if names:
            found[type(recipe.captured.model).__name__] = sorted(names)
    return found


def _recipes() -> dict[int, Recipe]:
    """Those that are still there, by their place: a rank may have let go of some that another one has."""
    return {place: recipe for place, each in enumerate(_WATCHED) if (recipe := each()) is not None}


def _changes(recipe: Recipe) -> dict[str, str]:
    return recipe.outside.changed if recipe.outside is not None and recipe.recorded else {}


def _in_words(rank: int, mine: dict[str, str], other: int, theirs: dict[str, str]) -> str:
    before = "what it was before"
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not names:
        return f"ranks {rank} and {other} have cut the model's code into layers that run different calls"
    return UNLIKE.format(
        name=names[0], mine=mine.get(names[0], before), rank=rank, theirs=theirs.get(names[0], before), other=other
    )
