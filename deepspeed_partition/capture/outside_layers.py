"""What a program puts on the modules that no layer holds, since their own code was written down.

Such are the model itself and the modules that were opened. A hook on one of them is called by no layer. A number
that their code reads of an attribute is in the layers what it was when that code was written down.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from deepspeed_partition.capture.captured import Captured
from deepspeed_partition.capture.kept_state import written_name
from deepspeed_partition.capture.left_behind import is_no_librarys
from deepspeed_partition.capture.recorder import OF_HOSTS, CaptureError
from deepspeed_partition.code_names import LIBRARIES, CodeSearch, forward_of
from deepspeed_partition.generators import members_of
from deepspeed_partition.module_hooks import MODULE_HOOKS

_LIBRARIES = frozenset((*LIBRARIES, "accelerate", "diffusers", "peft", "torchmetrics", "transformers"))
"""Whose hooks are part of what is written down, or of a host."""


_MOST_MEMBERS = 100
"""Members of a dict up to which each is looked at before each run of a layer."""
_PLAIN = frozenset((bool, int, float, complex, str, type(None)))
CHANGES = (
    "{} is {} now and was {} when the code that reads it was written down as layers: it is written down anew for "
    "each change, which takes about as long as making them; a tensor among the model's arguments may change"
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
        # What a run sets itself before it reads it may be anything beforehand.
        sets = {(id(vars(modules[owner])), name) for owner, name in captured.graph.recording.sets}
        every = [read for name, part in self._opened.items() for read in _read_by(name, part)]
        self._read = [read for read in every if (id(read.table), read.key) not in sets]
        self.tell: Callable[[str], object] = lambda sentence: None
        """Is given what a user should be told once."""

    def verify(self) -> None:
        """Refuse hooks that no layer calls.

        Raises:
            CaptureError: a program has hung one on.
        """
        if not any(self._hooks):
            return
        for name, part in self._opened.items():
            for kind, hook in _hooks_of(part):
                place = f"{name} ({type(part).__name__})" if name else type(part).__name__
                raise CaptureError(
                    f"{place} has a {kind} hook ({_name_of(hook)}), which no layer calls, for the code of "
                    f"{name or 'the model'} is cut into layers: register it on modules that it calls, such as its "
                    "blocks, before layers are made"
                )

    def changes(self) -> str:
        """Take what code reads for what it is now; return what has changed since it was read, or nothing."""
        changed = [read for read in self._read if read.is_changed]
        if not changed:
            return ""
        self._read = [read._replace(value=read.now) for read in self._read]
        first = changed[0]
        self.tell(CHANGES.format(first.written, repr(first.now), repr(first.value)))
        return f"{first.written} is {first.now!r} now and was {first.value!r}"


def refuse_kept_state(captured: Captured) -> None:
    """Refuse a model whose own code keeps something in an attribute for its next run.

    Raises:
        CaptureError: it does; the message names the line.
    """
    for name, line in captured.graph.recording.kept.items():
        raise CaptureError(
            f"{type(captured.model).__name__} keeps {name} for its next run ({line}), and the layers that its "
            "code is cut into begin each run with what that was in the capture: let a module of its own keep and "
            "read it, or take it as an argument and return it"
        )


def notes_on_attributes(captured: Captured) -> Iterator[str]:
    """What is lost of attributes that code sets which is cut into layers, one sentence for each."""
    graph = captured.graph
    opened = {"", *(name for name, _ in graph.opened)}
    for (owner, name), each in graph.recording.sets.items():
        if each.scope.target in opened and type(each.value) not in (int, float):
            yield (
                f"{written_name(owner, name)} is not set while layers run, into which the code that does is cut "
                f"({each.line}): let it return the value where something reads it"
            )


class _Read(NamedTuple):
    """A number, a string or the like that code reads of an attribute, or of what is in one."""

    table: Mapping[str, Any]
    key: str
    written: str
    value: Any

    @property
    def now(self) -> Any:
        return self.table.get(self.key)

    @property
    def is_changed(self) -> bool:
        now = self.now
        return now is not self.value and (type(now) not in _PLAIN or bool(now != self.value))


def _read_by(path: str, part: nn.Module) -> Iterator[_Read]:
    """What the code of a module reads of its attributes that stands for itself, two objects or dicts deep."""
    search = CodeSearch(is_no_librarys)
    search.read(forward_of(part), type(part))
    written = ".".join(filter(None, ("self", path)))
    yield from _plain_values(vars(part), search.written.difference(OF_HOSTS), written, 2)


def _plain_values(
    table: Mapping[str, Any], names: Container[str] | None, written: str, depth: int
) -> Iterator[_Read]:
    for key, value in list(table.items()):
        if not isinstance(key, str) or (names is not None and key not in names):
            continue
        if type(value) in _PLAIN:
            yield _Read(table, key, f"{written}.{key}", value)
        elif depth and isinstance(value, dict) and len(value) <= _MOST_MEMBERS:
            yield from _plain_values(value, None, f"{written}.{key}", depth - 1)
        elif depth and (members := members_of(value)) is not None:
            yield from _plain_values(members, names, f"{written}.{key}", depth - 1)


def _hooks_of(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for table, kind in MODULE_HOOKS.items():
        for hook in vars(part)[table].values():
            if _named(hook).__module__.partition(".")[0] not in _LIBRARIES:
                yield kind, hook


def _named(hook: Any) -> Any:
    """The function, or the class of the object, that a hook is."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook if hasattr(hook, "__qualname__") and hasattr(hook, "__module__") else type(hook)


def _name_of(hook: Any) -> str:
    return str(_named(hook).__qualname__).rpartition("<locals>.")[2]
