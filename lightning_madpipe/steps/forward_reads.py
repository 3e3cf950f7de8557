"""What ``forward()`` reads besides its input, and whether it is what it was when the layers were compared with it.

A pipeline runs the layers alone. ``forward()`` is compared with them once, on one micro-batch, and does the same
on every other one as long as what it reads is the same: attributes of the modules outside the layers, and names of
its file. These are looked at before each step (some microseconds for each of them), and where one has changed, the
two are compared again. The epoch counts as such an attribute where ``forward()`` asks the Trainer for anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepspeed_partition.capture.element_attributes import of_class, subclass_of
from deepspeed_partition.code_names import (
    LIBRARIES,
    Name,
    function_of,
    is_installed,
    module_of,
    names_read,
    set_by_class,
)
from deepspeed_partition.tensor_values import version_of
from lightning_madpipe.steps.step_side_effects import PLAIN

OF_THE_TRAINER = frozenset(("current_epoch", "global_step", "trainer", "lr_schedulers", "optimizers"))
"""What a LightningModule asks its Trainer for, which may be another thing in each epoch or step."""

MOST_TIMES = 3
"""How often in an epoch the layers are compared again: what changes more often changes in every step."""

DEPTH = 4
MOST_MEMBERS = 1000
MOST_FUNCTIONS = 100


class Read(NamedTuple):
    """A name that ``forward()`` reads."""

    owner: str
    """The path of the module that has it; empty for the LightningModule."""
    name: str
    is_global: bool = False
    """Whether it is a name of the file, or of the function around, that defines the owner's ``forward()``."""

    def __str__(self) -> str:
        return self.name if self.is_global else ".".join(filter(None, ("self", self.owner, self.name)))

    @property
    def is_of_the_trainer(self) -> bool:
        return not self.is_global and not self.owner and self.name in OF_THE_TRAINER


@contextmanager
def noted_reads(owners: Mapping[str, nn.Module], ignored: Collection[str]) -> Iterator[dict[Read, None]]:
    """Note meanwhile what is read of ``owners``, and what their ``forward()`` reads of its file.

    Args:
        ignored: Attributes that are not the user's.
    """
    found: dict[Read, None] = {}
    with ExitStack() as stack:
        for path, owner in owners.items():
            if _is_librarys(type(owner)):  # its own code is known; a program may have given it a number
                kind: Any = type(owner)
                for name, value in vars(owner).items():
                    if type(value) in PLAIN and _is_users(name, ignored) and name not in set_by_class(kind):
                        found[Read(path, name)] = None
                continue
            for name in _names_of_file(owner):
                found[Read(path, name, True)] = None
            stack.enter_context(_noting(path, owner, frozenset(ignored), found))
        yield found


@contextmanager
def _noting(path: str, owner: nn.Module, ignored: frozenset[str], found: dict[Read, None]) -> Iterator[None]:
    kind, is_inner = type(owner), False

    def getattribute(self: Any, name: str) -> Any:
        nonlocal is_inner
        asks = name in OF_THE_TRAINER and not path
        if is_inner or not (asks or (_is_users(name, ignored) and _is_value(self, name))):
            return kind.__getattribute__(self, name)
        found[Read(path, name)] = None
        is_inner = asks  # such a property reads others
        try:
            return kind.__getattribute__(self, name)
        finally:
            is_inner = False

    def hashed(self: Any) -> int:
        nonlocal is_inner
        before, is_inner = (
            is_inner,
            True,
        )  # a metric's hash reads its states; who looks for it asks for none of them
        try:
            return kind.__hash__(self)
        finally:
            is_inner = before

    with of_class(owner, subclass_of(kind, {"__getattribute__": getattribute, "__hash__": hashed})):
        yield


def _is_users(name: str, ignored: Collection[str]) -> bool:
    return not name.startswith("__") and name not in ignored


def _is_value(owner: Any, name: str) -> bool:
    """Whether a name is an attribute of the object, or a plain one of its class, and no method or property."""
    if name in object.__getattribute__(owner, "__dict__"):
        return True
    if name == "forward":  # which is called, and is replaced while steps run
        return False
    # A method, too: a program may put another one in its place.
    return type(_of_class(type(owner), name)) in (*PLAIN, list, tuple, dict, FunctionType)


def _of_class(kind: type, name: str) -> Any:
    """What a class of the program, and not of a library, defines by this name."""
    base = next((base for base in kind.__mro__ if name in vars(base)), None)
    return _MISSING if base is None or _is_librarys(base) else vars(base)[name]


def _is_librarys(kind: Any) -> bool:
    return module_of(kind).partition(".")[0] in LIBRARIES


_MISSING = object()


def _names_of_file(owner: nn.Module) -> list[str]:
    return [name for name, value in _outer_values(owner).items() if _is_data(value)]


