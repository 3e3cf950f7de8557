"""Orders of a step: the rules by which the devices of an allocation take turns.

A rule is a value that says, for any number of micro-batches, what a free device runs next (``step_simulator.py``):

- ``DepthRule``: 1F1B with a depth for each stage, or whatever is ready, with a limit on the micro-batches in
  flight of each stage;
- ``GroupRule``: interleaved 1F1B. A device with several stages takes micro-batches in groups: all of a group
  through its first stage, then through its second one, and so on, and back likewise. Groups of as many as there
  are devices are Megatron-LM's order (D. Narayanan et al., "Efficient large-scale language model training on GPU
  clusters using Megatron-LM", 2021, section 2.2); one group of all is breadth-first pipeline parallelism
  (J. Lamy-Poirier, 2022); groups of one are depth first. A first or a last stage that shares its device, an
  embedding or a head, may take no turn but run at once;
- ``PatternRule``: the order of a periodic pattern (MadPipe paper, section 4.3);
- ``FixedRule``: orders that were found, operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.step.step_simulator import (
    Choice,
    Positions,
    StepEngine,
    eager,
    in_order,
    one_f_one_b,
)

FIRST_AHEAD = 2
"""Micro-batches that a first stage that runs at once may be ahead of the second one."""


@dataclass(frozen=True, slots=True)
class DepthRule:
    """Rule with a limit on the micro-batches in flight of each stage."""

    name: str
    """Name of the rule: ``"1F1B"``, or ``"furthest"`` or ``"oldest"`` first (``step_simulator.eager``)."""
    depths: tuple[int, ...]
    """Most micro-batches in flight of each stage."""

    def choice(self, engine: StepEngine, num_micro_batches: int) -> Choice:
        if self.name == "1F1B":
            return in_order(self.orders(engine, num_micro_batches))
        return eager(engine, self._depths(num_micro_batches), oldest_first=self.name == "oldest")

    def orders(self, engine: StepEngine, num_micro_batches: int) -> tuple[Positions, ...]:
        """Return what each device does in 1F1B; a device has one stage."""
        return one_f_one_b(engine, self._depths(num_micro_batches), num_micro_batches)

    def _depths(self, num_micro_batches: int) -> list[int]:
        return [min(depth, num_micro_batches) for depth in self.depths]


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Interleaved 1F1B: forwards and backwards of a device follow fixed sequences, by groups of micro-batches."""

    group: int
    """Micro-batches of a group."""
    limits: tuple[int, ...]
    """Most forwards of each device, over all its stages, whose backwards have not begun."""
    alternates: bool
    """True: after ``limit - 1`` forwards a forward and a backward take turns, as in Megatron-LM; False: a backward
    begins whenever it can, else a forward."""
    at_once: tuple[int, ...] = ()
    """The first or the last stage, or both, where they run as soon as they can and count for no limit."""

    def choice(self, engine: StepEngine, num_micro_batches: int) -> Choice:
        """Return the choice.

        Raises:
            WaitInCircleError: a limit is below what the order needs, as far as that is known beforehand.
        """
        if self.alternates:
            choice = in_order(self.orders(engine, num_micro_batches))
        else:
            choice = _backward_first(self.sequences(engine, num_micro_batches), self.limits)
        if not self.at_once:
            return choice
        choice = _at_once(engine, self.at_once, choice)
        if 0 not in self.at_once:
            return choice
        # What the first stage waits for happens on another device, and ends no wait there: so the order of a step
        # in which it waited for too long is run again.
        run = engine.run(num_micro_batches, choice)
        assert run is not None
        return in_order([tuple(order) for order in run.orders])

    def orders(self, engine: StepEngine, num_micro_batches: int) -> tuple[Positions, ...]:
        """Return what each device does, where forwards and backwards take turns; without what runs at once."""
        every = self.sequences(engine, num_micro_batches)
        return tuple(_alternating(*each, limit) for each, limit in zip(every, self.limits, strict=True))

    def sequences(self, engine: StepEngine, num_micro_batches: int) -> list[tuple[Positions, Positions]]:
        """Return the forwards and the backwards of each device in turn, each in its order."""
        return [
            _sequences(
                engine, [stage for stage in stages if stage not in self.at_once], self.group, num_micro_batches
            )
            for stages in engine.stages_of
        ]


@dataclass(frozen=True, slots=True)
class PatternRule:
    """Rule that follows the order of a periodic pattern."""

    pattern: Pattern

    def choice(self, engine: StepEngine, num_micro_batches: int) -> Choice:
        pattern = self.pattern
        position = {name: index for index, name in enumerate(engine.names)}
        moments = [
            (begin + number * pattern.period, begin + number * pattern.period + each.ticks, number, each.name)
            for each, begin in zip(pattern.operations, pattern.begins, strict=True)
            if each.name in position
            for number in range(num_micro_batches)
        ]
        orders: list[list[int]] = [[] for _ in range(engine.num_devices)]
        # An operation without time comes before others at the same instant; then the path's order decides.
        for _, _, _, index in sorted((begin, end, number, position[name]) for begin, end, number, name in moments):
            orders[engine.device[index]].append(index)
        return in_order([tuple(order) for order in orders])


