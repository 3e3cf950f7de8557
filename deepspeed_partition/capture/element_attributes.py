"""What elements and the code around them leave to each other in attributes, which does not come to another rank.

An element runs on the rank that has it, and the code around the elements on the first rank and on the last one.
What an element sets on itself, such as its attention's weights, is missing there, or is of another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture.recorder import OF_HOSTS, CaptureError, patched


def subclass_of(kind: type, members: Mapping[str, Any]) -> type:
    """A class that differs from ``kind`` in ``members`` alone."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **members}
    return type(kind)(kind.__name__, (kind,), own)


@contextmanager
def of_class(owner: Any, kind: type) -> Iterator[None]:
    """Let ``owner`` meanwhile be of a subclass of its class; what TorchScript compiled stays as it is."""
    before = type(owner)
    if not isinstance(owner, torch.jit.ScriptModule):
        object.__setattr__(owner, "__class__", kind)
    try:
        yield
    finally:
        if type(owner) is kind:
            object.__setattr__(owner, "__class__", before)


class ElementAttributes:
    """Finds out whether elements and the code around them hand something to each other in attributes.

    Args:
        elements: The elements, by their names.
    """

    def __init__(self, elements: Mapping[str, nn.Module]) -> None:
        self._names = {
            part: f"{name}.{path}".removesuffix(".")
            for name, element in elements.items()
            for path, part in element.named_modules()
        }
        self._left: dict[tuple[nn.Module, str], None] = {}

    @contextmanager
    def of_elements_noted(self) -> Iterator[None]:
        """Note what elements set on themselves meanwhile, or put into what they hold."""
        lengths = dict(self._lengths())
        with attributes_noted(self._note):
            yield
        self._left.update(
            dict.fromkeys(place for place, length in self._lengths() if lengths.get(place) != length)
        )

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse code around the elements that reads what they set, or sets something on them.

        Raises:
            CaptureError: it does.
        """
        by_owner: dict[nn.Module, list[str]] = {}
        for owner, name in self._left:
            by_owner.setdefault(owner, []).append(name)
        with ExitStack() as stack:
            for owner, names in by_owner.items():
                members = {name: self._refusing(owner, name) for name in names}
                stack.enter_context(of_class(owner, subclass_of(type(owner), members)))
            stack.enter_context(attributes_noted(self._refuse_setting))
            yield

    def _note(self, owner: nn.Module, name: str) -> None:
        if owner in self._names and name not in OF_HOSTS:
            self._left[owner, name] = None

    def _lengths(self) -> Iterable[tuple[tuple[nn.Module, str], int]]:
        for owner in self._names:
            for name, value in vars(owner).items():
                if isinstance(value, list | dict | set) and not name.startswith("_"):
                    yield (owner, name), len(value)

    def _refusing(self, owner: nn.Module, name: str) -> property:
        def read(_: Any) -> Any:
            raise CaptureError(
                f"the model's code reads {self._names[owner]}.{name}, which that sets while it runs: it runs on "
                "the rank that has it, and the code around it on others, where the value does not come: let it "
                "return the value, or do without it"
            )

        return property(read)

    def _refuse_setting(self, owner: nn.Module, name: str) -> None:
        if owner in self._names and name not in OF_HOSTS:
            raise CaptureError(
                f"the model's code sets {self._names[owner]}.{name} for each batch: {self._names[owner]} runs on "
                "the rank that has it, and the code around it on others: give it the value as an argument"
            )


@contextmanager
def attributes_noted(note: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Tell a function of every attribute of a module that is set meanwhile, before it is set."""
    set_attribute = nn.Module.__setattr__

    def noted(module: nn.Module, name: str, value: Any) -> None:
        note(module, name)
        set_attribute(module, name, value)

    with patched(nn.Module, "__setattr__", noted):
        yield
