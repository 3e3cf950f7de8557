"""Regions of autocast in a model's code: which are open, and whether each names its type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from deepspeed_partition.capture.recording import Cast

KINDS = ("cpu", "cuda")
"""The types of devices whose autocast is followed."""
State = tuple[tuple[str, bool, torch.dtype], ...]


def casts_now() -> State:
    """Whether autocast is on, and its type, by device."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS)


class OpenCasts:
    """The regions that code is in while they are noted."""

    def __init__(self) -> None:
        self._regions: list[tuple[str, bool]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note regions that are opened meanwhile."""
        own = vars(torch.autocast)
        make, enter, leave, regions = own["__init__"], own["__enter__"], own["__exit__"], self._regions

        def made(cast: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            make(cast, device_type, dtype, *args, **kwargs)
            cast._madpipe_names_dtype = dtype is not None

        def entered(cast: Any) -> Any:
            # Of one that was made before, nothing is known.
            regions.append((cast.device, getattr(cast, "_madpipe_names_dtype", True)))
            return enter(cast)

        def left(cast: Any, *error: Any) -> Any:
            del regions[-1:]
            return leave(cast, *error)

        with ExitStack() as stack:
            for name, noting in (("__init__", made), ("__enter__", entered), ("__exit__", left)):
                stack.enter_context(patch.object(torch.autocast, name, noting))
            yield

    def since(self, outer: State, device: torch.device) -> tuple[Cast, ...]:
        """What is other than around the model, for a device of any type in the place of that of the capture.

        A type that the code has not named is that of the device that runs: bfloat16 on a CPU, float16 on a GPU.
        """
        named = {kind for kind, names in self._regions if names}  # regions within them have the same type
        return tuple(
            Cast(None if kind == device.type else kind, enabled, dtype if kind in named else None)
            for (kind, enabled, dtype), before in zip(casts_now(), outer, strict=True)
            if (kind, enabled, dtype) != before
        )
