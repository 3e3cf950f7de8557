"""A LightningModule whose class overrides ``state_dict()`` or ``load_state_dict()``, for one ordinary file.

Such a class leaves out a frozen teacher, casts what is saved, or renames what older files have. On one device it
goes through the whole state. So it does here: where it calls torch's method for the module itself, it is given the
whole, and what it hands on is taken. Folders are DeepSpeed's, and hold the layers as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

NOT_OF_THE_WHOLE = (
    "{name} of {kind} does not call super().{name} once, and each rank of a pipeline has a part of the layers: "
    "call that for the whole state, or change the state in {hook}"
)


def state_by_its_class(module: nn.Module, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what ``module.state_dict()`` makes of the ``whole`` state, which its layers here are a part of.

    Raises:
        ValueError: it does not begin with the state of the module.
    """
    if not is_overridden(module, "state_dict"):
        return whole
    asked: list[None] = []

    def state_dict(*arguments: Any, **keywords: Any) -> Any:
        asked.append(None)
        return OrderedDict(whole)

    with _instead_for(module, "state_dict", state_dict):
        state: Mapping[str, Any] = module.state_dict()
    _check_once(module, "state_dict", len(asked), "on_save_checkpoint")
    return state


def loaded_by_its_class(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool, present: Callable[[], Mapping[str, Any]]
) -> tuple[Mapping[str, Any], bool]:
    """Return what ``module.load_state_dict(state)`` hands on to torch, and whether it is strict there.

    Args:
        present: Makes the whole state that the module has, for a class that compares; tensors of other ranks may
            be stand-ins.

    Raises:
        ValueError: it does not load the module's state, or several times.
    """
    if not is_overridden(module, "load_state_dict"):
        return state, strict
    here, given = present(), list[tuple[Mapping[str, Any], bool]]()

    def load_state_dict(state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        given.append((state_dict, strict))
        return _IncompatibleKeys([], [])

    def state_dict(*arguments: Any, **keywords: Any) -> Any:
        return OrderedDict(here)

    with (
        _instead_for(module, "load_state_dict", load_state_dict),
        _instead_for(module, "state_dict", state_dict),
    ):
        module.load_state_dict(OrderedDict(state), strict=strict)
    _check_once(module, "load_state_dict", len(given), "on_load_checkpoint")
    return given[0]


def is_overridden(module: nn.Module, name: str) -> bool:
    """Whether a module has another method of this name than torch's, by its class or by itself."""
    return getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)


def _check_once(module: nn.Module, name: str, number: int, hook: str) -> None:
    if number != 1:
        kind = type(module).__name__
        raise ValueError(NOT_OF_THE_WHOLE.format(name=f"{name}()", kind=kind, hook=hook))


@contextmanager
def _instead_for(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let torch's method do what ``function`` does for ``module``, and for others what it does."""
    torchs = getattr(nn.Module, name)

    def method(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return (function if self is module else torchs.__get__(self))(*arguments, **keywords)

    setattr(nn.Module, name, method)
    try:
        yield
    finally:
        setattr(nn.Module, name, torchs)
