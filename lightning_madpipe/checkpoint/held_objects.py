"""The objects that a program holds while it trains: where copies of weights may stand.

A search begins with the attributes of callbacks, of the LightningModule, of modules beside its layers and of the
optimizer, and with what the code of these names: globals, variables of functions around, attributes of classes.
The nearest objects come first.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed_partition.code_names import LIBRARIES, CodeSearch, is_installed, is_librarys, module_of, slots_of
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.module import outside_pipeline

DEPTH = 12
"""How many attributes deep, from where a search begins, objects are looked for."""
MOST_OBJECTS = 200_000
"""How many objects are looked at, which takes about a second."""
MOST_ITEMS = 20_000
"""Items of a container up to which it is looked at what is within them."""
PLAIN, GIVING = ("builtins", "collections"), {"__iter__", "__getitem__", "__len__", "items", "values"}
"""Modules whose containers give what is in them, and the methods that do."""
OF_MODULES = frozenset(vars(nn.Module()))


def roots(module: Any, owners: Mapping[str, Any], ignored: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a search begins with: attributes of the owners, and what their code names, each with its place.

    Args:
        module: The LightningModule.
        owners: It, callbacks and others, by name.
        ignored: Attributes that are not the program's.
    """
    beside = {
        f"self.{path}": part for path, part in outside_pipeline(module) if path and not is_librarys(type(part))
    }
    for name, owner in {**owners, **beside}.items():
        # What stands in a module as a child is no copy; its plain attributes may be.
        skipped = {*ignored, *OF_MODULES} if isinstance(owner, nn.Module) else ignored
        yield from ((f"{name}.{key}", value) for key, value in list(vars(owner).items()) if key not in skipped)
    yield from _named_in_code(module, [*owners.values(), *beside.values()])


def _named_in_code(module: Any, owners: Collection[Any]) -> Iterator[tuple[str, Any]]:
    """The values of names that are no attributes of ``owners``, and that the code of their classes reads."""
    # Its own package is the program's even where it is installed.
    package = type(module).__module__.partition(".")[0]
    search = CodeSearch(lambda name: (name or "").partition(".")[0] == package or not is_installed(name))
    for owner in owners:
        for kind in type(owner).__mro__:
            for member in () if is_librarys(kind) else list(vars(kind).values()):
                search.read(member, type(owner))
        for value in list(vars(owner).values()):  # such as the functions of a LambdaCallback
            search.read(value, None)
    for hook in _hooks(module):
        search.read(hook, None)
    for (owner, key), name in search.found.items():
        yield f"{owner.rpartition('.')[2]}.{key}", name.value


def _hooks(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        yield from (
            *part._forward_hooks.values(),
            *part._forward_pre_hooks.values(),
            *part._backward_hooks.values(),
        )


def walk(begin: Iterator[tuple[str, Any]], visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the dicts, lists, modules and single weights that stand in objects, by place.

    Args:
        begin: What to begin with.
        visited: The identities of what is not looked at.
    """
    waiting = deque((place, value, DEPTH) for place, value in begin)
    num_objects = 0
    while waiting:
        place, value, depth = waiting.popleft()
        if isinstance(value, bool | int | float | str) or id(value) in visited:
            continue
        visited.add(id(value))
        if _makes_its_items(value):
            continue
        num_objects += 1
        if num_objects > MOST_OBJECTS:
            warn_once(
                "held objects",
                f"copies of weights were looked for in {MOST_OBJECTS:,} objects that callbacks, the module and "
                "the globals of its code hold, and there are more: a copy among the rest would not follow layers "
                "that move. Keep copies in an attribute of a callback or of the module",
            )
            return
        if isinstance(value, nn.Module | nn.Parameter | dict | list | tuple | set | frozenset | deque):
            yield place, value
        if not depth:
            continue
        is_item = isinstance(value, dict | list | tuple | deque)
        for key, child in list(inside(value).items()):
            if not (is_item and isinstance(child, Tensor)):
                waiting.append((f"{place}.{key}", child, depth - 1))


def inside(value: Any) -> Mapping[Any, Any]:
    """What is in a dict, list or tuple, what a function holds, or the attributes of an object of the program.

    None of one that a library made, such as the Trainer, but for the states of an optimizer; of a module its plain
    attributes alone. None of a file of Python that is installed, such as ``torch``, through which all is reached.
    """
    if isinstance(value, dict | list | tuple | deque) and len(value) > MOST_ITEMS:
        return {}
    if isinstance(value, dict):
        return dict(dict.items(value))  # and what it holds itself, where a library makes its values when asked
    if isinstance(value, ModuleType):
        return {} if is_installed(value.__name__) else vars(value)
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        defaults = {"defaults": value.__defaults__, "kwdefaults": value.__kwdefaults__}
        return {**defaults, **{name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}}
    if isinstance(value, MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, functools.partial):
        # What the strategy hangs on callbacks, such as the whole model that a summary shows, is not the program's.
        is_ours = (getattr(value.func, "__module__", None) or "").partition(".")[0] == "lightning_madpipe"
        return {} if is_ours else {"function": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, Optimizer):
        return {"state": value.state}
    if module_of(type(value)).partition(".")[0] in LIBRARIES or isinstance(value, type | Tensor):
        return {}
    held = _attributes(value)
    return (
        {key: each for key, each in held.items() if key not in OF_MODULES}
        if isinstance(value, nn.Module)
        else held
    )


def _makes_its_items(value: Any) -> bool:
    """Return whether a container's class has its own way to give what is in it.

    The table of models in transformers, a dict, imports each of them as it is looked at, or raises.
    """
    return isinstance(value, dict | list | tuple | set | frozenset | deque) and any(
        each.__module__ not in PLAIN and not GIVING.isdisjoint(vars(each)) for each in type(value).__mro__
    )


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has, without code of its class, which may make some or raise."""
    held = {}
    kind: type = type(value)
    for name, member in slots_of(kind).items():
        with suppress(AttributeError):  # one that is not set
            held[name] = member.__get__(value)
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return held
    return {**held, **own} if type(own) is dict else held


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # its variable has no value yet
        return True
    return False
