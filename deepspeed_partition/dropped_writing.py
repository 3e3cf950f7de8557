"""What code writes that is only measured: none of it stays.

Files that the code opens are as before afterwards, lines for logs and curves are dropped, and so is what goes to
descriptors of files, and what is printed. What is sent to another process is gone: that is said once.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from deepspeed_partition import kept_values
from deepspeed_partition.code_names import LIBRARIES, is_installed
from deepspeed_partition.kept_values import MOST_BYTES, drop_writing

SENT = (
    "{name}() was called while layers or the loss function ran to be measured, and what it sends cannot be "
    "undone: send it in the program's loop"
)
"""What is said once of what has left the process."""
NOT_AS_BEFORE = (
    "{path!r} was written while layers or the loss function ran to be measured, and cannot be put back: {why}. "
    "Write it in the program's loop"
)
_SENDS = (
    ("socket", "socket", "send"), ("socket", "socket", "sendall"), ("socket", "socket", "sendto"),
    ("multiprocessing.connection", "_ConnectionBase", "send"),
    ("multiprocessing.connection", "_ConnectionBase", "send_bytes"),
    ("multiprocessing.queues", "Queue", "put"), ("multiprocessing.queues", "SimpleQueue", "put"),
)  # fmt: skip
"""Methods by which something leaves the process."""
_DRAWS = (
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter", "add_event"),
    ("tensorboardX.event_file_writer", "EventFileWriter", "add_event"),
    ("wandb.sdk.wandb_run", "Run", "_log"),
)
"""Methods that add to curves."""


@contextmanager
def writing_dropped() -> Iterator[None]:
    """Let nothing stay of what this thread writes meanwhile."""
    files = _Files()
    with ExitStack() as stack:
        stack.callback(files.put_back)
        stack.enter_context(prints_asked(lambda _: False))
        stack.enter_context(_replaced(builtins, "open", files.opening))
        stack.enter_context(_replaced(io, "open", files.opening))
        stack.enter_context(_replaced(torch.serialization, "_open_zipfile_writer", files.opening_for_torch))
        stack.enter_context(_replaced(os, "write", _writing))
        stack.enter_context(_replaced(logging.FileHandler, "emit", _logging))
        for module, kind, name in (*_SENDS, *_DRAWS):
            owner = getattr(sys.modules.get(module), kind, None)
            if owner is not None:
                around = _sending if (module, kind, name) in _SENDS else _drawing
                stack.enter_context(_replaced(owner, name, around))
        yield


@contextmanager
def writing_noted(found: list[str]) -> Iterator[None]:
    """Note what this thread writes to meanwhile, each in words; it is written."""

    def note(what: str) -> None:
        if what not in found:
            found.append(what)

    def opening(opens: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if _is_for_writing(file, mode) and is_asked() and asked_by_program(sys._getframe(1)):
                note(repr(os.fsdecode(file)))
            return opens(file, mode, *arguments, **keywords)

        return opened

    def opening_for_torch(opens: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def opened(file: Any) -> Any:
            if isinstance(file, str | os.PathLike) and is_asked() and asked_by_program(sys._getframe(1)):
                note(repr(os.fsdecode(file)))
            return opens(file)

        return opened

    def writing(writes: Callable[..., int], is_asked: Callable[[], bool]) -> Callable[..., int]:
        def written(number: int, data: Any) -> int:
            is_programs = not is_installed(sys._getframe(1).f_globals.get("__name__"))
            if number not in (0, 1, 2) and is_asked() and is_programs:
                note("a descriptor (os.write)")
            return writes(number, data)

        return written

    def logging_to_file(emits: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def emitted(handler: Any, record: Any) -> Any:
            if is_asked() and not _is_librarys(record):
                note(repr(handler.baseFilename))
            return emits(handler, record)

        return emitted

    def calling(calls: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def called(owner: Any, *arguments: Any, **keywords: Any) -> Any:
            module = str(sys._getframe(1).f_globals.get("__name__") or "")
            if is_asked() and module.partition(".")[0] not in (*LIBRARIES, "multiprocessing"):
                note(f"{type(owner).__name__}.{calls.__name__}()")
            return calls(owner, *arguments, **keywords)

        return called

    with ExitStack() as stack:
        stack.enter_context(_replaced(builtins, "open", opening))
        stack.enter_context(_replaced(io, "open", opening))
        stack.enter_context(_replaced(torch.serialization, "_open_zipfile_writer", opening_for_torch))
        stack.enter_context(_replaced(os, "write", writing))
        stack.enter_context(_replaced(logging.FileHandler, "emit", logging_to_file))
        for module, kind, name in (*_SENDS, *_DRAWS):
            owner = getattr(sys.modules.get(module), kind, None)
            if owner is not None:
                stack.enter_context(_replaced(owner, name, calling))
        yield


@contextmanager
def prints_asked(shows: Callable[[FrameType], bool]) -> Iterator[None]:
    """Show of what the program prints in this thread, or logs to be shown, what ``shows`` says, given its frame.

    Warnings are shown, which come once anyway, and a debugger's prompt.
    """

    def printing(writes: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def written(text: Any) -> Any:
            if is_asked():
                frame = _printing_frame(sys._getframe(1))
                if frame is not None and not shows(frame):
                    return len(text)
            return writes(text)

        return written

    with ExitStack() as stack:
        for shown in {id(each): each for each in (sys.stdout, sys.stderr) if hasattr(each, "__dict__")}.values():
            stack.enter_context(_replaced(shown, "write", printing))
        yield


def _printing_frame(frame: FrameType | None) -> FrameType | None:
    """Where the program prints; None where a library, a warning or a debugger does."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__") or "")
        if module != __name__:
            if module in ("warnings", "bdb") or module.partition(".")[0] in LIBRARIES:
                return None
            if not is_installed(module):
                return frame
        frame = frame.f_back
    return None


