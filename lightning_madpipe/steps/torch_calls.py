"""What a step calls of torch, where in its code and with which numbers: a sign of what no tried step has done.

A step may make its inputs, its targets or weights of its loss from its whole batch (``x - x.mean(0)``,
``y.roll(1)``, ``w / w.sum()``) in some batches alone. The graph of the loss shows nothing of it, for it has no
gradient. So each call of a function of torch is noted, by the lines of the program that it comes from.

Or it makes a number of its batch, in Python or as a tensor, and multiplies its loss by it in some batches alone. A
number of a schedule is the same in all micro-batches of a batch, and one of the batch is not. So the numbers that
calls are given are compared between these. They may be alike in all of them and another one for the batch, such as
how many samples or classes there are. So where a step that is tried reads whole numbers of its batch that its
micro-batches do not have, fractions that are new at their place are a sign, too.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, EllipsisType, MethodWrapperType, NoneType
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

Site = tuple[Any, ...]
"""A function and the instructions of the program that call it, from the innermost one to the step's."""
Calls = dict[Site, set[tuple[Any, ...]]]
"""The arguments of the calls at each place; of tensors and other objects only that they are there."""
Numbers = dict[Site, list[Any]]
"""The numbers that the calls at each place are given, as they come; copies of those that are tensors."""

MOST_PLACES = 64
"""How often a call at a new place gives a batch up."""
MOST_ARGUMENTS = 1000
"""Arguments of a place that are told apart."""
MOST_ENTRIES = 16
"""Entries of a list of arguments that are looked at."""
MOST_NUMBERS = 256
"""Numbers of a place that are compared between micro-batches: a loop may go over samples."""
PLAIN = frozenset((int, bool, str, NoneType, EllipsisType, torch.dtype))
_SKIPPED, _RUNS_STEPS, _LEFT_OUT, _PROGRAM = range(1, 5)
_KINDS_OF_PACKAGES = {
    "torch": _SKIPPED,
    "lightning_madpipe": _LEFT_OUT,
    "deepspeed_partition": _LEFT_OUT,
    "torchmetrics": _LEFT_OUT,  # what metrics compute is looked at in what is logged
    "lightning": _LEFT_OUT,
    "pytorch_lightning": _LEFT_OUT,
}


def _folders() -> Iterator[tuple[str, int]]:
    """How names of files begin, with whose they are; one of Lightning's packages may be absent."""
    yield str(Path(__file__).with_name("step_runs.py")), _RUNS_STEPS
    for package, kind in _KINDS_OF_PACKAGES.items():
        spec = None
        with suppress(ValueError):  # something else stands in its place
            spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield f"{folder}{os.sep}", kind
    yield "<eval_with_key>", _SKIPPED  # what a compiler has made of a function


_FOLDERS = tuple(_folders())


_FRACTIONS = (float, numpy.floating)
_NUMBERS = (int, *_FRACTIONS, numpy.integer)
LEAVES_TORCH = frozenset((Tensor.numpy, Tensor.tolist, Tensor.__array__))
READS = LEAVES_TORCH | {
    *(Tensor.item, Tensor.detach, Tensor.__format__, Tensor.__repr__),
    *(Tensor.__bool__, Tensor.__complex__, Tensor.__float__, Tensor.__index__, Tensor.__int__),
}
"""What computes nothing of a number that it is given."""
GIVES = frozenset((
    Tensor.item, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__bool__, Tensor.__float__,
    Tensor.__index__, Tensor.__int__,
))  # fmt: skip
"""What gives Python a number."""
COMES_BACK = frozenset((torch.tensor, torch.as_tensor, torch.asarray))
"""What makes tensors of other things; of ``torch.from_numpy`` a mode hears nothing, but of what is called next."""


