"""Attributes that layers keep beside parameters and buffers, in Python: a counter, a cache, a generator."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from operator import is_
from types import BuiltinMethodType, MethodType, MethodWrapperType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from deepspeed_partition.cached_results import CACHE, cache_kept
from deepspeed_partition.code_names import (
    CodeSearch,
    SlotsOf,
    forward_of,
    function_of,
    is_installed,
    is_librarys,
)
from deepspeed_partition.generators import GENERATORS, generator_state, set_generator_state
from deepspeed_partition.hidden_modules import hidden_modules, modules_within
from deepspeed_partition.kept_values import (
    copied,
    iterator_kept,
    itself,
    kept_by_another,
    kept_in_place,
    say_of,
    state_of,
    told_of,
)
from deepspeed_partition.module_hooks import MODULE_HOOKS
from deepspeed_partition.names_of_forward import names_of_forward
from deepspeed_partition.pipeline_attributes import (
    is_engine,
    is_pipeline_module,
    modules_of_program,
    names_of_program,
)
from deepspeed_partition.profiling.module_tables import ModuleTables
from deepspeed_partition.profiling.object_members import (
    is_function_of_library,
    members_of,
    owner_of_method,
    packages_of,
)
from deepspeed_partition.profiling.weights_beside import WeightsBeside
from deepspeed_partition.tensor_values import num_bytes_of, version_of
from deepspeed_partition.tensor_values import put_back as put_values_back

PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
"""Types of values that nothing changes in place."""
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_DEEPSPEED = ("ds_", "_ds_")
OF_DEEPSPEED_ON_TENSORS = (
    "grad_accum", "param_idx_in_group", "get_full_hp_", "set_full_hp_", "load_hp_checkpoint_state",
)  # fmt: skip
"""How names begin of attributes that DeepSpeed sets on parameters, besides ``ds_`` and ``_``."""
_OWN_PACKAGES = ("deepspeed_partition", "lightning_madpipe")
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 2
"""Objects within objects that are put back and compared, as often as steps need it."""
_DEPTH_MEASURED = 4
"""Those that are put back where layers are measured: what lies deeper is said, if it has changed."""
_MOST_MEMBERS = 1000
"""Members of a list or a dict up to which each is compared: of longer ones the length is."""
_MOST_BYTES = 2**28
"""Bytes of the largest tensor or array that is copied to be put back: a larger one is data and no state."""
_MOST_BYTES_READ = 2**32
"""Bytes of the largest array that is read to see whether it has changed: an array counts no writes."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the class or a program has set on ``module`` itself, not on its children."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith(_OF_DEEPSPEED) and not isinstance(value, nn.Module)
    }


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
    remembering = _Remembering(_is_no_data, by_others=True)
    before = [(owner, remembering.each(attributes_of(owner))) for owner in owners]
    for owner, remembered in before:
        remembering.let_others_stand(vars(owner), remembered)
    tables = [(owner._buffers, remembering.each(owner._buffers)) for owner in dict.fromkeys(with_buffers)]
    of_any_size = _Remembering(lambda _: True, by_others=True)
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
            vars(owner).update(_restored(remembered))
        for tensor, remembered in of_tensors:
            for name in _attributes_of_tensor(tensor).keys() - remembered.keys():
                delattr(tensor, name)
            vars(tensor).update(_restored(remembered))
        for table, remembered in tables:
            for name, value in _restored(remembered).items():
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
    names = (*_OF_DEEPSPEED, "_hp_", *OF_DEEPSPEED_ON_TENSORS)
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
        apart: Modules of the functions whose weights others keep, as those of ``code_of``.
    """
    layers = list(code_of)
    held = HeldState(functions, layers, in_full=True)
    others = [each for each in (*layers, *apart) if isinstance(each, nn.Module)]
    restore = held.remembered(buffers=True, by_others=True)
    tables = ModuleTables(held.modules)
    weights = WeightsBeside(held.modules, {id(weight) for each in others for weight in each.parameters()})
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
        held = _Held(packages_of((*called, *layers)) if in_full else frozenset(), of_parts=in_full)
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
        remembering = _Remembering(copies or _is_no_data, known, by_others=by_others, iterators=iterators)
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
                _put_cache_back(name, cache, put_back)
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
            (id(table), key): (f"{path}.{key}".removeprefix("."), _mark(table[key], _DEPTH))
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


def mark(value: Any) -> Any:
    """Return what tells a value from what it is after a change, within a process; to be compared with ``==``."""
    return _mark(value, _DEPTH)


def _mark(value: Any, depth: int) -> Any:
    """What tells a value from what it is after a change, without its numbers where it is a tensor."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, list | tuple | deque) and len(value) <= _MOST_MEMBERS:
        return id(value), [_mark(member, depth) for member in value]
    if isinstance(value, dict) and len(value) <= _MOST_MEMBERS:
        return id(value), {key: _mark(member, depth) for key, member in value.items()}
    if isinstance(value, list | tuple | dict | set | deque):
        return id(value), len(value)
    if (owner := owner_of_method(value)) is not None:
        return id(owner), _mark(owner, depth)
    state = state_of(value)
    value = itself(value)
    if state is not None:
        return id(value), state
    table = members_of(value) if depth else None
    return id(value), None if table is None else {key: _mark(member, depth - 1) for key, member in table.items()}


