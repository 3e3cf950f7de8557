"""What a model's own code draws while it is recorded: from Python's and NumPy's generators, and from iterators.

What torch draws is an operation, which the layers run again for every micro-batch; to seed its generators is none.
A number that Python or NumPy draws is none, either: ``if random.random() < 0.1: continue`` between two blocks
would be recorded as the way that it went, and go that way for ever. The same holds for ``next(self.scales)``. So
generators, and iterators that modules have as attributes, are looked at wherever one module's code ends and
another one's begins.

Code that draws and makes nothing of it, as Hugging Face models do where no layer is to be dropped, hinders
nothing: it is recorded again with the smallest and the largest numbers, and compared.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import numpy
import torch
from torch import nn

from deepspeed_partition.capture.recording import Call, Recording, Template
from deepspeed_partition.capture.source_lines import model_frame
from deepspeed_partition.capture.without_data import hidden_modes
from deepspeed_partition.code_names import module_of
from deepspeed_partition.generators import COMMON, GENERATORS, generator_state, generators_of, set_generator_state
from deepspeed_partition.tensor_values import bytes_view, parts_of, plain_numbers, without_repeats

EXTREMES = (0, 0x12DD9BB3)
"""Words of the state of a Mersenne twister that give the smallest and the largest numbers."""
NUM_EXTREME = 64
"""After so many words numbers are ordinary again: code may draw until it gets another one."""


class Draws:
    """The generators that a model's code may draw from, and where they were when they were last looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._generators = {**COMMON, **_own(model)}
        self._before = [(each, generator_state(each)) for each in self._generators.values()]
        self._iterators: dict[str, Any] = {}
        self._last = self._states()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Count what is taken from iterators of modules; they give it again afterwards, as generators do."""
        for path, module in self._model.named_modules():
            for name, value in list(vars(module).items()):
                shown = ".".join(filter(None, ("self", path, name)))
                if isinstance(value, Rewindable):
                    self._iterators[shown] = _Rewound(value)
                elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
                    self._iterators[shown] = vars(module)[name] = _Counted(vars(module), name, value)
        self.forget()
        try:
            yield
        finally:
            for counted in self._iterators.values():
                counted.put_back()
            for generator, state in self._before:
                set_generator_state(generator, state)
            self._iterators = {}

    def since_last(self, ended: CodeType | None = None) -> str | None:
        """What was drawn from since the last look, with the line of the source; None: from nothing.

        Args:
            ended: The code that has drawn, if it has come to its end.
        """
        before, self._last = self._last, self._states()
        drawn = [name for name, place in self._last.items() if place != before.get(name)]
        return f"{drawn[0]} at {_line_of(drawn[0], ended)}" if drawn else None

    def forget(self) -> None:
        """Look away from what was drawn since the last look."""
        self._last = self._states()

    def _states(self) -> dict[str, Any]:
        places = {name: _place_of(generator) for name, generator in self._generators.items()}
        return {**places, **{name: counted.place for name, counted in self._iterators.items()}}


class Rewindable(Iterator[Any]):
    """An iterator that gives again what it has given, from its place on. Its names are none of a program's."""

    __slots__ = ("madpipe_iterator", "madpipe_place")
    madpipe_iterator: Iterator[Any]
    """What it stands for."""
    madpipe_place: int


class _Rewound:
    """An iterator that is an attribute, and is put back itself."""

    def __init__(self, iterator: Rewindable) -> None:
        self._iterator, self._before = iterator, iterator.madpipe_place

    @property
    def place(self) -> int:
        return self._iterator.madpipe_place

    def put_back(self) -> None:
        self._iterator.madpipe_place = self._before


class _Counted(Iterator[Any]):
    """An iterator that is an attribute, with what is taken from it."""

    def __init__(self, owner: dict[str, Any], name: str, iterator: Iterator[Any]) -> None:
        self._owner, self._name, self._iterator = owner, name, iterator
        self.taken: list[Any] = []

    def __next__(self) -> Any:
        self.taken.append(next(self._iterator))
        return self.taken[-1]

    @property
    def place(self) -> int:
        return len(self.taken)

    def put_back(self) -> None:
        if self._owner.get(self._name) is self:
            taken = self.taken
            self._owner[self._name] = itertools.chain(taken, self._iterator) if taken else self._iterator


def _place_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):  # no operation moves it without data: who does has seeded it
        with hidden_modes():
            return generator.get_state().numpy().tobytes()
    state = generator_state(generator)
    if isinstance(generator, numpy.random.RandomState):
        return state[1].tobytes(), *state[2:]
    return repr(state) if isinstance(state, dict) else state


