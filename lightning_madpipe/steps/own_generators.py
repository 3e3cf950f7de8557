"""Random generators of a program's own that its steps draw from, which give a batch what they give in one process.

A step runs on the first stage up to its call of ``forward``, on the last one as a whole, and there once for each
micro-batch. What it draws from ``random.Random``, NumPy's or torch's generators of its own is to be the same in
all of these runs: each begins where the generator was when the batch began, and afterwards the generator is where
a single run has left it, on every rank of the pipeline. Trials of a step leave it where it was.

The same holds for files that a step reads on in, and for iterators, such as ``itertools.cycle`` or that of a
loader of its own: what they have given is kept while a batch lasts, and given again.

Found are generators in attributes of the LightningModule and of its submodules, in lists, dicts and objects of the
program there, and those that the steps' code reads from its file, from functions around it, or from defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from io import IOBase
from operator import is_
from types import FunctionType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition.code_names import (
    LIBRARIES,
    STEPS,
    Defaults,
    function_of,
    is_installed,
    module_of,
    names_read,
)
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import COMMON, GENERATORS, METHODS, generator_state, set_generator_state
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.reached_objects import attributes_of
from lightning_madpipe.steps.replayed import RUNS_STEP, Replayed, begins_anew, forget_items, key_of, replayed

DEPTH = 4
MOST_MEMBERS = 200
MOST_FUNCTIONS = 200

States = dict[str, Any]
"""The state of each generator, by its name."""


_SOURCES = (*GENERATORS, Replayed)
_PLAIN = (int, float, str, bytes, NoneType, Tensor)
"""What leads to no generator. Tuples, because each step asks this often: unions of types take longer."""


def _is_read(value: Any) -> bool:
    """Whether this is a file that a step may read on in."""
    if not isinstance(value, IOBase) or value.closed:
        return False
    return value.readable() and value.seekable() and not value.writable()


def _state_of(source: Any) -> Any:
    if isinstance(source, IOBase):
        try:
            return source.tell()
        except (OSError, ValueError):  # a text file does not tell after next(), nor one that is closed
            return None
    return source.madpipe_place if isinstance(source, Replayed) else generator_state(source)


def _put(source: Any, state: Any) -> None:
    if isinstance(source, IOBase):
        if state is not None and not source.closed and _state_of(source) != state:
            source.seek(state)
    elif isinstance(source, Replayed):
        source.madpipe_place = state
    else:
        set_generator_state(source, state)


class OwnGenerators:
    """The generators of a program's own that its steps may draw from, and where they are.

    Args:
        module: The LightningModule.
        ignored: Attributes that are not the user's.
        error: The host's exception with a sentence.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], error: Callable[[str], Exception]) -> None:
        self._module, self._ignored, self._error = module, frozenset(ignored), error
        self._found: dict[str, Any] = {}
        self._num_batches = 1
        self._begun: dict[tuple[str, int], States] = {}
        """Where generators were when a batch began, by what runs its step and the seed of the batch."""
        self._left: dict[str, States] = {}
        """Where the last run of a step has left them, by what runs it."""
        self._at_call: States = {}
        self._is_rehearsing = False
        self._known_to_move: set[str] = set()
        """The generators that whole steps have drawn from in rehearsals, or of which it was noted since."""
        self._moved: set[str] = set()
        """Others that the last one has drawn from."""

    def newly_moved(self) -> bool:
        """Whether the last whole step has drawn from a generator that none has before; that is known then."""
        moved, self._moved = self._moved, set()
        self._known_to_move |= moved
        return bool(moved)

    def begin(self, num_batches: int = 1) -> None:
        """Begin with the batches of an optimizer step, or with one that is evaluated."""
        self._keep_items(forgets=True)
        self._found = found_in(self._module, self._ignored)
        self._num_batches, self._begun, self._left = num_batches, {}, {}

    def _keep_items(self, *, forgets: bool) -> None:
        """Let iterators that are attributes be able to give their items again, from now on if it ``forgets``."""
        for _, owner in outside_pipeline(self._module):
            for name, value in list(vars(owner).items()):
                if isinstance(value, Replayed):
                    if forgets:
                        forget_items(value)
                elif _has_items(value) and name not in self._ignored:
                    vars(owner)[name] = replayed(value, f"self.{name}")
        if forgets:
            for source in self._found.values():
                if isinstance(source, Replayed):
                    forget_items(source)

    def left(self) -> States:
        """The states in which the steps of these batches have left the generators, but for those that stayed."""
        live = self._states()
        return {name: s for name, s in self._left.get("all", {}).items() if key_of(s) != key_of(live[name])}

    def put(self, states: Mapping[str, Any]) -> None:
        """Put generators to where they are on another rank, or where steps have left them."""
        found = self._found if states.keys() <= self._found.keys() else found_in(self._module, self._ignored)
        for name, state in states.items():
            if name in found:
                _put(found[name], state)

    def all_states(self) -> States:
        """The present states of all generators."""
        self.begin()
        return self._states()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Leave generators where they are, whatever draws from them meanwhile.

        A batch that was given up begins where it began: in a window, behind what the batches before it have drawn.
        """
        before = self._found, self._num_batches, self._begun, self._left
        self._keep_items(forgets=False)
        self._found = found_in(self._module, self._ignored)
        begun = {key: states for key, states in self._begun.items() if states.keys() == self._found.keys()}
        self._num_batches, self._begun, self._left = 1, begun, {}
        rehearsed_already, self._is_rehearsing = self._is_rehearsing, True
        found, states = self._found, self._states()
        try:
            yield
        finally:
            for name, state in states.items():
                _put(found[name], state)
            self._found, self._num_batches, self._begun, self._left = before
            self._is_rehearsing = rehearsed_already

    @contextmanager
    def of_step(
        self, what: str, batch: int, ended: Callable[[dict[str, int], set[str]], None] | None
    ) -> Iterator[None]:
        """Let a step draw what it draws for its batch, and leave generators where they are meanwhile.

        Args:
            what: ``inputs`` where it ends at its call of ``forward``, else ``all``.
            batch: The batch's seed, which is its own.
            ended: Takes where generators were in the end, with Python's and NumPy's common ones, and which of
                these the step has drawn from.
        """
        live = self._states()
        begun = self._begun.setdefault((what, batch), self._left.get(what, live))
        self._put_found(begun)
        self._at_call = {}
        common = {} if ended is None else _keys_of(COMMON)
        running = RUNS_STEP.set(True)
        try:
            yield
        finally:
            RUNS_STEP.reset(running)
            left = self._left[what] = self._states()
            self._tell_of_files(begun, left)
            if what == "all":
                self._note_moves(begun, left)
            if ended is not None:
                ends = _keys_of({**found_in(self._module, self._ignored), **COMMON})
                ended(ends, {name for name, key in common.items() if ends[name] != key})
            self._put_found(live)
        if what == "all" and self._num_batches > 1:
            self._refuse_draws_around_the_call(begun, left)

    def _note_moves(self, begun: States, left: States) -> None:
        unknown = [name for name in begun if name not in self._known_to_move]
        self._moved = {name for name in unknown if key_of(begun[name]) != key_of(left[name])}
        if self._is_rehearsing:
            self.newly_moved()

    def _tell_of_files(self, begun: States, left: States) -> None:
        """Say of files that a step has read on in so that they do not tell where they are."""
        for name, state in left.items():
            if state is None and begun.get(name) is not None and isinstance(self._found[name], IOBase):
                warn_once(
                    f"read by next/{name}",
                    f"a step reads lines of {name} by next() or in a loop, and Python does not tell where the "
                    f"file is then: each batch reads on at the same place. Read by {name}.readline(), or read the "
                    "lines before the fit",
                )

    def note_call(self) -> None:
        """Note where generators are at the step's call of ``forward``."""
        if self._found and self._num_batches > 1:
            self._at_call = self._states()

    def _refuse_draws_around_the_call(self, begun: States, left: States) -> None:
        for name, state in self._at_call.items():
            if key_of(begun[name]) != key_of(state) != key_of(left[name]):
                raise self._error(
                    f"a step draws from {name} before and after its call of forward(), and with "
                    "accumulate_grad_batches the first stage, which runs it up to there, would draw other numbers "
                    "for the next batch than the last one: draw all before the call, or use a generator for each"
                )

    def _states(self) -> States:
        return {name: _state_of(generator) for name, generator in self._found.items()}

    def _put_found(self, states: States) -> None:
        for name, generator in self._found.items():
            _put(generator, states[name])


