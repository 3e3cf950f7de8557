"""Which code makes a text only to show it: to print or log it, to warn or to raise an error with it."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import FrameType

from deepspeed_partition.capture.reads_in_code import SHOWING

_SHOW = frozenset(("logging", "pprint", "reprlib", "traceback", "warnings"))
"""Modules that make texts of what they are given, which nothing but people reads."""


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
    shown = (each for each in ast.walk(tree) if isinstance(each, ast.stmt) and _shows(each))
    return frozenset(line for each in shown for line in range(each.lineno, (each.end_lineno or each.lineno) + 1))


def _shows(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert | ast.Raise):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in SHOWING
