"""Steps that count in something whose state is no attribute of Python: an array, a queue, shared memory, a file.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import multiprocessing
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.choice import is_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import Host, seeded, trained

Counting = tuple[Any, Callable[[Any], float]]
"""What counts, and a function that counts in it and gives the number."""


class Counts(cases.Classifier):
    def __init__(self, state: Any, count: Callable[[Any], float]) -> None:
        super().__init__(optimizer="sgd")
        self.state, self.count = state, count

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) / (1 + 0.1 * self.count(self.state))


def appended(state: Any) -> float:
    state.append(1)
    return len(state)


def raised(state: Any) -> float:
    state[0] += 1
    return float(state[0])


def raised_value(state: Any) -> float:
    state.value += 1
    return float(state.value)


def put(state: Any) -> float:
    state.put(1)
    return float(state.qsize())


def set_in_context(state: Any) -> float:
    state.set(state.get() + 1)
    return float(state.get())


def of_thread() -> threading.local:
    found = threading.local()
    found.number = 0
    return found


def raised_number(state: Any) -> float:
    state.number += 1
    return float(state.number)


def set_anew(state: Any) -> float:
    state.set(state.get(0) + 1)
    return float(state.get())


def with_class_around() -> Counting:
    class Local:
        number = 0

    def count(_: Any) -> float:
        Local.number += 1
        return float(Local.number)

    return None, count


def held_class() -> Any:
    class Held:
        number = 0

    return Held


def with_cache(keeps: Callable[..., Any]) -> Counting:
    """A function that keeps its results counts how often it has found none."""
    asked, number = [0], [0]

    @keeps
    def kept(_: int) -> int:
        number[0] += 1
        return number[0]

    def count(_: Any) -> float:
        asked[0] += 1
        return float(kept((asked[0] + 1) // 2))

    return None, count


def numbers(folder: Path) -> Any:
    path = folder / "numbers"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    return path


KINDS: dict[str, Callable[[Path], Counting]] = {
    "class of another file": lambda _: (None, lambda _: cases.Schedule.next_number() + cases.Schedule().own()),
    "array": lambda _: (array.array("i"), appended),
    "bytes": lambda _: (bytearray(), appended),
    "view of bytes": lambda _: (memoryview(bytearray(4)), raised),
    "number of C": lambda _: (ctypes.c_int(0), raised_value),
    "array of C": lambda _: ((ctypes.c_int * 4)(), raised),
    "shared value": lambda _: (multiprocessing.Value("i", 0), raised_value),
    "shared array": lambda _: (multiprocessing.Array("i", 4), raised),
    "queue": lambda _: (queue.Queue(), put),
    "queue by rank": lambda _: (queue.PriorityQueue(), put),
    "simple queue": lambda _: (queue.SimpleQueue(), put),
    "variable of a context": lambda _: (contextvars.ContextVar("number", default=0), set_in_context),
    "variable without a value": lambda _: (contextvars.ContextVar("number"), set_anew),
    "class of a function": lambda _: with_class_around(),
    "class that is held": lambda _: (held_class(), raised_number),
    "kept results": lambda _: with_cache(functools.cache),
    "variables of a thread": lambda _: (of_thread(), raised_number),
    "lines": lambda folder: (numbers(folder).open(), lambda file: float(file.readline())),
    "bytes of a file": lambda folder: (numbers(folder).open("rb"), lambda file: file.read(1)[0] % 7),
}


def kept_states(host: Host) -> dict[str, Any]:
    """Losses of steps that count in something, and what it counts afterwards."""
    found = {}
    for name, make in KINDS.items():
        if is_chosen(name):
            cases.Schedule.number = cases.Schedule.own_number = 0
            recorder, folder = cases.Recorder(), host.folder / name
            folder.mkdir(exist_ok=True)
            module = seeded(lambda make=make, folder=folder: Counts(*make(folder)))
            trained(host, module, recorder, data=cases.loader(32), max_epochs=2)
            found[name] = {"rows": recorder.rows, "next": float(module.count(module.state))}
    return found


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [kept_states], 4: []}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [], 4: []}