def _own(model: nn.Module) -> dict[str, Any]:
    """The generators in attributes of modules, and those that their code names in its file."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        forward: Any = inspect.unwrap(getattr(type(module), "forward", None) or module.forward)
        names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
        of_file = {name: forward.__globals__.get(name) for name in names}
        held = generators_of(module)
        of_self = {".".join(filter(None, ("self", path, name))): value for name, value in held.items()}
        for name, value in (*of_self.items(), *of_file.items()):
            if isinstance(value, GENERATORS):
                found.setdefault(id(value), (name, value))
    known = set(map(id, COMMON.values()))
    return {name: value for number, (name, value) in found.items() if number not in known}


def _line_of(name: str, ended: CodeType | None) -> str:
    """The line that draws; where the code that runs does not name it, the one that it has come to."""
    frame = model_frame() if ended is None else None
    code = ended if frame is None else frame.f_code
    if code is None:
        return "an unknown line"
    word = name.rpartition(".")[2]
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        lines, first = [], code.co_firstlineno
    last = first + len(lines) if frame is None else frame.f_lineno
    before = [place for place, line in enumerate(lines, first) if place <= last and word in line]
    return f"{code.co_filename}:{before[-1] if before else code.co_firstlineno if frame is None else last}"


def is_common(drawn: str) -> bool:
    """Whether what :meth:`Draws.since_last` has told of are Python's or NumPy's common generators."""
    return drawn.startswith(tuple(f"{name} at" for name in COMMON))


def keep_draws_that_matter(recording: Recording, again: Callable[[], Recording]) -> None:
    """Keep modules whole whose code draws, and forget that it has where it does the same whatever it draws.

    Args:
        again: Records the same once more.
    """
    drawing = [call for call in _modules_in(recording.root) if call.drawn is not None]
    if drawing and _is_the_same_for_all(drawing, again):
        for call in drawing:
            call.drawn = None
    for call in drawing:
        if call.drawn is not None and call is not recording.root:
            call.why_whole = call.why_whole or f"its code draws from {call.drawn}"


def _is_the_same_for_all(drawing: Sequence[Call], again: Callable[[], Recording]) -> bool:
    """Whether code does the same for the smallest and the largest numbers, and for others: alike on all ranks."""
    # Of other generators than the Mersenne twister's no extreme is known: what is drawn from them may matter.
    if not all(is_common(str(call.drawn)) for call in drawing):
        return False
    found = set()
    for word in (*EXTREMES, None):
        with numbers_drawn(word):
            try:
                found.add(_signature(again().root))
            except Exception:  # it goes another way
                return False
    return len(found) == 1


@contextmanager
def numbers_drawn(word: int | None) -> Iterator[None]:
    """Let the next numbers of the common generators be the smallest or the largest; None: some numbers."""
    before = {name: generator_state(generator) for name, generator in COMMON.items()}
    words = random.Random(0).getstate()[1][:624]
    if word is not None:
        words = (*(word,) * NUM_EXTREME, *words[NUM_EXTREME:])
    COMMON["random"].setstate((3, (*words, 0), None))
    COMMON["numpy.random"].set_state(("MT19937", numpy.array(words, numpy.uint32), 0, 0, 0.0))
    try:
        yield
    finally:
        for name, generator in COMMON.items():
            set_generator_state(generator, before[name])


def _modules_in(call: Call) -> Iterator[Call]:
    yield call
    for inner in call.calls:
        if inner.is_module:
            yield from _modules_in(inner)


def digest_of(root: Call) -> str:
    """What is the same for two recordings of the same calls, on whichever processes."""
    return sha256(repr(_signature(root)).encode()).hexdigest()


def _signature(root: Call) -> Any:
    """What a model's code did, as something that can be compared with another recording's."""
    known: dict[int, Any] = {}

    def of(call: Call) -> Any:
        ends = tuple(leaves(template) for template in (call.given, call.returned))
        conditions = tuple(str(each.outcome) for each in call.conditions)
        return _called(call.target), ends, call.context, tuple(map(of, call.calls)), conditions

    def leaves(template: Template | None) -> Any:
        return None if template is None else tuple(map(in_words, template.leaves))

    def in_words(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | numpy.ndarray):
            return _in_words(leaf)
        if id(leaf) not in known:  # a mask that each block is given is read once
            known[id(leaf)] = _contents_of(leaf)
        return known[id(leaf)]

    return of(root)


def _called(target: Any) -> Any:
    """A function or a module by its name, which is the same in all processes, as no address is."""
    if isinstance(target, str):
        return target
    if isinstance(target, partial):  # such as an autograd.Function, whose apply() is given it
        return (_called(target.func), *map(_called, target.args))
    if isinstance(target, type):  # a script that another process imports has another name there
        return module_of(target).replace("__mp_main__", "__main__"), target.__qualname__
    return getattr(target, "__name__", type(target).__qualname__)


def _contents_of(leaf: torch.Tensor | numpy.ndarray[Any, Any]) -> Any:
    """The type, the sizes and a digest of the numbers of a tensor or an array."""
    if isinstance(leaf, numpy.ndarray):
        numbers = None if leaf.dtype.hasobject else sha256(leaf.tobytes()).hexdigest()
        return str(leaf.dtype), leaf.shape, numbers
    with torch._C.DisableTorchFunction():
        parts = [(str(each.dtype), _sizes_of(each), _digest_of_numbers(each)) for each in parts_of(leaf.detach())]
        return str(leaf.dtype), str(leaf.layout), _sizes_of(leaf), parts


def _sizes_of(tensor: torch.Tensor) -> Any:
    return [_sizes_of(each) for each in tensor.unbind()] if tensor.is_nested else tuple(tensor.shape)


def _digest_of_numbers(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        return [_digest_of_numbers(each) for each in tensor.unbind()]
    if tensor.is_meta:
        return None
    return sha256(bytes_view(plain_numbers(without_repeats(tensor))).cpu().numpy().data).hexdigest()


def _in_words(leaf: Any) -> Any:
    is_plain = isinstance(leaf, bool | int | float | complex | str | torch.dtype | None)
    is_own = type(leaf).__module__.startswith("deepspeed_partition.")
    return repr(leaf) if is_plain or is_own else type(leaf).__name__
