"""Allocations in which several devices have several stages: all of them on small chains, else a beam of them.

Stages are laid from the end of the chain, as in ``one_special_device.py``, but a label holds load and memory of
every device. Hardly any label dominates another, and their number grows fast. All are enumerated as long as they
are few. Beyond that, only the labels that promise to need least memory go on at each boundary (a beam).

Source: an extension of the MadPipe paper, section 4.2, which has one special device. The enumeration is exact for
the "peak" estimate; the beam proves nothing. Cost for L layers and P devices: the enumeration grows like P^L and
stops at its limits; a beam of w labels takes O(L^2 P w) extensions, with O(P^2) loads of links for each label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import DeadlinePassed
from deepspeed_partition.planner.solvers.interface import Problem

MOST_CHILDREN = 2_000_000
"""Most partial allocations that are looked at together."""
MOST_LOADS, MOST_CHILDREN_LOADS = 100_000, 20_000_000
"""Most loads of links held at once: in the labels of a boundary where only some go on (on more than ten devices
these are fewer for it), and in what is made of them where all do."""


@dataclass(frozen=True, slots=True)
class _Labels:
    """Partial allocations of one boundary; a row each.

    Times are in ticks; bytes are counted as in ``Road.bytes_at_least``.
    """

    group: NDArray[np.int64]
    fill: NDArray[np.int64]
    """Fill of the 1F1B* delay in ticks, without the transfer over this boundary; [label]."""
    used: NDArray[np.int64]
    """Number of devices that have a stage; [label]."""
    top: NDArray[np.int64]
    """Device of the stage laid last; [label]."""
    load: NDArray[np.int64]
    """Ticks per period of each device; [label, device]."""
    kept: NDArray[np.int64]
    """Bytes of each device without the group that peaks; [label, device]."""
    peak: NDArray[np.int64]
    """Bytes of the group that peaks; [label, device]."""
    current: NDArray[np.int64]
    """Bytes of the group of the device's last stage, which may still grow; [label, device]."""
    current_group: NDArray[np.int64]
    """Number of the group of the device's last stage; [label, device]."""
    link: NDArray[np.int64]
    """Ticks per period of each link; [label, device, device]."""
    came_from: NDArray[np.int64]
    """Label that this one was made from, as (boundary below, place there); [label, 2]."""

    def pick(self, chosen: NDArray[np.intp]) -> _Labels:
        return _Labels(*(getattr(self, each.name)[chosen] for each in fields(self)))

    def without_tables(self) -> _Labels:
        """Return the labels without their tables of links, which take gigabytes on many devices."""
        return replace(self, link=self.link[:, :0, :0])

    @classmethod
    def joined(cls, parts: list[_Labels]) -> _Labels:
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))


