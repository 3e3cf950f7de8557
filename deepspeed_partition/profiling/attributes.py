"""Attributes that layers keep beside parameters and buffers, in Python: a counter, a cache, a generator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from deepspeed_partition.cached_results import cache_kept
from deepspeed_partition.code_names import is_librarys
from deepspeed_partition.generators import GENERATORS
from deepspeed_partition.hidden_modules import hidden_modules
from deepspeed_partition.names_of_forward import names_of_forward
from deepspeed_partition.profiling.held_by_code import Held
from deepspeed_partition.profiling.module_tables import ModuleTables
from deepspeed_partition.profiling.object_members import OF_DEEPSPEED, attributes_of, packages_of
from deepspeed_partition.profiling.remembered_values import (
    MOST_MEMBERS,
    PLAIN,
    Known,
    Remembering,
    is_no_data,
    mark,
    put_cache_back,
    restored_values,
)
from deepspeed_partition.profiling.weights_beside import WeightsBeside

OF_DEEPSPEED_ON_TENSORS = (
    "grad_accum", "param_idx_in_group", "get_full_hp_", "set_full_hp_", "load_hp_checkpoint_state",
)  # fmt: skip
"""How names begin of attributes that DeepSpeed sets on parameters, besides ``ds_`` and ``_``."""
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def attributes_kept(modules: Iterable[nn.Module], *, buffers: bool = False) -> Iterator[None]:
    """Put the attributes of ``modules`` and of their children back afterwards, and their buffers if asked.

    Modules that they hold in lists and objects count, too, with their buffers in any case. So do the attributes of
    parameters and buffers: whatever their size, as a gradient that is added up there.

    Numbers, strings, tensors, random generators, arrays, what ``kept_values.py`` knows, and lists, dicts, sets and
    deques of these become what they were, and so do the attributes of a program's objects. Of any other object
    only the name is put back: what has changed within it stays changed. Parameters and modules that are new are
    gone, and others stand where they stood.
    """
    listed = list(modules)
    owners = list(dict.fromkeys(owner for module in listed for owner in module.modules()))
    hidden = [each for module in listed for each in hidden_modules(module).values()]
    with_buffers = [*(owners if buffers else []), *hidden]
    tables_before = ModuleTables(owners, buffers=False), ModuleTables(hidden)
    owners = list(dict.fromkeys((*owners, *hidden)))
    remembering = Remembering(is_no_data, by_others=True)
    before = [(owner, remembering.each(attributes_of(owner))) for owner in owners]
    for owner, remembered in before:
        remembering.let_others_stand(vars(owner), remembered)
    tables = [(owner._buffers, remembering.each(owner._buffers)) for owner in dict.fromkeys(with_buffers)]
    of_any_size = Remembering(lambda _: True, by_others=True)
    tensors = {id(tensor): tensor for owner in owners for tensor in _tensors_of(owner)}
    of_tensors = [(tensor, of_any_size.each(_attributes_of_tensor(tensor))) for tensor in tensors.values()]
    for tensor, remembered in of_tensors:
        of_any_size.let_others_stand(vars(tensor), remembered)
    try:
        yield
    finally:
        for owner, remembered in before:
            for name in attributes_of(owner).keys() - remembered.keys():
                del vars(owner)[name]
            vars(owner).update(restored_values(remembered))
        for tensor, remembered in of_tensors:
            for name in _attributes_of_tensor(tensor).keys() - remembered.keys():
                delattr(tensor, name)
            vars(tensor).update(restored_values(remembered))
        for table, remembered in tables:
            for name, value in restored_values(remembered).items():
                if table[name] is not value:  # a scripted module's table can set one by one alone
                    table[name] = value
        for each in tables_before:
            each.put_back()


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a module itself."""
    tables: tuple[Any, ...] = (module._parameters, module._buffers)  # a scripted module's are no dicts
    yield from (tensor for table in tables for _, tensor in table.items() if tensor is not None)