def _keys_of(generators: Mapping[str, Any]) -> dict[str, int]:
    return {name: key_of(_state_of(generator)) for name, generator in generators.items()}


def found_in(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Any]:
    """The generators of a program's own that its steps may draw from, by name, in the same order on all ranks."""
    search = _Search(keeps_items=True)
    for path, owner in outside_pipeline(module):
        for name, value in list(vars(owner).items()):
            if name not in ignored and not isinstance(value, nn.Module):
                search.look_at(value, ".".join(filter(None, ("self", path, name))), DEPTH, (vars(owner), name))
    for step in STEPS:
        search.read(inspect.getattr_static(type(module), step, None), type(module))
    return search.found


def generators_of(modules: Collection[nn.Module]) -> list[Any]:
    """The generators in the attributes of modules and of their children."""
    search = _Search()
    for part in dict.fromkeys(part for module in modules for part in module.modules()):
        for name, value in vars(part).items():
            if not isinstance(value, nn.Module):
                search.look_at(value, name, DEPTH)
    return list(search.found.values())


def states_for_hook(owner: Any, hook: str) -> Callable[[], list[int]]:
    """What tells whether Python's, NumPy's or a program's own generators were drawn from, for a hook of ``owner``.

    torch's own are left out: what is drawn from them is seen by its operations.
    """
    search = _Search()
    for name, value in vars(owner).items():
        if not isinstance(value, nn.Module):
            search.look_at(value, name, 1)
    search.read(inspect.getattr_static(type(owner), hook, None), type(owner))
    own = [each for each in search.found.values() if not isinstance(each, torch.Generator)]
    return lambda: [key_of(_state_of(each)) for each in (*COMMON.values(), *own)]


