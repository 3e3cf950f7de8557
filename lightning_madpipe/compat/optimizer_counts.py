"""Numbers and places of what an optimizer has, asked for on a rank that has those of its own layers only.

``len(group["params"])``, ``group["params"][:2]`` and ``len(optimizer.state)`` call no function of torch, so that
nobody sees them who follows values. While a hook or a step of the user's runs, these containers tell who asks for
that.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lightning_madpipe.compat.absent_parameters import Absent
from lightning_madpipe.compat.by_place import goes_by_place
from lightning_madpipe.compat.hook_sentences import COUNTED_PARAMETERS, COUNTED_STATES, PLACES
from lightning_madpipe.compat.running_code import OTHERS

STATE_ELSEWHERE = (
    "the optimizer's {name!r} of a parameter is asked for on a rank that did not run its layer: a hook that every "
    "rank runs may change it in place, on the rank that has it, and may not read it"
)

Tell = Callable[[str, int], None]
"""Is called with a kind of sentence and the number that a rank gives."""


@contextmanager
def counts_told(optimizers: Iterable[Any], tell: Tell | None) -> Iterator[None]:
    """Tell meanwhile of code of the user's that counts what optimizers have; None: of nothing."""
    for optimizer in optimizers if tell is not None else ():
        _let_tell(optimizer)
    before, _Listening.tell = _Listening.tell, tell
    try:
        yield
    finally:
        _Listening.tell = before


class _Listening:
    tell: Tell | None = None


def states_of(optimizer: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The weights that an optimizer keeps something of, each with that."""
    own = _of_torch(optimizer)
    return [] if own is None else [(weight, kept) for weight, kept in own.state.items() if isinstance(kept, dict)]


def _of_torch(optimizer: Any) -> torch.optim.Optimizer | None:
    while not isinstance(optimizer, torch.optim.Optimizer):  # one of DeepSpeed's is around it
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            return None
    return optimizer


def _let_tell(optimizer: Any) -> None:
    """Put containers that tell in the place of an optimizer's; they stay, for a script may hold them."""
    optimizer = _of_torch(optimizer)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        if type(group["params"]) is list:
            group["params"] = _Parameters(group["params"])
    # One that somebody else holds, such as an optimizer around this one, has to stay the same object.
    if type(optimizer.state) is defaultdict and sys.getrefcount(optimizer.state) <= _REFERENCES_OF_ONE_HOLDER:
        optimizer.state = _States(optimizer.state.default_factory, optimizer.state)


_REFERENCES_OF_ONE_HOLDER = 2
"""The references to an attribute that nobody else holds, while they are counted."""


class _Place:
    """Where a container was last iterated over: ``list(container)`` asks for its length at the same place."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def note(self, frame: FrameType) -> None:
        self._last = id(frame), frame.f_lasti

    def tell(self, frame: FrameType, sentence: str, number: int) -> None:
        """Tell of a length, if code of the user's asks for it, and for nothing else."""
        if _Listening.tell is not None and self._last != (id(frame), frame.f_lasti) and _is_of_the_user(frame):
            _Listening.tell(sentence, number)


def _is_of_the_user(frame: FrameType) -> bool:
    return (frame.f_globals.get("__name__") or "").partition(".")[0] not in (*OTHERS, "torch", "copy")


class _Tells:
    """A container that tells of its length, and whose kind of sentence that is."""

    sentence = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._place = _Place()

    def __iter__(self) -> Iterator[Any]:
        self._place.note(sys._getframe(1))
        return super().__iter__()  # type: ignore[misc]

    def __len__(self) -> int:
        number: int = super().__len__()  # type: ignore[misc]
        self._place.tell(sys._getframe(1), self.sentence, number)
        return number

    def __bool__(self) -> bool:
        return super().__len__() > 0  # type: ignore[misc]


class _Parameters(_Tells, list[Any]):
    """The parameters of a group."""

    sentence = COUNTED_PARAMETERS

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        self._place.note(frame)
        if _Listening.tell is not None and _is_of_the_user(frame) and goes_by_place(frame):
            _Listening.tell(PLACES, list.__len__(self))
        return list.__iter__(self)

    def __getitem__(self, place: Any) -> Any:
        if _Listening.tell is not None and _is_of_the_user(sys._getframe(1)):
            _Listening.tell(PLACES, list.__len__(self))
        return list.__getitem__(self, place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


class _States(_Tells, defaultdict[Any, Any]):
    """The states of an optimizer."""

    sentence = COUNTED_STATES

    def __missing__(self, weight: Any) -> Any:
        return _StateElsewhere(weight) if isinstance(weight, Absent) else super().__missing__(weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (self.default_factory, dict(self))


class _StateElsewhere(dict[str, Any]):
    """The state of a parameter that another rank has: a hook that every rank runs may change it in place."""

    def __init__(self, weight: Absent) -> None:
        super().__init__()
        self._weight = weight

    def __missing__(self, name: str) -> Absent:
        form = self._weight._form
        shape = () if name == "step" else form.shape
        return Absent.like(form.new_empty(shape), self._weight._place, STATE_ELSEWHERE.format(name=name))
