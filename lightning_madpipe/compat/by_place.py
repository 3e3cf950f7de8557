"""Code that goes by the places of parameters: ``enumerate(self.parameters())``, ``list(self.parameters())[:2]``.

A rank of a pipeline has the parameters of its own layers, so that the first one there is another one than in one
process. Whether code counts them is seen in its source, around the place where it runs.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType

KNOWS_COLUMNS = hasattr(CodeType, "co_positions")
"""Whether Python knows where in its line an instruction stands, as from 3.11 on."""
COUNTING = frozenset(("enumerate", "islice", "batched"))
"""Functions whose results go by the places of what they are given."""
NUMBERS = frozenset(("range", "count"))
"""What makes a ``zip`` one by places. Lists that hooks keep are of this rank, as the parameters are."""
BY_NAME = frozenset(("state_dict",))
"""Functions that give a dict, of which ``[...]`` takes one by its name."""
IN_ORDER = frozenset(("list", "tuple", "reversed", "filter", "map", "iter"))
"""Functions that keep an order in which places can be counted later."""


def goes_by_place(frame: FrameType | None) -> bool:
    """Whether the expression that runs at ``frame`` gives parameters that are then taken by their places.

    False where the source cannot be read, and where numbers look something up (``averages[i]``), which may have
    been made of this rank's parameters.
    """
    return frame is not None and _goes_by_place(frame.f_code, frame.f_lasti, frame.f_lineno)


@functools.lru_cache(maxsize=4096)
def _goes_by_place(code: CodeType, at: int, line: int) -> bool:
    tree = _tree_of(code.co_filename)
    if tree is None:
        return False
    positions = list(code.co_positions())[at // 2] if KNOWS_COLUMNS else (line, None, None, None)
    return any(
        _is_taken_apart(node, tree) or any(_is_counted(source, tree) for source in _sources_of(node))
        for node in tree.at(positions)
    )


def _is_taken_apart(node: ast.AST, tree: _Tree) -> bool:
    """Whether this is the left side of ``first, *others = parameters``, and not what a loop names."""
    is_target = isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store)
    return is_target and isinstance(tree.parents.get(node), ast.Assign)


class _Tree:
    """The source of a file."""

    def __init__(self, root: ast.AST) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self._by_line: dict[int, list[ast.expr | ast.For]] = {}
        for node in ast.walk(root):
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
            if isinstance(node, ast.expr | ast.For):
                self._by_line.setdefault(node.lineno, []).append(node)

    def at(self, positions: tuple[int | None, ...]) -> Iterator[ast.expr | ast.For]:
        """What stands at these lines and columns; before Python 3.11, which knows the line alone, all of it."""
        begin, *rest = positions
        for node in self._by_line.get(begin or 0, ()):
            if rest[0] is None or [node.end_lineno, node.col_offset, node.end_col_offset] == rest:
                yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function that a node stands in, or the whole."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node in self.parents:
            node = self.parents[node]
        return node


@functools.lru_cache(maxsize=64)
def _tree_of(filename: str) -> _Tree | None:
    source = "".join(linecache.getlines(filename))
    try:
        return _Tree(ast.parse(source)) if source else None
    except (SyntaxError, ValueError):
        return None


def _sources_of(node: ast.expr | ast.For) -> list[ast.expr]:
    """What a node goes through, if it is a loop; else the node, and what a call is given."""
    if isinstance(node, ast.For):
        return [node.iter]
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return [each.iter for each in node.generators]
    if isinstance(node, ast.Call):
        return [node, *(source for argument in node.args for source in _sources_of(argument))]
    return [node]


def _is_counted(node: ast.expr, tree: _Tree) -> bool:
    """Whether what an expression gives is taken by its places, by what stands around it."""
    if _is_counting(node, tree):
        return True
    around = tree.parents.get(node)
    if isinstance(around, ast.Subscript) and around.value is node:
        return _called(node) not in BY_NAME
    if isinstance(around, ast.Call) and node in around.args:
        return _is_counting(around, tree) or (_called(around) in IN_ORDER and _is_counted(around, tree))
    if isinstance(around, ast.comprehension) and around.iter is node:
        whole = tree.parents[around]
        return isinstance(whole, ast.ListComp | ast.GeneratorExp) and _is_counted(whole, tree)
    if isinstance(around, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        targets = around.targets if isinstance(around, ast.Assign) else [around.target]
        function = tree.function_of(node)
        by_name = _called(around.value) in BY_NAME
        return any(_is_counted_later(target, function, tree, by_name=by_name) for target in targets)
    return False


def _is_counted_later(target: ast.expr, function: ast.AST, tree: _Tree, *, by_name: bool) -> bool:
    """Whether what a name or an attribute was given is taken by its places in the same function.

    Args:
        by_name: What stands in brackets are names.
    """
    if isinstance(target, ast.List | ast.Tuple):
        return True
    wanted = ast.unparse(target)
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == wanted:
            around = tree.parents.get(node)
            is_taken = isinstance(around, ast.Subscript) and around.value is node
            if is_taken and isinstance(node.ctx, ast.Load) and not by_name:
                return True
            if isinstance(around, ast.Call) and node in around.args and _is_counting(around, tree):
                return True
    return False


def _is_counting(node: ast.AST, tree: _Tree) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if _called(node) == "zip":
        return any(_called(each) in NUMBERS or _has_places(each) for each in node.args)
    return _called(node) in COUNTING and not _looks_up(node, tree)


def _has_places(node: ast.expr) -> bool:
    """Whether a list or tuple is written member by member, and not of others: ``[*parameters, *buffers]``."""
    return isinstance(node, ast.List | ast.Tuple) and not (
        node.elts and all(isinstance(each, ast.Starred) for each in node.elts)
    )


def _looks_up(call: ast.Call, tree: _Tree) -> bool:
    """Whether the numbers of ``enumerate`` look something up, which may be a list of this rank's own."""
    loop = tree.parents.get(call)
    target = getattr(loop, "target", None)
    if (
        _called(call) != "enumerate"
        or not isinstance(target, ast.Tuple)
        or not isinstance(target.elts[0], ast.Name)
    ):
        return False
    within = tree.parents[loop] if isinstance(loop, ast.comprehension) else loop
    assert within is not None, "a target stands in it"
    return any(
        isinstance(each, ast.Name) and each.id == target.elts[0].id
        for node in ast.walk(within)
        if isinstance(node, ast.Subscript)
        for each in ast.walk(node.slice)
    )


def _called(node: ast.AST | None) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