def _attributes_of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that a program, and not DeepSpeed, has set on a parameter or a buffer."""
    if isinstance(tensor, FakeTensor):  # what torch keeps there, such as a constant with data, is its own
        return {}
    names = (*OF_DEEPSPEED, "_hp_", *OF_DEEPSPEED_ON_TENSORS)
    return {name: value for name, value in vars(tensor).items() if not name.startswith(names)}


@contextmanager
def state_kept(
    functions: Iterable[Any], code_of: Iterable[Any] = (), apart: Iterable[nn.Module] = ()
) -> Iterator[None]:
    """Put back afterwards what functions and other objects that are called hold, and what other code names.

    That is, as :func:`attributes_kept` does it: attributes and buffers of a module, the attributes of an object
    and of what a method belongs to, the arguments of a partial, and the variables around the program's own code:
    of functions around it, of its file, of its class. Modules that stand in lists, dicts and objects there count,
    too, and weights of all of these modules that are not trained.

    Args:
        functions: What is called.
        code_of: Modules and specifications of layers, whose attributes others keep.
        apart: Modules of the functions, each without its children, whose weights others keep, as those of
            ``code_of``.
    """
    layers = list(code_of)
    held = HeldState(functions, layers, in_full=True)
    of_layers = [part for each in layers if isinstance(each, nn.Module) for part in each.modules()]
    by_others = {id(weight) for each in (*of_layers, *apart) for weight in each.parameters(recurse=False)}
    restore = held.remembered(buffers=True, by_others=True)
    tables = ModuleTables(held.modules)
    weights = WeightsBeside(held.modules, by_others)
    try:
        yield
    finally:
        restore(frozenset())
        tables.put_back()
        weights.put_back()


Place: TypeAlias = tuple[int, Any]
"""Where a value stands: the ``id`` of the table that has it, and its key there."""


class HeldState:
    """What functions and other objects that are called hold, as :func:`state_kept` says.

    Args:
        functions: What is called. What their code can reach is looked for once.
        code_of: Modules and specifications of layers, whose attributes do not count.
        in_full: Whether modules count, too, that stand in lists, dicts and objects, and what code of installed
            packages names, where functions or layers are of these packages.
    """

    def __init__(self, functions: Iterable[Any], code_of: Iterable[Any] = (), *, in_full: bool = False) -> None:
        called, layers = list(functions), list(code_of)
        held = Held(packages_of((*called, *layers)) if in_full else frozenset(), of_parts=in_full)
        for function in called:
            held.add(function)
        for each in layers:
            held.add_code_of(each)
        modules = [*held.modules, *(held.hidden_modules() if in_full else ())]
        self._owners = list(
            {id(owner): (owner, path) for module in modules for path, owner in module.named_modules()}.values()
        )
        self._pipelines = held.pipelines
        self._tables = list(held.tables())
        self._caches = held.caches
        self._has_others = False
        """Whether others stand in the place of iterators."""

    def remembered(
        self,
        *,
        buffers: bool,
        copies: Callable[[Any], bool] | None = None,
        known: Known | None = None,
        by_others: bool = False,
        iterators: bool = False,
    ) -> Callable[[Collection[Place]], None]:
        """Note all of it; return what puts it back, but for some places.

        Args:
            buffers: Whether buffers of modules count.
            copies: Whether a tensor or an array is copied, to be put back where it is changed in place.
            known: What others have noted at this instant, to which this is added: what several hold, such as the
                settings of all layers, is noted once.
            by_others: Let others stand until then in the place of iterators and the like, which cannot be put back
                themselves.
            iterators: Let others stand so in the place of iterators alone, which give what these give. They do
                until :meth:`let_iterators_stand_again`.
        """
        remembering = Remembering(copies or is_no_data, known, by_others=by_others, iterators=iterators)
        before = [
            (table, remembering.each({key: table[key] for key in keys if key in table}))
            for table, keys, _ in self._each(buffers=buffers)
        ]
        caches = [(name, cache, cache_kept(cache)) for name, cache in self._caches.items()]
        for table, remembered in before:
            remembering.let_others_stand(table, remembered)
        self._has_others |= iterators and remembering.has_others

        def restore(spared: Collection[Place]) -> None:
            for name, cache, put_back in caches:
                put_cache_back(name, cache, put_back)
            for (table, remembered), (_, keys, _) in zip(before, self._each(buffers=buffers), strict=True):
                for key in keys:
                    if key in table and key not in remembered and (id(table), key) not in spared:
                        del table[key]
                for key, put_back in remembered.items():
                    if (id(table), key) not in spared:
                        value = put_back()
                        if key not in table or table[key] is not value:
                            table[key] = value

        return restore

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are held, and their children, each once; of pipeline modules these themselves."""
        return [*(owner for owner, _ in self._owners), *self._pipelines]

    def let_iterators_stand_again(self) -> None:
        """Put iterators back to where others have stood for them, when nothing has to be given again any more."""
        if self._has_others:
            self._has_others = False
            self.remembered(buffers=False, copies=lambda _: False, iterators=True)(frozenset())
            self._has_others = False

    def look(self) -> dict[Place, tuple[str, Any]]:
        """Note how each value is written, and what can be compared of it later with ``==``."""
        return {
            (id(table), key): (f"{path}.{key}".removeprefix("."), mark(table[key]))
            for table, keys, path in self._each(buffers=True)
            for key in keys
            if key in table
        }

    def _each(self, *, buffers: bool) -> Iterator[tuple[MutableMapping[Any, Any], list[Any], str]]:
        """Yield each table with the keys in it that count, and the path of its module."""
        for owner, path in self._owners:
            yield vars(owner), list(attributes_of(owner)), path
            if buffers:
                yield owner._buffers, list(owner._buffers.keys()), path  # a scripted one's has no __iter__
        for pipeline, names in self._pipelines.items():
            yield vars(pipeline), [name for name in attributes_of(pipeline) if name in names], ""
            if buffers:
                yield pipeline._buffers, list(pipeline._buffers), ""
        for table, keys in self._tables:
            yield table, keys or list(table), ""


