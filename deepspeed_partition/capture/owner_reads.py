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
    reading -= set(dir(torch.Tensor))  # of a variable they are a tensor's, most likely
    last = path.rpartition(".")[2]
    return any(_reads(function, reading, last) for function in search.functions)


def _reads(function: FunctionType, names: set[str], owner: str) -> bool:
    """Whether a function reads one of these attributes of what may be the owner."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError, ValueError):
        return any(loads_attribute(function.__code__, name) for name in names)
    own = set(_names_bound_to_members(tree))
    if function.__name__ != "forward":
        own |= {*inspect.signature(function).parameters} - {"self"}
    return any(
        node.attr in names and isinstance(node.ctx, ast.Load) and _may_be(node.value, owner, own)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    ) or any(_asks_by_name(node, names) for node in ast.walk(tree))


def _names_bound_to_members(tree: ast.AST) -> Iterator[str]:
    """The variables of loops, and those that get an attribute, an item or what a call returns."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            targets = [node.target]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute | ast.Subscript | ast.Call):
            is_of_module = not isinstance(node.value, ast.Call) or getattr(node.value.func, "id", "") == "getattr"
            targets = node.targets if is_of_module else []
        for target in targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _may_be(value: ast.expr, owner: str, variables: set[str]) -> bool:
    """Whether what stands before the dot may be the owner: by its name, as a variable, or as a member."""
    if isinstance(value, ast.Name):
        return value.id in variables
    return not isinstance(value, ast.Attribute) or value.attr == owner


def _asks_by_name(node: ast.AST, names: set[str]) -> bool:
    """Whether it is ``getattr(..., "name")``."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "getattr":
        return False
    return any(isinstance(each, ast.Constant) and each.value in names for each in _arguments(node))


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args[1:2]
