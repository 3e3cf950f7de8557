"""Values that change in place beside lists, dicts and tensors, and what makes them what they were.

Counts and other iterators, arrays and buffers of bytes, values of ctypes and of ``multiprocessing``, queues, files
that are open, connections of SQLite. What is written to a file meanwhile does not get there. An iterator cannot be
turned back: meanwhile another one stands in its place, which gives the same.
"""

from __future__ import annotations

import array
import ast
import copy
import io
import itertools
import logging
import mmap
import multiprocessing
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import GeneratorType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet, WeakValueDictionary

from deepspeed_partition.capture.draws import Rewindable
from deepspeed_partition.generators import common_states, set_common_state
from deepspeed_partition.raw_states import has_raw_state, is_raw_state, put_raw_state, raw_size, raw_state

MOST_BYTES = 2**28
"""Bytes of the largest array, or file, whose contents are copied to be put back."""
_ITEMS: tuple[Any, ...] = ([], (), range(0), range(2**64), "", "é", b"", bytearray(), array.array("b"))
_DEPTH = 4
"""Iterators within iterators up to which it is known where they are."""
_COPIED = (itertools.count, type(reversed([])), *(type(iter(each)) for each in _ITEMS))
"""Iterators whose copies go their own way; those of others share what they take from."""
_TABLES: tuple[Any, ...] = ({}, {}.values(), {}.items(), set())
_GIVEN_AGAIN = (GeneratorType, enumerate, filter, map, zip, reversed, *(type(iter(each)) for each in _TABLES))
"""Iterators that cannot be copied, beside those of ``itertools``."""

Say: TypeAlias = Callable[[str], object]
"""Is given what was done with a value that cannot be undone, in words that follow its name."""
STAYS = (
    "{name} ({kind}): {what} {when}, and that cannot be undone: use an attribute, a list or a buffer in its "
    "place, or do it in the program's loop"
)
"""What is said once of a value that cannot be made what it was."""
WHEN_TRIED = "while layers or the loss function ran to be measured or tried"
DRAWN_EARLY = (
    "{name} ({kind}) draws from a common random generator ({generator}): its first items were drawn while layers "
    "or the loss function ran to be measured or tried, and are other numbers than without that. Let it draw from "
    "a generator of its own, such as torch.Generator() or random.Random(0)"
)

logger = logging.getLogger(__name__)


def _log(_: str, sentence: str) -> None:
    logger.warning(sentence)


_when = WHEN_TRIED
tell_once: Callable[[str, str], object] = _log
"""Says a sentence, known by a key; the engine, which knows what other ranks have said, has its own here."""


def say_of(name: str, value: Any) -> Say:
    """What says once that something with a value of this name cannot be undone."""
    kind = type(value).__name__

    def say(what: str) -> None:
        tell_once(f"stays/{name}/{_when}", STAYS.format(name=name, kind=kind, what=what, when=_when))

    return say


@contextmanager
def said_of(when: str) -> Iterator[None]:
    """Let it be said of what is put back meanwhile, and stays, that it was changed then, in words."""
    global _when
    before, _when = _when, when
    try:
        yield
    finally:
        _when = before


class Kept(NamedTuple):
    """What stands in the place of a value meanwhile, and what returns the value as it was."""

    meanwhile: Any
    restored: Callable[[], Any]


def kept_in_place(value: Any) -> Callable[[], object] | None:
    """Return what makes a value what it is now; None of anything that is of none of these kinds."""
    if isinstance(value, io.IOBase):
        return _file_kept(value)
    if isinstance(value, mmap.mmap):
        return _map_kept(value)
    return _raw_kept(value)


def kept_by_another(value: Any, name: str) -> Kept | None:
    """Let something else stand in the place of a value meanwhile; None where nothing has to.

    Files and databases stay where they are. What this thread writes to a file is dropped until it is restored, and
    what it changes in a database is rolled back.
    """
    say = say_of(name, value)
    if (
        type(value) is not Given and Rewindable in type(value).__mro__
    ):  # it says that it is of the class of what it stands for
        place = value.madpipe_place
        return Kept(value, lambda: _back_to(value, place))
    if isinstance(value, io.IOBase):
        back = drop_writing(value)
    elif isinstance(value, queue.Queue):
        back = _puts_counted(value, say)
    elif _is_of_several_processes(value):
        back = _change_told(value, say)
    elif isinstance(value, _kind("sqlite3", "Connection") or ()):
        back = _database_kept(value, say)
    else:
        return iterator_kept(value, name, is_measuring=True)
    return None if back is None else Kept(value, lambda: (back(), value)[1])


