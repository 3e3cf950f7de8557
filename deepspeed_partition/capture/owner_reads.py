"""Whether the code of a module reads an attribute of another module, as far as its source tells."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

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
    own = {key: getattr(each, "fget", each) for base in type(owner).__mro__ if base is not nn.Module
           for key, each in vars(base).items()}  # fmt: skip
    methods = {key: each for key, each in own.items() if isinstance(each, FunctionType) and key != "forward"}
    reading = {name, *(key for key, each in methods.items() if loads_attribute(each.__code__, name))}
    last = path.rpartition(".")[2]
    return any(_reads(function, reading, last) for function in search.functions)


def _reads(function: FunctionType, names: set[str], owner: str) -> bool:
    """Whether a function reads one of these attributes of what may be the owner."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return any(loads_attribute(function.__code__, name) for name in names)
    variables = _variables(function, tree)
    return any(
        node.attr in names and isinstance(node.ctx, ast.Load) and _may_be(node, owner, variables)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    ) or any(_asks_by_name(node, names) for node in ast.walk(tree))


def _variables(function: FunctionType, tree: ast.AST) -> set[str]:
    """The variables of a function that may be modules: not what it is given, and what is plainly a tensor."""
    given = {*inspect.signature(function).parameters}
    found = {
        *function.__code__.co_varnames,
        *function.__code__.co_freevars,
        *function.__code__.co_cellvars,
    } - given
    bound: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, []).append(node.value)
                elif isinstance(target, ast.Tuple) and _is_shape(node.value):
                    found -= {each.id for each in target.elts if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            bound.setdefault(node.target.id, []).append(node.value)
    found -= {name for name, values in bound.items() if all(map(_is_tensor, values))}
    return found if function.__name__ == "forward" else found | (given - {"self"})


_GIVE_MODULES = ("children", "get", "get_submodule", "getattr", "items", "modules", "next", "pop", "values")
_NO_MODULES = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.JoinedStr)


def _is_tensor(value: ast.expr) -> bool:
    """Whether an expression is plainly no module: a result of a call, of arithmetic, a number or a size."""
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", getattr(value.func, "attr", "")) not in _GIVE_MODULES
    return isinstance(value, _NO_MODULES) or _is_shape(value)


def _is_shape(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else value
    return isinstance(called, ast.Attribute) and called.attr in ("shape", "size")


def _may_be(read: ast.Attribute, owner: str, variables: set[str]) -> bool:
    """Whether what stands before the dot may be the owner: by its name, as a variable, or as a member."""
    value = read.value
    if isinstance(value, ast.Name):
        return value.id in variables and not hasattr(torch.Tensor, read.attr)
    if isinstance(value, ast.Attribute):
        return value.attr == owner
    is_item = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute)
    is_given = isinstance(value, ast.Call) and not _is_tensor(value)
    return is_item or is_given or not hasattr(torch.Tensor, read.attr)


def _asks_by_name(node: ast.AST, names: set[str]) -> bool:
    """Whether it is ``getattr(..., "name")``."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr":
        return False
    return any(isinstance(each, ast.Constant) and each.value in names for each in _arguments(node))


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args[1:2]
