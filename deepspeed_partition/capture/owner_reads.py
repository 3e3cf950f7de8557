"""Whether the code of a module reads an attribute of another module, as far as its source tells."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import NamedTuple, TypeGuard

import torch
from torch import nn

from deepspeed_partition.capture.left_behind import is_no_librarys
from deepspeed_partition.code_names import CodeSearch, forward_of
from deepspeed_partition.names_of_forward import loads_attribute


def reads_attribute_of(reader: nn.Module, owner: nn.Module, path: str, name: str) -> bool:
    """Whether a module's code may read an attribute of another one, by a name for it or by a method of it.

    Args:
        reader: The module whose ``forward`` is searched, with the functions that it calls.
        owner: The module that has the attribute.
        path: The owner's name in the model.
        name: The attribute.
    """
    search = CodeSearch(is_no_librarys)
    search.read(forward_of(reader), type(reader))
    own = [(key, getattr(each, "fget", each)) for base in type(owner).__mro__ if base is not nn.Module
           for key, each in vars(base).items()]  # fmt: skip
    methods = {key for key, each in own if isinstance(each, FunctionType) and key != "forward"
               and loads_attribute(each.__code__, name)}  # fmt: skip
    last = path.rpartition(".")[2]
    return any(_reads(function, reader, last, name, methods) for function in search.functions)


def _reads(function: FunctionType, reader: nn.Module, owner: str, name: str, methods: set[str]) -> bool:
    """Whether a function reads an attribute of what may be the owner, or calls a method of it that does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return any(loads_attribute(function.__code__, each) for each in (name, *methods))
    variables, called = _variables(function, tree, reader), _called_in(tree)
    return any(
        isinstance(node.ctx, ast.Load) and _may_be(node, owner, variables, is_called=node in called)
        for node in ast.walk(tree)
        # A number is not called: what x.max() reads is none.
        if isinstance(node, ast.Attribute) and (node.attr in methods or (node.attr == name and node not in called))
    ) or any(_asks_by_name(node, {name, *methods}) for node in ast.walk(tree))


class _Variables(NamedTuple):
    """Names of variables."""

    may_be_modules: set[str]
    of_members: set[str]
    """Those that get an attribute of ``self``, or an item of one."""


def _variables(function: FunctionType, tree: ast.AST, reader: nn.Module) -> _Variables:
    """The variables of a function that may be modules: not what it is given, and what is plainly a tensor."""
    given = {*inspect.signature(function).parameters}
    found, bound = {*function.__code__.co_freevars}, dict[str, list[ast.expr]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):  # of a function within, too
            found.add(node.arg)
        for name, value in _bindings(node):
            bound.setdefault(name, []).append(value)
    found -= given | {name for name, values in bound.items() if all(_is_tensor(each, reader) for each in values)}
    found |= set() if function.__name__ == "forward" else given - {"self"}
    return _Variables(
        found, {name for name, values in bound.items() if any(_is_member(each, reader) for each in values)}
    )


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The variables that a statement or an expression sets, each with what it gets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _parts(target, node.value)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from _parts(node.target, node.value)
    elif isinstance(node, ast.For | ast.comprehension):
        yield from _parts(node.target, _item_of(node.iter))


def _parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from _parts(target.value, value)
    elif isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(values) != len(target.elts) or any(isinstance(each, ast.Starred) for each in target.elts + values):
            values = [_item_of(value)] * len(target.elts)
        for each, own in zip(target.elts, values, strict=True):
            yield from _parts(each, own)


def _item_of(value: ast.expr) -> ast.expr:
    return ast.Subscript(value, ast.Constant(0), ast.Load())


_GIVE_MODULES = ("children", "get", "get_submodule", "getattr", "items", "modules", "next", "pop", "values")
_NO_MODULES = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.JoinedStr)


def _is_tensor(value: ast.expr, reader: nn.Module) -> bool:
    """Whether an expression is plainly no module: a result of a call, of arithmetic, a number or a size."""
    if isinstance(value, ast.Call):
        if _is_of_self(value.func):  # a module within returns tensors, and a method may return a module
            return not callable(getattr(type(reader), value.func.attr, None))
        arguments = (*value.args, *(each.value for each in value.keywords))
        return not _gives_modules(value) and not any(_has_attribute(each, reader) for each in arguments)
    return isinstance(value, _NO_MODULES) or _is_shape(value) or _is_plain(value, reader)


def _gives_modules(call: ast.Call) -> bool:
    """Whether a function is called by whose name one gets modules out of containers."""
    return getattr(call.func, "id", getattr(call.func, "attr", "")) in _GIVE_MODULES


def _is_shape(value: ast.expr) -> bool:
    """Whether an expression is sizes of a tensor, or one of them."""
    value = value.value if isinstance(value, ast.Subscript) else value
    called = value.func if isinstance(value, ast.Call) else value
    return isinstance(called, ast.Attribute) and called.attr in ("shape", "size")


def _is_of_self(value: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"


def _is_plain(value: ast.expr, reader: nn.Module) -> bool:
    """Whether an expression is an attribute of the reader that is a tensor, a number or a text."""
    if not _is_of_self(value):
        return False
    tables = (reader._parameters, reader._buffers, vars(reader))
    return any(isinstance(table.get(value.attr), torch.Tensor | float | int | str) for table in tables)


def _has_attribute(value: ast.expr, reader: nn.Module) -> bool:
    """Whether an attribute of ``self`` stands in an expression, and is neither called nor plainly no module."""
    called = _called_in(value)
    return any(
        _is_of_self(node) and node not in called and not _is_plain(node, reader)
        for node in ast.walk(value)
        if isinstance(node, ast.expr)
    )


def _is_member(value: ast.expr, reader: nn.Module) -> bool:
    """Whether an expression is an attribute of ``self``, one of that, or an item of one."""
    return isinstance(value, ast.Attribute | ast.Subscript) and _has_attribute(value, reader)


def _called_in(tree: ast.AST) -> set[ast.expr]:
    """The expressions in a tree that are called."""
    return {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _may_be(read: ast.Attribute, owner: str, variables: _Variables, *, is_called: bool) -> bool:
    """Whether what stands before the dot may be the owner: by its name, as a variable, or as a member."""
    value = read.value
    # Tensors have methods that code calls, and other attributes that it does not call.
    has_tensor = hasattr(torch.Tensor, read.attr) and callable(getattr(torch.Tensor, read.attr)) == is_called
    if isinstance(value, ast.Name):
        return value.id in variables.may_be_modules and (value.id in variables.of_members or not has_tensor)
    if isinstance(value, ast.Attribute):
        return value.attr == owner
    is_item = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute)
    is_given = isinstance(value, ast.Call) and _gives_modules(value)
    return is_item or is_given or not has_tensor


def _asks_by_name(node: ast.AST, names: set[str]) -> bool:
    """Whether it is ``getattr(..., "name")``."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr":
        return False
    return any(isinstance(each, ast.Constant) and each.value in names for each in _arguments(node))


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args[1:2]