class _Search:
    """Looks for generators.

    Args:
        keeps_items: Let iterators that are found in tables, which the program fills, be able to give their items
            again; such iterators are found, too.
    """

    def __init__(self, *, keeps_items: bool = False) -> None:
        self.found: dict[str, Any] = {}
        self._keeps_items = keeps_items
        self._seen: set[int] = {id(torch.default_generator), *map(id, COMMON.values())}
        self._num_functions = 0

    def look_at(self, value: Any, name: str, depth: int, holder: tuple[Any, Any] | None = None) -> None:
        """Look for generators in a value.

        Args:
            holder: A table in which another value can be put into the place of this one, and its key there.
        """
        if isinstance(value, _PLAIN):
            return
        if holder is not None and self._keeps_items and (_gives_items(value) or isinstance(value, tuple)):
            table, key = holder
            kept = _kept_in(value, name, depth)
            if kept is not value:
                value = table[key] = kept
        if isinstance(value, _SOURCES) or (self._keeps_items and _is_read(value)):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.found[name if name not in self.found else f"{name} {len(self.found)}"] = value
            return
        if not depth or id(value) in self._seen:
            return
        owner = value.__self__ if isinstance(value, METHODS) else None  # draw = random.Random(0).random
        if isinstance(owner, GENERATORS):
            self.look_at(owner, name, depth)
        elif isinstance(value, dict | list | tuple):
            self._seen.add(id(value))
            members = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in list(members)[:MOST_MEMBERS]:
                holds = not isinstance(value, tuple)
                self.look_at(child, f"{name}[{key!r}]", depth - 1, (value, key) if holds else None)
        elif isinstance(value, FunctionType):
            self.read(value, None)
        else:
            self._look_into(value, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        table = _attributes_of(value)
        if table is None:
            return
        self._seen.add(id(value))
        is_followed = attributes_of(value) is not None
        for key, child in list(table.items())[:MOST_MEMBERS]:
            self.look_at(child, f"{name}.{key}", depth - 1, (table, key) if is_followed else None)

    def read(self, code: Any, kind: type | None) -> None:
        """Look for generators among the names that a function of the program reads, and in what it calls."""
        function = function_of(code)
        if function is None or id(function) in self._seen or self._num_functions >= MOST_FUNCTIONS:
            return
        self._seen.add(id(function))
        self._num_functions += 1
        is_programs = not is_installed(function.__module__)
        defaults = Defaults(function)
        for key, default in tuple(defaults.items()):
            holder = (defaults, key) if is_programs else None
            self.look_at(default, f"default {key} of {function.__name__}()", 1, holder)
        for name in names_read(function, kind):
            value = name.value
            if name.is_member and function_of(value) is not None:
                self.read(value, kind)
            elif not isinstance(value, nn.Module | ModuleType):
                self.look_at(value, name.written, DEPTH - 1, (name.table, name.key) if is_programs else None)


def _gives_items(value: Any) -> bool:
    """Whether this is an iterator whose place is not among its own attributes, which are followed."""
    return _has_items(value) and attributes_of(value) is None


def _has_items(value: Any) -> bool:
    """Whether this is an iterator whose items can be given again."""
    if isinstance(value, Replayed | IOBase | type) or not isinstance(value, Iterator):
        return False
    return not begins_anew(type(value))


def _kept_in(value: Any, name: str, depth: int) -> Any:
    """An iterator that can give its items again; a tuple with such ones in it where it holds iterators."""
    if not isinstance(value, tuple):
        return replayed(value, name) if _gives_items(value) else value
    if not depth or len(value) > MOST_MEMBERS:
        return value
    kept = [_kept_in(child, f"{name}[{place}]", depth - 1) for place, child in enumerate(value)]
    if all(map(is_, kept, value)):
        return value
    return type(value)._make(kept) if hasattr(value, "_make") else type(value)(kept)


def _attributes_of(value: Any) -> MutableMapping[str, Any] | None:
    """The attributes of an object of the program, also of one that can be called."""
    followed = attributes_of(value)
    if followed is not None and not isinstance(value, FunctionType):
        return followed
    if isinstance(value, nn.Module | type | ModuleType) or not hasattr(value, "__dict__"):
        return None
    return None if module_of(type(value)).partition(".")[0] in LIBRARIES else vars(value)