class TorchCalls(TorchFunctionMode):
    """Notes the calls of torch in a step that runs within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Calls = defaultdict(set)
        self.numbers: Numbers = defaultdict(list)
        self.read: Numbers = defaultdict(list)
        """The whole numbers that Python is given, and how many elements it takes at once."""
        self._leaves: Site | None = None
        self._comes_back: Site | None = None
        self._left: set[int] = set()
        """Where tensors are that were taken to NumPy or Python: in memory that both share."""

    def beyond_torch(self) -> tuple[str, str] | None:
        """The lines where the step takes a tensor to NumPy or Python, and where it is given one from there."""
        if self._leaves is None or self._comes_back is None:
            return None
        return _line_of(self._leaves), _line_of(self._comes_back)

    def _note_numbers(self, site: Site, values: Any) -> None:
        for value in values:
            if isinstance(value, _NUMBERS) or _is_number(value):
                if len(self.numbers[site]) < MOST_NUMBERS:
                    self.numbers[site].append(value.clone() if isinstance(value, Tensor) else value)
            elif type(value) is list or type(value) is tuple:
                self._note_numbers(site, [each for each in value[:MOST_ENTRIES] if isinstance(each, _FRACTIONS)])

    def _look_beyond(self, func: Any, site: Site, args: Any) -> None:
        if func in LEAVES_TORCH:
            self._leaves = self._leaves or site
            storage = _storage_of(args[0])
            self._left.update([] if storage is None else [storage.data_ptr()])
        elif self._comes_back is None and (func in COMES_BACK or any(map(self._is_of_numpy, args))):
            self._comes_back = site

    def _is_of_numpy(self, value: Any) -> bool:
        """Whether this is a tensor in memory of NumPy's, and none that NumPy was given."""
        storage = _storage_of(value) if type(value) is Tensor and value.device.type == "cpu" else None
        return storage is not None and not storage.resizable() and storage.data_ptr() not in self._left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A compiler that follows a step is not to follow this; and what reads an attribute computes nothing.
        if not torch.compiler.is_compiling() and type(func) is not MethodWrapperType:
            site = _site_of(func)
            if site is not None:
                named = [(name, _shown(value)) for name, value in kwargs.items()] if kwargs else ()
                self.made[site].add((*map(_shown, args), *named))
                if func not in READS:
                    self._note_numbers(site, (*args, *kwargs.values()) if kwargs else args)
                if self._leaves is not None or func in LEAVES_TORCH:
                    self._look_beyond(func, site, args)
                result = func(*args, **(kwargs or {}))
                if func in GIVES or func in LEAVES_TORCH:
                    self._note_read(site, args[0].numel() if func in LEAVES_TORCH else result)
                return result
        return func(*args, **(kwargs or {}))

    def _note_read(self, site: Site, number: Any) -> None:
        is_whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
        if is_whole and len(self.read[site]) < MOST_NUMBERS:
            self.read[site].append(number)


def _storage_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # a sparse one, or one of ``torch.func``
        return None


def _is_number(value: Any) -> bool:
    """Whether this is a tensor of one number, which the loss has no gradient by."""
    is_one = type(value) is Tensor and not value.ndim and not value.requires_grad
    return is_one and value.device.type != "meta" and value.dtype != torch.bool and _storage_of(value) is not None


def _line_of(site: Site) -> str:
    """The innermost line of the program at a place."""
    _, address, last, *_ = site
    code = next(each for each in _CODES if id(each) == address)
    line = next((line for begin, end, line in code.co_lines() if begin <= last < end), None)
    return f"{Path(code.co_filename).name}:{line}"


