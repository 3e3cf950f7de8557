"""Iterators of a program that give again what they have given, for each run of a step on the same batch."""

from __future__ import annotations

import inspect
import pickle
import random
import zlib
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_partition.capture.draws import Rewindable
from deepspeed_partition.code_names import is_librarys
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.random_state import random_state, torch_state

RUNS_STEP = ContextVar("RUNS_STEP", default=False)
"""Whether a step runs, and not a hook."""
_OWN = frozenset(
    f"__{name}__"
    for name in (
        "new", "init", "init_subclass", "subclasshook", "class", "class_getitem", "del", "dict", "weakref",
        "slots", "getattribute", "getattr", "setattr", "delattr", "dir", "iter", "next", "copy", "deepcopy",
        "reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "sizeof",
    )
)  # fmt: skip
"""Special methods that what stands for an iterator has for itself."""


class Replayed(Rewindable):
    """What stands for an iterator, and can be put back to where it was since :func:`forget_items`.

    It is used like the iterator, of which it has all attributes; its own have names that no program uses. Layers
    that are measured have ``kept_values.Given`` in the place of this: what they draw for an item goes by the
    common generators, and not by the item's number.
    """

    __slots__ = ("__weakref__", "_madpipe_items", "_madpipe_name", "_madpipe_num_forgotten", "_madpipe_seed")

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self.madpipe_iterator, self._madpipe_name = iterator, name
        self._madpipe_items: deque[Any] = deque()
        self._madpipe_num_forgotten = self.madpipe_place = 0
        self._madpipe_seed = torch.initial_seed()

    def __next__(self) -> Any:
        items, num_forgotten = self._madpipe_items, self._madpipe_num_forgotten
        while self.madpipe_place - num_forgotten >= len(items):
            items.append(_drawn_from(self))
        self.madpipe_place += 1
        return items[self.madpipe_place - 1 - num_forgotten]

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        iterator = self.madpipe_iterator
        if name == "send" and RUNS_STEP.get():
            warn_once(
                f"sent to a generator/{self._madpipe_name}",
                f"a step sends to {self._madpipe_name}, a generator: each micro-batch does, on the last stage and "
                "up to the call of the layers on the first one, and so does each trial, and what a generator has "
                "been sent cannot be taken back: losses that depend on it are others than in one process. Send in "
                "a hook, such as on_train_batch_end, and keep what it gives in an attribute",
            )
        found = inspect.getattr_static(type(iterator), name, None)
        if isinstance(found, FunctionType) and name not in getattr(iterator, "__dict__", ()):
            return MethodType(found, self)  # it may take items
        return getattr(iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NAMES:
            object.__setattr__(self, name, value)
            return
        setattr(self.madpipe_iterator, name, value)
        if RUNS_STEP.get():
            warn_once(
                f"set on an iterator/{self._madpipe_name}/{name}",
                f"a step sets {name} on {self._madpipe_name}, an iterator whose items are given again to each "
                f"micro-batch and after trials: {name} is set by each of these, on the last stage and up to the "
                "call of the layers on the first one. Set it in a hook",
            )

    def __delattr__(self, name: str) -> None:
        delattr(self.madpipe_iterator, name)

    def __dir__(self) -> list[str]:
        return dir(self.madpipe_iterator)

    def __reduce_ex__(self, _: Any) -> Any:
        own = tuple(getattr(self, name) for name in _STATE)
        return _made_again, (self.madpipe_iterator, own)

    __reduce__ = object.__reduce__


_STATE = (*(name for name in Replayed.__slots__ if name != "__weakref__"), "madpipe_place")
_NAMES = frozenset((*_STATE, "madpipe_iterator"))


def _made_again(iterator: Iterator[Any], state: tuple[Any, ...]) -> Replayed:
    found = _kind_for(type(iterator))(iterator, "")
    for name, value in zip(_STATE, state, strict=True):
        object.__setattr__(found, name, value)
    return found


@cache
def _kind_for(kind: type) -> type[Replayed]:
    """The class of what stands for iterators of a class, with the special methods of that."""
    names = [name for name in dir(kind) if name.startswith("__") and name.endswith("__") and name not in _OWN]
    special = {
        name: _forwarded(name)
        for name in names
        if callable(found := getattr(kind, name)) and found is not getattr(object, name, None)
    }
    members = {
        "__slots__": (),
        "__module__": Replayed.__module__,
        "__class__": property(lambda _: kind),
        **special,
    }
    return type(kind.__name__, (Replayed,), members)


def _forwarded(name: str) -> Any:
    def special(self: Replayed, *arguments: Any, **keywords: Any) -> Any:
        iterator = self.madpipe_iterator
        found = inspect.getattr_static(type(iterator), name)
        method = MethodType(found, self) if isinstance(found, FunctionType) else getattr(iterator, name)
        result = method(*arguments, **keywords)
        return self if result is iterator else result

    return special


_KEPT: WeakValueDictionary[int, Replayed] = WeakValueDictionary()


def replayed(iterator: Iterator[Any], name: str) -> Replayed:
    """What gives the items of an iterator again, the same wherever that stands; it keeps it, and its identity."""
    return _KEPT.setdefault(id(iterator), _kind_for(type(iterator))(iterator, name))


def begins_anew(kind: type) -> bool:
    """Whether a loop over an iterator of this class may begin anew: it does more than to return the iterator."""
    function = inspect.getattr_static(kind, "__iter__", None)
    if not isinstance(function, FunctionType) or is_librarys(function) or function.__module__ == "collections.abc":
        return False
    return function.__code__.co_code != _returns_itself.__code__.co_code


def _returns_itself(self: Any) -> Any:
    return self


def forget_items(source: Replayed) -> None:
    """Forget the items that were given: they are not asked for again."""
    while source._madpipe_items and source._madpipe_num_forgotten < source.madpipe_place:
        source._madpipe_items.popleft()
        source._madpipe_num_forgotten += 1


def _drawn_from(source: Replayed) -> Any:
    """The next item. What a step draws with it from common generators goes by the item's number alone.

    The first and the last stage draw it in runs that are seeded otherwise, and it is to be the same one.
    """
    if not RUNS_STEP.get():
        return next(source.madpipe_iterator)
    number = source._madpipe_num_forgotten + len(source._madpipe_items)
    seed = (source._madpipe_seed + 104729 * number) % 2**32
    back = random_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        if get_accelerator().device_name() != "cpu":
            get_accelerator().manual_seed(seed)
        before = common_states()
        item = next(source.madpipe_iterator)
        if common_states() != before:
            warn_once(
                f"draws/{source._madpipe_name}",
                f"a step takes items from {source._madpipe_name}, which draws from the common random generators "
                "for them, as a loader with shuffle=True does: these are other numbers than in one process. Give "
                "it a generator of its own, as by DataLoader(..., generator=torch.Generator().manual_seed(0))",
            )
        return item
    finally:
        back()


def key_of(state: Any) -> int:
    """A number that tells states apart."""
    return zlib.crc32(state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state))


def common_states() -> tuple[Any, ...]:
    """What tells where Python's, NumPy's and torch's common generators are."""
    return key_of(random.getstate()), key_of(np.random.get_state()), torch_state()