def told_of(value: Any, name: str) -> Callable[[], object] | None:
    """Return what says what was done since with a value that stays so; None of a value that is put back."""
    say = say_of(name, value)
    if isinstance(value, _kind("sqlite3", "Connection") or ()):
        before = value.total_changes

        def tell() -> None:
            if value.total_changes != before:
                say(f"{value.total_changes - before} rows were changed")

        return tell
    if _is_of_several_processes(value):
        return _change_told(value, say)
    if isinstance(value, io.IOBase) and not value.closed and "a" in str(getattr(value, "mode", "")):
        place = _told_place(value)
        return lambda: None if value.closed or _told_place(value) == place else say("lines were added to it")
    return None


def copied(value: Any) -> Callable[[], Any] | None:
    """Return what makes an iterator like this one is now; None of anything else, and of what cannot be copied."""
    if type(value) not in _COPIED:
        return None
    before = _copy_of(value)
    if before is None:
        return None
    return lambda: value if state_of(value) == state_of(before) else _copy_of(before)


def itself(value: Any) -> Any:
    """The program's own iterator where something of this module stands in its place; else the value."""
    return value.iterator if type(value) is Given else value


def state_of(value: Any) -> Any:
    """What tells a value from what it is after a change, to be compared with ``==``; None where nothing does."""
    if type(value) is Given:
        return value.state
    if type(value) in (*_COPIED, *_GIVEN_AGAIN) or type(value).__module__ == "itertools":
        return _place_of(value, _DEPTH)
    if not has_raw_state(value) or raw_size(value) > MOST_BYTES:
        return None
    state = raw_state(value)
    return list(map(id, state)) if isinstance(state, list) else zlib.crc32(state)


# Iterators


class Hold:
    """A place of an iterator that stands for another one, to which it may be put back as long as this is there."""

    __slots__ = ("__weakref__", "is_measuring", "place")

    def __init__(self, place: int, *, is_measuring: bool) -> None:
        self.place, self.is_measuring = place, is_measuring


class _Item(NamedTuple):
    """What an iterator gave."""

    item: Any
    state: Any
    """What tells where the iterator was before."""
    drawn: dict[str, tuple[Any, Any]]
    """Common generators that it drew from, with their states before and after."""


class Given(Rewindable):
    """An iterator that can give again what was taken from another one, which is asked for everything else.

    What it gives again leaves the common random generators as when it was drawn, if they are where they were then.
    Lightning's steps have ``Replayed`` in the place of this. Their runs are seeded by the number of the
    micro-batch, so an item is the same there on ranks whose generators differ; and the program sees what stands
    there for a whole training, so it is of the iterator's class, with all special methods.
    """

    __slots__ = ("__weakref__", "_holds", "_items", "_name", "_num_forgotten")

    def __init__(self, iterator: Iterator[Any], name: str = "") -> None:
        self.madpipe_iterator, self._items, self._name = iterator, list[_Item](), name
        self._holds: WeakSet[Hold] = WeakSet()
        self.madpipe_place = self._num_forgotten = 0

    @property
    def iterator(self) -> Iterator[Any]:
        """What it stands for."""
        return self.madpipe_iterator

    @property
    def _is_given_again(self) -> bool:
        return self.madpipe_place - self._num_forgotten < len(self._items)

    @property
    def state(self) -> Any:
        """What tells where it is: where the other one was before it gave the next item."""
        if self._is_given_again:
            return self._items[self.madpipe_place - self._num_forgotten].state
        return state_of(self.madpipe_iterator)

    def __next__(self) -> Any:
        if self._is_given_again:
            found = self._items[self.madpipe_place - self._num_forgotten]
            self._draw_again(found.drawn)
        else:
            found = self._drawn()
            self._items.append(found)
        self.madpipe_place += 1
        self._forget()
        return found.item

    def _drawn(self) -> _Item:
        state = state_of(self.madpipe_iterator) if self._holds else None
        before = common_states()
        item = next(self.madpipe_iterator)
        now = common_states()
        return _Item(
            item, state, {name: (before[name], now[name]) for name in before if now[name] != before[name]}
        )

    def _draw_again(self, drawn: dict[str, tuple[Any, Any]]) -> None:
        """Let the common generators be where they were behind an item."""
        now = common_states() if drawn else {}
        for name, (before, after) in drawn.items():
            if now[name] == before:
                set_common_state(name, after)
            elif not any(hold.is_measuring for hold in self._holds):
                kind = type(self.madpipe_iterator).__name__
                tell_once(
                    f"drawn early/{self._name}", DRAWN_EARLY.format(name=self._name, kind=kind, generator=name)
                )

    def __getattr__(self, name: str) -> Any:
        if name in (*Given.__slots__, *Rewindable.__slots__) or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.madpipe_iterator, name)

    def held(self, *, is_measuring: bool) -> Callable[[], Any]:
        """Keep what is given from now on; return what lets it be given again, and returns the iterator for it.

        It is kept as long as what this returns is there.
        """
        hold = Hold(self.madpipe_place, is_measuring=is_measuring)
        self._holds.add(hold)

        def restored() -> Any:  # at each place where it stands
            if hold in self._holds:
                self.madpipe_place = hold.place
                self._holds.discard(hold)
                self._forget()
            return self if self._is_given_again or self._holds else self.madpipe_iterator

        return restored

    def _forget(self) -> None:
        oldest = min((hold.place for hold in self._holds), default=self.madpipe_place)
        num_forgotten = min(oldest, self.madpipe_place) - self._num_forgotten
        if num_forgotten > 0:
            del self._items[:num_forgotten]
            self._num_forgotten += num_forgotten


