"""The names that a program's code reads: of its file, of functions around it, of its class."""

from __future__ import annotations

import dis
import inspect
import os
import site
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache, cached_property
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from deepspeed_partition.cached_results import CACHE

LIBRARIES = (
    "deepspeed", "deepspeed_partition", "lightning", "lightning_fabric", "lightning_madpipe", "pytorch_lightning",
    "torch",
)  # fmt: skip
"""Whose objects change while a program's code runs without its doing: an allocation counter, a loop."""
PACKAGES = frozenset(("site-packages", "dist-packages"))
"""How folders are called that packages are installed in."""
MOST_FUNCTIONS = 200
"""Functions that are read of a program, and as many of installed packages."""
OF_EXEC = "exec()"
"""The owner of names of a function that belongs to no module: ``exec()`` has made it in a dict without a name."""
_OF_FILE = frozenset(
    f"{does}_{what}" for does in ("LOAD", "STORE", "DELETE") for what in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS")
)
"""Operations on names that are no attributes: those of a class's body may be of its file."""
_OF_HEAP = 1 << 9
"""A flag of classes that code in Python has made."""
_OF_NOTHING = frozenset(("RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"))
"""Operations of a function that returns a constant."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")


class Name(NamedTuple):
    """A name that a function reads, and where its value stands."""

    owner: str
    """What it belongs to, in words: a file's module, a function around it, a class."""
    key: str
    table: MutableMapping[str, Any]
    written: str
    """How the function writes it."""

    @property
    def value(self) -> Any:
        """What it stands for now; None where it stands for nothing."""
        return self.table.get(self.key)

    def is_at(self, other: Name) -> bool:
        """Whether another name of the same owner, with this key, is this one."""
        if isinstance(self.table, _Cells) and isinstance(other.table, _Cells):
            return self.table.cells[self.key] is other.table.cells[self.key]
        if isinstance(self.table, _Members) and isinstance(other.table, _Members):
            return self.table.kind is other.table.kind
        return self.table is other.table

    @property
    def is_member(self) -> bool:
        """Whether it is an attribute of a class."""
        return isinstance(self.table, _Members)


def function_of(value: Any) -> FunctionType | None:
    """The function of the program in a method, a property or a decorated function; None where there is none."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    function = function_in(attribute_of(value, "__func__", value))
    return None if function is None or is_librarys(function) else function


def forward_of(module: nn.Module) -> Any:
    """The ``forward`` of a module's class as it is written there; a scripted module has none in Python."""
    return inspect.getattr_static(type(module), "forward", None)


def names_read(function: FunctionType, kind: type | None) -> Iterator[Name]:
    """The names that ``function`` and the functions within it read, but for its own.

    Args:
        function: A function of the program's.
        kind: The class whose method it is.
    """
    if function.__closure__:
        cells = _Cells(dict(zip(function.__code__.co_freevars, function.__closure__, strict=True)))
        around = function.__qualname__.partition(".<locals>")[0]
        for key, value in cells.items():
            yield Name(around, key, cells, key)
            if isinstance(value, type) and not is_librarys(value) and value is not kind:
                yield from _data_of_class(value, key)
    names, of_file = names_in(function.__code__), globals_in(function.__code__)
    for key in names:
        value = function.__globals__.get(key) if key in of_file else None
        if isinstance(value, ModuleType):
            if not is_librarys(value):
                for inner in names:
                    if inner in vars(value):
                        yield Name(value.__name__, inner, vars(value), f"{key}.{inner}")
                        if isinstance(member := vars(value)[inner], type) and not is_librarys(member):
                            yield from _data_of_class(member, f"{key}.{inner}")
        elif key in of_file and key in function.__globals__:
            yield Name(module_of(function) or OF_EXEC, key, function.__globals__, key)
            if isinstance(value, type) and not is_librarys(value) and value is not kind:
                yield from _data_of_class(value, key)
        if kind is not None:
            owner = next((each for each in kind.__mro__ if key in vars(each)), None)
            if owner is not None and not is_librarys(owner):
                yield Name(owner.__name__, key, _Members(owner), f"{kind.__name__}.{key}")


def _defaults_of(function: FunctionType) -> Iterator[Name]:
    """The defaults of arguments that may change, such as a list."""
    table = Defaults(function)
    for key, value in table.items():
        # Registries of packages, which fill themselves when they are asked, are none that code counts in.
        is_container = type(value) in (list, dict, set, bytearray, deque, Counter, defaultdict, OrderedDict)
        if is_container or isinstance(value, Iterator) or module_of(type(value)) == function.__module__:
            yield Name(f"{name_of(function)}()", key, table, key)


