"""The modules that a layer is made of, by names and classes: a script may change these when the layer is built.

Where the layer moves, parts without parameters and buffers that were put in, replaced or deleted are so there,
too, and so are classes that were changed (``layer.__class__ = Other``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from deepspeed_partition.code_names import module_of


class UnlikeTreeError(Exception):
    """A module is not what a specification builds, and cannot be made so; says what it is in words."""


@dataclass(frozen=True, slots=True)
class Node:
    """A module within a layer."""

    kind: tuple[str, str]
    """The class of the module: the file of Python that defines it, as it is imported, and its qualified name."""
    children: tuple[tuple[str, str | None], ...]
    """The modules right below this one: their names, and their paths in the layer, which several may share."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    training: bool
    has_own_tensors: bool
    """Whether it has parameters or buffers itself."""
    has_tensors: bool
    """Whether it, or a module below it, has some."""
    is_hidden: bool
    """Whether a list or an object holds it, where torch does not look."""

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.kind[1]


Tree: TypeAlias = dict[str, Node]
"""The modules of a layer by their paths; parents before children."""


def tree_of(layer: nn.Module, hidden: dict[str, nn.Module]) -> Tree:
    """Return what a layer is made of.

    Args:
        layer: A layer.
        hidden: The modules that it holds where torch does not look, by name.
    """
    paths = {id(module): path for path, module in layer.named_modules()}
    return {
        path: Node(
            (module_of(type(module)), type(module).__qualname__),
            tuple((name, None if each is None else paths.get(id(each))) for name, each in module._modules.items()),
            tuple(module._parameters.keys()),
            tuple(module._buffers.keys()),
            module.training,
            _has_tensors(module),
            any(map(_has_tensors, module.modules())),
            path in hidden,
        )
        for path, module in {**dict(layer.named_modules()), **hidden}.items()
    }


def _has_tensors(module: nn.Module) -> bool:
    tables: tuple[Any, ...] = (module._parameters, module._buffers)  # a scripted module's are no dicts
    return any(tensor is not None for table in tables for _, tensor in table.items())


def new_paths(there: Tree, here: Tree) -> set[str]:
    """Return the paths of modules that stand in another one's place, or in none's, and have no tensors."""
    found: set[str] = set()
    for path, node in there.items():
        own = here.get(path)
        is_other = own is None or own.kind != node.kind or path.rpartition(".")[0] in found
        has_some = node.has_own_tensors if own is None else node.has_tensors
        if path and is_other and not has_some and not node.is_hidden:
            found.add(path)
    return found


def check_tree(there: Tree, here: Tree) -> None:
    """Refuse what cannot be made of the modules of another process.

    Raises:
        UnlikeTreeError: a class that cannot be found by its name, or a part in a list.
    """
    new = new_paths(there, here)
    for path, node in there.items():
        own = here.get(path)
        is_like = own is not None and own.kind == node.kind and path not in new
        if is_like and (node.is_hidden or (own is not None and own.children == node.children)):
            continue
        shown = f"its {path}" if path else "it"
        if node.is_hidden:
            raise UnlikeTreeError(f"{shown}, in a list or an object, is a {node.name}")
        if own is None and path not in new:
            raise UnlikeTreeError(f"{shown} is a {node.name}, which has buffers or shares weights")
        kind = type(None) if is_like else _class_of(node.kind)
        if kind is None:
            raise UnlikeTreeError(f"{shown} is a {node.name}, a class that is not found by its name")
        if node.kind[0].startswith("torch.jit") or issubclass(kind, torch.jit.ScriptModule):
            raise UnlikeTreeError(f"{shown} is a {node.name}, whose parts torch has compiled")


def take_tree(layer: nn.Module, there: Tree, here: Tree) -> None:
    """Let a layer be made of the modules that it is made of in another process.

    Args:
        layer: which is here.
        there: What it is made of in the other process.
        here: What it is made of here.

    Raises:
        UnlikeTreeError: a class does not let its objects be made, or an object become one of it.
    """
    new, modules = new_paths(there, here), dict(layer.named_modules())
    nodes = {path: node for path, node in there.items() if not node.is_hidden}
    for path, node in nodes.items():
        if path in new:
            modules[path] = _made(path, node)
        elif here[path].kind != node.kind:
            kind: Any = _class_of(node.kind)
            try:
                modules[path].__class__ = kind
            except TypeError as error:
                raise UnlikeTreeError(f"its {path} is a {node.name}: {error}") from error
    for path, node in nodes.items():
        children = {name: None if at is None else modules[at] for name, at in node.children}
        table: Any = modules[path]._modules
        if list(table.keys()) != list(children) or any(table[name] is not each for name, each in children.items()):
            table.clear()
            table.update(children)
        for name in children:
            modules[path].__dict__.pop(name, None)  # as None, which was no child


def _made(path: str, node: Node) -> nn.Module:
    kind: Any = _class_of(node.kind)
    try:
        module: nn.Module = kind.__new__(kind)
        nn.Module.__init__(module)
    except Exception as error:  # whatever its class does
        raise UnlikeTreeError(f"its {path} is a {node.name}: {type(error).__name__}: {error}") from error
    module.training = node.training
    module._parameters.update(dict.fromkeys(node.parameters))
    module._buffers.update(dict.fromkeys(node.buffers))
    return module


def _class_of(kind: tuple[str, str]) -> type | None:
    """Find a class of modules by its name, also one that a function defines; None where it is not the only one."""
    module, name = kind
    found: Any = sys.modules.get(module)
    for each in name.split("."):
        found = getattr(found, each, None)
    if isinstance(found, type):
        return found
    todo, known = [nn.Module], set[type]()
    while todo:
        fresh = [each for each in type.__subclasses__(todo.pop()) if each not in known]
        known.update(fresh)
        todo += fresh
    named = [each for each in known if (module_of(each), each.__qualname__) == kind]
    return named[0] if len(named) == 1 else None
