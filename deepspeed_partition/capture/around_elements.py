"""What the code around elements changes for its next run, and whether it seeds what elements draw from.

That code runs in the first layer and again in the last one, on copies of the model's modules that have the
attributes of these. So what it sets there is gone in its next run, and what it fills is filled twice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture.element_attributes import attributes_noted
from deepspeed_partition.capture.kept_state import reads_of, written_name
from deepspeed_partition.capture.left_behind import held_by
from deepspeed_partition.capture.plain_tensors import PlainTensors
from deepspeed_partition.capture.recorder import OF_HOSTS, SEEDING, CaptureError, patched
from deepspeed_partition.capture.source_lines import model_line
from deepspeed_partition.capture.structure import flatten

KEEPS = (
    "the code around its elements keeps {} for its next run, and that runs on copies of the model, in the first "
    "layer and in the last one: let an element keep it, or take it as an argument and return it"
)
SEEDS = (
    "the code around its elements sets the state of random generators by {}, from which its elements draw on "
    "other ranks: make what is drawn so once, in __init__() and as a buffer"
)
CHANGES = (
    "{} is changed by the code around {} and its followers, which runs in the first layer and again in the last "
    "one, on copies of the model: it is not what it is in one process, so let the model return the value where "
    "something reads it"
)


class AroundElements:
    """Notes what the code around elements does beside passing on tensors.

    Args:
        model: The model.
        copies: The modules in which that code runs, by the names of those that they are copies of.
        plain: The tensors that it holds beside weights and buffers.
    """

    def __init__(self, model: nn.Module, copies: Mapping[str, nn.Module], plain: PlainTensors) -> None:
        self._model, self._plain = model, plain
        self._names = {part: name for name, part in copies.items()}
        self.changed: dict[str, None] = {}
        self._counted: dict[str, tuple[str, str]] = {}
        """The module and the name of those that are numbers, and that code reads."""
        self._seeds = ""
        self._elements_draw = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what the code around elements changes meanwhile, and where it seeds."""
        held = held_by(self._model, None, ())
        values = self._plain.values()
        before: dict[tuple[nn.Module, str], Any] = {}

        def note(owner: nn.Module, name: str) -> None:
            if owner in self._names and name not in (*OF_HOSTS, *owner._buffers):
                before.setdefault((owner, name), vars(owner).get(name))

        with ExitStack() as stack:
            stack.enter_context(attributes_noted(note))
            for owner, name in SEEDING:
                stack.enter_context(patched(owner, name, self._noting_seeds(name, getattr(owner, name))))
            yield
        for (part, name), value in before.items():
            now = vars(part).get(name)
            shown = written_name(self._names[part], name)
            if type(now) in (int, float) and now != value:
                self.changed[shown] = None
                if reads_of(part).has_attribute(name):
                    self._counted[shown] = self._names[part], name
            elif _has_tensors(now):
                self.changed[shown] = None
        now_and_then = zip(self._plain.names(), values, self._plain.values(), strict=True)
        self.changed.update(dict.fromkeys(name for name, was, now in now_and_then if now != was))
        for left in held.left_now():
            members = list(left.members.values())
            if any(map(_has_tensors, members)) or any(type(each) in (int, float) for each in members):
                self.changed[left.written] = None

    @contextmanager
    def of_elements_noted(self) -> Iterator[None]:
        """Note whether an element draws random numbers meanwhile."""
        states = _states()
        yield
        self._elements_draw |= not all(map(torch.equal, states, _states()))

    def numbers(self) -> dict[str, Any]:
        """The numbers that code changes and reads, as the model itself has them now."""
        return {
            shown: vars(self._model.get_submodule(owner)).get(name)
            for shown, (owner, name) in self._counted.items()
        }

    def refuse(self, *, differs: bool, same_again: Container[str] = ()) -> None:
        """Refuse what layers would do otherwise than the model.

        Args:
            differs: Whether they have, in a second run.
            same_again: The numbers that a second run of the model, for other samples, has not changed: they are
                none of runs or of data, such as the length of a table.

        Raises:
            CaptureError: something is kept that matters, or seeded.
        """
        kept = list(self.changed) if differs else [shown for shown in self._counted if shown not in same_again]
        if kept:
            raise CaptureError(KEEPS.format(" or ".join(kept[:3])))
        if self._seeds and self._elements_draw:
            raise CaptureError(SEEDS.format(self._seeds))

    def notes(self, element: str) -> list[str]:
        """What a user should be told of what is changed, one sentence for each."""
        return [CHANGES.format(shown, element) for shown in self.changed]

    def _noting_seeds(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(__package__ or ""):
                self._seeds = self._seeds or f"{name}() ({model_line()})"
            return function(*args, **kwargs)

        return noting


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0])


def _states() -> list[torch.Tensor]:
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_devices]