class PartialArguments(MutableMapping[str, Any]):
    """What a ``functools.partial`` is made of: its function, its arguments, and by their names those with one."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def _table(self) -> dict[str, Any]:
        return {"func": self._function.func, "args": self._function.args, **self._function.keywords}

    def partial_of(self, values: Iterable[Any]) -> Any:
        """A partial of other values, which come in the same order."""
        function, args, *given = values
        return functools.partial(function, *args, **dict(zip(self._function.keywords, given, strict=True)))

    def __getitem__(self, name: str) -> Any:
        return self._table()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        function, args, *keywords = {**self._table(), name: value}.values()
        named = dict(zip(self._function.keywords, keywords, strict=True))
        self._function.__setstate__((function, args, named, vars(self._function)))

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


class _Held:
    """What functions hold: modules, and variables by the tables that they stand in.

    Args:
        packages: Installed packages whose code is read as the program's own.
        of_parts: Whether the code of the children of a module that is called is read, too.
    """

    def __init__(self, packages: Container[str] = frozenset(), *, of_parts: bool = False) -> None:
        self.modules: list[nn.Module] = []
        self.pipelines: dict[nn.Module, set[str]] = {}
        """Pipeline modules of DeepSpeed's, and the attributes of these that are the program's: others go on."""
        self._objects: list[MutableMapping[str, Any]] = []
        self._seen: dict[int, Any] = {}
        """What was looked at, by ``id``; it is held, so that no other one gets the ``id`` of a method."""
        self._of_parts = of_parts
        self._search = CodeSearch(
            lambda module: not is_installed(module) or (module or "").partition(".")[0] in packages
        )

    @property
    def caches(self) -> dict[str, Any]:
        """The functions with a cache, by name."""
        return self._search.caches

    def add(self, value: Any) -> None:
        """Find what ``value`` holds, if it can be called."""
        if id(value) in self._seen or isinstance(value, type) or not callable(value) or is_engine(value):
            return
        self._seen[id(value)] = value
        if is_pipeline_module(value):
            self._add_pipeline(value)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            self._read(forward_of(value), type(value))
            self._add_hooks_of(value)
            if self._of_parts:
                self._read_parts(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.add(part)
            self._objects.append(PartialArguments(value))
        elif isinstance(value, MethodType):
            self._add_object(value.__self__, value)
            self._read(value.__func__, type(value.__self__))
            self._read_call_of(value.__self__)
        elif function_of(value) is not None:
            self._read(value, None)
        else:
            self._add_object(value)
            self._read(type(value).__call__, type(value))

    def add_code_of(self, layer: Any) -> None:
        """Find what the code of a module and its children names; of a specification, its arguments, too."""
        if isinstance(layer, nn.Module):
            self._add_hooks_of(layer)
            self._read_parts(layer)
        elif isinstance(kind := getattr(layer, "typename", None), type):
            self._objects.append(vars(layer))
            self._read(getattr(kind, "forward", None), kind)

    def _read_parts(self, module: nn.Module) -> None:
        for part in module.modules():
            for base in type(part).__mro__:  # one may call that of another with super()
                if "forward" in vars(base):
                    self._read(vars(base)["forward"], type(part))
            for value in attributes_of(part).values():
                self._read_functions(value)

    def _add_hooks_of(self, module: nn.Module) -> None:
        for part in module.modules():
            for kind in MODULE_HOOKS:
                for hook in list(getattr(part, kind, {}).values()):
                    self.add(hook)

    def _read_functions(self, value: Any) -> None:
        """Read functions of the program that are an attribute, or stand in one."""
        members = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        )
        for member in list(members)[:_MOST_MEMBERS]:
            owner = owner_of_method(member)
            if function_of(member) is not None:
                self._read(member, None if owner is None else type(owner))
            self._read_call_of(member if owner is None else owner)

    def _read_call_of(self, value: Any) -> None:
        """Read what calls an object of the program's that is no function and no module."""
        is_none = isinstance(value, type | nn.Module | functools.partial) or function_of(value) is not None
        if callable(value) and not is_none and not is_function_of_library(value):
            self._read(type(value).__call__, type(value))

    def _add_pipeline(self, value: nn.Module, method: Any = None) -> None:
        if value not in self.pipelines:
            self.modules += modules_of_program(value)
        self.pipelines.setdefault(value, set()).update(names_of_program(type(value), method))

    def _add_object(self, value: Any, method: Any = None) -> None:
        if is_engine(value):
            return
        if is_pipeline_module(value):
            self._add_pipeline(value, method)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(table := getattr(value, "__dict__", None), dict):
            if type(value).__module__.partition(".")[0] not in _OWN_PACKAGES:  # what ours keep is of the measuring
                self._objects += [table, value] if isinstance(value, dict) else [table]
            for member in list(table.values()):
                self.add(member)

    def _read(self, code: Any, kind: type | None) -> None:
        before, num_read, num_caches = set(self._search.found), len(self._search.functions), len(self.caches)
        self._search.read(code, kind)
        self._objects += [vars(function) for function in self._search.functions[num_read:]]
        self._objects += [vars(cache) for cache in list(self.caches.values())[num_caches:]]
        for place, name in list(self._search.found.items()):
            if place not in before:
                self.add(name.value)

    def hidden_modules(self) -> list[nn.Module]:
        """The modules that stand in containers and objects, in these modules or elsewhere."""
        found = [each for module in self.modules for each in hidden_modules(module).values()]
        for table, keys in self.tables():
            for key in keys or list(table):
                found += modules_within(table.get(key))
        return [each for each in dict.fromkeys(found) if not is_pipeline_module(each) and not is_engine(each)]

    def tables(self) -> Iterator[tuple[MutableMapping[str, Any], list[str]]]:
        """Yield each table with the variables in it that are held; no names: all of them."""
        for table in self._objects:
            yield table, []
        for name in self._search.found.values():
            yield name.table, [name.key]


