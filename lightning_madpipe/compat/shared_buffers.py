"""Buffers that are one tensor in several modules, where these are brought to a device.

``nn.Module.to()`` keeps a parameter and changes its values, and makes a new tensor for each place of a buffer. A
buffer of the LightningModule itself and of the layer that reads it would be two tensors on a GPU: what a step
writes into one would not be in the other, and a state dict would have both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_madpipe.compat.elsewhere import HiddenTensors


class SharedBuffers:
    """The places in modules whose buffers are one tensor now.

    Args:
        roots: Modules with all that is within them. The first of several places has the values that count.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        seen: set[int] = set()
        for part in (part for root in roots for part in root.modules()):
            if id(part) not in seen:
                seen.add(id(part))
                for name, buffer in _table(part).items():
                    if isinstance(buffer, Tensor):
                        places.setdefault(id(buffer), []).append((part, name))
        self._places = [each for each in places.values() if len(each) > 1]

    def share(self) -> None:
        """Let the places have one tensor again, that of the first one."""
        for (first, name), *others in self._places:
            tensor = _table(first).get(name)
            for part, place in others:
                if _table(part).get(place) is not tensor:
                    is_hidden = isinstance(part._buffers, HiddenTensors) and place in part._buffers.hidden
                    (_table(part) if is_hidden else part._buffers)[place] = tensor


def _table(part: nn.Module) -> dict[str, Any]:
    """Return all buffers of a module, those that other ranks have included; of a scripted module none."""
    table = part._buffers
    if isinstance(table, HiddenTensors):
        return table.whole
    return table if isinstance(table, dict) else {}
