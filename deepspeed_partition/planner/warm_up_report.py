"""Measurements of devices and links that a run makes in its warm-up, while its layers are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGE_BYTES, LONG_SECONDS = 2**20, 1e-3
"""Bytes and seconds from which a message tells the bandwidth of its link: then latency (10 to 100 us) and the
error of the clocks are a small part of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Messages between two neighbouring devices; seconds are medians."""

    link: tuple[int, int]
    """Device of a stage and that of the next one."""
    forward_bytes: int
    forward_seconds: float
    """Seconds of an activation, from when it could travel until it arrived."""
    backward_bytes: int
    backward_seconds: float
    """Seconds of its gradient, from when it could travel until it arrived."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second in the slower direction; None where no message is large enough to tell."""
        both = ((self.forward_bytes, self.forward_seconds), (self.backward_bytes, self.backward_seconds))
        telling = [each for each in both if each[0] >= LARGE_BYTES and each[1] >= LONG_SECONDS]
        return min((size / seconds for size, seconds in telling), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """Measurements of a warm-up on its trial partition."""

    boundaries: tuple[int, ...]
    """Boundaries of the trial partition: the first layer of each stage, and the number of layers."""
    num_steps: int
    """Number of steps whose times count."""
    optimizer_seconds: tuple[float | None, ...]
    """Median seconds of the optimizer steps of each device; None where none was measured."""
    peak_bytes: tuple[int | None, ...]
    """Peak bytes of each device in a step, with weights, gradients and the optimizer's states; None where not
    measured."""
    planned_peak_bytes: tuple[int, ...]
    """Peak bytes of each device by the planner's model of the trial partition, with as many micro-batches in
    flight."""
    step_seconds: float | None = None
    """Median seconds of a step from the first forward to the last backward of the first device; None where not
    measured."""
    links: tuple[LinkUse, ...] = ()
    """Use of each link between the devices of neighbouring stages, where transfers were recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, a part of a chain file."""
        return {
            "boundaries": list(self.boundaries),
            "num_steps": self.num_steps,
            "optimizer_seconds": list(self.optimizer_seconds),
            "peak_bytes": list(self.peak_bytes),
            "planned_peak_bytes": list(self.planned_peak_bytes),
            **({} if self.step_seconds is None else {"step_seconds": self.step_seconds}),
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
        """Read the JSON form, after the schema of a chain file has accepted it."""
        return cls(
            boundaries=tuple(map(int, data["boundaries"])),
            num_steps=int(data["num_steps"]),
            optimizer_seconds=tuple(None if each is None else float(each) for each in data["optimizer_seconds"]),
            peak_bytes=tuple(None if each is None else int(each) for each in data["peak_bytes"]),
            planned_peak_bytes=tuple(map(int, data["planned_peak_bytes"])),
            step_seconds=float(data["step_seconds"]) if "step_seconds" in data else None,
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
