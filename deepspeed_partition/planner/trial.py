"""What a run saw of its devices and links while its layers were measured in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGE_BYTES, LONG_SECONDS = 2**20, 1e-3
"""Of a message that tells the bandwidth of its link: a latency, some 10 to 100 us, and what clocks are wrong by,
are a small part of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The messages between two neighboring devices; seconds are medians."""

    link: tuple[int, int]
    """The device of a stage and that of the next one."""
    forward_bytes: int
    forward_seconds: float
    """Of an activation, from when it could travel until it was there."""
    backward_bytes: int
    backward_seconds: float
    """Of its gradient."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second in the slower direction; None where no message is large enough to tell."""
        both = ((self.forward_bytes, self.forward_seconds), (self.backward_bytes, self.backward_seconds))
        telling = [each for each in both if each[0] >= LARGE_BYTES and each[1] >= LONG_SECONDS]
        return min((size / seconds for size, seconds in telling), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """A warm-up on a trial cut."""

    boundaries: tuple[int, ...]
    """The trial cut."""
    num_steps: int
    """Steps whose times count."""
    optimizer_seconds: tuple[float | None, ...]
    """Of each device: the median of its optimizer steps."""
    peak_bytes: tuple[int | None, ...]
    """Of each device: the most in use in a step, with weights, gradients and the optimizer's states."""
    planned_peak_bytes: tuple[int, ...]
    """Of each device: what the planner's model says of the trial cut, with as many micro-batches in flight."""
    links: tuple[LinkUse, ...] = ()
    """Between the devices of neighboring stages, where transfers were recorded."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, a part of a chain file."""
        return {
            "boundaries": list(self.boundaries),
            "num_steps": self.num_steps,
            "optimizer_seconds": list(self.optimizer_seconds),
            "peak_bytes": list(self.peak_bytes),
            "planned_peak_bytes": list(self.planned_peak_bytes),
            "links": [
                {
                    "link": list(use.link),
                    "forward_bytes": use.forward_bytes,
                    "forward_seconds": use.forward_seconds,
                    "backward_bytes": use.backward_bytes,
                    "backward_seconds": use.backward_seconds,
                    **({} if use.bandwidth is None else {"bandwidth": use.bandwidth}),
                }
                for use in self.links
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrialRun:
        """Read what the schema of a chain file has let through."""
        return cls(
            boundaries=tuple(map(int, data["boundaries"])),
            num_steps=int(data["num_steps"]),
            optimizer_seconds=tuple(None if each is None else float(each) for each in data["optimizer_seconds"]),
            peak_bytes=tuple(None if each is None else int(each) for each in data["peak_bytes"]),
            planned_peak_bytes=tuple(map(int, data["planned_peak_bytes"])),
            links=tuple(
                LinkUse(
                    link=(int(use["link"][0]), int(use["link"][1])),
                    forward_bytes=int(use["forward_bytes"]),
                    forward_seconds=float(use["forward_seconds"]),
                    backward_bytes=int(use["backward_bytes"]),
                    backward_seconds=float(use["backward_seconds"]),
                )
                for use in data["links"]
            ),
        )
