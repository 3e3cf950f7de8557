"""Which code makes a text only to show it: to print or log it, to warn or to raise an error with it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

from deepspeed_partition.capture.reads_in_code import SHOWING

_SHOW = frozenset(("logging", "pprint", "reprlib", "traceback", "warnings"))
"""Modules that make texts of what they are given, which nothing but people reads."""
_CHECKS = re.compile("assert|check|debug|error|info|log|print|raise|warn")
"""Parts of the names of functions that show a text, at once or where a check fails; code drops their result."""


def only_shows(frame: FrameType | None) -> bool:
    """Whether code that makes a text of a number now does so in a statement that shows it, and no more.

    Args:
        frame: That of the code.
    """
    if frame is None or str(frame.f_globals.get("__name__") or "").partition(".")[0] in _SHOW:
        return True
    return frame.f_lineno in _lines_that_show(frame.f_code.co_filename)


@lru_cache(maxsize=256)
def _lines_that_show(file: str) -> frozenset[int]:
    """The lines of a file on which a statement stands that only shows something."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    shown = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and _shows(each)]
    lines = {line for each in shown for line in _lines_of(each)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            lines |= set(_lines_of_messages(function, lines))
    return frozenset(lines)


def _lines_of(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _lines_of_messages(function: ast.FunctionDef | ast.AsyncFunctionDef, shown: set[int]) -> Iterator[int]:
    """The lines of texts that get a name, which nothing but statements that show them reads."""
    used = [each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.JoinedStr):
            names = {each.id for each in statement.targets if isinstance(each, ast.Name)}
            places = [each.lineno for each in used if each.id in names]
            if len(names) == len(statement.targets) and shown.issuperset(places):
                yield from _lines_of(statement)


def _shows(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert | ast.Raise):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in SHOWING or _CHECKS.search(name) is not None