def module_of(named: Any) -> str:
    """The name of the module of a class or a function, or nothing.

    Classes that Cython makes for its functions have a descriptor there, and functions of ``exec()`` may have none.
    """
    name = getattr(named, "__module__", None)
    return name if isinstance(name, str) else ""


def name_of(function: FunctionType) -> str:
    """The name of a function with that of its module."""
    return f"{module_of(function) or OF_EXEC}.{function.__qualname__}"


@cache
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of the classes of Python that a class is made of, by name, each with what reads and writes it."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if base.__flags__ & _OF_HEAP
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }


def is_librarys(value: Any) -> bool:
    """Whether a function, a class or a module belongs to a library that runs steps or computes in them."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return str(name).partition(".")[0] in (*LIBRARIES, "numpy", "torchmetrics", "torchvision", "lightning_madpipe")


def _data_of_class(kind: Any, written: str) -> Iterator[Name]:
    """The attributes of a class that code names, but for its functions; ``written`` is how it calls the class."""
    for owner in kind.__mro__:
        for key, value in () if is_librarys(owner) or owner is object else list(vars(owner).items()):
            if _is_data_of_class(key, value):
                yield Name(owner.__name__, key, _Members(owner), f"{written}.{key}")


def _is_data_of_class(key: str, value: Any) -> bool:
    return not key.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")


@cache
def is_installed(module: str | None) -> bool:
    """Whether a module, by its name, is Python's own or lies among installed packages."""
    if (module or "").partition(".")[0] in sys.stdlib_module_names:
        return True
    paths = map(sysconfig.get_path, ("purelib", "platlib", "stdlib"))
    folders = (*site.getsitepackages(), site.getusersitepackages(), *paths)
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    # A path in a .pth file or in PYTHONPATH may bring packages of another environment.
    return file.startswith(folders) or not PACKAGES.isdisjoint(file.split(os.sep))


