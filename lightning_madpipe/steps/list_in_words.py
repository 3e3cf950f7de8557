"""Words for the layers of a list, and for what ``forward`` does between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_madpipe.module import TiedModule

SUGGESTIONS = {
    "relu": "nn.ReLU()", "relu_": "nn.ReLU()", "gelu": "nn.GELU()", "silu": "nn.SiLU()", "elu": "nn.ELU()",
    "leaky_relu": "nn.LeakyReLU()", "tanh": "torch.tanh", "sigmoid": "torch.sigmoid", "dropout": "nn.Dropout(p)",
    "max_pool2d": "nn.MaxPool2d(...)", "avg_pool2d": "nn.AvgPool2d(...)", "flatten": "nn.Flatten()",
    "view": "`lambda x: x.view(...)`", "reshape": "`lambda x: x.reshape(...)`",
    "permute": "`lambda x: x.permute(...)`", "mean": "`lambda x: x.mean(...)`",
    "softmax": "nn.Softmax(dim)", "log_softmax": "nn.LogSoftmax(dim)", "squeeze": "`lambda x: x.squeeze(...)`",
    "add": "one module whose forward() adds (it gets what the layer before it returns, also a tuple)",
}  # fmt: skip
"""What to write for what ``forward`` does between two layers."""


class ListInWords:
    """The places of a list of layers, in words.

    Args:
        layers: The list, with modules, tied modules and functions.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers

    def described(self, place: int) -> str:
        """The layer at ``place``: ``layer 2 (Linear)``."""
        layer = self._layers[place]
        part = module_of(layer)
        name = type(part).__name__ if part is not None else getattr(layer, "__name__", type(layer).__name__)
        return f"layer {place} ({name})"

    def between(self, before: int, after: int) -> str:
        """What lies between two places, of which -1 is the input, and the number of layers the output."""
        if before < 0 and after >= len(self._layers):
            return "from its input to its output"
        if before < 0:
            return f"before {self.described(after)}"
        if after >= len(self._layers):
            return f"after {self.described(before)}"
        return f"between {self.described(before)} and {self.described(after)}"


def advice_for(done: Sequence[str]) -> str:
    """What to write into the list for what ``forward`` does between two layers."""
    for name in done:
        if name.startswith("self."):
            return f"list {name.partition(' ')[0]} there"
        if name in SUGGESTIONS:
            return f"list {SUGGESTIONS[name]} there"
    return "list that there, as a module or a function: functions are layers, too"


def module_of(layer: Any) -> nn.Module | None:
    """The module that a layer runs; None for a function alone."""
    if isinstance(layer, TiedModule):
        return layer.module
    return layer if isinstance(layer, nn.Module) else None


def times(number: int) -> str:
    """A number of times: ``once``, ``2 times``."""
    return "once" if number == 1 else f"{number} times"


def some(names: Sequence[str]) -> str:
    """The first three of ``names``, with commas."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
