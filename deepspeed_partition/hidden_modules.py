"""Modules that a module holds where torch does not look: in lists, dicts and objects, such as a frozen teacher.

They are in no ``parameters()`` and in no ``state_dict()``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.code_names import LIBRARIES, SlotsOf, module_of, slots_of
from deepspeed_partition.generators import OF_THREADS
from deepspeed_partition.layer_calls import original_of

_OF_TORCH = frozenset(vars(nn.Module()))
_DEPTH = 3
_MOST_MEMBERS = 1000
_LEAVES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Tensor,
    np.ndarray,
    type,
    ModuleType,
    FunctionType,
)


def hidden_modules(
    module: nn.Module, apart: Container[nn.Module] = (), *, of_children: bool = True
) -> dict[str, nn.Module]:
    """Return the modules that a module and its children hold so, and their children, by names as ``fixed[0]``.

    Args:
        module: A layer.
        apart: Modules that belong elsewhere, such as other layers of a pipeline.
        of_children: Whether what its registered children hold counts, too.
    """
    module = original_of(module)
    own = set(map(id, module.modules()))
    known = set(own)
    found: dict[str, nn.Module] = {}
    todo = deque(module.named_modules() if of_children else [("", module)])
    while todo:
        path, owner = todo.popleft()
        # A module around the layer, or around the child that points to it, is a model and no part of the layer.
        inside = {id(module), id(owner)} if id(owner) in own else {id(module)}
        for name, value in list(vars(owner).items()):
            if name in _OF_TORCH:
                continue
            for inner, hidden in _modules_in(value, f"{path}.{name}" if path else name, _DEPTH):
                if id(hidden) in known or hidden in apart or not inside.isdisjoint(map(id, hidden.modules())):
                    continue
                for below, each in hidden.named_modules():
                    if id(each) not in known:
                        known.add(id(each))
                        place = f"{inner}.{below}" if below else inner
                        found[place] = each
                        todo.append((place, each))
    return found


def hidden_beside(
    module: nn.Module, apart: Container[nn.Module] = (), *, of_children: bool = True
) -> dict[str, nn.Module]:
    """Return the modules that a module holds so, but for those of ``apart`` in a whole model."""
    found = hidden_modules(module, of_children=of_children)

    def is_in_more(path: str) -> bool:
        ends = (place for place, sign in enumerate(path) if sign == ".")
        return any(found.get(path[:end], module) not in apart for end in ends if path[:end] in found)

    return {path: each for path, each in found.items() if each not in apart or not is_in_more(path)}


def parts_of(modules: Iterable[nn.Module]) -> Container[nn.Module]:
    """Return the modules and their children, by identity: the hash of a metric depends on what it holds."""
    found = WeakIdKeyDictionary()
    for module in modules:
        for part in module.modules():
            found[part] = None
    return found


def modules_within(value: Any) -> list[nn.Module]:
    """Return the modules in a container or an object, and those that they hold where torch does not look."""
    found = dict.fromkeys(module for _, module in _modules_in(value, "", _DEPTH))
    return list(dict.fromkeys(each for module in found for each in (module, *hidden_modules(module).values())))


def hidden_tensors(hidden: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of :func:`hidden_modules`, by name."""
    return {
        f"{path}.{name}": tensor
        for path, module in hidden.items()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


def _modules_in(value: Any, name: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        if module_of(type(value)).partition(".")[0] not in ("deepspeed", "deepspeed_partition"):
            yield name, value
    elif not depth or isinstance(value, _LEAVES):
        return
    elif isinstance(value, dict | list | tuple | deque):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in list(islice(members, _MOST_MEMBERS)):
            yield from _modules_in(member, f"{name}[{key!r}]", depth - 1)
    elif isinstance(value, MethodType):
        yield from _modules_in(value.__self__, f"{name}.__self__", depth - 1)
    elif isinstance(value, functools.partial):
        for key, member in (*enumerate((value.func, *value.args)), *value.keywords.items()):
            yield from _modules_in(member, f"{name}({key})", depth - 1)
    elif module_of(type(value)).partition(".")[0] not in (*LIBRARIES, *OF_THREADS):
        for key, member in list(islice(table_of(value).items(), _MOST_MEMBERS)):
            yield from _modules_in(member, f"{name}.{key}", depth - 1)


def table_of(value: Any) -> Any:
    """Return the attributes of an object, also those in slots, as a table that can be written to."""
    kind: Any = type(value)
    slots, table = slots_of(kind), getattr(value, "__dict__", None)
    table = table if isinstance(table, dict) else None
    return SlotsOf(value, slots, table) if slots else {} if table is None else table
