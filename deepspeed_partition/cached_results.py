"""The results that ``functools.cache`` and ``functools.lru_cache`` keep, and what makes a cache what it was."""

from __future__ import annotations

import dis
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, NoneType
from typing import Any

CACHE: Any = type(functools.cache(lambda: None))
"""The class of a function with a cache."""
OF_WRAPPERS = frozenset((*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"))
"""Attributes that each of these functions has."""
FILLED = (
    "{name} keeps results (lru_cache), and trials of a step have put some into it that stay: single results "
    "cannot be taken out of a cache with a maxsize. It seems to read what changes, or to draw random numbers, so "
    "that a step may get other results than in one process: use functools.cache or a dict in its place"
)
"""What is said once of a cache that cannot be made what it was."""
OF_LAST_STAGE = (
    "{name} keeps results (functools.cache) of each rank's own, and {step} fills it on the last stage. It seems "
    "to read what changes, or to draw random numbers, so that hooks on other ranks, and code behind fit, may get "
    "other results than in one process: keep them in a dict, which goes to every rank"
)
"""What is said once of a cache that a step fills, and whose function gives another result another time."""
_DRAWS = frozenset((
    "choice", "choices", "integers", "next", "normal", "perf_counter", "permutation", "rand", "randint", "randn",
    "random", "randperm", "sample", "shuffle", "time", "uniform",
))  # fmt: skip
"""Names by which a function gets another number each time."""
_STORES = frozenset(("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR"))
_CONSTANT = frozenset((bool, bytes, complex, float, int, str, tuple, NoneType))


def cache_kept(cache: Any) -> Callable[[], bool]:
    """Return what makes a cache what it is now, and returns whether it could.

    How often it was asked is counted on.
    """
    before, maxsize = cache.cache_info(), cache.cache_parameters()["maxsize"]
    table = _results_of(cache) if maxsize is None else None
    results = dict(table or ())

    def restore() -> bool:
        now = cache.cache_info()
        if (now.misses, now.currsize) == (before.misses, before.currsize):
            return True
        if table is not None:
            table.clear()
            table.update(results)
        elif not before.currsize:
            cache.cache_clear()
        return table is not None or not before.currsize

    return restore


def without_added(cache: Any) -> Callable[[], None]:
    """Return what takes out of a cache what is put into it from now on.

    Where the cache has a maxsize, Python copes with a result that is gone: what it keeps of it is dropped in turn.
    """
    before = list(_results_of(cache) or ())

    def drop() -> None:
        table = _results_of(cache)
        if table is None:
            cache.cache_clear()
            return
        known = set(map(id, before))
        for key in [key for key in table if id(key) not in known]:
            del table[key]

    return drop


def may_differ(functions: Iterable[FunctionType], data: Iterable[Any]) -> bool:
    """Whether a function may return another result when it is called another time with the same arguments.

    Args:
        functions: It and the functions of the program that it calls.
        data: The values that these name beside themselves.
    """
    codes = [code for function in functions for code in _codes_in(function.__code__)]
    return (
        any(not _DRAWS.isdisjoint(code.co_names) for code in codes)
        or any(step.opname in _STORES for code in codes for step in dis.get_instructions(code))
        or any(type(value) not in _CONSTANT for value in data)
    )


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes_in(each)


def _results_of(cache: Any) -> dict[Any, Any] | None:
    """The table in which a cache keeps its results, by their arguments; Python's own has no other way to it."""
    own = vars(cache)
    tables = [each for each in gc.get_referents(cache) if type(each) is dict and each is not own]
    return tables[0] if len(tables) == 1 and len(tables[0]) == cache.cache_info().currsize else None