@contextmanager
def _replaced(owner: Any, name: str, around: Callable[[Any, Callable[[], bool]], Any]) -> Iterator[None]:
    """Let what ``around`` makes of a function stand in its place; it is told whether this thread asks."""
    thread, is_own, function = threading.get_ident(), name in vars(owner), getattr(owner, name)
    stand_in = around(function, lambda: threading.get_ident() == thread)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if vars(owner).get(name) is stand_in:
            if is_own:
                setattr(owner, name, function)
            else:  # a method of a base
                delattr(owner, name)


def asked_by_program(frame: FrameType | None) -> bool:
    """Whether code of the program asks for something, also through a package that writes what it is given.

    What torch or a host writes for itself, such as a compiled kernel, is not the program's.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__") or "")
        if module.partition(".")[0] in LIBRARIES and module != "torch.serialization":
            return False
        if not is_installed(module):
            return not module.startswith("importlib")
        frame = frame.f_back
    return False


def _is_for_writing(file: Any, mode: Any) -> bool:
    return isinstance(mode, str) and not {*mode}.isdisjoint("wax+") and not isinstance(file, int)


def _is_librarys(record: logging.LogRecord) -> bool:
    return record.name == "py.warnings" or record.name.partition(".")[0] in LIBRARIES


class _Files:
    """Files that were opened for writing, as they were before."""

    def __init__(self) -> None:
        self._before: dict[str, bytes | None] = {}
        """Their contents, by path; None of one that was not there."""

    def opening(self, opens: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if not (_is_for_writing(file, mode) and is_asked() and asked_by_program(sys._getframe(1))):
                return opens(file, mode, *arguments, **keywords)
            if "a" not in mode or not os.path.exists(file):
                self._note(file)
            made = opens(file, mode, *arguments, **keywords)
            if "a" in mode:  # perhaps others write to its end, too
                drop_writing(made)
            return made

        return opened

    def opening_for_torch(self, opens: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
        def opened(file: Any) -> Any:
            if isinstance(file, str | os.PathLike) and is_asked() and asked_by_program(sys._getframe(1)):
                self._note(file)
            return opens(file)

        return opened

    def _note(self, file: Any) -> None:
        path = os.path.abspath(os.fsdecode(file))
        if path in self._before:
            return
        try:
            status = os.stat(path)
        except OSError:
            self._before[path] = None
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_size > MOST_BYTES:
            self._tell(path, f"it has {status.st_size} bytes")
            return
        with suppress(OSError):
            self._before[path] = Path(path).read_bytes()

    def put_back(self) -> None:
        """Make all of them what they were."""
        for path, contents in self._before.items():
            try:
                if contents is None:
                    Path(path).unlink(missing_ok=True)
                elif Path(path).read_bytes() != contents:
                    Path(path).write_bytes(contents)
            except OSError as error:
                self._tell(path, str(error))

    def _tell(self, path: str, why: str) -> None:
        kept_values.tell_once(f"written/{path}", NOT_AS_BEFORE.format(path=path, why=why))


def _writing(writes: Callable[..., int], is_asked: Callable[[], bool]) -> Callable[..., int]:
    def written(number: int, data: Any) -> int:
        if number in (0, 1, 2) or not is_asked() or is_installed(sys._getframe(1).f_globals.get("__name__")):
            return writes(number, data)
        if stat.S_ISREG(os.fstat(number).st_mode):
            return memoryview(data).nbytes
        _tell_of("os.write")
        return writes(number, data)

    return written


def _logging(emits: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
    def emitted(handler: Any, record: Any) -> Any:
        return emits(handler, record) if _is_librarys(record) or not is_asked() else None

    return emitted


def _drawing(adds: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
    def added(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if is_asked() else adds(owner, *arguments, **keywords)

    return added


def _sending(sends: Callable[..., Any], is_asked: Callable[[], bool]) -> Callable[..., Any]:
    def sent(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        module = str(sys._getframe(1).f_globals.get("__name__") or "")
        if is_asked() and module.partition(".")[0] not in (*LIBRARIES, "multiprocessing"):
            _tell_of(f"{type(owner).__name__}.{sends.__name__}")
        return sends(owner, *arguments, **keywords)

    return sent


def _tell_of(name: str) -> None:
    kept_values.tell_once(f"sent/{name}", SENT.format(name=name))