Remembered: TypeAlias = Callable[[], Any]
"""Function that makes a value what it was, and returns it."""
Known: TypeAlias = dict[tuple[int, int], Remembered]
"""Such functions by the ``id`` of their values, and by the depth to which these are looked into."""


class _Remembering:
    """Makes functions that put values back.

    Args:
        copies: Whether a tensor or an array is copied, to be put back where it is changed in place.
        known: Functions that were made for values at this instant.
        by_others: Whether others stand meanwhile in the place of what cannot be put back itself.
        iterators: Whether they do in the place of iterators, for code that runs as it does.
    """

    def __init__(
        self,
        copies: Callable[[Any], bool],
        known: Known | None = None,
        *,
        by_others: bool = False,
        iterators: bool = False,
    ) -> None:
        self._copies, self._known, self._by_others = copies, {} if known is None else known, by_others
        self._iterators = iterators
        self._depth = _DEPTH_MEASURED if by_others else _DEPTH
        self._name = ""
        self._meanwhile: dict[Remembered, Any] = {}
        """What stands in the place of a value, by the function that puts it back."""

    @property
    def has_others(self) -> bool:
        """Whether something stands in the place of a value."""
        return bool(self._meanwhile)

    def each(self, values: Mapping[Any, Any], depth: int | None = None) -> dict[Any, Remembered]:
        """Return what makes each value what it is now."""
        found, depth = {}, self._depth if depth is None else depth
        for key, value in values.items():
            if depth == self._depth and isinstance(key, str):
                self._name = key
            found[key] = self._remembered(value, depth)
        return found

    def let_others_stand(self, container: Any, remembered: Mapping[Any, Remembered]) -> None:
        """Put others into the place of some values of a container for the time being."""
        for key, put_back in remembered.items() if self._meanwhile else ():
            if put_back in self._meanwhile:
                with suppress(Exception):  # a container of a class that lets nobody write to it
                    container[key] = self._meanwhile[put_back]

    def _remembered(self, value: Any, depth: int) -> Remembered:
        if type(value) in PLAIN:
            return lambda: value
        key = id(value), depth
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._by_another(value, depth) or self._itself(value, depth)
        return found

    def _itself(self, value: Any, depth: int) -> Remembered:
        restore = self._restorer(value, depth)
        tell = None if self._by_others else told_of(value, self._name)

        def restored() -> Any:  # it holds the value, so that its id is no other's
            if tell is not None:
                tell()
            restore()
            return value

        return restored

    def _by_another(self, value: Any, depth: int) -> Remembered | None:
        """What returns a value, or another one in its place; None where it stays itself."""
        if type(value) in (dict, list) or isinstance(value, torch.Tensor | np.ndarray):
            return None
        if isinstance(value, tuple):
            return self._made_anew(value, value, depth, getattr(type(value), "_make", type(value)))
        if type(value) is functools.partial:
            arguments = PartialArguments(value)
            return self._made_anew(value, tuple(arguments.values()), depth, arguments.partial_of)
        if owner_of_method(value) is not None:
            method = value.__func__
            return self._made_anew(value, (value.__self__,), depth, lambda owner: MethodType(method, owner[0]))
        is_method = isinstance(value, BuiltinMethodType | MethodWrapperType)
        if is_method and not isinstance(value.__self__, type | ModuleType):
            name = value.__name__  # as of itertools.count().__next__
            return self._made_anew(value, (value.__self__,), depth, lambda owner: getattr(owner[0], name))
        if not self._by_others:
            found = copied(value)
            kept = iterator_kept(value, self._name) if self._iterators and found is None else None
        else:
            found, kept = None, kept_by_another(value, self._name)
        if kept is None:
            return found
        restore = self._restorer(value, depth) if kept.meanwhile is value else _nothing

        def restored() -> Any:
            before = kept.restored()
            restore()
            return before

        if kept.meanwhile is not value:
            self._meanwhile[restored] = kept.meanwhile
        return restored

    def _made_anew(
        self, value: Any, parts: tuple[Any, ...], depth: int, make: Callable[[list[Any]], Any]
    ) -> Remembered:
        """Keep the parts of a value into which nothing can be put: of other parts another value is made."""
        remembered = [self._remembered(part, depth) for part in parts]
        others = [self._meanwhile.get(each, part) for each, part in zip(remembered, parts, strict=True)]

        def restored() -> Any:
            now = [each() for each in remembered]
            return value if all(map(is_, now, parts)) else make(now)

        if not all(map(is_, others, parts)):
            self._meanwhile[restored] = make(others)
        return restored

    def _restorer(self, value: Any, depth: int) -> Callable[[], object]:
        if type(value) in PLAIN:
            return _nothing
        if isinstance(value, GENERATORS):
            state = generator_state(value)
            return lambda: set_generator_state(value, state)
        if isinstance(value, torch.Tensor) and nn.parameter.is_lazy(value):
            return _nothing
        if isinstance(value, torch.Tensor | np.ndarray) and not self._copies(value):
            return self._large_told(value) if self._by_others else _nothing
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
            copy, version = value.detach().clone(), value._version

            def is_same() -> bool:  # batch normalization changes its buffers, and torch does not count that
                is_read = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
                return value._version == version and (not is_read or torch.equal(value, copy))

            return lambda: None if is_same() else _copy_back(value, copy)
        if isinstance(value, np.ndarray):
            array = value.copy()
            return lambda: np.copyto(value, array) if value.flags.writeable else None
        if isinstance(value, list):
            if PLAIN.issuperset(map(type, value)):  # a long list of numbers, as of losses, is copied at once
                numbers = list(value)
                return lambda: _refill_list(value, numbers)
            items = [self._remembered(item, depth) for item in value]
            self.let_others_stand(value, dict(enumerate(items)))
            return lambda: _refill_list(value, [item() for item in items])
        if isinstance(value, dict):
            members = {key: self._remembered(member, depth) for key, member in value.items()}
            self.let_others_stand(value, members)
            return lambda: _refill(value, _restored(members))
        if isinstance(value, set):
            entries = set(value)
            return lambda: _refill(value, entries)
        if isinstance(value, deque):
            queue = list(value)
            return lambda: _refill_queue(value, queue)
        if isinstance(value, CACHE):
            name, cache = self._name, cache_kept(value)
            return lambda: _put_cache_back(name, value, cache)
        in_place = kept_in_place(value)
        if in_place is not None:
            return in_place
        table = members_of(value)
        if table is not None and not depth:
            return self._teller(value, table) if self._by_others else _nothing
        if table is not None:
            inner = self.each(table, depth - 1)
            self.let_others_stand(table, inner)
            return lambda: _refill(table, _restored(inner))
        return _nothing

    def _large_told(self, value: Any) -> Callable[[], object]:
        """What says whether a tensor or an array has changed that is too large to be copied."""
        name, before = self._name, _mark_of_large(value)

        def tell() -> None:
            if _mark_of_large(value) != before:
                say_of(name, value)("its values, too many to be copied, were changed")

        return tell

    def _teller(self, value: Any, table: Mapping[str, Any]) -> Callable[[], object]:
        """What says whether an object has changed that lies too deep to be put back."""
        name, before = self._name, {key: _mark(member, 0) for key, member in table.items()}

        def tell() -> None:
            if any((id(value), depth) in self._known for depth in range(1, self._depth + 1)):
                return  # another way to it is shorter
            if {key: _mark(member, 0) for key, member in table.items()} != before:
                say_of(name, value)("what it holds was changed")

        return tell


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
        remembering = _Remembering(self._copies)
        before = []
        for table, names in self._places:
            noted = {name: table[name] for name in names if name in table and self._is_noted(table[name])}
            absent = [name for name in names if name not in table]
            before.append((table, remembering.each(noted), absent))

        def restore() -> None:
            for table, remembered, absent in before:
                table.update(_restored(remembered))
                for name in absent:
                    table.pop(name, None)

        return restore

    def _is_noted(self, value: Any) -> bool:
        if type(value) in PLAIN or isinstance(value, GENERATORS):
            return True
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._copies(value)
        if type(value) not in _CONTAINERS or len(value) > _MOST_MEMBERS:
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


