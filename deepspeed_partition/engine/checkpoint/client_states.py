"""What a script saves with a checkpoint, ``client_state``, where the ranks of a pipeline have different values.

DeepSpeed writes one file for each stage. With as many stages each rank gets its own back, with another number of
them all ranks get that of rank 0.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.tensor_values import bytes_view


def unlike_keys(client_state: Any, *, is_saved: bool) -> list[str]:
    """The keys whose values differ between the ranks, in the order of their names. Collective.

    Args:
        client_state: What this rank is to save.
        is_saved: Whether DeepSpeed saves that of this rank, as it does on one rank of each stage.
    """
    state = client_state if isinstance(client_state, Mapping) else {}
    mine = {str(key): _digest(value) for key, value in state.items()} if is_saved else None
    first, *others = (each for each in gather_objects(mine) if each is not None)
    keys = sorted({key for each in (first, *others) for key in each})
    return [key for key in keys if any(each.get(key, "") != first.get(key, "") for each in others)]


class _Pickler(pickle.Pickler):
    """Writes tensors by their values; torch's own bytes differ for equal tensors."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        return tuple, ((str(value.dtype), tuple(value.shape), bytes_view(value.cpu()).numpy().tobytes()),)


def _digest(value: Any) -> int | None:
    """A checksum of a value; None where it cannot be told whether another rank's is the same."""
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.fast = True  # equal values give equal bytes, whichever parts of them are one object
    try:
        pickler.dump(value)
    except Exception:  # of a cycle or of an object that pickle does not know, of which saving tells by itself
        return None
    return zlib.crc32(written.getbuffer())