class AttributesOfForward:
    """What ``forward`` of some modules sets on them, or may change in place: counters, lists, generators.

    That is told by the code of their classes. To note it takes nothing for modules that have none. Large tensors
    are not held, nor containers with such or with many members: they stay as they are.

    Args:
        modules: with all of their children.
        copies: Whether a tensor or an array is copied, to be put back where it is changed in place.
    """

    def __init__(self, modules: Iterable[nn.Module], copies: Callable[[Any], bool]) -> None:
        self._copies = copies
        self._places = [
            (vars(owner), names)
            for module in modules
            for owner in module.modules()
            if (names := list(_changed_by_forward(owner)))
        ]

    def remembered(self) -> Callable[[], None]:
        """Note all of it; return what puts it back."""
        remembering = Remembering(self._copies)
        before = []
        for table, names in self._places:
            noted = {name: table[name] for name in names if name in table and self._is_noted(table[name])}
            absent = [name for name in names if name not in table]
            before.append((table, remembering.each(noted), absent))

        def restore() -> None:
            for table, remembered, absent in before:
                table.update(restored_values(remembered))
                for name in absent:
                    table.pop(name, None)

        return restore

    def _is_noted(self, value: Any) -> bool:
        if type(value) in PLAIN or isinstance(value, GENERATORS):
            return True
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._copies(value)
        if type(value) not in _CONTAINERS or len(value) > MOST_MEMBERS:
            return False
        members = value.values() if isinstance(value, dict) else value
        return all(
            type(each) in PLAIN or (isinstance(each, torch.Tensor | np.ndarray) and self._copies(each))
            for each in members
        )


def _changed_by_forward(module: nn.Module) -> Iterator[str]:
    kind: Any = type(module)
    if is_librarys(kind):
        return
    own, found = attributes_of(module), names_of_forward(kind)
    of_torch = {*module._parameters, *module._buffers, *module._modules}
    yield from (name for name in found.written if name not in of_torch)
    for name, value in own.items():
        may_change = isinstance(value, GENERATORS) or (found.fills and type(value) in _CONTAINERS)
        if name not in found.written and (name in found.counted or (may_change and name in found.read)):
            yield name