def _is_data(value: Any) -> bool:
    return type(value) in (*PLAIN, list, tuple, dict) or (
        not isinstance(value, ModuleType) and _members(value) is not None
    )


def _outer_values(owner: nn.Module) -> dict[str, Any]:
    """What ``forward()`` of a user's class reads from its file, from functions around it, and by what it calls."""
    forward = function_of(getattr(type(owner), "forward", None))
    if forward is None:
        return {}
    kind: Any = type(owner)
    return {written: name.value for written, name in _names_of(forward, kind).items()}


@functools.cache
def _names_of(forward: Any, kind: Any) -> dict[str, Name]:
    found: dict[str, Name] = {}
    todo: list[tuple[FunctionType, type | None]] = [(forward, kind)]
    seen = {forward}
    while todo and len(seen) < MOST_FUNCTIONS:
        function, of = todo.pop()
        for name in names_read(function, of):
            called = function_of(name.value)
            if called is None and not name.is_member:
                written = name.written
                while written in found and not found[written].is_at(name):
                    written = f"{name.owner}.{written}"
                found[written] = name
            elif called is not None and called not in seen and not is_installed(called.__module__):
                seen.add(called)
                todo.append((called, of if name.is_member else None))
    return found


class ForwardWatch:
    """Tells whether what ``forward()`` read when it was compared has changed since.

    Args:
        module: The LightningModule.
        reads: What was read.
        epoch: Gives the number of the epoch.
        say: Says a sentence once.
        found_in: What calls the layers that were found, such as ``self()``; None where they are named.
    """

    def __init__(
        self, module: nn.Module, epoch: Callable[[], int], say: Callable[[str], None], found_in: str | None = None
    ) -> None:
        self._module, self._epoch, self._say, self._found_in = module, epoch, say, found_in
        self._reads: dict[Read, None] = {}
        self._seen: dict[Read, Any] = {}
        self._in_epoch, self._num_times = -1, 0

    def begin(self, reads: Collection[Read]) -> None:
        """Take what is read now, and what was read before, for what has been compared."""
        self._reads.update(dict.fromkeys(reads))
        self._seen = self._now()
        self._in_epoch = self._epoch()

    @property
    def is_needed(self) -> bool:
        return bool(self._reads)

    def changed(self) -> list[str]:
        """The names whose values are others than when the layers were compared."""
        if self._epoch() != self._in_epoch:
            self._num_times, self._in_epoch = 0, self._epoch()
        if not self._reads or self._num_times >= MOST_TIMES:
            return []
        now = self._now()
        names = [str(read) for read in self._reads if now[read] != self._seen[read]]
        self._num_times += bool(names)
        if self._num_times == MOST_TIMES:
            what = "pipeline_layers() is" if self._found_in is None else "the layers that were found are"
            called = self._found_in or "forward()"
            self._say(
                f"{called} of {type(self._module).__name__} reads {', '.join(names)}, which changes from step to "
                f"step: {what} compared with it again at the start of each epoch only; what "
                "shall change in each step belongs in a layer"
            )
        return names

    def _now(self) -> dict[Read, Any]:
        return {read: self._value(read) for read in self._reads}

    def _value(self, read: Read) -> Any:
        if read.is_of_the_trainer:
            return self._epoch()
        owner = self._module.get_submodule(read.owner)
        if read.is_global:
            return facts_of(_outer_values(owner).get(read.name, _MISSING))
        value = vars(owner).get(read.name, _MISSING)
        return facts_of(_of_class(type(owner), read.name) if value is _MISSING else value)


class _Same:
    """An object that is equal to itself alone; this keeps it, so that no other one gets its number."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def facts_of(value: Any, depth: int = DEPTH) -> Any:
    """What tells whether a value has changed, in attributes of objects, too."""
    if type(value) in PLAIN:
        # NaN is no other value than before.
        return repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    members = _members(value) if depth else None
    if members is None:
        return _Same(value)
    return type(value), [(key if type(key) in PLAIN else _Same(key), facts_of(v, depth - 1)) for key, v in members]


def _members(value: Any) -> list[tuple[Any, Any]] | None:
    """What is within a container or an object of the program; None where that is not looked at."""
    if isinstance(value, list | tuple):
        found: list[tuple[Any, Any]] = list(enumerate(value))
    elif isinstance(value, set | frozenset):
        found = sorted(((repr(each), each) for each in value), key=lambda pair: pair[0])
    elif isinstance(value, dict):
        found = list(value.items())
    else:
        is_program = not _is_librarys(type(value)) and not isinstance(value, nn.Module | type)
        if not is_program or callable(value) or not hasattr(value, "__dict__"):
            return None
        found = list(vars(value).items())
    return found if len(found) <= MOST_MEMBERS else None
