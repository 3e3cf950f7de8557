"""Per-layer statistics of peak memory that mCAP's incremental profiling measures, and its predictor.

Source: H. Dreuning et al., mCAP, Euro-Par 2022: ``mem_isolated`` and ``mem_added`` of section 3.1, and the
predictor of section 3.3, listing 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PER_LAYER = ("isolated_bytes", "isolated_bytes_per_more", "added_bytes", "added_bytes_per_more")
_LARGEST_BYTES = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class McapProfile:
    """The two statistics of each layer, as short training runs of chosen partitions have shown them.

    The paper's pipeline holds all micro-batches of a step at once on every device. Under 1F1B a device holds
    fewer the nearer it is to the end, so each statistic is a line here: its bytes with one micro-batch in flight,
    and the bytes for each further one. Differences of two runs may be negative: a layer that writes in place.

    Raises:
        ValueError: the lists are empty or of different lengths, or a number is malformed.
    """

    isolated_bytes: tuple[int, ...]
    """Peak bytes of a device with this layer alone, and one micro-batch in flight: ``mem_isolated``."""
    isolated_bytes_per_more: tuple[int, ...]
    """Bytes that each further micro-batch in flight adds to that."""
    added_bytes: tuple[int, ...]
    """Bytes by which the peak of a device grows with this layer behind those before it, with one micro-batch in
    flight: ``mem_added``. Of the first layer, which nothing is before: 0."""
    added_bytes_per_more: tuple[int, ...]
    """Bytes that each further micro-batch in flight adds to that."""
    num_runs: int
    """Training runs from which they are."""

    def __post_init__(self) -> None:
        for key in _PER_LAYER:
            values = tuple(getattr(self, key))
            for index, value in enumerate(values):
                whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
                if not whole or abs(value) > _LARGEST_BYTES:
                    raise ValueError(f"mcap.{key}[{index}] is {value!r}, not a whole number of bytes")
            object.__setattr__(self, key, tuple(map(int, values)))
        lengths = {key: len(getattr(self, key)) for key in _PER_LAYER}
        if len(set(lengths.values())) != 1 or not self.isolated_bytes:
            raise ValueError(f"mcap has numbers of {lengths} layers: each list has one for every layer")

    @property
    def num_layers(self) -> int:
        """Number of layers, L."""
        return len(self.isolated_bytes)

    def peak_bytes(self, start: int, stop: int, in_flight: int) -> int:
        """Return the predicted peak bytes of a device with layers ``start`` to ``stop``: listing 1.1.

        Args:
            in_flight: Micro-batches that the device holds at once at most.
        """
        isolated, added = self._with(in_flight)
        return int(isolated[start] + added[start + 1 : stop].sum())

    def peaks(self, in_flight: int) -> NDArray[np.int64]:
        """Return, as entry [k, l], the predicted peak bytes of layers k to l; L + 1 rows and columns.

        Entries with l <= k are no stages and mean nothing.

        Args:
            in_flight: Micro-batches that the device holds at once at most.
        """
        isolated, added = self._with(in_flight)
        until = np.concatenate(([0], added.cumsum()))
        first = np.append(isolated, 0) - np.append(until[1:], 0)
        return np.asarray(first[:, None] + until[None, :], dtype=np.int64)

    def _with(self, in_flight: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return both statistics of each layer with so many micro-batches in flight."""
        isolated, isolated_more, added, added_more = (
            np.array(getattr(self, key), dtype=np.int64) for key in _PER_LAYER
        )
        return isolated + (in_flight - 1) * isolated_more, added + (in_flight - 1) * added_more

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, a part of a chain file."""
        return {"num_runs": self.num_runs, **{key: list(getattr(self, key)) for key in _PER_LAYER}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> McapProfile:
        """Read the JSON form, after the schema of a chain file has accepted it.

        Raises:
            ValueError: the lists are of different lengths.
        """
        return cls(num_runs=int(data["num_runs"]), **{key: tuple(data[key]) for key in _PER_LAYER})