@dataclass(frozen=True, slots=True)
class FixedRule:
    """Rule that follows given orders, for their number of micro-batches alone."""

    orders: tuple[Positions, ...]

    def choice(self, engine: StepEngine, num_micro_batches: int) -> Choice:
        return in_order(self.orders)


Rule = DepthRule | GroupRule | PatternRule | FixedRule


def fixed_orders(rule: Rule, engine: StepEngine, num_micro_batches: int) -> tuple[Positions, ...] | None:
    """Return what each device does where a rule says so beforehand; None where it chooses among what has come."""
    if isinstance(rule, FixedRule):
        return rule.orders
    if isinstance(rule, GroupRule) and rule.alternates and not rule.at_once:
        return rule.orders(engine, num_micro_batches)
    if isinstance(rule, DepthRule) and rule.name == "1F1B":
        return rule.orders(engine, num_micro_batches)
    return None


def natural_limits(engine: StepEngine, orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return one more than the forwards that each device ran before its first backward."""
    limits = []
    for order in orders:
        backward = (index for index, position in enumerate(order) if position >= engine.num_stages)
        limits.append(next(backward, len(order)) + 1)
    return tuple(limits)


def megatron_limits(devices: Sequence[int], group: int) -> tuple[int, ...]:
    """Return the limits of Megatron-LM's interleaved 1F1B: 2 (P - d - 1) + (v - 1) P forwards, and one more.

    Args:
        devices: of the stages that take turns; d is the turn in which a device comes first.
    """
    num_devices = max(devices) + 1
    turn = {place: number for number, place in enumerate(dict.fromkeys(devices))}
    return tuple(
        2 * (num_devices - turn[place] - 1) + (devices.count(place) - 1) * group + 1
        for place in range(num_devices)
    )


def _at_once(engine: StepEngine, stages: Sequence[int], others: Choice) -> Choice:
    """Return the choice by which some stages run as soon as they can, backwards first; else as another one says.

    Forwards of the first stage wait for those of the second one, or else all of them would run before any.
    """
    last = len(engine.ticks) - 1
    of_device: list[list[int]] = [[] for _ in range(engine.num_devices)]
    for stage in stages:
        of_device[engine.device[stage]] += [last - stage, stage]

    def choose(device: int, arrived: list[int], begun: list[int]) -> int:
        for position in of_device[device]:
            if begun[position] < arrived[position] and (position or begun[0] - begun[1] < FIRST_AHEAD):
                return position
        return others(device, arrived, begun)

    return choose


def _sequences(
    engine: StepEngine, stages: Sequence[int], group: int, num_micro_batches: int
) -> tuple[Positions, Positions]:
    """Return the forwards and the backwards of some stages of a device, each in its order."""
    size = len(engine.ticks)
    down: list[int] = []
    up: list[int] = []
    for first in range(0, num_micro_batches, group):
        count = min(group, num_micro_batches - first)
        for stage in stages:
            down += [stage] * count
        for stage in reversed(stages):
            up += [size - 1 - stage] * count
    return tuple(down), tuple(up)


def _alternating(down: Positions, up: Positions, limit: int) -> Positions:
    ahead = min(limit - 1, len(down))
    turns = [each for pair in zip(down[ahead:], up, strict=False) for each in pair]
    return (*down[:ahead], *turns, *up[len(down) - ahead :])


def _backward_first(sequences: Sequence[tuple[Positions, Positions]], limits: Sequence[int]) -> Choice:
    num_down, num_up = [0] * len(sequences), [0] * len(sequences)

    def choose(device: int, arrived: list[int], begun: list[int]) -> int:
        down, up = sequences[device]
        back = num_up[device]
        if back < len(up):
            position = up[back]
            if begun[position] < arrived[position]:
                num_up[device] += 1
                return position
        ahead = num_down[device]
        if ahead < len(down) and ahead - back < limits[device]:
            position = down[ahead]
            if begun[position] < arrived[position]:
                num_down[device] += 1
                return position
        return -1

    return choose


def in_flight(engine: StepEngine, orders: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the most micro-batches of each stage whose forward began before an earlier one's backward did."""
    most = [0] * engine.num_stages
    for order in orders:
        count = [0] * engine.num_stages
        for position in order:
            if position < engine.num_stages:
                count[position] += 1
                most[position] = max(most[position], count[position])
            else:
                count[len(engine.ticks) - 1 - position] -= 1
    return tuple(most)


def least_bytes(engine: StepEngine, orders: Sequence[Positions]) -> int:
    """Return bytes that the largest device needs at least in given orders: weights, buffers and stashes."""
    most = 0
    reserved = [0] * engine.num_devices
    for boundary, num_bytes in enumerate(engine.crossing_bytes):
        for place in engine.device[boundary : boundary + 2]:
            reserved[place] += engine.platform.comm_buffers * num_bytes
    change = np.array([*engine.stash, *(-stash for stash in reversed(engine.stash))], dtype=np.int64)
    for place, order in enumerate(orders):
        late = sum(late for stage, late in enumerate(engine.late_gradients) if engine.device[stage] == place)
        stashed = int(np.cumsum(change[list(order)]).max())
        most = max(most, engine.kept[place] - late + reserved[place] + stashed)
    return most
