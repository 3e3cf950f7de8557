"""What code reads of attributes, dicts and variables for more than to count in them, to fill or to show them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from deepspeed_partition.code_names import names_in
from deepspeed_partition.names_of_forward import FILLING, loads_attribute

SHOWING = frozenset(("critical", "debug", "error", "exception", "info", "print", "warn", "warning"))
"""Functions that show what they are given, and whose result code leaves."""
_PLAIN = frozenset(("float", "format", "int", "len", "repr", "round", "str", "type"))
"""Functions that do nothing else than to return something of what they are given."""
_CONSTANTS = (bool, float, int, str)
_EXPRESSIONS = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Dict, ast.FormattedValue, ast.JoinedStr,
    ast.List, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.keyword,
)  # fmt: skip


class Reading(NamedTuple):
    """A place where code reads an attribute or a variable."""

    name: str
    is_attribute: bool
    key: str | None
    """The one entry of a dict that is read; None where that is not known."""


class ReadsInCode:
    """What some functions read.

    Args:
        functions: Those of a program.
    """

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self._without_source: list[CodeType] = []
        self._readings: list[Reading] = []
        for function in functions:
            readings = _readings_of(function)
            if readings is None:
                self._without_source.append(function.__code__)
            else:
                self._readings += readings

    def has_attribute(self, name: str) -> bool:
        """Whether an attribute of this name is read, of anything."""
        is_read = any(each.is_attribute and each.name == name for each in self._readings)
        return is_read or any(loads_attribute(code, name) for code in self._without_source)

    def has_variable(self, name: str) -> bool:
        """Whether a variable of this name is read."""
        is_read = any(not each.is_attribute and each.name == name for each in self._readings)
        return is_read or any(name in names_in(code) for code in self._without_source)

    def keys_of(self, name: str) -> frozenset[str] | None:
        """The entries that are read of what an attribute or a variable is, if it is a dict; None: any may be."""
        keys = [each.key for each in self._readings if each.name == name]
        is_known = None not in keys and not any(name in names_in(code) for code in self._without_source)
        return frozenset(key for key in keys if key is not None) if is_known else None


@cache
def _readings_of(function: FunctionType) -> tuple[Reading, ...] | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        made = compile(tree, "<code>", "exec", dont_inherit=True)
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    # A file may have been changed since it was read.
    if not any(_contents_of(each) == _contents_of(function.__code__) for each in _codes_in(made)):
        return None
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            above = list(_above(node, parents))
            if not (_is_filled(node, above) or _is_counted(node, above) or _is_shown(node, above)):
                name, is_attribute = (node.id, False) if isinstance(node, ast.Name) else (node.attr, True)
                found.append(Reading(name, is_attribute, _key_of(node, above)))
    return tuple(found)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_in(each)


def _contents_of(code: CodeType) -> tuple[str, frozenset[str], frozenset[Any]]:
    """The names and the constants in compiled code, by which it is known again."""
    every = [code, *_codes_in(code)]
    names = {name for each in every for name in (*each.co_names, *each.co_varnames, *each.co_freevars)}
    constants = {
        (type(value), value) for each in every for value in each.co_consts if isinstance(value, _CONSTANTS)
    }
    texts = {each for each in constants if "\n" in str(each[1])}  # such as a docstring, whose lines are indented
    return code.co_name, frozenset(names - {"__class__"}), frozenset(constants - texts)


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _is_filled(node: ast.expr, above: list[ast.AST]) -> bool:
    """Whether it is changed as in ``self.found.append(x)`` or ``self.found[key] += 1``."""
    match above:
        case [ast.Attribute(attr=method), ast.Call(), ast.Expr(), *_] if method in FILLING:
            return True
        case [ast.Subscript(value=value, ctx=ast.Store() | ast.Del()), *_]:
            return value is node
    return False


def _is_counted(node: ast.expr, above: list[ast.AST]) -> bool:
    """Whether it is ``self.calls`` in ``self.calls = self.calls + 1``."""
    match above:
        case [ast.BinOp(), ast.Assign(targets=[target]), *_]:
            return ast.unparse(target) == ast.unparse(node)
    return False


def _is_shown(node: ast.AST, above: list[ast.AST]) -> bool:
    """Whether it is printed, or asked whether to print."""
    for below, here in pairwise((node, *above)):
        if isinstance(here, ast.If):
            return below is here.test and all(map(_only_shows, (*here.body, *here.orelse)))
        if isinstance(here, ast.Expr):
            return _only_shows(here)
        is_plain = not isinstance(here, ast.Call) or _name_of(here) in _PLAIN | SHOWING
        if not isinstance(here, _EXPRESSIONS) or not is_plain:
            return False
    return False


def _only_shows(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass():
            return True
        case ast.Expr(value=ast.Call() as call):
            return _name_of(call) in SHOWING
    return False


def _name_of(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _key_of(node: ast.expr, above: list[ast.AST]) -> str | None:
    match above:
        case [ast.Subscript(value=value, slice=ast.Constant(value=str(key))), *_] if value is node:
            return key
        case [ast.Attribute(attr="get"), ast.Call(args=[ast.Constant(value=str(key)), *_]), *_]:
            return key
        case [ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()]), *_]:
            return key
    return None
