"""What a layer returns and no stage can hand on, in words, with what to return instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MOST_NAMED = 3
"""Members of a tuple that a sentence names at most."""
ONE_LAYER = (
    "make one layer of this one and the next, such as LayerSpec(nn.Sequential, ...), so that no cut comes between"
)


def why_not_carried(outputs: Any) -> str:
    """Say what a layer returns that is neither a tensor nor a tuple of tensors, and what to do."""
    if not isinstance(outputs, tuple):
        found = f"returns {_kind(outputs)}"
    elif not outputs:
        found = "returns an empty tuple"
    else:
        others = [(place, each) for place, each in enumerate(outputs) if not isinstance(each, torch.Tensor)]
        named = " and ".join(f"[{place}] is {_kind(each)}" for place, each in others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more are no tensors" if len(others) > MOST_NAMED else ""
        found = f"returns a tuple of which {named}{more}"
    return f"{found}, and only a tensor, or a tuple with nothing but tensors, can cross a cut: {ways_out(outputs)}"


def ways_out(outputs: Any) -> str:
    """Say what to do where a layer returns neither a tensor nor a tuple of tensors."""
    if isinstance(outputs, tuple):
        others = [each for each in outputs if not isinstance(each, torch.Tensor)]
        ways = list(dict.fromkeys(_way_out(each, within="the ") for each in others)) or ["return a tensor"]
    else:
        ways = [_way_out(outputs)]
    return f"{'; '.join(ways)}; or {ONE_LAYER}"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _way_out(value: Any, within: str = "a ") -> str:
    if value is None:
        return f"leave None out of {within}tuple" if within == "the " else "return a tensor"
    if isinstance(value, bool | int | float):
        return "return a number as torch.tensor(number), of which the next layer takes .item()"
    if isinstance(value, str):
        return "give text to the layers that need it when they are built"
    if isinstance(value, Mapping):
        return f"return the values of a dict as members of {within}tuple"
    if isinstance(value, list | tuple):
        return f"return the members of a {type(value).__name__} as members of {within}tuple"
    return "return the tensors that the next layer needs of it"