def _is_no_data(value: Any) -> bool:
    return (num_bytes_of(value) if isinstance(value, torch.Tensor) else value.nbytes) <= _MOST_BYTES


def _mark_of_large(value: Any) -> int | None:
    """What tells whether a large tensor or array was written in place; None where it would take too long."""
    if isinstance(value, torch.Tensor):
        return version_of(value)
    is_read = value.flags.writeable and value.flags.c_contiguous and not isinstance(value, np.memmap)
    if not is_read or value.dtype.hasobject or value.nbytes > _MOST_BYTES_READ:
        return None
    return zlib.crc32(value.view(np.uint8).data) if value.nbytes else 0


def _restored(remembered: Mapping[Any, Remembered]) -> dict[Any, Any]:
    return {key: restored() for key, restored in remembered.items()}


def _nothing() -> None:
    pass


def _put_cache_back(name: str, cache: Any, put_back: Callable[[], bool]) -> None:
    if not put_back():
        say_of(name, cache)("its cache, which has a maxsize, has got results")


def _copy_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.shape != copy.shape or tensor.layout is not torch.strided:
        put_values_back(tensor, copy)
        return
    with torch.no_grad():
        tensor.copy_(copy)


def _refill_list(present: list[Any], items: list[Any]) -> None:
    if len(present) != len(items) or not all(map(is_, present, items)):  # it may refuse to be written to
        present[:] = items


def _refill_queue(queue: deque[Any], items: list[Any]) -> None:
    present = list(queue)
    if len(present) != len(items) or not all(map(is_, present, items)):  # threads may use it
        queue.clear()
        queue.extend(items)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, SlotsOf):
        for key in [key for key in container if key not in contents]:
            del container[key]
        for key, value in contents.items():
            if key not in container or container[key] is not value:
                container[key] = value
        return
    if _has_same(container, contents):  # it may refuse to be written to
        return
    container.clear()
    container.update(contents)


def _has_same(container: Any, contents: Any) -> bool:
    """Whether a container has these objects already, in this order."""
    if not isinstance(container, dict):
        return bool(container == contents)
    pairs = zip(container.items(), contents.items(), strict=False)
    return len(container) == len(contents) and all(key is old and now is was for (key, now), (old, was) in pairs)