class SeveralSearch:
    """Search for allocations that may fit at a period, by the "peak" estimate of every device's memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_layers = problem.chain.num_layers
        self.num_devices = min(problem.platform.num_devices, self.num_layers)
        times, table = problem.times, problem.table
        self.compute = times.compute
        self.transfer = times.round_trip
        # A stage's weights are rounded up to a byte, a device's only once: the bound must not count that.
        self.rounded = 0 if float(problem.platform.weight_copies).is_integer() else 1
        memory = max(0, problem.platform.memory_bytes - table.fixed_bytes)
        self.memory = memory
        stash, part = table.with_part_of_versions(table.weights - self.rounded)
        self.fixed = np.minimum(table.weights - part + table.buffers - self.rounded, memory + 1)
        self.stash = np.minimum(stash, memory + 1)
        self.transient = np.minimum(table.transient, memory + 1)

    def all(self, period: int, limit: int) -> list[Placement] | None:
        """Return every allocation that may fit; None where there are over ``limit`` labels, or time is up."""
        try:
            return self._lay(period, limit, exact=True)
        except DeadlinePassed:
            return None

    def some(self, period: int, width: int) -> list[Placement]:
        """Return allocations that may fit, the most promising first, from ``width`` labels at each boundary."""
        try:
            narrow = max(1, min(width, MOST_LOADS // self.num_devices**2))
            return self._lay(period, narrow, exact=False) or []
        except DeadlinePassed:
            return []

    def _lay(self, period: int, width: int, *, exact: bool) -> list[Placement] | None:
        known = {self.num_layers: self._start()}
        waiting: dict[int, list[_Labels]] = {}
        for stop in range(self.num_layers, 0, -1):
            if stop < self.num_layers:
                if stop not in waiting or self.transfer[stop] > period:
                    continue
                known[stop] = _Labels.joined(waiting.pop(stop))
            starts = np.flatnonzero(self.compute[stop] - self.compute[:stop] <= period)
            count = len(known[stop].group)
            children = count * self.num_devices
            if exact and (
                count > width
                or children * len(starts) > MOST_CHILDREN
                or children * self.num_devices**2 > MOST_CHILDREN_LOADS
            ):
                return None
            if count > width:
                known[stop] = self._most_promising(known[stop], stop, period, width)
            for start in starts.tolist():
                self.problem.deadline.check()
                made = self._extended(known[stop], start, stop, period, None if exact or not start else width)
                if len(made.group):
                    parts = waiting.setdefault(start, [])
                    parts.append(made if start else made.without_tables())
                    num_waiting = sum(len(part.group) for part in parts)
                    if exact and start and self.transfer[start] <= period and num_waiting > width:
                        return None
                    if not exact and num_waiting > 4 * width:  # keeps the waiting labels few
                        waiting[start] = [self._most_promising(_Labels.joined(parts), start, period, width)]
            known[stop] = known[stop].without_tables()
        if 0 not in waiting:
            return []
        known[0] = _Labels.joined(waiting[0])
        order = np.argsort(self._promise(known[0], 0, period), kind="stable")
        found = []
        for place in order.tolist():
            self.problem.deadline.check()
            placement = self._trace(known, place)
            if placement.num_shared > 1:
                found.append(placement)
        return found

    def _start(self) -> _Labels:
        def of_devices(*shape: int) -> NDArray[np.int64]:
            return np.zeros((1, *shape), dtype=np.int64)

        P = self.num_devices
        one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        return _Labels(
            one, none, none, none - 1, of_devices(P), of_devices(P), of_devices(P), of_devices(P), of_devices(P),
            of_devices(P, P), of_devices(2),
        )  # fmt: skip

    def _most_promising(self, labels: _Labels, stop: int, period: int, width: int) -> _Labels:
        return labels.pick(np.argsort(self._promise(labels, stop, period), kind="stable")[:width])

    def _promise(self, labels: _Labels, stop: int, period: int) -> NDArray[np.float64]:
        """Return for each label the bytes of all devices if no further group opens; lower is better."""
        num_bytes = (labels.kept + labels.peak).sum(axis=1)
        return self._promised(num_bytes, labels.group, labels.fill, stop, period)

    def _promised(
        self,
        num_bytes: NDArray[np.int64],
        group: NDArray[np.int64],
        fill: NDArray[np.int64],
        stop: int,
        period: int,
    ) -> NDArray[np.float64]:
        prefix = float(self.problem.table.stash[0, stop]) if stop else 0.0
        promise: NDArray[np.float64] = num_bytes + (group - 1 + fill / max(period, 1)) * prefix
        return promise

    def _extended(self, labels: _Labels, start: int, stop: int, period: int, width: int | None) -> _Labels:
        """Return the labels with layers ``start`` to ``stop`` on each device that may have them.

        Args:
            width: keep only so many, the most promising; None: all.
        """
        transfer, load = int(self.transfer[stop]), int(self.compute[stop] - self.compute[start])
        opens = labels.fill + transfer > period
        group, fill = labels.group + opens, np.where(opens, transfer, labels.fill + transfer)
        opens = fill + load > period
        group, fill = group + opens, np.where(opens, load, fill + load)

        stash, transient = int(self.stash[start, stop]), int(self.transient[start, stop])
        count = np.arange(len(group))
        device = np.arange(self.num_devices)[None, :]
        on_link = labels.link[count, labels.top] + transfer  # [label, device]; of no device at the chain's end
        counted = np.minimum(group - 1, self.memory // max(stash, 1) + 1)[:, None] * stash
        kept = labels.kept + int(self.fixed[start, stop]) + counted
        grows = labels.current_group == group[:, None]
        current = stash + np.where(grows, np.maximum(labels.current, transient), transient)
        peak = np.maximum(labels.peak, current)
        chosen = (
            (device <= labels.used[:, None])
            & (device != labels.top[:, None])
            & (labels.load + load <= period)
            & (kept + peak <= self.memory)
            & ((on_link <= period) | (stop == self.num_layers))
            & self._rest_may_fit(labels, start, load, kept, group, period)
        )
        place, on = np.nonzero(chosen)
        if width is not None and len(place) > width:  # choose before the tables are made, which may be large
            bytes_below = (labels.kept + labels.peak).sum(axis=1)[place] - (labels.kept + labels.peak)[place, on]
            promise = self._promised(
                bytes_below + (kept + peak)[place, on], group[place], fill[place], start, period
            )
            best = np.sort(np.argsort(promise, kind="stable")[:width])
            place, on = place[best], on[best]
        made = labels.pick(place)
        row = np.arange(len(place))
        made.load[row, on] += load
        made.kept[row, on] = kept[place, on]
        made.peak[row, on] = peak[place, on]
        made.current[row, on] = current[place, on]
        made.current_group[row, on] = group[place]
        if stop < self.num_layers:
            top = labels.top[place]
            made.link[row, on, top] = made.link[row, top, on] = on_link[place, on]
        return _Labels(
            group[place], fill[place], np.maximum(made.used, on + 1), on, made.load, made.kept, made.peak,
            made.current, made.current_group, made.link, np.stack([np.full_like(place, stop), place], axis=1),
        )  # fmt: skip

    def _rest_may_fit(
        self,
        labels: _Labels,
        start: int,
        load: int,
        kept: NDArray[np.int64],
        group: NDArray[np.int64],
        period: int,
    ) -> NDArray[np.bool_]:
        """Return, as entry [label, device], whether time and memory suffice for layers 0 to ``start``.

        Their delays are in the group ``group`` or above.
        """
        free = self.num_devices * period - labels.load.sum(axis=1) - load
        weights = self.problem.table.training.of([(0, start)])
        stash = float(self.problem.table.stash[0, start]) if start else 0.0
        others = labels.kept.sum(axis=1, dtype=float)[:, None] - labels.kept
        needed = weights - self.num_layers * self.rounded + (group - 1)[:, None] * stash + others + kept
        enough: NDArray[np.bool_] = needed * (1 - 1e-12) <= float(self.num_devices) * self.memory
        enough &= (self.compute[start] <= free)[:, None]
        return enough

    def _trace(self, known: dict[int, _Labels], place: int) -> Placement:
        cuts, devices, boundary = [0], [], 0
        while boundary < self.num_layers:
            devices.append(int(known[boundary].top[place]))
            boundary, place = known[boundary].came_from[place].tolist()
            cuts.append(boundary)
        return Placement.of(cuts, devices)


def neighbours(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """Yield neighbours: a layer moved over a boundary, or a stage or a part of one on another device."""
    owner = [device for (start, stop), device in placement.stages for _ in range(start, stop)]
    seen = {placement}
    for (start, stop), _ in placement.stages:
        for first in range(start, stop):
            # Move all of the stage, or either end of it: that adds at most one boundary.
            for last in range(first + 1, stop + 1) if first == start else (stop,):
                for device in range(problem.platform.num_devices):
                    if device != owner[first]:
                        changed = [*owner[:first], *[device] * (last - first), *owner[last:]]
                        moved = Placement.of(range(len(changed) + 1), changed)
                        if moved not in seen:
                            seen.add(moved)
                            yield moved
