"""What a step leaves behind on its LightningModule: found, brought to the other ranks, or undone.

A step runs on the last stage. The attributes that it sets there, the lists that it lengthens, the buffers and
the states of torchmetrics metrics that it changes are sent to the other ranks of the pipeline after the batch,
so that a hook finds them wherever it runs. Up to its call of the pipeline the same step runs on the first stage,
too, and some steps are rehearsed: what those runs leave behind is undone.

Seen are numbers, strings, tensors, NumPy arrays, lists, tuples, dicts, sets, deques and dataclasses of them, in
the attributes and buffers of the LightningModule and of its submodules outside the pipeline, in objects that are
reached from there (``reached_objects.py``), and what its steps reach beside it (``beside_module.py``). Of any
other object it is seen that an attribute names another one; that it changed is only noticed, to be said.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from operator import is_
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import Metric, MetricCollection

from deepspeed_partition.code_names import LIBRARIES, module_of
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import GENERATORS
from deepspeed_partition.raw_states import (
    RawState,
    has_raw_state,
    is_raw_state,
    put_raw_state,
    raw_state,
)
from deepspeed_partition.tensor_values import put_back, version_of
from lightning_madpipe.compat.elsewhere import HiddenTensors, StandIn
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.reached_objects import ReachedObjects, attributes_of

PLAIN = frozenset((bool, bytes, complex, float, int, str, NoneType))
"""Types whose values never change."""
_MISSING = object()


class Place(NamedTuple):
    owner: str
    """The path of the submodule, empty for the LightningModule itself; or who it is beside the module."""
    kind: Literal["attribute", "buffer", "beside", "object"]
    """``object``: an attribute of an object that is reached from elsewhere, which has the name ``owner``."""
    name: str

    def __str__(self) -> str:
        is_named = self.kind in ("beside", "object")
        return ".".join(filter(None, ("" if is_named else "self", self.owner, self.name)))


class Beside(Protocol):
    """What steps may change beside their LightningModule, see ``BesideModule``."""

    @property
    def owner_ids(self) -> set[int]:
        """The identities of callbacks and data, which are looked at wherever they stand."""

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Every place with its value now."""

    def table(self, owner: str, name: str) -> MutableMapping[str, Any]:
        """Where the value of an owner stands that has this name."""

    def reached(self, attributes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """The objects of the program that steps reach, from attributes and from beside the module, by name."""

    def begin(self, *, undoable: bool) -> None:
        """Begin to look at all places before a step."""

    def look(self, place: Place, value: Any) -> Literal["whole", "versions", "checksum", "identity"]:
        """Whether to copy a value, or to look at its tensors' versions, at a checksum, or at which one it is."""

    def caches_kept(self) -> Callable[[], None]:
        """Return what takes out what functions with a cache and variables without a value have got since."""

    def note_change(self, place: Place) -> None:
        """Note that a step has changed a place."""

    def modules(self) -> list[nn.Module]:
        """The modules that the steps' code names and that are no part of their own, such as a loss."""

    def is_of_program(self, value: Any) -> bool:
        """Whether the class of an object is the program's own."""


class Change(NamedTuple):
    """One attribute or buffer that is not what it was."""

    place: Place
    kind: str
    """``bind`` a new value, ``delete``, ``refill`` the same object, ``extend`` the same list, or bind a new list
    that ``continues`` it."""
    value: Any = None
    """The new contents; for ``extend`` and ``continues`` the items that were added."""


@dataclass(slots=True)
class Seen:
    """A value as it was."""

    value: Any
    version: int | None = None
    """The version of a tensor; torch counts what changes it in place."""
    contents: Any = None
    """What a container held; a copy of an array, and of a tensor where one was asked for."""
    inner: dict[Any, Seen] = field(default_factory=dict)
    """The contents of a container that may change themselves, by index or key."""
    mark: int | None = None
    """What tells of a large one that it has changed, where its contents are not kept."""

    def difference(self, place: Place, value: Any) -> Change | None:
        """How another value, or the same one as it is now, differs; None where it does not."""
        return _difference(place, self, value)


class Leftovers:
    """The module as it is now, to be compared with what it will be after a step.

    Args:
        module: The LightningModule.
        ignored: Attributes that are not the user's.
        undoable: Keep copies of tensors, so that :meth:`undo` brings them back, too.
        may_be_undone: Keep copies at least of those that are attributes, such as the states of metrics; of
            tensors in lists and dicts, which are seldom changed in place, only if ``undoable``.
        beside: What steps may change beside the module; None: that is not looked at.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str],
        *,
        undoable: bool,
        may_be_undone: bool = False,
        beside: Beside | None = None,
    ) -> None:
        self._module, self.ignored, self._beside = module, frozenset(ignored), beside
        memo: dict[int, Seen] = {}
        # Buffers are compared by their values: batch normalization changes them, and torch does not count that.
        self._before = {
            place: look(value, undoable, memo, copied=undoable or may_be_undone or place.kind == "buffer")
            for place, value in self._places()
        }
        self._hidden = set(self._hidden_places())
        self._opaque: list[tuple[Any, list[Any]]] = []
        if beside is not None:
            beside.begin(undoable=undoable)
        self.objects: Mapping[str, Any] = reached_objects(module, self.ignored, beside)
        """The objects that are looked into, by name."""
        self._plain: dict[str, dict[str, Any]] = {}
        """The attributes of each object, by its name, as they were when this began: numbers, texts and other
        values that nothing can change but by setting the attribute anew."""
        self._known = set(map(id, self.objects.values())) | (set() if beside is None else beside.owner_ids)
        self._metrics: list[Callable[[], None]] = []
        """What puts back the attributes of metrics that stand in containers."""
        self._undoable, self._may_be_undone = undoable, may_be_undone
        self._note_opaque(memo, lambda _: True)
        self._look_beside(beside, undoable, may_be_undone)
        self._opaque += [(value, held_by(value)) for value in ([] if beside is None else beside.modules())]
        self._restore_caches = beside.caches_kept() if beside is not None and undoable else None

    def _look_beside(self, beside: Beside | None, undoable: bool, may_be_undone: bool) -> None:
        """Look at what is beside the module, and at the attributes of objects."""
        for name, value in self.objects.items():
            table = attributes_of(value) or {}
            self._plain[name] = {key: each for key, each in table.items() if type(each) in PLAIN}
        for place, value in (*(() if beside is None else beside.places()), *self._object_places()):
            if type(value) in PLAIN:
                self._before[place] = Seen(value)
                continue
            within: dict[int, Seen] = {}
            kind = "whole" if beside is None else beside.look(place, value)
            copies = undoable and kind == "whole"
            if kind in ("checksum", "identity"):
                self._before[place] = Seen(value, mark=_mark(value, kind == "checksum"))
            else:
                copied = copies or (may_be_undone and kind == "whole")
                self._before[place] = look(value, copies, within, copied=copied)
            self._note_opaque(
                within,
                lambda value: isinstance(value, nn.Module) or beside is None or beside.is_of_program(value),
            )

    def _object_places(self) -> Iterator[tuple[Place, Any]]:
        """The attributes of objects, but for plain values that are what they were, as most are."""
        for name, value in self.objects.items():
            plain = self._plain[name]
            for key, attribute in (attributes_of(value) or {}).items():
                if key in plain and plain[key] is attribute:
                    continue
                if isinstance(key, str) and not isinstance(attribute, nn.Module):
                    yield Place(name, "object", key), attribute

    def _gone_from_objects(self) -> Iterator[Place]:
        """The attributes of objects that had a plain value and are no more, or are a module now."""
        for name, plain in self._plain.items():
            table = attributes_of(self.objects[name]) or {}
            for key, was in plain.items():
                value = table.get(key, _MISSING) if isinstance(key, str) else was
                if value is not was and (value is _MISSING or isinstance(value, nn.Module)):
                    yield Place(name, "object", key)

    def _was(self, place: Place) -> Seen | None:
        """What was at a place; None where there was nothing."""
        seen = self._before.get(place)
        if seen is None and place.kind == "object" and place.name in self._plain.get(place.owner, ()):
            return Seen(self._plain[place.owner][place.name])
        return seen

    def _note_opaque(self, memo: dict[int, Seen], is_wanted: Callable[[Any], bool]) -> None:
        """Note what is held by objects that are neither sent nor undone, to say that a step changes one."""
        found = [
            seen.value
            for seen in memo.values()
            if id(seen.value) not in self._known and _is_opaque(seen.value) and is_wanted(seen.value)
        ]
        if any(isinstance(value, nn.Module) for value in found):
            # One that is an attribute, too, is looked into as one, or is a layer.
            own = set(map(id, self._module.modules()))
            found = [value for value in found if id(value) not in own]
        self._opaque += [(value, held_by(value)) for value in found]
        if self._undoable or self._may_be_undone:
            parts = [
                part for value in found if isinstance(value, Metric | MetricCollection) for part in value.modules()
            ]
            self._metrics += [attributes_kept(part, self._undoable) for part in parts]

    def changes(self, is_looked_at: Callable[[Place, Any], bool] | None = None) -> list[Change]:
        """What is different now.

        Args:
            is_looked_at: Which places to compare, given with their values; left out: all.
        """
        # Layers may have moved meanwhile: a buffer that they use comes to a rank and goes from it by that.
        hidden = self._hidden.union(self._hidden_places())
        now = {place: value for place, value in self._places() if place not in hidden}
        if self._beside is not None:
            now.update(self._beside.places())
        now.update(self._object_places())
        gone = [Change(place, "delete") for place in self._before if place not in now and place not in hidden]
        gone += [Change(place, "delete") for place in self._gone_from_objects()]
        if is_looked_at is not None:
            gone = [change for change in gone if is_looked_at(change.place, None)]
            now = {place: value for place, value in now.items() if is_looked_at(place, value)}
        differences = (_difference(place, self._was(place), value) for place, value in now.items())
        found = gone + [change for change in differences if change is not None]
        for place in {change.place for change in found}:
            if place.kind in ("beside", "object") and self._beside is not None:
                self._beside.note_change(place)
        return found

    def changed_objects(self, among: Collection[int] | None = None) -> list[str]:
        """The classes of objects, neither sent nor undone, whose attributes are not what they were.

        Args:
            among: The identities of those that are looked at; left out: all.
        """
        return [
            type(value).__name__
            for value, before in self._opaque
            if (among is None or id(value) in among) and not are_held(before, held_by(value))
        ]

    def undo(self, is_wanted: Callable[[Change], bool] = lambda _: True) -> None:
        """Make the module what it was; tensors that were changed in place only if copies were kept.

        Args:
            is_wanted: Which changes to undo; left out: all.
        """
        for change in filter(is_wanted, self.changes()):
            table = _table(self._module, change.place, self._beside, self.objects)
            if (seen := self._was(change.place)) is not None:
                if change.place.kind in ("beside", "object") and change.kind == "refill" and seen.contents is None:
                    warn_once(
                        f"beside/{change.place}",
                        f"a step changes {change.place} in place, which is large and beside its module, and what "
                        "trials of the step have done to it stays: make it a buffer of the module",
                    )
                restore(seen, set())
                table[change.place.name] = seen.value
            else:
                del table[change.place.name]
        if self._restore_caches is not None:
            self._restore_caches()
        for restore_metric in self._metrics:
            restore_metric()

    def _places(self) -> Iterator[tuple[Place, Any]]:
        for path, owner in outside_pipeline(self._module):
            for name, value in vars(owner).items():
                # Layers stand here, too: those of the pipeline stay readable as plain attributes.
                if name not in self.ignored and not isinstance(value, nn.Module):
                    yield Place(path, "attribute", name), value
            for name, buffer in owner._buffers.items():
                yield Place(path, "buffer", name), buffer

    def _hidden_places(self) -> Iterator[Place]:
        """The buffers beside layers that layers of another rank use, and that cannot be read here."""
        for path, owner in outside_pipeline(self._module):
            if isinstance(owner._buffers, HiddenTensors):
                yield from (Place(path, "buffer", name) for name in owner._buffers.hidden)


def reached_objects(module: nn.Module, ignored: Collection[str], beside: Beside | None) -> dict[str, Any]:
    """The objects of the program that steps reach, by names that are the same on all ranks.

    Args:
        ignored: Attributes of the module that are not the user's.
        beside: What steps may change beside the module; None: only its attributes are looked through.
    """
    roots = [
        (".".join(filter(None, ("self", path, name))), value)
        for path, owner in outside_pipeline(module)
        for name, value in vars(owner).items()
        if name not in ignored and type(value) not in PLAIN and not isinstance(value, nn.Module)
    ]
    return ReachedObjects(roots, apart=[id(module)]).by_name if beside is None else beside.reached(roots)


def make_changes(
    module: nn.Module,
    changes: list[Change],
    beside: Beside | None = None,
    objects: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Make the changes that another rank's step made, but for buffers that only layers of that rank use.

    Args:
        objects: The objects that steps reach, as they were named before the step.
    """
    extended: set[int] = set()
    with torch.no_grad():
        for place, kind, value in changes:
            if place.kind == "object" and place.owner not in objects:
                warn_once(
                    f"absent/{place}",
                    f"a step changes {place}, and this rank has no {place.owner}: ranks keep what they have",
                )
                continue
            table = _table(module, place, beside, objects)
            if isinstance(table, HiddenTensors) and place.name in table.hidden:
                continue
            before = table.get(place.name)
            if kind == "delete":
                table.pop(place.name, None)
            elif kind == "extend" and isinstance(before, list):
                if id(before) not in extended:  # one list may stand in several places
                    before.extend(value)
                    extended.add(id(before))
            elif kind == "continues" and isinstance(before, list):
                table[place.name] = [*before, *value]
            elif kind != "refill" or not (_refilled(before, value) or isinstance(value, RawState)):
                table[place.name] = value


def _table(
    module: nn.Module, place: Place, beside: Beside | None, objects: Mapping[str, Any]
) -> MutableMapping[str, Any]:
    if place.kind == "object":
        table = attributes_of(objects[place.owner])
        assert table is not None, "what is reached has some"
        return table
    if place.kind == "beside":
        assert beside is not None, "what is beside the module is found by it"
        return beside.table(place.owner, place.name)
    owner = module.get_submodule(place.owner)
    return owner._buffers if place.kind == "buffer" else vars(owner)


def look(value: Any, copies: bool, memo: dict[int, Seen], *, copied: bool | None = None) -> Seen:
    """Record a value as it is now.

    Args:
        copies: Whether to copy the tensors within it.
        copied: Whether to copy it, if it is a tensor; left out: as ``copies`` says.
    """
    if type(value) in PLAIN:
        return Seen(value)
    if id(value) in memo:
        return memo[id(value)]
    seen = memo[id(value)] = Seen(value)
    if isinstance(value, nn.Parameter):
        pass  # the optimizer changes it
    elif isinstance(value, Tensor):
        seen.version = version_of(value)
        if (copies if copied is None else copied) and value.layout is torch.strided:
            seen.contents = value.detach().clone()
    elif isinstance(value, numpy.ndarray | set):
        seen.contents = value.copy()
    elif has_raw_state(value):
        seen.contents = raw_state(value)
    elif isinstance(value, list | tuple | deque):
        seen.contents = list(value)
        children = enumerate(seen.contents)
        # Most lists are long because they hold numbers or strings.
        seen.inner = {i: look(child, copies, memo) for i, child in children if type(child) not in PLAIN}
    elif (table := _fields(value)) is not None:
        seen.contents = dict(table)
        seen.inner = {name: look(child, copies, memo) for name, child in table.items() if type(child) not in PLAIN}
    return seen


def attributes_kept(module: nn.Module, copies: bool) -> Callable[[], None]:
    """Return what puts the attributes of a module back, and their tensors.

    Args:
        copies: Whether to copy tensors in lists and dicts, too.
    """
    before = {name: look(value, copies, {}, copied=True) for name, value in vars(module).items()}

    def restore_all() -> None:
        for seen in before.values():
            restore(seen, set())
        _fill(vars(module), {name: seen.value for name, seen in before.items()})

    return restore_all


def _mark(value: Any, is_array: bool) -> int | None:
    """A number that changes with the values of a large array, or with the length of a large container."""
    if isinstance(value, numpy.ndarray):
        return zlib.crc32(numpy.ascontiguousarray(value).view(numpy.uint8).reshape(-1).data) if is_array else None
    return len(value) if isinstance(value, list | dict | set | deque) else None


def _fields(value: Any) -> dict[Any, Any] | None:
    """The values in a dict or a dataclass, by name; None for anything else."""
    if isinstance(value, dict):  # one that is asked otherwise may fill itself by that
        return value if type(value).__iter__ in (dict.__iter__, OrderedDict.__iter__) else None
    is_record = is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")
    return vars(value) if is_record else None


def _is_opaque(value: Any) -> bool:
    """Whether this may change without being seen; libraries that run the step change objects of their own."""
    if isinstance(value, GENERATORS) or has_raw_state(value):
        return False  # see own_generators.py and raw_states.py
    if isinstance(value, nn.Module):
        return True  # in a dict, where torch does not see that it is one
    if not hasattr(value, "__dict__") or _fields(value) is not None or isinstance(value, Tensor | type | Callable):
        return False
    return module_of(type(value)).partition(".")[0] not in LIBRARIES


def held_by(value: Any) -> list[Any]:
    """What an object has in its attributes; of a module also that of its parts, and how often tensors changed."""
    if not isinstance(value, nn.Module):
        return list(vars(value).values())
    held: list[Any] = []
    for part in value.modules():
        for each in (*vars(part).values(), *part._buffers.values()):
            held += (each, version_of(each)) if isinstance(each, Tensor) else (each,)
            if isinstance(each, list | dict | set | deque):
                held.append(len(each))
    return held


def are_held(before: list[Any], now: list[Any]) -> bool:
    """Whether an object holds what it held; versions are numbers, which may be equal and not the same."""
    return len(before) == len(now) and all(
        old is new or (type(old) is int and old == new) for old, new in zip(before, now, strict=True)
    )


def _is_same(seen: Seen, value: Any, visited: set[int]) -> bool:
    if type(value) is str and value == seen.value:
        return True  # the environment makes a new string whenever it is read
    if value is not seen.value:
        return False
    if type(value) in PLAIN or id(value) in visited or isinstance(value, nn.Parameter):
        return True
    visited.add(id(value))
    known = seen.contents
    if isinstance(value, Tensor):
        # What a capture has left, such as in a dictionary that a hook fills, has no data to be compared, nor has
        # what stands for a tensor of another rank.
        is_known = known is not None and not isinstance(value, FakeTensor | StandIn)
        # One that was put back has another version, and what it had.
        return torch.equal(value, known) if is_known else seen.version == version_of(value)
    if known is None:
        is_array = isinstance(value, numpy.ndarray)
        return seen.mark is None or seen.mark == _mark(value, is_array)
    if isinstance(value, numpy.ndarray):
        return value.shape == known.shape and value.tobytes() == known.tobytes()
    if isinstance(value, set):
        return value == known
    if has_raw_state(value):
        return is_raw_state(value, known)
    table = _fields(value)
    return len(value if table is None else table) == len(known) and _begins_with(value, seen, visited)


def _begins_with(value: Any, seen: Seen, visited: set[int]) -> bool:
    """Whether the items of a container are those that it held, and perhaps more."""
    table = _fields(value)
    if table is not None:
        same = all(map(is_, seen.contents, table)) and all(map(is_, seen.contents.values(), table.values()))
    else:
        same = all(map(is_, seen.contents, value))
    return same and all(_is_same(child, child.value, visited) for child in seen.inner.values())


def _difference(place: Place, seen: Seen | None, value: Any) -> Change | None:
    if seen is None:
        return Change(place, "bind", value)
    if value is seen.value and type(value) in PLAIN:  # most are, and each batch asks of all
        return None
    if _is_same(seen, value, set()):
        return None
    kept = value is seen.value
    if type(value) is list and type(seen.value) is list and seen.contents is not None:
        length = len(seen.contents)
        if len(value) >= length and _begins_with(value, seen, set()):
            return Change(place, "extend" if kept else "continues", value[length:])
    if kept and has_raw_state(value):
        return Change(place, "refill", RawState(raw_state(value)))
    return Change(place, "refill" if kept else "bind", value)


def restore(seen: Seen, visited: set[int]) -> None:
    value, contents = seen.value, seen.contents
    if contents is None or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        if value.shape != contents.shape:
            put_back(value, contents)
        elif not _is_same(seen, value, set()):
            value.detach().copy_(contents)
        return
    if isinstance(value, numpy.ndarray | set):
        _refilled(value, contents)
        return
    if has_raw_state(value):
        put_raw_state(value, contents)
        return
    for child in seen.inner.values():
        restore(child, visited)
    if isinstance(contents, dict):
        table = _fields(value)
        assert table is not None, "what was seen by its fields has some"
        _fill(table, contents)
    elif not isinstance(value, tuple):
        _refilled(value, contents)


def _refilled(old: Any, new: Any) -> bool:
    """Give ``old`` the contents of ``new`` where it can take them, so that whoever holds it sees them."""
    if isinstance(new, RawState):
        return has_raw_state(old) and put_raw_state(old, new.contents)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        fits = old.shape == new.shape and old.dtype == new.dtype
        if fits:
            old.detach().copy_(new)
        return fits
    if isinstance(old, numpy.ndarray) and isinstance(new, numpy.ndarray):
        fits = old.shape == new.shape and old.dtype == new.dtype
        if fits:
            old[...] = new
        return fits
    if type(old) is not type(new) and not (isinstance(old, deque) and isinstance(new, list)):
        return False
    if isinstance(old, list | deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, set | dict):
        _fill(old, new)
    else:
        return False
    return True


def _fill(old: Any, new: Any) -> None:
    """Give a dict or a set new contents, also where its class has an ``update`` of its own, as meters have."""
    kind: Any = next(kind for kind in (OrderedDict, dict, set) if isinstance(old, kind))
    kind.clear(old)
    kind.update(old, new)