class ClassData(MutableMapping[str, Any]):
    """The attributes of a class that are data, such as a counter."""

    def __init__(self, kind: type) -> None:
        self._members = _Members(kind)

    def __getitem__(self, name: str) -> Any:
        if not _is_data_of_class(name, value := self._members[name]):
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._members[name] = value

    def __delitem__(self, name: str) -> None:
        del self._members[name]

    def __iter__(self) -> Iterator[str]:
        yield from [name for name, value in self._members.items() if _is_data_of_class(name, value)]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def names_in(code: CodeType) -> list[str]:
    """All names in compiled code and in the functions within it."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in names_in(each)]
    return list(dict.fromkeys([*code.co_names, *inner]))


@cache
def globals_in(code: CodeType) -> frozenset[str]:
    """The names of its file that compiled code and the functions within it read or set, and no attributes."""
    inner = (name for each in code.co_consts if isinstance(each, CodeType) for name in globals_in(each))
    own = (each.argval for each in dis.get_instructions(code) if each.opname in _OF_FILE)
    return frozenset((*own, *inner))


@cache
def set_by_class(kind: Any) -> frozenset[str]:
    """The attributes that the constructors of a class set, and other names in them."""
    constructors = (function_in(vars(base).get("__init__")) for base in kind.__mro__)
    return frozenset(name for each in constructors if each is not None for name in each.__code__.co_names)


def function_in(value: Any) -> FunctionType | None:
    """The function that decorators are around."""
    if not callable(value) or attribute_of(value, "__wrapped__") is None:
        return value if isinstance(value, FunctionType) else None
    try:
        function = inspect.unwrap(value)
    except Exception:  # what it is around raises when it is looked at, or goes round in a circle
        return None
    function = getattr(function, "__func__", function)  # a cache of an object's own is around its method
    return function if isinstance(function, FunctionType) else None


def attribute_of(value: Any, name: str, default: Any = None) -> Any:
    """An attribute of any object that code names; ``default`` also where to ask for one raises another error.

    Stand-ins for packages that are not installed raise their own for every name (MONAI's ``optional_import``).
    """
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def does_nothing(value: Any) -> bool:
    """Whether a function or a method has no code but ``return``, ``pass`` or a docstring."""
    function = attribute_of(value, "__func__", value)
    return isinstance(function, FunctionType) and all(
        each.opname in _OF_NOTHING and (each.opname == "RESUME" or each.argval is None)
        for each in dis.get_instructions(function)
    )


class CodeSearch:
    """Finds the names in code of a program and in what it calls.

    Args:
        is_of_program: Whether a file, by the name of its module, is the program's.
    """

    def __init__(self, is_of_program: Callable[[str | None], bool]) -> None:
        self.found: dict[tuple[str, str], Name] = {}
        """The names that stand for data, by whom they belong to and their own."""
        self.written = set[str]()
        """All names in the code."""
        self.functions: list[FunctionType] = []
        """Those that were read."""
        self.caches: dict[str, Any] = {}
        """Functions that keep their results, by name, but for those of installed packages."""
        self._is_of_program, self._seen = is_of_program, set[int]()
        self._num_read = Counter[bool]()
        """How many functions have been read of installed packages, and how many others."""

    def read(self, code: Any, kind: type | None) -> None:
        """Find what a function reads, and the functions of the program that it calls."""
        function = function_of(code)
        if function is None or not self._is_of_program(function.__module__):
            return
        of_package = is_installed(function.__module__)
        if self._num_read[of_package] >= MOST_FUNCTIONS:
            return
        wrapper = attribute_of(code, "__func__", code)
        is_cache = isinstance(wrapper, CACHE) and not of_package
        if is_cache and not any(wrapper is each for each in self.caches.values()):
            written = shown = f"{name_of(function)}()"
            while shown in self.caches:  # of another call of the function around it
                shown = f"{written} {len(self.caches) + 1}"
            self.caches[shown] = wrapper
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._num_read[of_package] += 1
        self.functions.append(function)
        self.written.update(names_in(function.__code__))
        for name in _defaults_of(function):
            self._keep(name)
        for name in names_read(function, kind):
            value = name.value
            if function_of(value) is not None:
                self.read(value, kind if name.is_member else None)
            elif (
                isinstance(value, type)
                and self._is_of_program(value.__module__)
                and not issubclass(value, nn.Module)
            ):
                for member in vars(value).values():
                    if function_of(member) is not None:
                        self.read(member, value)
            elif name.is_member or name.owner not in sys.modules or self._is_of_program(name.owner):
                self._keep(name)

    def _keep(self, name: Name) -> None:
        """Keep a name under its owner; two functions that one around them has made have variables of their own."""
        owner, number = name.owner, 1
        while (owner, name.key) in self.found and not self.found[owner, name.key].is_at(name):
            number += 1
            owner = f"{name.owner} {number}"
        self.found[owner, name.key] = name


class _Cells(MutableMapping[str, Any]):
    """The variables of functions around a function, those that are bound."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self.cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # a cell that is still empty
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Defaults(MutableMapping[str, Any]):
    """The defaults of a function's arguments, by the names of these."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def _places(self) -> dict[str, int]:
        code, defaults = self._function.__code__, self._function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        return {name: place for place, name in enumerate(names)}

    def __getitem__(self, name: str) -> Any:
        place = self._places().get(name)
        if place is None:
            return (self._function.__kwdefaults__ or {})[name]
        return (self._function.__defaults__ or ())[place]

    def __setitem__(self, name: str, value: Any) -> None:
        place = self._places().get(name)
        if place is None:
            self._function.__kwdefaults__ = {**(self._function.__kwdefaults__ or {}), name: value}
        else:
            defaults = list(self._function.__defaults__ or ())
            defaults[place] = value
            self._function.__defaults__ = tuple(defaults)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from (*self._places(), *(self._function.__kwdefaults__ or ()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Members(MutableMapping[str, Any]):
    """The attributes of a class itself."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self.kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self.kind))

    def __len__(self) -> int:
        return len(vars(self.kind))


class SlotsOf(MutableMapping[str, Any]):
    """The attributes of an object with ``__slots__``, and of its dict where it has one."""

    def __init__(self, value: Any, slots: dict[str, Any], table: dict[str, Any] | None) -> None:
        self._value, self._slots, self._table = value, slots, {} if table is None else table

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._table[name]
        try:
            return self._slots[name].__get__(self._value)
        except AttributeError:  # one that is not set
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._value, value)
        else:
            self._table[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._value)
        else:
            del self._table[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._slots if name in self)
        yield from self._table

    def __contains__(self, name: object) -> bool:
        member = self._slots.get(name) if isinstance(name, str) else None
        if member is None:
            return name in self._table
        try:
            member.__get__(self._value)
        except AttributeError:
            return False
        return True

    def __len__(self) -> int:
        return sum(1 for _ in self)
