"""What a program puts on the modules that no layer holds, since their own code was written down.

Such are the model itself and the modules that were opened. A hook on one of them is called by no layer. A number
that their code reads of an attribute is in the layers what it was when that code was written down.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed_partition.capture.captured import Captured
from deepspeed_partition.capture.computing_hooks import only_computes
from deepspeed_partition.capture.kept_state import written_name
from deepspeed_partition.capture.left_behind import is_no_librarys
from deepspeed_partition.capture.reads_in_code import ReadsInCode
from deepspeed_partition.capture.recorder import OF_HOSTS, CaptureError
from deepspeed_partition.code_names import LIBRARIES, CodeSearch, forward_of, module_of
from deepspeed_partition.generators import members_of
from deepspeed_partition.module_hooks import MODULE_HOOKS

_LIBRARIES = frozenset((*LIBRARIES, "accelerate", "diffusers", "peft", "torchmetrics", "transformers"))
"""Whose hooks are part of what is written down, or of a host."""

_MOST_MEMBERS = 100
"""Members of a list or a dict up to which each is looked at before each run of a layer."""
_MOST_COMPARED = 64
"""Members of a list or a dict of more than ``_MOST_MEMBERS`` that are looked at to see whether it has changed."""
_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = frozenset((bool, int, float, complex, str, type(None)))
_KEY = "read by captured code"
CHANGES = (
    "{} when the code that reads {} was written down as layers: it is written down anew for each change, which "
    "takes about as long as making them; a tensor among the model's arguments may change"
)
_MOST_ALIKE = 3
"""Changes in a row of a list or a dict, or of an entry of a dict of which any may be read, without which the same
would be recorded: after them it is not compared any more."""
NOT_COMPARED = (
    "{} has changed {} times, and the code that reads {} ran the same calls each time: layers do not follow its "
    "changes any more; give it to the model as a tensor where the code comes to do something else by it"
)
TOO_LONG = (
    "{} has changed, and has {} members: layers follow changes of lists and dicts of up to {}, so they go on with "
    "what it was when the code that reads {} was written down; give it to the model as a tensor where that code "
    "comes to do something else by it"
)
UNCALLED = "which no layer calls"
UNFILLED = (
    "{} stays what it is while layers run, into which the code of {} is cut that changes it: let the model return "
    "what is kept there, or a module of its own keep it"
)


class OutsideLayers:
    """The modules of a captured model whose code was written down.

    Args:
        captured: The model with the graph of which layers are made.
    """

    def __init__(self, captured: Captured) -> None:
        modules = captured.graph.recording.modules
        names = dict.fromkeys(("", *sorted(name for name, _ in captured.graph.opened)))
        self._opened = {name: modules[name] for name in names}
        self._hooks = [vars(part)[table] for part in self._opened.values() for table in MODULE_HOOKS]
        self._recorded = self._computing()
        # What a run sets itself before it reads it may be anything beforehand.
        recording = captured.graph.recording
        self._set = {written_name(*each) for each in recording.sets} | {each.written for each in recording.left}
        self._filled = {id(each.table) for each in recording.left}  # which may have several names
        self._left_alone: set[str] = set()
        """What is not compared any more."""
        self._read = self._looked()
        self._last: list[str] = []
        """What has changed last."""
        self._num_alike: dict[str, int] = {}
        """How often in a row a change has changed nothing in what was recorded, by what is called so."""
        self.changed = {read.written: read.in_words for read in self._read}
        """What was read, or has changed since, and was not yet compared with other ranks, in words."""
        self.tell: Callable[[str, str], object] = lambda key, sentence: None
        """Is given what a user should be told once, and what that is known by."""

    def _looked(self) -> list[_Read]:
        """What code reads, as it is now."""
        every = chain.from_iterable(_read_by(*each) for each in self._opened.items())
        return [
            read
            for read in every
            if self._set.isdisjoint((read.written, read.reader))
            and read.container not in self._filled
            and read.written not in self._left_alone
        ]

    def verify(self) -> None:
        """Refuse hooks that no layer calls.

        Raises:
            CaptureError: a program has hung one on.
        """
        if any(self._hooks):
            refuse_hooks(self._opened, but=self._recorded)

    def _computing(self) -> list[Any]:
        """The hooks that compute with tensors alone, and that are written down with the code."""
        return [hook for part in self._opened.values() for hook in _computing_on(part)]

    def changes(self) -> str:
        """Take what code reads for what it is now; return what has changed since it was read, or nothing."""
        if self._recorded and self._recorded != (now := self._computing()):
            self._recorded = [hook for hook in self._recorded if hook in now]
            return "a hook is there no more"
        changed = self._followed([read for read in self._read if read.is_changed])
        if not changed:
            return ""
        self._last = [read.written for read in changed]
        self._num_alike |= {name: self._num_alike.get(name, 0) + 1 for name in self._last}
        self._read = self._looked()
        self.changed |= {read.written: read._replace(value=read.now).in_words for read in changed}
        first = changed[0]
        self.tell(_KEY, CHANGES.format(first.compared, first.reader))
        return first.now_in_words

    def values(self) -> dict[str, Any]:
        """What code reads now, by what it is called."""
        return {read.written: read.now for read in self._read}

    def values_in_words(self) -> dict[str, str]:
        """What code reads now, by what it is called, for another process."""
        return {read.written: _in_words(read.now) for read in self._read if read.now is not _NOT_TAKEN}

    def set_since(self, values: Mapping[str, Any]) -> list[str]:
        """What code reads that is not what it was when :meth:`values` were taken."""
        now = self.values()
        return [name for name in now.keys() & values.keys() if not _is_same(now[name], values[name])]

    def runs_other_calls(self) -> None:
        """Take that the last change has changed what was recorded, or that this is not known."""
        self._num_alike |= dict.fromkeys(self._last, 0)

    def _followed(self, changed: Sequence[_Read]) -> list[_Read]:
        """What has changed, but for what is too long, and what a program sets in each step without an effect."""
        left_alone: dict[str, str] = {}
        for read in changed:
            name = read.written
            if isinstance(read.now, _Long):
                left_alone[name] = TOO_LONG.format(name, read.now.length, _MOST_MEMBERS, read.reader)
            elif read.may_be_idle and self._num_alike.get(name, 0) >= _MOST_ALIKE:
                left_alone[name] = NOT_COMPARED.format(name, _MOST_ALIKE, read.reader)
        for name, sentence in left_alone.items():
            self.tell(f"{_KEY}: {name}", sentence)
        if left_alone:
            self._left_alone.update(left_alone)
            self._read = [read for read in self._read if read.written not in left_alone]
        return [read for read in changed if read.written not in left_alone]


def refuse_hooks(
    parts: Mapping[str, nn.Module], kinds: Container[str] = MODULE_HOOKS, why: str = UNCALLED,
    but: Container[Any] = (),
) -> None:  # fmt: skip
    """Refuse the program's hooks on modules whose code is cut into layers.

    Args:
        parts: The modules, by their names in the model.
        kinds: Where torch keeps the hooks that are meant.
        why: What is wrong with them.
        but: Those that are not meant.

    Raises:
        CaptureError: there is one.
    """
    for name, part in parts.items():
        for kind, hook in _hooks_of(part, kinds):
            if hook in but:
                continue
            place = f"{name} ({type(part).__name__})" if name else type(part).__name__
            raise CaptureError(
                f"{place} has a {kind} hook ({_name_of(hook)}), {why}, for the code of {name or 'the model'} is "
                "cut into layers: register it on modules that it calls, such as its blocks, before layers are made"
            )


def refuse_kept_state(captured: Captured) -> None:
    """Refuse a model whose own code keeps something in an attribute for its next run.

    Raises:
        CaptureError: it does; the message names the line.
    """
    for name, line in captured.graph.recording.kept.items():
        where = f" ({line})" * bool(line)
        raise CaptureError(
            f"{type(captured.model).__name__} keeps {name} for its next run{where}, and the layers that its "
            "code is cut into begin each run with what that was in the capture: let a module of its own keep and "
            "read it, or take it as an argument and return it"
        )


def notes_on_attributes(captured: Captured) -> Iterator[str]:
    """What is lost of attributes that code sets which is cut into layers, one sentence for each."""
    graph = captured.graph
    opened = {"", *(name for name, _ in graph.opened)}
    for shown, scope in graph.recording.unfilled.items():
        if scope.target in opened:
            yield UNFILLED.format(shown, scope.target or "the model")
    for (owner, name), each in graph.recording.sets.items():
        if each.scope.target in opened and type(each.value) not in (int, float):
            yield (
                f"{written_name(owner, name)} is not set while layers run, into which the code that does is cut "
                f"({each.line}): let it return the value where something reads it"
            )


class _Read(NamedTuple):
    """A number, a string, a tensor or the like that code reads of an attribute, a variable, or what is in one.

    A list is compared by its members.
    """

    table: Mapping[Any, Any]
    key: Any
    written: str
    reader: str
    """What is read: itself, or a dict of which any entry may be."""
    value: Any

    @property
    def now(self) -> Any:
        return _taken(self.table.get(self.key))

    @property
    def container(self) -> int | None:
        """The list or dict that it is, by its address; None of what is none."""
        return id(self.table[self.key]) if type(self.table.get(self.key)) in (list, *_DICTS) else None

    @property
    def may_be_idle(self) -> bool:
        """Whether code may have no use for it: a list or a dict, or an entry of a dict that is read as a whole."""
        return self.container is not None or self.reader != self.written

    @property
    def is_changed(self) -> bool:
        return not _is_same(self.now, self.value)

    @property
    def in_words(self) -> str:
        """What it was, for another process."""
        return _in_words(self.value)

    @property
    def now_in_words(self) -> str:
        """What the value is now, and what it was when the layers were made, in words."""
        now, was = self.now, self.value
        if _is_plain(now) and _is_plain(was):
            return f"{self.written} is {now!r} now and was {was!r}"
        return f"{self.written} is another {'tensor' if isinstance(now, torch.Tensor) else 'value'} now"

    @property
    def compared(self) -> str:
        """What the value is now and was, as the first words of a sentence that goes on with ``when ...``."""
        return self.now_in_words + " than" * (not _is_plain(self.now) or not _is_plain(self.value))


def _read_by(path: str, part: nn.Module) -> Iterator[_Read]:
    """What the code of a module reads of its attributes, two objects or dicts deep, and of variables of files."""
    search = CodeSearch(is_no_librarys)
    search.read(forward_of(part), type(part))
    for hook in _computing_on(part):
        search.read(hook, None)
    reads = ReadsInCode(search.functions)
    names = {name for name in search.written.difference(OF_HOSTS) if reads.has_attribute(name)}
    written = ".".join(filter(None, ("self", path)))
    yield from _plain_values(vars(part), names, written, reads, 2)
    for name in search.found.values():
        if name.key in names or reads.has_variable(name.key):
            yield from _values_of(name.table, name.key, name.written, reads, 1)


def _plain_values(
    table: Mapping[str, Any], names: Container[str], written: str, reads: ReadsInCode, depth: int
) -> Iterator[_Read]:
    for key in list(table):
        if key in names:
            yield from _values_of(table, key, f"{written}.{key}", reads, depth)


def _values_of(
    table: Mapping[Any, Any], key: Any, written: str, reads: ReadsInCode, depth: int, *, is_entry: bool = False
) -> Iterator[_Read]:
    """What a value stands for, or its members.

    Args:
        is_entry: Whether it stands in a dict, and no attribute or variable is called so.
    """
    value = table.get(key)
    keys = reads.keys_of(key) if isinstance(value, dict) and not is_entry else None
    taken = _taken(value) if keys is None else _NOT_TAKEN
    if isinstance(taken, _Long) and not all(map(_is_member, taken.some)):
        return
    if taken is not _NOT_TAKEN:
        yield _Read(table, key, written, written, taken)
    if depth and isinstance(value, dict) and not isinstance(taken, _Long):
        for member in list(value) if keys is None else [member for member in keys if member in value]:
            if _is_plain(member):
                name = f"{written}[{member!r}]"
                for read in _values_of(value, member, name, reads, depth - 1, is_entry=True):
                    yield read if keys is not None else read._replace(reader=written)
    elif depth and taken is _NOT_TAKEN and (members := members_of(value)) is not None:
        names = {name for name in members if reads.has_attribute(name)}
        yield from _plain_values(members, names, written, reads, depth - 1)


_NOT_TAKEN = object()
"""What stands for what is not looked at."""


class _Long(NamedTuple):
    """A list or a dict of more members than layers follow."""

    length: int
    some: tuple[Any, ...]
    """The members that are looked at to see a change."""


def _taken(value: Any) -> Any:
    """What is compared of a value."""
    if _is_plain(value) or isinstance(value, torch.Tensor):
        return value
    is_list = type(value) in (list, tuple)
    if (is_list or isinstance(value, dict)) and len(value) > _MOST_MEMBERS:
        return _Long(len(value), _some_of(value))  # all members would take too long, before each run of a layer
    # Of a dict the keys: what is behind each is compared by itself.
    is_taken = all(map(_is_member, value)) if is_list or type(value) in _DICTS else False
    return (type(value), *value) if is_taken else _NOT_TAKEN


def _some_of(value: Any) -> tuple[Any, ...]:
    """Up to ``_MOST_COMPARED`` members of a list, or of a dict the first and the last ones."""
    if isinstance(value, dict):
        values = dict.values(value)  # a class of its own may make them in its ``values()``
        half = _MOST_COMPARED // 2
        return (*islice(values, half), *islice(reversed(values), half))
    return tuple(value[:: 1 + len(value) // _MOST_COMPARED])


def _is_member(value: Any) -> bool:
    return _is_plain(value) or isinstance(value, torch.Tensor)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _in_words(value: Any) -> str:
    """What :func:`_taken` has made of a value, for a reader or another process."""
    if type(value) is tuple:
        return f"[{', '.join(map(_in_words, value[1:]))}]"
    if isinstance(value, _Long):
        return f"of {value.length} members"
    return repr(value) if _is_plain(value) else type(value).__name__


def _is_same(now: Any, was: Any) -> bool:
    if isinstance(now, _Long) and isinstance(was, _Long):
        return now.length == was.length and _is_same(now.some, was.some)
    if type(now) is tuple and type(was) is tuple:
        return len(now) == len(was) and all(map(_is_same, now, was))
    return now is was or (type(now) in _PLAIN and type(was) in _PLAIN and bool(now == was))


def _computing_on(part: nn.Module) -> list[Any]:
    found = _hooks_of(part, ("_forward_pre_hooks", "_forward_hooks"))
    return [hook for _, hook in found if only_computes(hook, part)]


def _hooks_of(part: nn.Module, kinds: Container[str]) -> Iterator[tuple[str, Any]]:
    for table, kind in MODULE_HOOKS.items():
        for hook in vars(part)[table].values() if table in kinds else ():
            if module_of(_named(hook)).partition(".")[0] not in _LIBRARIES:
                yield kind, hook


def _named(hook: Any) -> Any:
    """The function, or the class of the object, that a hook is."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook if hasattr(hook, "__qualname__") and hasattr(hook, "__module__") else type(hook)


def _name_of(hook: Any) -> str:
    return str(_named(hook).__qualname__).rpartition("<locals>.")[2]
