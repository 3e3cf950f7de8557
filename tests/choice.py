"""Which cases the chosen tests need: a worker of several processes runs these alone.

A test names its cases in its parameters or in its own code. So ``pytest -k`` and the marker ``exhaustive`` leave
out the work, too, and not only the sentence about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import CodeType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # workers, which read the choice, do without
    import pytest

Record = TypeVar("Record")

VARIABLE = "MADPIPE_TEST_CASES"
"""The environment variable that holds the names, as a JSON list, for a worker."""


def words_of(items: Iterable[pytest.Item]) -> set[str]:
    """Every string among the parameters and in the code of tests."""
    words: set[str] = set()
    for item in items:
        words.update(_texts(_parameters(item).values()))
        if function := getattr(item, "function", None):
            words.update(_constants(function.__code__))
    return words


def environment_for(request: pytest.FixtureRequest, **parameters: object) -> dict[str, str]:
    """The variable with the words of the chosen tests in the file of ``request``.

    Args:
        request: of a fixture: tests that ask for another one do not count. One that asks by
            ``request.getfixturevalue`` is counted, unless its parameters say that it does not.
        parameters: values that a test must have where it has such a parameter.
    """
    items = [
        item
        for item in request.session.items
        if item.path == request.path and _has(item, parameters) and _may_ask_for(item, request.fixturename)
    ]
    return {VARIABLE: json.dumps(sorted(words_of(items)))}


def is_chosen(case: str) -> bool:
    """Whether a worker has to run ``case``; every one without the variable, as by hand."""
    chosen = os.environ.get(VARIABLE)
    return chosen is None or case in json.loads(chosen)


def run_chosen(runs: Mapping[str, Callable[[], Record]]) -> dict[str, Record]:
    """What those of ``runs`` return that the chosen tests name, by their names: the runs of a case, one by one."""
    return {name: run() for name, run in runs.items() if is_chosen(name)}


def _parameters(item: pytest.Item) -> dict[str, object]:
    own = getattr(item, "callspec", None)
    return {} if own is None else own.params


def _has(item: pytest.Item, parameters: dict[str, object]) -> bool:
    own = _parameters(item)
    return all(own.get(name, value) == value for name, value in parameters.items())


def _may_ask_for(item: pytest.Item, fixture: str | None) -> bool:
    names = getattr(item, "fixturenames", [])
    return fixture is None or fixture in names or "request" in names


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list | set | frozenset | KeysView | ValuesView):
        for part in value:
            yield from _texts(part)


def _constants(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield from _texts(constant)