_GIVEN: WeakValueDictionary[int, Given] = WeakValueDictionary()


def iterator_kept(value: Any, name: str, *, is_measuring: bool = False) -> Kept | None:
    """Let something else stand in the place of an iterator, as :func:`kept_by_another`; None of anything else."""
    kind = type(value)
    if kind is Given:
        return Kept(value, value.held(is_measuring=is_measuring))
    copy_of = _copy_of(value) if kind in _COPIED else None
    if copy_of is not None:
        return Kept(copy_of, lambda: value)
    if kind in (*_COPIED, *_GIVEN_AGAIN) or (kind.__module__ == "itertools" and isinstance(value, Iterator)):
        given = _GIVEN.setdefault(id(value), Given(value, name))  # it keeps the iterator, and its identity
        return Kept(given, given.held(is_measuring=is_measuring))
    return None


def _place_of(value: Any, depth: int) -> Any:
    """What tells where an iterator is, as far as it tells that itself; the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        names = {} if frame is None or not depth else dict(frame.f_locals)
        return frame and frame.f_lasti, [_place_of(each, depth - 1) for each in names.values()]
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, tuple):
        return [_place_of(each, depth) for each in value]
    if not depth or not (type(value) in (*_COPIED, *_GIVEN_AGAIN) or type(value).__module__ == "itertools"):
        return len(value) if isinstance(value, list | dict | set) else None
    with suppress(TypeError):  # Python 3.14 does not tell of those of itertools
        return [_place_of(each, depth - 1) for each in value.__reduce__()[1:]]
    return None


def _copy_of(iterator: Any) -> Any:
    """An iterator that gives the same, and goes its own way; None where there is none."""
    if type(iterator) is not itertools.count:
        return copy.copy(iterator)
    numbers = numbers_of_count(iterator)
    return None if numbers is None else itertools.count(*numbers)


def numbers_of_count(count: Any) -> tuple[Any, ...] | None:
    """The next number of an ``itertools.count``, and its step unless that is 1; None of numbers of other kinds."""
    with suppress(ValueError, SyntaxError):
        return tuple(ast.literal_eval(f"({repr(count)[len('count(') : -1]},)"))
    return None


def _back_to(iterator: Any, place: int) -> Any:
    iterator.madpipe_place = place
    return iterator


# Bytes and queues


def _raw_kept(value: Any) -> Callable[[], object] | None:
    """Return what puts back bytes, an array, a value of several processes or a queue."""
    if not has_raw_state(value) or raw_size(value) > MOST_BYTES or _is_taken_from(value):
        return None
    before = raw_state(value)
    return lambda: None if _is_taken_from(value) or is_raw_state(value, before) else put_raw_state(value, before)


def _map_kept(value: mmap.mmap) -> Callable[[], object] | None:
    if value.closed or len(value) > MOST_BYTES or memoryview(value).readonly:
        return None
    before = value[:]
    return lambda: None if value.closed or value[:] == before else value.__setitem__(slice(None), before)


def _is_of_several_processes(value: Any) -> bool:
    """Whether the process that has begun this one may have a value of ``multiprocessing``, too."""
    is_shared = isinstance(value, _kind("multiprocessing.sharedctypes", "SynchronizedBase") or ())
    return is_shared and multiprocessing.parent_process() is not None


def _change_told(value: Any, say: Say) -> Callable[[], object]:
    before = bytes(value.get_obj())
    return lambda: None if bytes(value.get_obj()) == before else say("it was changed, which other processes see")


def _kind(module: str, name: str) -> Any:
    """A class of a module, if that was imported: else there is no object of it."""
    return getattr(sys.modules.get(module), name, None)


def _is_taken_from(items: Any) -> bool:
    """Whether a thread waits for what is put into a queue."""
    return isinstance(items, queue.Queue) and bool(items.not_empty._waiters)  # type: ignore[attr-defined]


def _puts_counted(items: queue.Queue[Any], say: Say) -> Callable[[], object] | None:
    """Count what this thread puts into a queue from which another one takes it."""
    if "_put" in vars(items) or not _is_taken_from(items):
        return None
    puts, thread, count = items._put, threading.get_ident(), itertools.count()

    def put(item: Any) -> None:
        if threading.get_ident() == thread:
            next(count)
        puts(item)

    def end() -> None:
        del items._put
        if number := next(count):
            say(f"{number} items were put into it, which another thread takes")

    items._put = put  # type: ignore[method-assign]
    return end


# Files


def _file_kept(file: Any) -> Callable[[], object] | None:
    """Return what puts the place in a file back, and the contents of one in memory."""
    if file.closed or _is_shown(file):
        return None
    if type(file) in (io.StringIO, io.BytesIO):
        contents, place = file.getvalue(), file.tell()
        return lambda: _put_contents_back(file, contents, place)
    try:
        place = _place_in(file) if file.seekable() else None
    except (OSError, ValueError, AttributeError):
        place = None
    return None if place is None else lambda: _seek(file, place)


def _put_contents_back(file: Any, contents: Any, place: int) -> None:
    if file.closed:
        return
    if file.getvalue() != contents:
        file.seek(0)
        file.truncate()
        file.write(contents)
    file.seek(place)


def _seek(file: Any, place: int) -> None:
    if not file.closed and _told_place(file) != place:
        file.seek(place)


def _told_place(file: Any) -> int | None:
    """The place in a file; None in one that is read line by line, which hides it."""
    with suppress(OSError):
        return int(file.tell())
    return None


def _place_in(file: Any) -> int | None:
    place = _told_place(file)
    if place is None:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            return None
        rest = file.read()
        file.seek(0)
        num_before = len(file.read()) - len(rest)
        file.seek(0)
        file.read(num_before)
        place = _told_place(file)
    return place


def _is_shown(file: Any) -> bool:
    """Whether this is standard output or the like, which whoever runs the program looks at."""
    return any(file is each for each in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def drop_writing(file: Any) -> Callable[[], object] | None:
    """Let go nowhere what this thread writes to a file; return what ends that."""
    if file.closed or not file.writable() or _is_shown(file) or type(file) in (io.StringIO, io.BytesIO):
        return None
    target = file.buffer if isinstance(file, io.TextIOWrapper) else file
    if not hasattr(target, "__dict__") or "write" in vars(target):
        return None
    writes, truncates, thread = target.write, target.truncate, threading.get_ident()

    def write(data: Any) -> Any:
        if threading.get_ident() != thread:
            return writes(data)
        return len(data) if isinstance(data, str) else memoryview(data).nbytes

    def truncate(size: int | None = None) -> Any:
        return truncates(size) if threading.get_ident() != thread else target.tell() if size is None else size

    _flush(file)
    target.write, target.truncate = write, truncate

    def end() -> None:
        _flush(file)
        for name in ("write", "truncate"):
            target.__dict__.pop(name, None)

    return end


def _flush(file: Any) -> None:
    with suppress(OSError, ValueError):  # who writes to it next is told
        file.flush()


# Databases


def _database_kept(connection: Any, say: Say) -> Callable[[], object] | None:
    """Return what rolls back what a connection of SQLite changes from now on, and says what was committed."""
    try:
        contents, num_changes, was_open = (
            _contents_of(connection),
            connection.total_changes,
            connection.in_transaction,
        )
        if was_open:  # else the program may begin one itself
            connection.execute("SAVEPOINT madpipe")
    except Exception:  # closed, of another thread, or locked
        return None

    def restore() -> None:
        with suppress(Exception):  # a commit has ended it
            if was_open:
                connection.execute("ROLLBACK TO madpipe")
                connection.execute("RELEASE madpipe")
            elif connection.in_transaction:
                connection.rollback()
        if connection.total_changes == num_changes or (contents and _contents_of(connection) == contents):
            return
        if contents and not connection.execute("PRAGMA database_list").fetchone()[2]:  # it is in memory
            connection.deserialize(contents)
        else:
            say(f"{connection.total_changes - num_changes} rows were changed")

    return restore


def _contents_of(connection: Any) -> bytes | None:
    """All of a database; None of a large one, and in a version of Python that does not tell."""
    [num_pages], [page_bytes] = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
    )
    if num_pages * page_bytes > MOST_BYTES or not hasattr(connection, "serialize"):
        return None
    return bytes(connection.serialize())
