"""Tensors of other ranks in a hook that goes by the places of all parameters, or changes one by its name.

``for place, weight in enumerate(self.parameters()): weight.grad.mul_(0.9**place)`` is to give each parameter the
number of its place in the model, so that the loop runs for those of other ranks, too. ``self.gate.heat.zero_()``
runs on all ranks, and changes the buffer where it is. What a hook computes with what is not here is of no use,
and is computed where that is: it is followed by its form, and ends in nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.by_place import goes_by_place
from lightning_madpipe.compat.elsewhere import (
    TABLES,
    ElsewhereError,
    HiddenTensors,
    Listing,
    StandIn,
    device_here,
)
from lightning_madpipe.compat.followed_values import RANDOM_OF_TENSORS
from lightning_madpipe.compat.running_code import OTHERS, asks_for_its_rank, is_logged
from lightning_madpipe.module import OUTSIDE_A_STEP

NEEDED_HERE = (
    "a hook that goes by the places of all parameters uses a value that another rank has, where this rank needs "
    "it: only what is done to each parameter by itself is done on its rank. Go by the names of "
    "self.named_parameters(), which are those of this rank, and bring the ranks' parts together, as by "
    "torch.distributed.all_reduce"
)
CHANGED_HERE = (
    ". A hook that every rank runs may change it in place, or set a buffer, by values that all ranks know: the "
    "rank that has it makes the change. A function that asks for its rank may not, because the other ranks might "
    "not do it: change it in a function that does not ask"
)

KEPT = (
    "{place} keeps what it has made of a tensor that another rank has ({name}): on this rank that is a form "
    "without values, also when the run has ended. Go through named_parameters() and named_buffers(), which have "
    "those of this rank, and keep what is made of them by these names"
)
"""What is said of a hook that keeps such a thing."""
MOST_KEPT = 1000

BY_VALUES = ("multinomial", "poisson")
"""Functions that draw as many numbers as values say."""


class Absent(StandIn):
    """A tensor of another rank, or what is computed from one."""

    may_be_changed = True
    _is_parameter: bool
    _hidden: Tensor | None

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """Whether this stands for a parameter; torch asks where it is set."""
        return self._is_parameter

    def __bool__(self) -> bool:
        raise ElsewhereError(self._refusal)

    __float__ = __int__ = __index__ = __bool__

    @staticmethod
    def like(
        form: Tensor, device: torch.device, refusal: str = NEEDED_HERE, *, is_parameter: bool = False,
        hidden: Tensor | None = None,
    ) -> Absent:  # fmt: skip
        """What has this form, and is on ``device``; ``refusal`` is said to whoever needs its values.

        Args:
            hidden: The tensor of this rank that nobody trains, which is frozen and unfrozen with it.
        """
        absent = torch.Tensor._make_subclass(Absent, form.detach(), form.requires_grad)
        vars(absent).update(
            _refusal=refusal, _form=form, _place=device, _is_parameter=is_parameter, _hidden=hidden
        )
        return absent

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{name} {getattr(getattr(function, '__self__', None), '__name__', '')}"
        if name.startswith("_foreach_"):
            return _without_absent(function, arguments, keywords)
        if name in ("__get__ grad", "__get__ data"):
            return arguments[0]
        if name in ("requires_grad_", "__set__ requires_grad") and isinstance(arguments[0], Absent):
            trains = bool(next(iter((*arguments[1:], *keywords.values())), True))
            for tensor in (arguments[0]._form, arguments[0]._hidden):
                if tensor is not None:
                    tensor.requires_grad_(trains)
            return arguments[0]
        given = (*arguments, *keywords.values())  # torch.nn.init gives all by keyword
        refusal = next((each._refusal for each in _absent(given)), NEEDED_HERE)
        if _writes(name):
            if not isinstance(given[0], Absent):
                raise ElsewhereError(refusal)
            _draw_alike(function, name, arguments, keywords)
            return given[0]
        if is_logged(sys._getframe()) or name in ("__reduce_ex__", "__reduce__"):  # a file would have no values
            raise ElsewhereError(refusal)
        layer = _layer_that_runs(sys._getframe())
        if layer is not None:
            raise ElsewhereError(
                f"a hook runs a layer that another rank has ({type(layer).__name__}), and this rank has its own "
                f"stage of the layers only: {OUTSIDE_A_STEP}"
            )
        try:
            return super().__torch_function__(function, types, arguments, keywords)
        except ElsewhereError:
            return _by_form(function, arguments, keywords, refusal)


def _layer_that_runs(frame: FrameType | None) -> nn.Module | None:
    """The module whose tensors are on another rank and whose ``forward`` is being called; None if there is none.

    A module that reads the tensors of layers in its own ``forward``, such as an average of weights, is not one.
    """
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    module = None if frame is None else frame.f_locals.get("self")
    is_elsewhere = module is not None and any(isinstance(vars(module)[table], HiddenTensors) for table in TABLES)
    return module if is_elsewhere else None


_made: list[weakref.ref[Absent]] | None = None
"""What a hook has made of tensors that are not here; None: no hook runs."""


@contextmanager
def reached_in_hooks(module: nn.Module, place: str) -> Iterator[None]:
    """Let hooks reach tensors of other ranks meanwhile.

    Code that goes by the places of parameters has all of them, in the order of the model. Code that changes a
    tensor by its name does so where that is. What it keeps of what is made of them is told.

    Args:
        place: The hook, in words.
    """
    global _made

    def absent(tensor: Tensor, refusal: str) -> Absent:
        is_parameter = isinstance(tensor, nn.Parameter)
        form = StandIn.of(tensor, "")._form
        return Absent.like(form, device_here(tensor), refusal, is_parameter=is_parameter, hidden=tensor)

    listing = Listing(module, lambda tensor, _: absent(tensor, NEEDED_HERE))

    def listing_for() -> Listing | None:
        return listing if goes_by_place(_frame_of_the_user()) else None

    def stand_in(tensor: Tensor, refusal: str) -> StandIn:
        frame = _frame_of_the_user()
        if frame is None:
            return StandIn.of(tensor, refusal)
        if asks_for_its_rank(frame):
            return StandIn.of(tensor, refusal + CHANGED_HERE)
        return absent(tensor, refusal + CHANGED_HERE)

    before, made_before = (HiddenTensors.listing_for, HiddenTensors.stand_in), _made
    HiddenTensors.listing_for, HiddenTensors.stand_in = listing_for, stand_in
    made = _made = []
    try:
        yield
        kept = next((value for each in made if (value := each()) is not None), None)
        if kept is not None:
            name = kept._refusal.partition(" ")[0]
            warn_once(f"kept/{place}", KEPT.format(place=place, name=name if "." in name else "of its place"))
    finally:
        _made = made_before
        HiddenTensors.listing_for, HiddenTensors.stand_in = before


def _frame_of_the_user() -> FrameType | None:
    """Where code that is not torch's or a host's asks for tensors; None where a host does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if package != "torch" and frame.f_globals.get("__name__") not in (__name__, HiddenTensors.__module__):
            return None if package in OTHERS else frame
        frame = frame.f_back
    return None


