"""Memory of a plan for the replay (``replay.py``): from the instants of its operations to the peak of each device.

Every term is derived here a second time, from the chain and from the operations alone; ``memory.py`` is what the
planner counts with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.plan import MemoryUse, Plan, PlannedStage
from deepspeed_partition.planner.problem import Chain, LayerProfile
from deepspeed_partition.planner.simulate.replay_step import Timeline, as_spans, boundaries_of
from deepspeed_partition.planner.simulate.replay_versions import HeldByStage, held_by_stage

DevicePeaks = tuple[MemoryUse, ...]
"""Memory of one device at each of the moments when it needs the most: the same total, possibly in other terms."""


def costs_of(plan: Plan, chain: Chain, *, in_step: bool) -> list[StageCost]:
    """Return the costs of the stages of a plan, in a step that drains or in a steady state."""
    costs = []
    for stage in plan.stages:
        names = Counter(
            name
            for other in plan.stages
            if other.device == stage.device
            for layer in chain.layers[slice(*other.layers)]
            for name, _ in layer.shared_weights
        )
        several = frozenset(name for name, count in names.items() if count > 1)
        speed = plan.platform.speed_of(stage.device)
        costs.append(StageCost(chain, stage, several, in_step=in_step, speed=speed))
    return costs


class StageCost:
    """Times and bytes of one stage, from the chain alone.

    Args:
        in_step: whether the stage runs in a step that drains, or in a steady state, which has gradients at any
            time and counts the larger of what a layer needs forward and backward.
        shared: names of weights that several layers of the device share.
        speed: of its device; it divides all seconds.
    """

    def __init__(
        self,
        chain: Chain,
        stage: PlannedStage,
        shared: Set[str] = frozenset(),
        *,
        in_step: bool = False,
        speed: float = 1.0,
    ) -> None:
        self.speed = speed
        start, stop = stage.layers
        layers = chain.layers[start:stop]
        self.forward_seconds = math.fsum(layer.forward_seconds for layer in layers)
        self.backward_seconds = math.fsum(layer.backward_seconds for layer in layers)
        self.weight_bytes = sum(layer.weight_bytes for layer in layers)
        halves = [(layer.backward_input_seconds, layer.backward_weight_seconds) for layer in layers]
        known = [(first, second) for first, second in halves if first is not None and second is not None]
        self.input_seconds, self.later_seconds = (
            (math.fsum(each) for each in zip(*known, strict=True)) if known else (0.0, 0.0)
        )
        """Seconds of the two halves of the backward: the gradient of the input, the gradients of the weights."""
        self.has_halves = len(known) == len(layers)
        self.input_bytes = chain.boundary_bytes(start)
        """Bytes of the input, which is all that a forward that keeps nothing leaves."""
        self.weight_stash_bytes = sum(
            (layer.stash_bytes or 0) if layer.weight_stash_bytes is None else layer.weight_stash_bytes
            for layer in layers
        )
        """Bytes of one micro-batch from the start of the first half of its backward to the end of the second."""
        self.passing_bytes = max(
            0, *(_passing(layer, index, self.input_bytes, in_step=in_step) for index, layer in enumerate(layers))
        )
        """Bytes that a forward that keeps nothing needs while it runs."""
        blocks = [(first - start, last - start) for first, last in stage.blocks]
        kept = [layer.stash_bytes or 0 for layer in layers]
        recomputed = 0
        for first, last in blocks:  # of a block the first layer keeps the input, and the others nothing
            block_input = chain.boundary_bytes(start + first)
            recomputed = max(recomputed, sum(kept[first:last]) - block_input)
            kept[first:last] = [block_input] + [0] * (last - first - 1)
            again = math.fsum(layer.forward_seconds for layer in layers[first:last])
            self.backward_seconds += again
            self.input_seconds += again
        if stop < chain.num_layers and all(last < len(layers) for _, last in blocks):
            kept[-1] += layers[-1].cut_stash_bytes
        self.stash_bytes = sum(kept)
        late = [_late_gradient_bytes(layer, shared) if in_step else 0 for layer in layers]
        self.late_gradient_bytes = sum(late)
        """Gradients that come with the first backward of the step."""
        self.forward_transient_bytes = self.backward_transient_bytes = self.first_transient_bytes = 0
        for index, layer in enumerate(layers):
            forward, backward = _transient(layers, kept, blocks, index)
            if layer.running_bytes is None:
                backward = forward + recomputed
            elif in_step and layer.forward_running_bytes is not None:
                forward -= layer.running_bytes - layer.forward_running_bytes
            self.forward_transient_bytes = max(self.forward_transient_bytes, forward)
            self.backward_transient_bytes = max(self.backward_transient_bytes, backward)
            # In the first backward the gradients of those behind it have come, and of its own so much.
            own = (
                late[index] if layer.first_backward_bytes is None else min(late[index], layer.first_backward_bytes)
            )
            come = sum(late) if layer.running_bytes is None else own + sum(late[index + 1 :])
            self.first_transient_bytes = max(self.first_transient_bytes, backward + come)
        # What is counted while the first half runs may be less than the stash that is there at its beginning.
        beyond = max(0, self.stash_bytes - self.weight_stash_bytes)
        measured = any(layer.running_bytes is not None for layer in layers)
        self.input_transient_bytes = self.backward_transient_bytes + (beyond if measured else 0)

    def seconds(self, kind: str, *, recomputes: bool) -> float | None:
        """Return how long an operation lasts; None for half a backward where the chain does not say.

        Args:
            kind: the first letter of its name.
            recomputes: its micro-batch kept nothing, and no operation of its own runs the forward again.
        """
        again = self.forward_seconds if recomputes else 0.0
        if kind == "B":
            return (self.backward_seconds + again) / self.speed
        if kind in "IW":
            if not self.has_halves:
                return None
            return (self.later_seconds if kind == "W" else self.input_seconds + again) / self.speed
        return self.forward_seconds / self.speed


def _passing(layer: LayerProfile, index: int, input_bytes: int, *, in_step: bool) -> int:
    """Return what a layer needs in a forward that keeps nothing; behind layer 0 the input of the stage waits."""
    if layer.running_bytes is None:
        return layer.transient_bytes
    running = layer.running_bytes
    if in_step and layer.forward_running_bytes is not None:
        running = layer.forward_running_bytes
    return running + (input_bytes if index else 0)


def _late_gradient_bytes(layer: LayerProfile, shared: Set[str]) -> int:
    """Return the gradients of weights that no other layer of the device has: those of others may come earlier."""
    own = layer.weight_bytes - sum(size for name, size in layer.shared_weights if name in shared)
    return layer.gradient_bytes * own // layer.weight_bytes if layer.weight_bytes else 0


def _transient(
    layers: Sequence[LayerProfile], kept: Sequence[int], blocks: Sequence[tuple[int, int]], index: int
) -> tuple[int, int]:
    """Return what one layer of a stage needs beyond all that the stage keeps, in its forward and its backward."""
    running = layers[index].running_bytes
    if running is None:
        return layers[index].transient_bytes, layers[index].transient_bytes
    for first, last in blocks:
        if first < index < last:  # its backward begins when the forwards of the block have run again
            again = sum(layer.stash_bytes or 0 for layer in layers[first:index])
            beyond = running - sum(kept[first:])
            return beyond + kept[first], beyond + max(kept[first], again)
    return running - sum(kept[index:]), running - sum(kept[index:])


class _Residents:
    """Intervals during which something is kept, and how many of them contain given instants.

    ``instants``: an interval that begins and ends at one instant contains it, as the micro-batch in a stage that
    takes no time; otherwise it contains none, as for a tensor that is used the moment it comes.
    """

    def __init__(self, spans: NDArray[Any], *, instants: bool = False) -> None:
        instant = spans[:, 0] == spans[:, 1]
        self.starts = np.sort(spans[:, 0])
        self.lasting_starts = np.sort(spans[~instant][:, 0])
        self.lasting_ends = np.sort(spans[~instant][:, 1])
        self.instants = np.sort(spans[instant & instants][:, 0])

    def count(self, at: NDArray[Any]) -> NDArray[np.int64]:
        """Count the intervals at each instant; what ends there is gone before anything begins there."""
        lasting = self.lasting_starts.searchsorted(at, "right") - self.lasting_ends.searchsorted(at, "right")
        return lasting + self.instants.searchsorted(at, "right") - self.instants.searchsorted(at, "left")


def peaks_of(
    plan: Plan, chain: Chain, costs: Sequence[StageCost], timeline: Timeline
) -> tuple[tuple[int, ...], tuple[DevicePeaks, ...]]:
    """Return the most in flight of each stage, and each device's memory at its peaks, in the timeline's window."""
    in_flight = [0] * len(plan.stages)
    memory: list[DevicePeaks] = []
    for device in range(plan.platform.num_devices):
        moments = Moments(plan, chain, costs, timeline, device)
        for index, alive in moments.in_flight.items():
            in_flight[index] = int(alive.max())
        memory.append(tuple(dict.fromkeys(moments.use(place) for place in moments.at_peak)))
    return tuple(in_flight), tuple(memory)


class Moments:
    """What a device holds at each instant at which that may grow, in the window of a timeline.

    Arrays have an entry for each instant. Stages are named by their numbers, ends of boundaries by the number of
    the boundary and their side.

    Args:
        ends: count also at the instants at which it may shrink, and at the beginning.
    """

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        costs: Sequence[StageCost],
        timeline: Timeline,
        device: int,
        *,
        ends: bool = False,
    ) -> None:
        mine = [index for index, stage in enumerate(plan.stages) if stage.device == device]
        lives = {index: _Lives(timeline, index) for index in mine}
        at_ends = dict(_waiting_at_ends(plan, chain, timeline, device))
        inside = dict(_waiting_inside(plan, chain, timeline, device))
        running = {
            (index, kind): _Residents(timeline.spans[f"{kind}{index}"], instants=True)
            for index in mine
            for kind in "FBfRIW"
            if f"{kind}{index}" in timeline.names
        }
        self.fixed_bytes = plan.platform.fixed_bytes
        held_of_weights = {index: held_by_stage(plan, chain, index) for index in mine if plan.is_asynchronous}
        self.weights, self.after_backwards = _for_weights(plan, chain, device, held_of_weights)
        """Bytes for weights, with all gradients, and those needed besides behind the last backward."""
        self.updates_behind = f"B{mine[0]}" if mine and plan.is_asynchronous else None
        """Name of the backward behind which updates come, where micro-batches are in flight then; else None."""
        held = {(index, term): residents for index in mine for term, residents in lives[index].held.items()}
        in_flight = {index: lives[index].in_flight for index in mine}
        residents = [
            *in_flight.values(),
            *held.values(),
            *(r for r, _ in at_ends.values()),
            *(r for r, _ in inside.values()),
        ]
        starts = [r.starts for r in (*residents, *running.values())]
        if ends and starts:
            starts += [r.lasting_ends for r in (*residents, *running.values())]
            starts.append(np.zeros(1, dtype=np.int64))  # weights are there before the first operation
        instants = np.unique(np.concatenate(starts)) if starts else np.zeros(0, dtype=np.int64)
        self.instants = instants[(instants >= timeline.window[0]) & (instants < timeline.window[1])]
        """Ticks."""
        self.in_flight = {index: in_flight[index].count(self.instants) for index in mine}
        self.held = {
            (index, term): (residents.count(self.instants), getattr(costs[index], f"{term}_bytes"))
            for (index, term), residents in held.items()
        }
        """Micro-batches that hold something at each instant, and the bytes of one, by stage and by what that is:
        ``stash``, ``input`` (they kept nothing and have not been recomputed) or ``weight_stash`` (the gradients of
        the weights are still to come)."""
        reserved = plan.platform.comm_buffers
        self.tensors = {end: np.maximum(reserved, r.count(self.instants)) for end, (r, _) in at_ends.items()}
        """Tensors at each end of a boundary, reserved or waiting."""
        self.tensors |= {(index, "inside"): r.count(self.instants) for index, (r, _) in inside.items()}
        self.tensor_bytes = {end: size for end, (_, size) in at_ends.items()}
        self.tensor_bytes |= {(index, "inside"): size for index, (_, size) in inside.items()}
        self.late_gradients = {
            index: (
                self.instants
                < min(
                    timeline.spans[name][:, 1].min()
                    for name in (f"B{index}", f"W{index}")
                    if name in timeline.names
                ),
                costs[index].late_gradient_bytes,
            )
            for index in mine
        }
        """Gradients that are still to come, by stage: whether its first backward has not ended, at each instant,
        and their bytes."""
        self.running = {
            f"{kind}{index}": (runs.count(self.instants) > 0, self._transient(costs[index], index, kind))
            for (index, kind), runs in running.items()
        }
        """Operations by name, such as ``F0``: whether each runs, and the bytes that it needs only then, at each
        instant."""

    def _transient(self, cost: StageCost, index: int, kind: str) -> NDArray[np.int64]:
        while_forward = {"F": cost.forward_transient_bytes, "R": cost.forward_transient_bytes}
        alike = while_forward | {"f": cost.passing_bytes, "I": cost.input_transient_bytes}
        if kind in alike:
            return np.full(len(self.instants), alike[kind], dtype=np.int64)
        is_first, _ = self.late_gradients[index]
        transient = np.where(is_first, cost.first_transient_bytes, cost.backward_transient_bytes)
        return (
            np.maximum(transient, self.after_backwards) if self.updates_behind == f"{kind}{index}" else transient
        )

    @cached_property
    def at_peak(self) -> tuple[int | None, ...]:
        """Places of instants of the peak, one for each set of terms; None: after the last backward of a step."""
        total = self._terms.sum(axis=0)
        # Behind the last backward no micro-batch is there, and no tensor.
        drains = self.updates_behind is None
        if not len(total) or (drains and self.weights + self.after_backwards > total.max()):
            return (None,)
        places = np.flatnonzero(total == total.max())
        _, first = np.unique(self._terms[:, places], axis=1, return_index=True)
        return tuple(places[np.sort(first)].tolist())

    def over_time(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the instants in ticks, and bytes at each: weights, stashes, buffers, transient.

        The second has the shape (4, number of instants). A device without stages has one instant, the first.
        """
        if len(self.instants):
            return self.instants, self._terms
        return np.zeros(1, dtype=np.int64), np.array([[self.weights], [0], [0], [0]], dtype=np.int64)

    def use(self, place: int | None) -> MemoryUse:
        """Return the bytes at an instant, by term."""
        if place is None:
            return MemoryUse(
                weights=self.weights, stash=0, buffers=0, transient=self.after_backwards, fixed=self.fixed_bytes
            )
        held, stash, buffers, transient = self._terms[:, place].tolist()
        return MemoryUse(weights=held, stash=stash, buffers=buffers, transient=transient, fixed=self.fixed_bytes)

    @cached_property
    def _terms(self) -> NDArray[np.int64]:
        """Bytes at each instant: weights, stashes, buffers, transient; shape (4, number of instants)."""
        terms = np.zeros((4, len(self.instants)), dtype=np.int64)
        held, stash, buffers, transient = terms
        held += self.weights
        for is_absent, num_bytes in self.late_gradients.values():
            held -= is_absent * num_bytes
        for count, num_bytes in self.held.values():
            stash += count * num_bytes
        for end, count in self.tensors.items():
            buffers += count * self.tensor_bytes[end]
        for runs, needs in self.running.values():
            np.maximum(transient, runs * needs, out=transient)
        return terms


