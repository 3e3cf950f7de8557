"""Orders of a step with backwards in two halves: the rules by which a free device chooses what it runs next.

All rules run the gradient of an input, ``I``, as soon as it can begin, since other devices wait for it; then a
forward, as long as there is room and not too many micro-batches are ahead of their backwards; and the gradients of
weights, ``W``, where the device would be idle otherwise, where more of them wait than a limit, and where a forward
or an ``I`` needs their memory. With a limit of 0 this is 1F1B whose gradients are sent on earlier. ``patience``
says when a device waits for the next tensor rather than to begin a ``W``.

Source: P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", 2023 (the two halves, and ``W`` in the
bubbles), and "Pipeline Parallelism with Controllable Memory", 2024 (V shape). The rules here are greedy; the
handcrafted schedules of these papers are among their results for equal stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed_partition.planner.solvers.step.orders import GroupRule
from deepspeed_partition.planner.solvers.step.split_engine import SplitChoice, SplitEngine, SplitSimulation

UNLIMITED = 2**30
"""A limit that limits nothing."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Rule of a step with halves."""

    depths: tuple[int, ...]
    """Most micro-batches of each stage that have begun their forward and not their backward; with ``group``, of
    each device, over all its stages."""
    most_waiting: int
    """Most ``W`` of a device that wait while it runs something else."""
    patience: float
    """A device that could run nothing but a ``W`` waits for the next tensor, if that may come within this part of
    the time of the ``W``; 0: it never waits."""
    group: int = 0
    """Micro-batches that a device takes through one of its stages before the next one; 0: it takes what is
    furthest on the path."""

    def choice(self, engine: SplitEngine, num_micro_batches: int) -> SplitChoice:
        """Return the choice of this rule, for one simulation."""
        forwards = self._grouped(engine, num_micro_batches) if self.group else self._furthest(engine)
        stages_of = engine.stages_of
        backs = [sorted((engine.backs[stage] for stage in mine), reverse=True) for mine in stages_of]
        size = engine.num_stages

        def choose(state: SplitSimulation, device: int) -> int:
            mine, room = stages_of[device], engine.rooms[device]
            waiting = [stage for stage in mine if state.open[stage]]
            later = 2 * size + max(waiting, key=lambda stage: engine.weight_stash[stage]) if waiting else -1
            if waiting and sum(state.open[stage] for stage in waiting) > self.most_waiting:
                return later
            held = state.held[device]
            for position in backs[device]:
                if state.begun[position] == state.arrived[position]:
                    continue
                stage = 2 * size - 1 - position
                more = engine.weight_stash[stage] - engine.stash[stage] if engine.later[stage] is not None else 0
                if waiting and held + more + engine.input_transient[stage] > room:
                    return later
                return position
            for stage in forwards(state, device):
                if held + engine.stash[stage] + engine.transient[stage] <= room:
                    return stage
                if waiting:
                    return later
            if waiting and self.patience:
                ticks = engine.later[later - 2 * size] or 0
                if state.next_arrival(device) - state.now < self.patience * ticks:
                    return -1
            return later

        return choose

    def _furthest(self, engine: SplitEngine) -> Callable[[SplitSimulation, int], Iterator[int]]:
        depths = self.depths

        def forwards(state: SplitSimulation, device: int) -> Iterator[int]:
            for stage in reversed(engine.stages_of[device]):
                begun = state.begun[stage]
                if begun < state.arrived[stage] and begun - state.begun[engine.backs[stage]] < depths[stage]:
                    yield stage

        return forwards

    def _grouped(
        self, engine: SplitEngine, num_micro_batches: int
    ) -> Callable[[SplitSimulation, int], Iterator[int]]:
        rule = GroupRule(self.group, self.depths, alternates=False)
        sequences = [down for down, _ in rule.sequences(engine, num_micro_batches)]

        def forwards(state: SplitSimulation, device: int) -> Iterator[int]:
            mine = engine.stages_of[device]
            done = sum(state.begun[stage] for stage in mine)
            back = sum(state.begun[engine.backs[stage]] for stage in mine)
            if done < len(sequences[device]) and done - back < self.depths[device]:
                stage = sequences[device][done]
                if state.begun[stage] < state.arrived[stage]:
                    yield stage

        return forwards