def _writes(name: str) -> bool:
    """Whether a function changes its first argument."""
    if name.startswith("__"):
        return name.startswith(("__set__", "__setitem__", "__delitem__")) or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name.endswith("_")


def _draw_alike(function: Callable[..., Any], name: str, arguments: Any, keywords: Mapping[str, Any]) -> None:
    """Draw from generators as much as where the tensor is, so that all ranks go on with the same numbers.

    Raises:
        Exception: that depends on the values of the tensor.
    """
    if getattr(function, "__module__", None) != torch.nn.init.__name__ and name not in RANDOM_OF_TENSORS:
        return

    def here(value: Any) -> Any:
        if not isinstance(value, Absent):
            return value
        return torch.zeros(value._form.shape, dtype=value._form.dtype, device=value._place)

    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        function(*tree_map(here, tuple(arguments)), **tree_map(here, dict(keywords)))


def _by_form(function: Callable[..., Any], arguments: Any, keywords: Mapping[str, Any], refusal: str) -> Any:
    """The form of what a function gives."""
    device = next(each._place for each in _absent((*arguments, *keywords.values())))

    def form(value: Any) -> Any:
        if isinstance(value, Absent):
            return value._form
        return value.to("meta") if isinstance(value, Tensor) else value

    try:
        name = getattr(function, "__name__", "")
        if name in BY_VALUES:
            raise ElsewhereError(refusal)
        _draw_alike(function, name, arguments, keywords)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            result = function(*tree_map(form, tuple(arguments)), **tree_map(form, dict(keywords)))
    except Exception as error:  # numbers cannot be taken out of what is not here
        raise ElsewhereError(refusal) from error

    def absent(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = Absent.like(value, device, refusal)
        if _made is not None and len(_made) < MOST_KEPT:
            _made.append(weakref.ref(made))
        return made

    return tree_map(absent, result)


def _without_absent(function: Callable[..., Any], arguments: Any, keywords: Mapping[str, Any]) -> Any:
    """A function on lists, for what is here of them."""
    lists = [value for value in arguments if isinstance(value, list | tuple)]
    here = [not any(isinstance(each, Absent) for each in row) for row in zip(*lists, strict=True)]
    if any(isinstance(value, Absent) for value in (*arguments, *keywords.values())) and any(here):
        raise ElsewhereError(NEEDED_HERE)

    def kept(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [each for each, is_here in zip(value, here, strict=True) if is_here]

    made = function(*map(kept, arguments), **keywords) if any(here) else None
    if made is None:
        return None if function.__name__.endswith("_") else list(lists[0])
    results = iter(made)
    return [next(results) if is_here else value for value, is_here in zip(lists[0], here, strict=True)]


def _absent(values: Any) -> Iterator[Absent]:
    for value in values:
        if isinstance(value, Absent):
            yield value
        elif isinstance(value, list | tuple):
            yield from _absent(value)