def weights_of(plan: Plan, chain: Chain, device: int) -> int:
    """Return the bytes that training keeps for the weights of a device, with one version of them."""
    return _for_weights(plan, chain, device, {})[0]


def _for_weights(plan: Plan, chain: Chain, device: int, held: Mapping[int, HeldByStage]) -> tuple[int, int]:
    """Return the bytes that training keeps for the weights of a device, and those needed behind its backwards.

    Args:
        held: versions and gradients of each of its stages, where the pipeline never drains. Two versions are among
            ``weight_copies`` then, and one among ``training_bytes``.
    """
    placed = [
        (layer, index)
        for index, stage in enumerate(plan.stages)
        if stage.device == device
        for layer in chain.layers[slice(*stage.layers)]
    ]
    layers = [layer for layer, _ in placed]
    copies, seen = Fraction(str(plan.platform.weight_copies)), set[str]()
    kept = multiplied = 0
    for layer, index in placed:
        again = [size for key, size in layer.shared_weights if key in seen]
        seen.update(key for key, _ in layer.shared_weights)
        own = layer.weight_bytes - sum(again)
        if layer.training_bytes is None:
            multiplied += own
            if held:
                kept += (held[index].versions - 2) * own + (held[index].gradients - 1) * layer.weight_bytes
        else:
            kept += layer.training_bytes
            kept -= sum(layer.training_bytes * size // layer.weight_bytes for size in again if layer.weight_bytes)
            if held:
                kept += (held[index].versions - 1) * own if layer.num_trainable_parameters else 0
                kept += (held[index].gradients - 1) * layer.gradient_bytes
    steps = [layer.optimizer_transient_bytes for layer in layers]
    optimizer = sum(steps) if plan.platform.optimizer_step == "sum" else max(steps, default=0)
    reduction = sum(layer.reduction_bytes for layer in layers)
    return kept + math.ceil(copies * multiplied), max(optimizer, reduction)


_Named = str | tuple[str, str, int]
"""A name; or two first letters and the number of a stage, which runs one of the two on each micro-batch."""


def _between(timeline: Timeline, first: _Named, first_edge: int, second: _Named, second_edge: int) -> NDArray[Any]:
    """Return per micro-batch the instants of an edge (0 start, 1 end) of one operation and of another."""
    begins = _spans_of(timeline, first)[:, first_edge]
    return np.stack([begins, np.maximum(begins, _spans_of(timeline, second)[:, second_edge])], axis=1)


def _spans_of(timeline: Timeline, named: _Named) -> NDArray[Any]:
    """Return when one operation begins and ends on each micro-batch: a row each."""
    if isinstance(named, str):
        return timeline.spans[named]
    often, seldom = f"{named[0]}{named[2]}", f"{named[1]}{named[2]}"
    if seldom not in timeline.names:
        return timeline.spans[often]
    operations = timeline.operations
    return as_spans(
        operations[seldom, number] if (seldom, number) in operations else operations[often, number]
        for number in timeline.micro_batches
    )


class _Lives:
    """What a stage holds of its micro-batches, and when."""

    def __init__(self, timeline: Timeline, stage: int) -> None:
        if not any(f"{kind}{stage}" in timeline.names for kind in "fIW"):
            self.in_flight = _Residents(_between(timeline, f"F{stage}", 0, f"B{stage}", 1), instants=True)
            self.held = {"stash": self.in_flight}
            return
        whole: list[tuple[int, int]] = []
        spans: dict[str, list[tuple[int, int]]] = {"stash": [], "input": [], "weight_stash": []}
        for micro_batch in timeline.micro_batches:
            ran = {
                kind: timeline.operations[f"{kind}{stage}", micro_batch]
                for kind in "FBfRIW"
                if (f"{kind}{stage}", micro_batch) in timeline.operations
            }
            forward = ran["F"] if "F" in ran else ran["f"]
            back = ran["B"] if "B" in ran else ran["I"]
            end = max(back[1], ran["W"][1]) if "W" in ran else back[1]
            whole.append((forward[0], max(forward[0], end)))
            begin = forward[0]
            if "f" in ran:  # it holds its input until it is recomputed, by itself or at the start of its backward
                begin = ran["R"][0] if "R" in ran else back[0]
                spans["input"].append((forward[1], max(forward[1], begin)))
            until = back[0] if "W" in ran else back[1]
            if "W" not in ran or until > begin:
                spans["stash"].append((begin, max(begin, until)))
            if "W" in ran:
                spans["weight_stash"].append((back[0], end))
        self.in_flight = _Residents(as_spans(whole), instants=True)
        # An input that is used the moment it is there has not waited.
        self.held = {
            term: _Residents(as_spans(each), instants=term != "input") for term, each in spans.items() if each
        }


def _waiting_at_ends(
    plan: Plan, chain: Chain, timeline: Timeline, device: int
) -> Iterator[tuple[tuple[int, str], tuple[_Residents, int]]]:
    """Yield the tensors, activations and gradients together, at each end of a boundary that lies on ``device``."""
    for index, num_bytes in boundaries_of(plan, chain, between_devices=True):
        before, after = ("F", "f", index), ("F", "f", index + 1)
        if plan.stages[index].device == device:
            spans = [
                _between(timeline, before, 1, f"SF{index}", 1),
                _between(timeline, f"SB{index}", 0, ("B", "I", index), 0),
            ]
            yield (index, "upper"), (_Residents(np.concatenate(spans)), num_bytes)
        if plan.stages[index + 1].device == device:
            spans = [
                _between(timeline, f"SF{index}", 0, after, 0),
                _between(timeline, ("B", "I", index + 1), 1, f"SB{index}", 1),
            ]
            yield (index, "lower"), (_Residents(np.concatenate(spans)), num_bytes)


def _waiting_inside(
    plan: Plan, chain: Chain, timeline: Timeline, device: int
) -> Iterator[tuple[int, tuple[_Residents, int]]]:
    """Yield the tensors that wait between neighbouring stages of one device."""
    for index, num_bytes in boundaries_of(plan, chain, between_devices=False):
        if plan.stages[index].device == device:
            spans = [
                _between(timeline, ("F", "f", index), 1, ("F", "f", index + 1), 0),
                _between(timeline, ("B", "I", index + 1), 1, ("B", "I", index), 0),
            ]
            yield index, (_Residents(np.concatenate(spans)), num_bytes)
