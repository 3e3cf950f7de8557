"""States of values without attributes in Python: bytes, arrays, numbers of C, shared memory, queues, variables.

The variables are those of a context or a thread.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
import sys
import threading
from array import array
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_DATA_OF_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_VARIABLES = (ContextVar, threading.local)
_LISTED = (queue.SimpleQueue, *_VARIABLES)
"""Classes of values whose state is a list."""
RAW = (bytearray, array, memoryview, *_DATA_OF_C)


@dataclass(frozen=True, slots=True)
class RawState:
    """The state of one of these values, to be put into the value of another rank."""

    contents: Any


def has_raw_state(value: Any) -> bool:
    """Whether a value is one of these, and its state can be put back."""
    if isinstance(value, memoryview):
        with suppress(ValueError):  # it was released
            return not value.readonly and value.c_contiguous
        return False
    if isinstance(value, _DATA_OF_C):
        return _has_no_pointers(type(value))
    return isinstance(value, RAW) or type(value) in _LISTED or _is_queue(value) or _shared(value) is not None


def raw_state(value: Any) -> Any:
    """What a value holds now: bytes, an array, the items of a queue with the number of unfinished tasks, or the
    value of a variable of this context, or those of this thread with their names."""
    if type(value) is ContextVar:
        with suppress(LookupError):
            return [value.get()]
        return []
    if type(value) is threading.local:
        return [each for item in vars(value).items() for each in item]
    if type(value) is queue.SimpleQueue:
        items = _taken_out(value)
        for item in items:
            value.put(item)
        return items
    if _is_queue(value):
        with value.mutex:
            return [*value.queue, value.unfinished_tasks]
    shared = _shared(value)
    if isinstance(value, memoryview):
        return value.tobytes()
    return value[:] if isinstance(value, array) else bytes(value if shared is None else shared)


def is_raw_state(value: Any, state: Any) -> bool:
    """Whether a value holds what it held then."""
    now = raw_state(value)
    if isinstance(now, list):
        return len(now) == len(state) and all(
            a is b or _is_equal_number(a, b) for a, b in zip(now, state, strict=True)
        )
    return bool(now == state)


def put_raw_state(value: Any, state: Any) -> bool:
    """Let a value hold what it held then, or what that of another rank holds; return whether it can."""
    if type(value) is ContextVar:
        for each in state:  # one that had no value keeps what it has got
            value.set(each)
        return True
    if type(value) is threading.local:
        vars(value).clear()
        vars(value).update(zip(state[::2], state[1::2], strict=True))
        return True
    if type(value) is queue.SimpleQueue:
        _taken_out(value)
        for item in state:
            value.put(item)
        return True
    if _is_queue(value):
        *items, unfinished = state
        with value.mutex:
            value.queue.clear()
            value.queue.extend(items)
            value.unfinished_tasks = unfinished
            value.not_full.notify_all()
            value.not_empty.notify_all()
        return True
    if isinstance(value, bytearray | array):
        value[:] = state
        return True
    if isinstance(value, memoryview):
        fits = value.nbytes == len(state)
        if fits:
            value.cast("B")[:] = state
        return fits
    data = _shared(value)
    data = value if data is None else data
    if not isinstance(data, _DATA_OF_C) or ctypes.sizeof(data) != len(state):
        return False
    ctypes.memmove(ctypes.addressof(data), state, len(state))
    return True


def raw_size(value: Any) -> int:
    """The bytes of a value's state; of a queue the number of items."""
    if type(value) in _VARIABLES:
        return len(raw_state(value))
    if type(value) is queue.SimpleQueue or _is_queue(value):
        return int(value.qsize())
    shared = _shared(value)
    data = value if shared is None else shared
    if isinstance(data, _DATA_OF_C):
        return ctypes.sizeof(data)
    return int(data.nbytes) if isinstance(data, memoryview) else len(data) * getattr(data, "itemsize", 1)


def _is_queue(value: Any) -> bool:
    """Whether this is a queue, also of a program's own class, that keeps its items as those of Python do."""
    return isinstance(value, queue.Queue) and isinstance(getattr(value, "queue", None), list | deque)


def _taken_out(items: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(items.get_nowait())
    return found


def _is_equal_number(now: Any, then: Any) -> bool:
    return type(now) in (int, float, str) and type(now) is type(then) and bool(now == then)


def _has_no_pointers(kind: Any) -> bool:
    """Whether values of a type of ctypes are numbers alone: an object that a pointer leads to has other owners."""
    if issubclass(kind, ctypes._SimpleCData):
        return kind._type_ not in "OPXZz"
    if issubclass(kind, ctypes.Array):
        return _has_no_pointers(kind._type_)
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        return all(_has_no_pointers(field[1]) for field in getattr(kind, "_fields_", ()))
    return False


def _shared(value: Any) -> Any:
    """The number or the array of C in shared memory that a value of ``multiprocessing`` has; None of another one.

    A process that another one has begun may share it with that: then it is not for this one to put it back.
    """
    module = sys.modules.get("multiprocessing.sharedctypes")
    if module is None or not isinstance(value, module.SynchronizedBase) or multiprocessing.parent_process():
        return None
    return value.get_obj()
