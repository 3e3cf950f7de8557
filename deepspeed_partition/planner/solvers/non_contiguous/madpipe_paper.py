"""MadPipe as its paper prints it: a dynamic program on a grid, Algorithm 1 around it, then one schedule.

For comparison only: ``one_special_device.py`` answers the same question exactly and sooner. With layers k to l the
next stage (half-open here, so ``C(k)`` is for the boundary before it), p normal devices left, ``x (+) y`` the
delay of 1F1B* and g the micro-batches in flight, both at a target period That::

    T(l, p, t, m, V) = min over k < l of
        max(U(k, l), C(k), T(k, p - 1, t, m, V'))         a normal device, if M(k, l, g) fits
        max(t', C(k), T(k, p, t', m', V'))                the special one, if m' = m + M(k, l, g - 1) fits
    T(0, p, t, m, V) = t      T(l, 0, t, m, V) = U(0, l) + t, if m + M(0, l, g - 1) fits
    t' = t + U(k, l)      V' = (V (+) U(k, l)) (+) C(k)      g = ceil((V + U(k, l)) / That)

The load t, the memory m and the delay V are rounded to equally distributed values from 0 to U(0, L), to the
memory of a device, and to U(0, L) plus all transfers. T is the least, over paths through these states, of the
largest cost on the path; so it is computed from (L, P - 1, 0, 0, 0) downwards and only where paths lead, which
gives the same value and costs a fraction of the whole table.

What differs from the text, and why:

- Algorithm 1, line 7, uses That as it was before line 6. As printed it gives no answer where memory is tight.
- Its first upper bound adds the transfers over all boundaries; the printed sum has the end of the chain in the
  place of the first boundary. V' adds the transfers over the boundary before the stage, not those over the one
  behind it.
- g is at least 1: a layer that takes no time has a micro-batch in flight, too.
- Stash and transient bytes are those of the chain; transient bytes, which the paper has not, count on normal
  devices only, since the estimate for the special one is a lower bound.
- The paper does not say how it rounds. ``rounding="up"`` is the default: its value alone is never below that of
  the recurrence without a grid. What exceeds the largest delay has then no value to be rounded to and is left
  out; the others round it to the largest one.

Exact for its recurrence on the grid; the answer is never proved, since rounding and the estimate of the special
device's memory may miss better allocations. Cost for L layers, P devices and G values of the grid: O(L^2 P G)
time and O(L P G) memory per target period, at most; then one integer program.

Source: O. Beaumont, L. Eyraud-Dubois, A. Shilova, MadPipe, 2020, sections 4.2 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, fits
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road, one_by_one
from deepspeed_partition.planner.units import exact_bytes, format_bytes

Rounding = Literal["nearest", "up", "down"]
Integers = NDArray[np.int64]

SCHEDULE_SECONDS = 60.0
"""Limit of the paper for its integer program, in seconds; ``ilp.py`` spends 20 s on each of its two solves."""
MOST_STEPS = 1000
"""Most steps of a grid: times in ticks have 15 digits, and their products with this are exact in 64 bits."""
MOST_VALUES = 10_000_000
"""Most values of a grid, for one boundary and number of normal devices: they are 57,000 in the paper."""
NOTHING = 2**62
"""Cost that no allocation has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperMadPipe:
    """Solver ``madpipe-paper``: its period is that of its schedule, never proved.

    Raises:
        ValueError: the grid has less than 2 or more than ``MOST_STEPS`` values in a dimension, or more than
            ``MOST_VALUES`` in all; there is no iteration; the rounding is unknown.
    """

    load_steps: int = 101
    memory_steps: int = 11
    delay_steps: int = 51
    rounding: Rounding = "up"
    iterations: int = 10
    name: str = "madpipe-paper"

    def __post_init__(self) -> None:
        for key in ("load_steps", "memory_steps", "delay_steps"):
            if not 2 <= getattr(self, key) <= MOST_STEPS:
                raise ValueError(f"{key} is {getattr(self, key)}: it must be from 2 to {MOST_STEPS}")
        num_values = self.load_steps * self.memory_steps * self.delay_steps
        if num_values > MOST_VALUES:
            raise ValueError(f"the grid has {num_values} values and may have {MOST_VALUES}: use fewer steps")
        if self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}: it must be at least 1")
        if self.rounding not in ("nearest", "up", "down"):
            raise ValueError(f"rounding is {self.rounding!r}: it must be nearest, up or down")

    def solve(self, problem: Problem) -> Answer:
        if not problem.constraints.any_allocation or problem.num_micro_batches is not None:
            raise ValueError(
                f"{self.name} puts several stages on a device and knows no step that drains: use madpipe where "
                "each rank has one stage or micro-batches are given"
            )
        placement = self.allocation(problem)
        if placement is None:
            raise self._nothing_found(problem)
        if placement.is_contiguous and fits(problem, placement.cuts):
            return Answer((placement.cuts,))
        road = Road(problem, placement)
        needs = max(device.bytes_for_one for device in road.memory)
        if needs > problem.platform.memory_bytes:
            raise self._too_large(problem, placement, needs)
        return Answer((), patterns=(_scheduled(problem, road),))

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        """Return what a contiguous partition needs: what this method itself needs follows no rule."""
        return Contiguous(self.name).smallest_memory(problem)

    def allocation(self, problem: Problem) -> Placement | None:
        """Return the allocation of ``promised``."""
        return self.promised(problem)[1]

    def promised(self, problem: Problem) -> tuple[int, Placement | None]:
        """Run Algorithm 1: return the expected period of its allocation, in ticks, and the allocation.

        The allocation is None where no target period has one. Where the deadline passes, the answer is the best
        so far.
        """
        grid = Grid(problem, self)
        lower, upper = -(-int(problem.times.compute[-1]) // problem.platform.num_devices), problem.longest_period
        target, best = lower, NOTHING
        placement = None
        for _ in range(self.iterations):
            try:
                period, found = grid.best(target)
            except DeadlinePassed:
                break
            if max(period, target) < best:
                best, placement = max(period, target), found
            lower, upper = max(lower, min(period, target)), min(upper, max(period, target))
            last, target = target, (lower + upper) // 2
            if target == last:
                break  # the remaining iterations repeat this one
        return best, placement

    def _nothing_found(self, problem: Problem) -> InfeasibleError:
        memory = problem.platform.memory_bytes
        if problem.deadline.passed():
            return InfeasibleError(f"{self.name} had no allocation when its time was up: give it more time")
        found = self.smallest_memory(problem)
        smallest = None if found is None or found[1] <= memory else found[1]
        would_do = "" if smallest is None else (
            f"; the smallest memory with which a contiguous plan fits is {exact_bytes(smallest)} "
            f"({format_bytes(smallest)})"
        )  # fmt: skip
        return InfeasibleError(
            f"{self.name} finds no allocation for {format_bytes(memory)} per device on its grid{would_do}: give "
            "more memory or devices, or use madpipe",
            smallest_memory_bytes=smallest,
        )

    def _too_large(self, problem: Problem, placement: Placement, needs: int) -> InfeasibleError:
        memory = problem.platform.memory_bytes
        where = " ".join(f"{start}..{stop}@{device}" for (start, stop), device in placement.stages)
        return InfeasibleError(
            f"{self.name} has no plan for {format_bytes(memory)} per device: the allocation that it chose "
            f"({where}), by an estimate that is too low, needs {exact_bytes(needs)} ({format_bytes(needs)}), "
            f"{exact_bytes(needs - memory)} more than there are: give that much memory, or use madpipe",
            short_bytes=needs - memory,
            smallest_memory_bytes=needs,
        )


def _scheduled(problem: Problem, road: Road) -> Pattern:
    """Return the pattern of the integer program; where the time is up before, one micro-batch after the other."""
    found = ilp.schedule(road, None, Deadline(SCHEDULE_SECONDS, within=problem.deadline)).pattern
    return one_by_one(road) if found is None else found


@dataclass(frozen=True, slots=True)
class _States:
    """States that paths lead to at one boundary; a state is (delay, normals, memory, load) as one number."""

    codes: Integers
    costs: Integers
    """Least, over the paths to each state, of their largest cost; in ticks times ``Grid.scale``."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Costs and limits of every stage [k, l) with one l; arrays are indexed [k, delay]."""

    normal_fits: NDArray[np.bool_]
    special_fits: Integers
    """Largest memory of the special device before it took the stage, in steps of the grid."""
    special_adds: Integers
    """Memory that the stage adds to the special device, in steps of the grid."""
    delay: Integers
    """Delay V' above the stage, in steps of the grid; -1 above the largest one."""


class Grid:
    """Dynamic program on the grid: T(L, P - 1, 0, 0, 0) and an allocation that has it, for any target period."""

    def __init__(self, problem: Problem, options: PaperMadPipe) -> None:
        self.problem = problem
        self.rounding: Rounding = options.rounding
        times, table, size = problem.times, problem.table, problem.chain.num_layers
        self.num_layers = size
        self.num_normals = min(problem.platform.num_devices - 1, size)
        self.last_load, self.last_memory = options.load_steps - 1, options.memory_steps - 1
        self.last_delay = options.delay_steps - 1
        self.shape = (options.delay_steps, self.num_normals + 1, options.memory_steps, options.load_steps)
        self.scale = self.last_load
        """Factor of the costs, which are in ticks times this: loads of the special device are multiples of a
        step."""
        self.loads = np.maximum(times.compute[None, :] - times.compute[:, None], 0)
        self.total = int(times.compute[-1])
        self.load_adds = self._rounded(self.loads * self.last_load, self.total)
        self.transfer = times.round_trip
        self.longest = problem.longest_period
        # Bytes in units in which their products with the number of steps are 64-bit numbers.
        memory = max(1, problem.platform.memory_bytes - table.fixed_bytes)
        unit = -(-memory * self.last_memory // 2**61)
        self.memory = memory // unit
        self.fixed = -(-np.minimum(table.weights + table.buffers, memory + unit) // unit)
        self.stash = -(-np.minimum(table.stash, memory + unit) // unit)
        free = self.memory - self.fixed
        self.most_kept = np.where(free < 0, -1, free // np.maximum(self.stash, 1))
        self.most_kept[(free >= 0) & (self.stash == 0)] = NOTHING

    def best(self, target: int) -> tuple[int, Placement | None]:
        """Run MadPipe-DP: return the least period (ticks, rounded up), with memory counted at ``target``.

        The answer is ``NOTHING`` and None where there is no allocation.

        Raises:
            DeadlinePassed: the deadline passed before the answer was known.
        """
        start = np.ravel_multi_index((0, self.num_normals, 0, 0), self.shape)
        known = {self.num_layers: _States(np.array([start]), np.array([0]))}
        stages = {self.num_layers: self.stages(self.num_layers, target)}
        least = np.empty(math.prod(self.shape), dtype=np.int64)
        for boundary in range(self.num_layers - 1, 0, -1):
            least.fill(NOTHING)
            for stop, states in known.items():
                for _, _, codes, costs in self._moves(states, stages[stop], boundary, stop):
                    np.minimum.at(least, codes, costs)
            codes = np.flatnonzero(least < NOTHING)
            if len(codes):
                known[boundary] = _States(codes, least[codes])
                stages[boundary] = self.stages(boundary, target)
        return self._traced(known, stages)

    def _traced(self, known: dict[int, _States], stages: dict[int, Stages]) -> tuple[int, Placement | None]:
        """Trace the allocation from the cheapest end, each time to a state that leads there at the same cost."""
        best, place, end, on_special = NOTHING, -1, 0, False
        for stop, states in known.items():
            for special, places, _, costs in self._moves(states, stages[stop], 0, stop):
                if len(costs) and costs.min() < best:
                    one = int(costs.argmin())
                    best, place, end, on_special = int(costs[one]), int(places[one]), stop, special
        if best == NOTHING:
            return NOTHING, None
        cuts, specials = [0, end], [on_special]
        while end < self.num_layers:
            code, cost = known[end].codes[place], known[end].costs[place]
            place, end, on_special = next(
                (int(places[same][0]), stop, special)
                for stop, states in known.items() if stop > end
                for special, places, codes, costs in self._moves(states, stages[stop], end, stop)
                if (same := (codes == code) & (costs == cost)).any()
            )  # fmt: skip
            cuts.append(end)
            specials.append(on_special)
        devices = [0 if special else stage for stage, special in enumerate(specials, 1)]
        return -(-best // self.scale), Placement.of(cuts, devices)

    def _moves(
        self, states: _States, stages: Stages, start: int, stop: int
    ) -> Iterator[tuple[bool, NDArray[np.intp], Integers, Integers]]:
        """Yield the moves that lay layers ``start`` to ``stop`` as the next stage, from each state.

        Yields:
            Whether the stage is on the special device, places of states, where each leads, and at what cost; if
            ``start`` is 0, with that of T(0, ...).

        Raises:
            DeadlinePassed: the deadline has passed before the first move.
        """
        self.problem.deadline.check()
        delay, normals, memory, load = np.unravel_index(states.codes, self.shape)
        transfer, compute = self.scale * int(self.transfer[start]), self.scale * int(self.loads[start, stop])
        room = memory <= stages.special_fits[start][delay]
        if start == 0:
            # Without normal devices left the special one takes all the rest, whose time is not rounded.
            none_left = normals == 0
            places = np.flatnonzero(none_left & room)
            yield True, places, states.codes[places], np.maximum(
                states.costs[places], load[places] * self.total + compute
            )  # fmt: skip
        else:
            none_left = (normals == 0) | (stages.delay[start][delay] < 0)
        further = (stages.delay[start][delay] - delay) if start else np.zeros_like(delay)

        places = np.flatnonzero(~none_left & stages.normal_fits[start][delay])
        codes = states.codes[places] + self._step(0) * further[places] - self._step(1)
        costs = np.maximum(states.costs[places], max(compute, transfer))
        yield False, places, codes, costs if start else np.maximum(costs, load[places] * self.total)

        places = np.flatnonzero(~none_left & room)
        loaded = np.minimum(load[places] + self.load_adds[start, stop], self.last_load)
        adds = stages.special_adds[start][delay[places]]
        codes = states.codes[places] + self._step(0) * further[places] + self._step(2) * adds
        codes += loaded - load[places]
        yield True, places, codes, np.maximum(states.costs[places], np.maximum(loaded * self.total, transfer))

    def _step(self, axis: int) -> int:
        return math.prod(self.shape[axis + 1 :])

    def stages(self, stop: int, target: int) -> Stages:
        """Return every stage that ends at layer ``stop``. Delays are in ticks times ``last_delay``."""
        wide = self.last_delay * target
        delay = np.arange(self.last_delay + 1) * self.longest
        load = self.last_delay * self.loads[:stop, stop, None]
        in_flight = np.maximum(1, -(-(delay + load) // wide))
        above = _plus(_plus(delay, load, wide), self.last_delay * self.transfer[:stop, None], wide)
        steps = self._rounded(above, self.longest)
        over = -1 if self.rounding == "up" else self.last_delay
        kept = in_flight - 1
        fits = kept <= self.most_kept[:stop, stop, None]
        needs = self.fixed[:stop, stop, None] + np.where(fits, kept, 0) * self.stash[:stop, stop, None]
        return Stages(
            normal_fits=in_flight <= self.problem.table.max_in_flight[:stop, stop, None],
            special_fits=np.where(fits, self.last_memory + -(needs * self.last_memory) // self.memory, -1),
            special_adds=self._rounded(needs * self.last_memory, self.memory),
            delay=np.where(steps > self.last_delay, over, steps),
        )

    def _rounded(self, numerator: Integers, denominator: int) -> Integers:
        """Return a quotient as a whole number of steps of the grid."""
        if self.rounding == "up":
            return -(-numerator // denominator)
        return (numerator + (denominator // 2 if self.rounding == "nearest" else 0)) // denominator


def _plus(delay: Integers, load: Integers, period: int) -> Integers:
    """Return ``x (+) y`` as printed in the paper: a new group where the old one has no room."""
    group = -(-delay // period)
    return np.where(group == -(-(delay + load) // period), delay + load, group * period + load)
