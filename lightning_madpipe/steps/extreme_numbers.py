"""Extreme random numbers of torch for code that draws between two layers, to see what it does by them.

Torch's generators on the CPU are Mersenne twisters, as Python's and NumPy's are: a state of equal words gives the
smallest or the largest numbers. Generators of other devices are not, and no extremes of them are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deepspeed_partition.engine.runtime.random_state import device_drawn_on, torch_state

_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 624 * 8)
"""Where the state of a generator has how many words are left, the place of the next one, and the words."""
_NUM_WORDS = 624


def call_with_extremes(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], word: int | None
) -> tuple[Any, str | None]:
    """Call a function of torch, and again with extreme numbers if it draws on the CPU.

    Generators are then where one call with ordinary numbers has left them.

    Args:
        function: What is called, which may be in place.
        arguments: What it is given.
        keywords: What it is given by name, such as ``generator``.
        word: One of ``EXTREMES`` in ``deepspeed_partition/capture/draws.py``; None: only tell whether it draws.

    Returns:
        What it gives, and the kind of device that it draws on; None where it draws nothing.
    """
    before, given = torch_state(), keywords.get("generator")
    own = given if isinstance(given, torch.Generator) else None
    own_before = torch.empty(0) if own is None else own.get_state()
    result = function(*arguments, **keywords)
    has_drawn_own = own is not None and not torch.equal(own_before, own.get_state())
    generator = own if has_drawn_own and own is not None else torch.default_generator
    device = generator.device.type if has_drawn_own else device_drawn_on(before, torch_state())
    if word is None or device != "cpu":
        return result, device
    after = generator.get_state()
    generator.set_state(_extreme(after, word))
    try:
        return function(*arguments, **keywords), device
    finally:
        generator.set_state(after)


def drawn_from_torch(device: str) -> str:
    """What a draw on this kind of device is from, in words."""
    return "torch" if device == "cpu" else f"torch on {device}"


def has_extremes(drawn: str) -> bool:
    """Whether extremes are known of what has drawn, in words that begin with those of :func:`drawn_from_torch`."""
    return not drawn.startswith("torch on ")


class ExtremeNumbers(TorchFunctionMode):
    """A mode in which each function of torch that draws gets extreme numbers.

    Args:
        word: One of ``EXTREMES``; None: ordinary numbers.
    """

    def __init__(self, word: int | None) -> None:
        super().__init__()
        self._word = word

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._word is None:
            return func(*args, **(kwargs or {}))
        return call_with_extremes(func, args, kwargs or {}, self._word)[0]


def _extreme(state: torch.Tensor, word: int) -> torch.Tensor:
    extreme = state.clone()
    extreme[_LEFT] = torch.tensor([_NUM_WORDS], dtype=torch.int32).view(torch.uint8)
    extreme[_NEXT] = torch.tensor([1], dtype=torch.int64).view(torch.uint8)
    extreme[_WORDS] = torch.full((_NUM_WORDS,), word, dtype=torch.int64).view(torch.uint8)
    return extreme
