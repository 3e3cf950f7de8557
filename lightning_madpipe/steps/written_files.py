"""Files, pipes, tables and connections that a step writes to.

A step runs once per micro-batch, on the first stage up to its call of the layers, and in trials. What it does to
its module is brought together or undone; what it has written is written. So it is said once.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from deepspeed_partition.code_names import (
    LIBRARIES,
    CodeSearch,
    forward_of,
    is_installed,
)
from deepspeed_partition.dropped_writing import asked_by_program, prints_asked, writing_dropped
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.finding.step_call import replaced
from lightning_madpipe.steps.ending_contexts import EndingContexts
from lightning_madpipe.steps.prints import LAYERS_PRINT, line_of

OPENED_BEFORE = (
    "{step} writes to {names}, opened before it, and a step runs on the last stage once per micro-batch and in "
    "trials, up to its call of the layers on the first one, too: each of these writes, and files that other ranks "
    "have opened get nothing. Write in a hook, such as on_train_batch_end, on one rank"
)
"""What is said once of a step that writes to files that were open when it began."""
_DOES = (
    "{does}, and a step runs on the last stage once per micro-batch, up to its call of the layers on the first "
    "one, and in trials: each of these {verb}. {verb_to_do} in a hook, such as on_train_batch_end, on one rank"
)
LAYERS_DO = (
    "{does}, and layers run once per micro-batch, on the rank that has them, again where a batch is given up or a "
    "layer is recomputed, and in trials: each of these {verb}. {verb_to_do} in a hook, such as "
    "on_train_batch_end, on one rank"
)
"""What is said once of layers that write."""
FORWARD = "a layer or forward()"
_STEP_RUNS = "lightning_madpipe.steps.step_runs"
"""The module that runs steps."""

_OPENS = (
    ("builtins", "open"), ("io", "open"), ("bz2", "_builtin_open"), ("tarfile", "bltn_open"),
    ("torch.serialization", "_open_zipfile_writer"),
)  # fmt: skip
"""Functions that open files, where they are looked up."""
_SENDS = (
    *(("socket.socket", name) for name in ("send", "sendall", "sendmsg", "sendto")),
    *(("ssl.SSLSocket", name) for name in ("send", "sendall", "sendto")),
    *(("multiprocessing.connection._ConnectionBase", name) for name in ("send", "send_bytes")),
    ("multiprocessing.queues.Queue", "put"),
    ("multiprocessing.queues.SimpleQueue", "put"),
    ("tensorboard.summary.writer.event_file_writer.EventFileWriter", "add_event"),
    ("tensorboardX.event_file_writer.EventFileWriter", "add_event"),
    ("wandb.sdk.wandb_run.Run", "_log"),
)
"""Methods by which something leaves the process, or gets to a thread that writes it."""


class WritingTold:
    """Says of what a step opens for writing, and of what it sends, how often that happens.

    It is made once, because each run of a step is watched.

    Args:
        step: The name of the step.
        say: Is given what is said.
        sentence: What that is.
    """

    def __init__(self, step: str, say: Callable[[str], None], sentence: str = _DOES) -> None:
        self._step, self._say, self._sentence = step, say, sentence
        self._thread: int | None = None
        """The one that runs the step; None: none does."""
        self._watched: dict[tuple[str, str], _Watched] = {}
        """The functions that are watched, by where they stand."""
        self._begun: list[_Watched] = []
        self._num_modules = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Say it of what happens meanwhile."""
        try:
            self._begin()
            yield
        finally:
            try:
                self._end()
            finally:  # a signal handler may have raised within the former
                self._end()

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            self._find()
        for watched in self._watched.values():
            self._begun.append(watched)
            watched.begin()

    def _end(self) -> None:
        while self._begun:
            self._begun[-1].end()
            self._begun.pop()
        self._thread = None

    def _find(self) -> None:
        for place, name in _OPENS:
            if hasattr(owner := sys.modules.get(place), name):
                self._watch((place, name), owner, self._opening)
        for place, name in _SENDS:
            module, _, kind = place.rpartition(".")
            if (owner := getattr(sys.modules.get(module), kind, None)) is not None:
                self._watch((place, name), owner, self._sending)
        self._watch(("os", "write"), os, self._writing)
        self._watch(("logging.FileHandler", "emit"), logging.FileHandler, self._logging)

    def _watch(self, place: tuple[str, str], owner: Any, around: Callable[[Any, str], Any]) -> None:
        self._watched.setdefault(place, _Watched(owner, place[1], around))

    def _tell(self, does: str, verb: str = "writes", verb_to_do: str = "Write") -> None:
        if self._is_of_this_thread():
            self._say(self._sentence.format(does=f"{self._step} {does}", verb=verb, verb_to_do=verb_to_do))

    def _is_of_this_thread(self) -> bool:
        # Other threads may write, too; and what was imported meanwhile may have taken a function from here.
        return self._thread == threading.get_ident()

    def _opening(self, opens: Callable[..., Any], name: str) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if set(mode) & set("wax+"):
                self._tell(f"opens {str(file)!r} for writing")
            return opens(file, mode, *arguments, **keywords)

        def opened_by_torch(file: Any) -> Any:
            if not hasattr(file, "write"):
                self._tell(f"opens {str(file)!r} for writing")
            return opens(file)

        return opened_by_torch if name == "_open_zipfile_writer" else opened

    def _sending(self, sends: Callable[..., Any], name: str) -> Callable[..., Any]:
        def sent(sender: Any, *arguments: Any, **keywords: Any) -> Any:
            if not _sends_for_itself(sys._getframe(1).f_globals.get("__name__") or ""):
                self._tell(f"calls {type(sender).__name__}.{name.lstrip('_')}()", "sends", "Send")
            return sends(sender, *arguments, **keywords)

        return sent

    def _logging(self, emits: Callable[..., Any], name: str) -> Callable[..., Any]:
        def emitted(handler: Any, record: Any) -> Any:
            if record.name != "py.warnings" and not _is_librarys(record.name):
                self._tell(f"logs to {handler.baseFilename!r}", "logs", "Log")
            return emits(handler, record)

        return emitted

    def _writing(self, writes: Callable[..., int], name: str) -> Callable[..., int]:
        def written(number: int, data: Any) -> int:
            if number not in (1, 2) and not is_installed(sys._getframe(1).f_globals.get("__name__")):
                self._tell(f"writes to the file descriptor {number}")
            return writes(number, data)

        return written


