"""Whether ranks have written a model's code down alike, where that reads what a program may change.

Each rank records the code again where a number that it reads has changed there. If ranks count otherwise, as
where a hook on one of them counts, their layers would be of different models. So ranks compare what they have
recorded at the end of a batch in which something has changed on some rank, and of the first one.

In a pipeline that never drains, batches have no end of their own. While batches are in flight, ranks are not
compared. Where it comes to rest, ranks compare the values that the code reads then (numbers, strings, flags, and
lists of these; of tensors nothing), and one that differs is said in a line: nothing is recorded for that, and
nothing is refused. A value that differed in between is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from deepspeed_partition.capture.draws import digest_of
from deepspeed_partition.capture.model_layers import Recipe
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.first_failure import raised_by_all

_WATCHED: list[weakref.ref[Recipe]] = []
"""Recipes of the models whose layers a program has made, in that order, which is alike on all ranks."""
UNLIKE = (
    "{name} is {mine} on rank {rank} and {theirs} on rank {other}, and the code that reads it was cut into "
    "layers, which are of different models then: set it alike on all ranks, before the step, or let a module of "
    "its own read it"
)
UNLIKE_AT_REST = (
    "{name} is {mine} on rank {rank} and {theirs} on rank {other} where the pipeline comes to rest, and the code "
    "that reads it was cut into layers: layers of different models may have been trained since the last rest. Set "
    "it alike on all ranks"
)
_MOST_SHOWN = 80
"""Characters of a value that a line shows."""


def watch_recordings(recipe: Recipe) -> None:
    """Let ranks compare what they have recorded of a model."""
    _WATCHED.append(weakref.ref(recipe))


def has_changed() -> bool:
    """Whether something that captured code reads has changed on this rank since ranks compared it."""
    return any(_changes(recipe) for recipe in _recipes().values())


def refuse_unlike_recordings(pipeline: int) -> None:
    """Compare with the other ranks of a pipeline what they have recorded. Collective.

    Args:
        pipeline: The number of this rank's.

    Raises:
        RuntimeError: some ranks of a pipeline have recorded other calls, on all ranks.
    """
    mine = {}
    for place, recipe in _recipes().items():
        if recipe.outside is not None and recipe.recorded:
            digests = {repr(state): digest_of(each.root) for state, each in recipe.recorded.items()}
            mine[place] = digests, recipe.outside.changed
            recipe.outside.changed = {}
    all_ranks = gather_objects((pipeline, mine))
    for rank, (number, own) in enumerate(all_ranks):
        for other, (another, theirs) in enumerate(all_ranks[:rank]):
            for place in sorted(own.keys() & theirs.keys()) if number == another else ():
                (one, changes), (two, their_changes) = own[place], theirs[place]
                if any(one[state] != two[state] for state in one.keys() & two.keys()):
                    raise raised_by_all(RuntimeError(_in_words(rank, changes, other, their_changes)))


def tell_unlike_values(pipeline: int) -> None:
    """Compare with the other ranks of a pipeline what captured code reads now, and say what differs. Collective.

    Only what has changed on some rank since ranks were compared is looked at.

    Args:
        pipeline: The number of this rank's.
    """
    recipes = {place: each for place, each in _recipes().items() if each.recorded}
    mine = {
        place: (list(each.outside.changed), each.outside.values_in_words())
        for place, each in recipes.items()
        if each.outside is not None
    }
    all_ranks = gather_objects((pipeline, mine))
    differ = set()
    for rank, (number, own) in enumerate(all_ranks):
        for other, (another, theirs) in enumerate(all_ranks[:rank]):
            for place in sorted(own.keys() & theirs.keys()) if number == another else ():
                (changed, one), (also, two) = own[place], theirs[place]
                for name in dict.fromkeys([*changed, *also]):
                    # One that a rank follows no more, or that is not there, has no value to compare.
                    if name in one and name in two and one[name] != two[name]:
                        differ.add(place)
                        words = {"mine": one[name][:_MOST_SHOWN], "theirs": two[name][:_MOST_SHOWN]}
                        line = UNLIKE_AT_REST.format(name=name, rank=rank, other=other, **words)
                        warn_once(f"unlike at rest/{place}/{name}", line)
    for place, recipe in recipes.items():
        if recipe.outside is not None and place not in differ:  # else the next batch that drains refuses it
            recipe.outside.changed = {}


def values_read() -> dict[int, dict[str, Any]]:
    """What captured code reads now of models whose layers have run, for each by its place."""
    return {
        place: each.outside.values()
        for place, each in _recipes().items()
        if each.outside is not None and each.recorded
    }


def set_since(values: Mapping[int, Mapping[str, Any]]) -> dict[str, list[str]]:
    """What captured code reads that is not what it was when :func:`values_read` was asked, by class of model."""
    found: dict[str, list[str]] = {}
    for place, recipe in _recipes().items():
        if recipe.outside is not None and (names := recipe.outside.set_since(values.get(place, {}))):
            found.setdefault(type(recipe.captured.model).__name__, []).extend(sorted(names))
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
    one, two = (changes.get(names[0], before)[:_MOST_SHOWN] for changes in (mine, theirs))
    return UNLIKE.format(name=names[0], mine=one, rank=rank, theirs=two, other=other)