class TriedCalls:
    """The calls of steps that were tried, and whether others are a sign of a loss that was not.

    A call at a new place is one; new arguments are the 1st, 2nd, 4th, 8th, ... time at the same place: lengths of
    sequences are others in nearly each batch.
    """

    def __init__(self) -> None:
        self._tried: Calls = {}
        self._num_new: Counter[Site] = Counter()
        self._times_new = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether calls at new places are no sign any more, for there were too many."""
        return self._times_new >= MOST_PLACES

    def note(self, calls: Calls) -> None:
        """Note those of a step that is tried."""
        for site, arguments in calls.items():
            self._tried.setdefault(site, set()).update(arguments)

    def are_others(self, calls: Calls) -> bool:
        """Whether those of a step are a sign that it does what no tried step has done; they are known then."""
        new_places = [site for site in calls if site not in self._tried]
        others = [site for site in calls if site in self._tried and self._are_new(site, calls[site])]
        self._num_new.update(others)
        self.note(calls)
        if new_places and not self.is_exhausted:
            self._times_new += 1
            return True
        return any(number & (number - 1) == 0 for number in map(self._num_new.__getitem__, others))

    def _are_new(self, site: Site, arguments: set[tuple[Any, ...]]) -> bool:
        tried = self._tried[site]
        return len(tried) < MOST_ARGUMENTS and not arguments <= tried


class UnlikeNumbers:
    """The places of calls that get other numbers in one micro-batch than in another one of the same batch.

    The step has made them of the batch, and what they do in one batch a trial of another one does not show. A
    place that did so where it was tried is no sign any more.
    """

    def __init__(self) -> None:
        self._of_parts: list[Numbers] = []
        self._known: set[Site] = set()
        self._fractions = NewFractions()
        self.has_new_fractions = False
        """Whether the last batch had fractions that may be another number of the whole batch."""

    def begin(self) -> None:
        """Begin a batch."""
        self._of_parts = []

    def add(self, numbers: Numbers) -> None:
        """Add those of the next micro-batch."""
        own = {site: given for site, given in numbers.items() if site not in self._known}
        self._of_parts.append(own)

    def begin_trial(self) -> None:
        """Begin the trial of a batch."""
        self.begin()
        self._fractions.begin_trial()

    def add_tried(self, calls: TorchCalls) -> None:
        """Add those of a step that is tried."""
        self.add(calls.numbers)
        self._fractions.note_read(calls.read)

    def end_trial(self) -> None:
        """Know the numbers of a batch that has been tried."""
        self._are_new(is_tried=True)

    def are_new(self) -> bool:
        """Whether those of the batch differ where none did before; they are known then."""
        return self._are_new(is_tried=False)

    def _are_new(self, *, is_tried: bool) -> bool:
        first: Numbers = {}
        of_parts = _read(self._of_parts)
        new = {
            site
            for numbers in of_parts
            for site, own in numbers.items()
            if _differ(first.setdefault(site, own), own)
        }
        self._known |= new
        self.has_new_fractions = self._fractions.are_new(of_parts, is_tried=is_tried)
        self.begin()
        return bool(new)


class NewFractions:
    """The places of calls that get fractions which no step that was tried has given them.

    They are no sign but where a step that was tried has read whole numbers of its batch that its micro-batches do
    not have: of these it may make a number that is alike in all micro-batches and another one for the batch. Then
    new ones are a sign at the 1st, 2nd, 4th, 8th, ... time at the same place: those of a schedule are new in each
    batch.
    """

    def __init__(self) -> None:
        self._read: Numbers = {}
        self._are_looked_at = False
        self._seen: dict[Site, set[float]] = defaultdict(set)
        self._num_new: Counter[Site] = Counter()

    def begin_trial(self) -> None:
        """Begin the trial of a batch."""
        self._read = {}

    def note_read(self, read: Numbers) -> None:
        """Note the whole numbers that a step reads of a batch that is tried, or of a part of it."""
        for site, own in read.items():
            self._are_looked_at |= _differ(self._read.setdefault(site, own), own)

    def are_new(self, of_parts: Sequence[Numbers], *, is_tried: bool) -> bool:
        """Whether those of a batch are a sign; they are known then."""
        if not self._are_looked_at:
            return False
        new = set()
        for site, own in ((site, own) for numbers in of_parts for site, own in numbers.items()):
            seen = self._seen[site]
            others = {float(each) for each in own if isinstance(each, _FRACTIONS) and each == each} - seen
            if others and len(seen) < MOST_ARGUMENTS:
                new.add(site)
                seen |= others
        if is_tried:
            return False
        self._num_new.update(new)
        return any(number & (number - 1) == 0 for number in map(self._num_new.__getitem__, new))


def _read(of_parts: Sequence[Numbers]) -> list[Numbers]:
    """Read the numbers of tensors, with one wait for the device."""
    tensors = [each for part in of_parts for own in part.values() for each in own if isinstance(each, Tensor)]
    if not tensors:
        return list(of_parts)
    with _disable_current_modes():  # a number of Python's is no tensor to them
        wide = torch.complex128 if any(map(torch.is_complex, tensors)) else torch.float64
        values = iter(torch.stack([each.to(tensors[0].device, wide) for each in tensors]).tolist())
    return [
        {site: [next(values) if isinstance(each, Tensor) else each for each in own] for site, own in part.items()}
        for part in of_parts
    ]


def _differ(numbers: list[Any], others: list[Any]) -> bool:
    # What comes more often, as in a loop over samples, is no other number.
    return any(itertools.starmap(are_others, zip(numbers, others, strict=False)))


def are_others(value: Any, other: Any) -> bool:
    """Whether two numbers or texts are not the same; NaN is as NaN."""
    return value != other and not (value != value and other != other)


_KINDS: dict[int, int] = {}
"""Whose code is whose, by its address."""
_CODES: list[CodeType] = []
"""What these addresses are of: kept, so that no other code comes there."""


def _kind_of(code: CodeType) -> int:
    place = code.co_filename
    kind = next((kind for folder, kind in _FOLDERS if place.startswith(folder)), _PROGRAM)
    _CODES.append(code)
    _KINDS[id(code)] = kind
    return kind


def _site_of(func: Any) -> Site | None:
    """From where the program calls a function of torch; None: something else does."""
    site, known = [func], _KINDS
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        address = id(code)
        kind = known.get(address) or _kind_of(code)
        if kind == _PROGRAM:
            site += (address, frame.f_lasti)
        elif kind == _LEFT_OUT:
            return None
        elif kind == _RUNS_STEPS:
            break
        frame = frame.f_back
    return tuple(site) if len(site) > 1 else None


def _shown(value: Any) -> Any:
    """What of an argument is looked at."""
    kind = type(value)
    if kind is Tensor:
        return None
    if kind in PLAIN:
        return value
    if kind is float:
        return value == 0.0  # such as the weight of something that begins
    if kind is slice:
        return "slice", _shown(value.start), _shown(value.stop), _shown(value.step)
    if kind is tuple or kind is list:
        return (len(value), *map(_shown, value[:MOST_ENTRIES]))
    return None
