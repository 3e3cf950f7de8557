"""What hooks on layers write, such as features in a dictionary of the module, and a step may not read.

A hook runs where its layer runs, once per micro-batch, and the step on the last stage. Hooks are read, and not
run. Where there is no source, nothing is found.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from deepspeed_partition.code_names import function_of, is_librarys, names_in
from lightning_madpipe.compat.unsupported import hooks_of
from lightning_madpipe.module import PipelineCall

MUTATORS = frozenset((
    "__setitem__", "add", "append", "appendleft", "clear", "extend", "insert", "pop", "setdefault", "update",
))  # fmt: skip
"""Methods that change a list, a dict, a set or a deque."""


class Collected(NamedTuple):
    """An attribute that a hook on a layer writes, or whose list or dict it fills."""

    owner: Any
    """The LightningModule, a part of it, or an object that one of them has."""
    shown: str
    """The attribute in words, such as ``self.features``."""
    name: str
    hook: str
    """The hook and where it hangs, in words."""
    function: Any
    """The hook."""
    layer: int | str
    """The number of its layer, or the key of a tie."""


def collected_by_hooks(module: nn.Module, call: PipelineCall) -> Iterator[Collected]:
    """What hooks on the layers of a pipeline write on the module, on its parts and on objects that these have."""
    owners = list(_objects(module))
    shown_as = {id(owner): shown for owner, shown in owners}
    names = {part: f"self.{name}" for name, part in module.named_modules()}
    for number, layer in call.existing_modules():
        for path, part in layer.named_modules():
            place = names.get(part, f"layer {number}{'.' if path else ''}{path}")
            for hook in (hook for hooks in hooks_of(part).values() for hook in hooks):
                said = f"the hook {getattr(hook, '__name__', type(hook).__name__)} on {place}"
                for owner, name in _writes(hook, part, [owner for owner, _ in owners]):
                    if id(owner) in shown_as:
                        yield Collected(owner, f"{shown_as[id(owner)]}.{name}", name, said, hook, number)


def read_around(model: nn.Module, elements: Sequence[nn.Module]) -> tuple[Collected, str] | None:
    """What code around the elements of a model reads that a hook in one of them writes, and whose code that is.

    That code runs where the first and the last layer are, and the hook where its element is.
    """
    inside = {part for element in elements for part in element.modules()}
    around = [part for part in model.modules() if part not in inside]
    for collected in collected_by_hooks(model, PipelineCall(layers=tuple(elements), attribute="forward")):
        for part in around:
            kind: Any = part.__class__
            if collected.name in _names_from_forward(kind):
                return collected, type(part).__name__
    return None


@functools.cache
def _names_from_forward(kind: Any) -> frozenset[str]:
    """All names in the program's code of ``forward()`` of a class, of its base classes, and of what it calls."""
    found, todo = set[str](), {"forward"}
    while todo:
        name = todo.pop()
        functions = (function_of(vars(base).get(name)) for base in kind.__mro__ if not is_librarys(base))
        for function in (function for function in functions if function is not None):
            todo |= {*names_in(function.__code__)} - found
            found.update(names_in(function.__code__))
    return frozenset(found)


def _objects(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """The module, its parts, and the objects of classes of the program that these have, as a step writes them."""
    for path, part in module.named_modules():
        shown = f"self.{path}" if path else "self"
        for name, value in vars(part).items():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | FunctionType):
                yield value, f"{shown}.{name}"
    for path, part in module.named_modules():
        yield part, f"self.{path}" if path else "self"


def _writes(hook: Any, part: nn.Module, owners: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """The owners and names of attributes that a hook sets, or whose containers it changes."""
    given: list[Any] = []
    while isinstance(hook, functools.partial):
        hook, given = hook.func, [*hook.args, *given]
    if not isinstance(hook, FunctionType | MethodType):
        hook = getattr(hook, "__call__", hook)  # noqa: B004  of an object
    if isinstance(hook, MethodType):
        hook, given = hook.__func__, [hook.__self__, *given]
    if not isinstance(hook, FunctionType):
        return
    code = hook.__code__
    known = dict(hook.__globals__)
    known.update(zip(code.co_freevars, (_content(cell) for cell in hook.__closure__ or ()), strict=False))
    known.update(zip(code.co_varnames[: code.co_argcount], [*given, part], strict=False))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(hook)))
    except (OSError, SyntaxError):  # typed into a shell, or a part of a line
        return
    if code.co_name == "<lambda>":  # its line may have more than the lambda
        given_names = list(code.co_varnames[: code.co_argcount])
        found = (each for each in ast.walk(tree) if isinstance(each, ast.Lambda))
        tree = ast.Module([ast.Expr(each) for each in found if [a.arg for a in each.args.args] == given_names], [])
    aliases = _aliases(tree)
    for target in _targets(tree):
        passed = set[str]()
        while isinstance(target, ast.Name) and target.id in aliases and target.id not in passed:
            passed.add(target.id)
            target = aliases[target.id]
        if isinstance(target, ast.Attribute):
            yield _value(target.value, known), target.attr
        elif isinstance(target, ast.Name) and isinstance(held := known.get(target.id), list | dict | set):
            for owner in owners:
                yield from ((owner, name) for name, value in vars(owner).items() if value is held)


def _aliases(tree: ast.AST) -> dict[str, ast.AST]:
    """The containers that local names stand for, or are taken out of, as in ``own = self.features[name]``."""
    return {
        node.targets[0].id: _container(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript)
    }


def _targets(tree: ast.AST) -> Iterator[ast.AST]:
    """The attributes that code sets, and the names and attributes whose containers it changes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _container(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield _container(node.func.value)


def _container(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _value(node: ast.AST, known: dict[str, Any]) -> Any:
    """What stands in a name or in attributes of one; None where it cannot be told."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _value(node.value, known)
    if isinstance(owner, nn.Module) and node.attr in owner._modules:
        return owner._modules[node.attr]
    return getattr(owner, "__dict__", {}).get(node.attr)