class _Watched:
    """A function of a module, or a method of a class, and what stands there while a step runs."""

    def __init__(self, owner: Any, name: str, around: Callable[[Any, str], Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._function = self._stand_in = None

    def begin(self) -> None:
        function = getattr(self._owner, self._name)
        if function is self._stand_in:  # a step within a step
            return
        if function is not self._function:
            self._function, self._stand_in = function, self._around(function, self._name)
            self._is_own = self._name in vars(self._owner)
        setattr(self._owner, self._name, self._stand_in)

    def end(self) -> None:
        if vars(self._owner).get(self._name) is not self._stand_in:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._function)
        else:  # a method of a base
            delattr(self._owner, self._name)


class LayerWriting:
    """Says of layers, where they are tried, that they write.

    Args:
        layers: Gives the modules that layers consist of, at any time.
    """

    def __init__(self, layers: Callable[[], Iterable[nn.Module]]) -> None:
        self._layers, self._told = layers, WritingTold(FORWARD, _say_of_layers, LAYERS_DO)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Say it of what happens meanwhile, of which nothing stays in files that are opened meanwhile."""
        files = OpenFiles()
        files.begin(self._files())
        with files.of_step(), self._told.watching(), writing_dropped(), prints_asked(_tell_of_print):
            yield
        for name in files.written():
            does = f"{FORWARD} writes to {name}"
            _say_of_layers(LAYERS_DO.format(does=does, verb="writes", verb_to_do="Write"), asks=False)

    def _files(self) -> dict[str, Any]:
        """The files that are open for writing, of those that the code of layers names and that layers hold."""
        search = CodeSearch(lambda file: not is_installed(file))
        found: dict[str, Any] = {}
        for part in self._layers():
            search.read(forward_of(part), type(part))
            found.update({f"{type(part).__name__}.{key}": value for key, value in vars(part).items()})
        found.update({f"{owner}.{key}": name.value for (owner, key), name in search.found.items()})
        return {name: value for name, value in found.items() if _is_open_for_writing(value)}


def _is_open_for_writing(value: Any) -> bool:
    shown = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    is_file = isinstance(value, io.IOBase) and not any(value is each for each in shown)
    return is_file and not value.closed and value.writable()


def _say_of_layers(sentence: str, *, asks: bool = True) -> None:
    frame: FrameType | None = sys._getframe(1)
    if asks and _is_of_step(frame):
        return  # of which it is said
    while frame is not None and frame.f_globals.get("__name__") in (__name__, asked_by_program.__module__):
        frame = frame.f_back
    if not asks or asked_by_program(frame):  # and not by a compiler, for its kernels
        warn_once(f"layers write/{sentence}", sentence)


def _tell_of_print(frame: FrameType) -> bool:
    """Say of layers that they print, and show nothing of it."""
    warn_once("layers print", LAYERS_PRINT.format(line=line_of(frame)))
    return False


def _is_of_step(frame: FrameType | None) -> bool:
    """Whether a step itself runs, of those in which layers are tried, and no layer that it calls."""
    while frame is not None:
        runs = frame.f_globals.get("__name__")
        if runs in (nn.Module.__module__, _STEP_RUNS):
            return bool(runs == _STEP_RUNS)
        frame = frame.f_back
    return False


def _is_librarys(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _sends_for_itself(module: str) -> bool:
    """Whether this is code of a library that sends something to workers, such as those of a loader."""
    return module.startswith("multiprocessing.") or (_is_librarys(module) and "tensorboard" not in module)


class OpenFiles:
    """Files, pipes and databases that were open before a step, and those of them that it has written to."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Any, int]] = {}
        self._silent: dict[str, Any] = {}
        """Those that do not tell how much was written to them."""
        self._written: dict[str, None] = {}

    def begin(self, found: Mapping[str, Any]) -> None:
        """Begin with a batch: nothing was written yet to what is open for writing, given by name."""
        self.forget()
        for name, file in found.items():
            place = _place_of(file)
            if place is None:
                self._silent[name] = file
            else:
                self._places[name] = file, place

    def forget(self) -> None:
        """Look at nothing any more."""
        self._places, self._silent, self._written = {}, {}, {}

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """See what a step writes meanwhile to what does not tell it afterwards."""
        stack = EndingContexts()
        try:
            with stack:
                for name, file in self._silent.items():
                    stack.enter_context(_write_noted(file, partial(self._note, name)))
                yield
        finally:
            stack.end()

    def written(self) -> list[str]:
        """The names of what steps have written to since :meth:`begin`."""
        self._note_moved()
        return list(self._written)

    def _note(self, name: str) -> None:
        self._written[name] = None

    def _note_moved(self) -> None:
        for name, (file, place) in self._places.items():
            if _place_of(file) not in (place, None):
                self._note(name)


def _place_of(file: Any) -> int | None:
    """How much was written to a file or a database; None where it does not tell."""
    database = getattr(file, "connection", file)
    try:
        return int(database.total_changes if hasattr(database, "total_changes") else file.tell())
    except Exception:  # a pipe, one that was closed, or one of a class of the program
        return None


@contextmanager
def _write_noted(file: Any, note: Callable[[], None]) -> Iterator[None]:
    """Note that something is written meanwhile."""
    # A table of csv has taken the file's own ``write``, behind which texts wait to be written to the buffer.
    buffer = file.buffer if type(file) is io.TextIOWrapper else None
    stack = EndingContexts()
    try:
        with stack:
            if buffer is not None:
                _flush(file)
                stack.enter_context(_noted(buffer, note))
                stack.callback(_flush, file)
            stack.enter_context(_noted(file, note))
            yield
    finally:
        stack.end()


@contextmanager
def _noted(file: Any, note: Callable[[], None]) -> Iterator[None]:
    writes = getattr(file, "write", None)
    if writes is None or not hasattr(file, "__dict__"):
        yield
        return

    def write(*arguments: Any, **keywords: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "logging":
            note()
        return writes(*arguments, **keywords)

    with replaced(file, "write", write):
        yield


def _flush(file: Any) -> None:
    with suppress(OSError, ValueError):  # who writes to it next is told
        file.flush()
