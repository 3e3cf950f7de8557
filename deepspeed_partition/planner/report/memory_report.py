"""Explanation of a plan's memory: what the peak of each device consists of, when it comes, what would lower it.

What would lower it is found by trying: the peak is counted again, at the same instants, with another layer at the
end of a stage, with a stage recomputed, or with half the micro-batch. Times would change with these, too, so that
a plan made anew may hold a little more or less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_partition.planner.plan import MemoryUse, Plan, PlannedStage
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.remedies import divided
from deepspeed_partition.planner.simulate.replay import clock_of, timeline_of
from deepspeed_partition.planner.simulate.replay_memory import Moments, costs_of
from deepspeed_partition.planner.simulate.replay_step import Timeline
from deepspeed_partition.planner.units import format_bytes, format_seconds, shown

RUNS = {
    "F": "forward", "B": "backward", "f": "forward and keeps nothing", "R": "forward again",
    "I": "backward to its input", "W": "backward to its weights",
}  # fmt: skip
HELD = {
    "stash": "in flight",
    "input": "with their input alone",
    "weight_stash": "waiting for the gradients of weights",
}
MOST_NAMED = 3
"""Layers that are named of a stage: those that keep most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a peak."""

    term: str
    """Term of the sum: ``weights``, ``stash``, ``buffers``, ``transient`` or ``fixed``."""
    what: str
    """Words: which stage, boundary or layer."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change, and the bytes by which the peak of a device would be lower."""

    what: str
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Peak of one device."""

    device: int
    use: MemoryUse
    when: str
    """Words: the instant, and what runs there."""
    seconds: float | None
    """Seconds from the beginning of the step, or of the period, to the peak; None behind the last backward."""
    parts: tuple[Part, ...]
    """Parts of the peak, the largest first; their sum is ``use.total``."""
    remedies: tuple[Remedy, ...]
    """Changes that would lower the peak, that which lowers it most first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, in bytes and seconds."""
        return {
            "device": self.device,
            "peak_memory_bytes": self.use.total,
            "memory": self.use.to_dict(),
            "when": self.when,
            "seconds": self.seconds,
            "parts": [
                {"term": part.term, "what": part.what, "bytes": part.num_bytes} for part in self.parts
            ],
            "remedies": [
                {"what": remedy.what, "saved_bytes": remedy.saved_bytes} for remedy in self.remedies
            ],
        }  # fmt: skip


def explain_memory(plan: Plan, chain: Chain) -> list[DevicePeak]:
    """Explain the peak of each device of a plan.

    Raises:
        PlanMismatchError: the plan is for another chain.
        ValueError: the order of the plan's step cannot be run.
    """
    plan.check_chain(chain)
    timeline = timeline_of(plan, chain)
    if isinstance(timeline, str):
        raise ValueError(timeline)
    return [_Explanation(plan, chain, timeline, device).peak() for device in range(plan.platform.num_devices)]


class _Explanation:
    def __init__(self, plan: Plan, chain: Chain, timeline: Timeline, device: int) -> None:
        self.plan, self.chain, self.timeline, self.device = plan, chain, timeline, device
        self.mine = [index for index, stage in enumerate(plan.stages) if stage.device == device]
        self.moments = self._moments(plan, chain)
        self.place = self.moments.at_peak[0]

    def peak(self) -> DevicePeak:
        parts = sorted(self._parts(), key=lambda part: -part.num_bytes)
        seconds = None
        if self.place is not None:
            begin = int(self.moments.instants[self.place]) - self.timeline.window[0]
            seconds = clock_of(self.plan, self.chain).seconds(begin)
        return DevicePeak(
            device=self.device,
            use=self.moments.use(self.place),
            when=self._when(seconds),
            seconds=seconds,
            parts=tuple(part for part in parts if part.num_bytes),
            remedies=tuple(sorted(self._remedies(), key=lambda remedy: -remedy.saved_bytes)),
        )

    def _moments(self, plan: Plan, chain: Chain) -> Moments:
        costs = costs_of(plan, chain, in_step=plan.step is not None)
        return Moments(plan, chain, costs, self.timeline, self.device)

    def _when(self, seconds: float | None) -> str:
        if not self.mine:
            return "always: no stage is here"
        if seconds is None:
            return (
                "after the last backward of a step, where gradients are brought together and the optimizer steps"
            )
        running = [name for name, (runs, _) in self.moments.running.items() if runs[self.place]]
        what = " and ".join(self._in_words(name) for name in running) or "a tensor waits"
        whole = "the step" if self.plan.step is not None else "the period"
        return f"{format_seconds(seconds)} from the beginning of {whole}, while {what}"

    @staticmethod
    def _in_words(name: str) -> str:
        return f"stage {name[1:]} runs {RUNS[name[0]]}"

    def _parts(self) -> Iterator[Part]:
        use, moments, place = self.moments.use(self.place), self.moments, self.place
        yield Part(term="fixed", what="the process itself", num_bytes=use.fixed)
        yield from self._weights(use.weights)
        if place is None:
            yield Part(
                term="transient",
                what="copies of gradients, or what the optimizer's step needs",
                num_bytes=use.transient,
            )
            return
        for (index, term), (count, each) in moments.held.items():
            number = int(count[place])
            what = f"stage {index}: {number} {HELD[term]}, {format_bytes(each)} each"
            largest = self._largest_stashes(self.plan.stages[index]) if term == "stash" else ""
            yield Part(term="stash", what=f"{what}{largest}" if number else what, num_bytes=number * each)
        for end, tensors in moments.tensors.items():
            number, (boundary, side) = int(tensors[place]), end
            where = {
                "upper": f"to stage {boundary + 1}", "lower": f"from stage {boundary}",
                "inside": f"between stages {boundary} and {boundary + 1}, here",
            }[side]  # fmt: skip
            yield Part(
                term="buffers",
                what=f"boundary {where}: {number} tensors of {format_bytes(moments.tensor_bytes[end])}",
                num_bytes=number * moments.tensor_bytes[end],
            )
        if use.transient:
            name, most = max(
                ((name, int(needs[place])) for name, (runs, needs) in moments.running.items() if runs[place]),
                key=lambda named: named[1],
            )
            yield Part(term="transient", what=f"while {self._in_words(name)}", num_bytes=most)

    def _weights(self, held: int) -> Iterator[Part]:
        layers = [
            layer for index in self.mine for layer in self.chain.layers[slice(*self.plan.stages[index].layers)]
        ]
        own = sum(layer.weight_bytes for layer in layers)
        gradients = sum(layer.gradient_bytes for layer in layers)
        gradients -= self.moments.weights - held  # of stages without a backward so far
        if own <= held and gradients and own + gradients <= held:
            yield Part(term="weights", what="weights", num_bytes=own)
            yield Part(term="weights", what="gradients", num_bytes=gradients)
            yield Part(
                term="weights", what="the optimizer's states, master copies", num_bytes=held - own - gradients
            )
        else:
            copies = f", {self.plan.platform.weight_copies:.4g} copies" if held == self.moments.weights else ""
            if (versions := self.plan.versions) is not None:
                counts = " and ".join(str(versions.num_held(index)) for index in self.mine)
                copies += f", two versions among them, and {counts or 0} held here"
            yield Part(term="weights", what=f"weights of {format_bytes(own)}{copies}", num_bytes=held)

    def _largest_stashes(self, stage: PlannedStage) -> str:
        start, stop = stage.layers
        if stage.blocks:
            return f" ({'recomputed' if stage.rematerialize is True else 'parts of it recomputed'})"
        layers = sorted(self.chain.layers[start:stop], key=lambda layer: -self.chain.stash(layer))[:MOST_NAMED]
        named = [f"{shown(layer.name)} {format_bytes(self.chain.stash(layer))}" for layer in layers]
        return f" ({', '.join(named)}{', ...' if len(named) < stop - start else ''})"

    def _remedies(self) -> Iterator[Remedy]:
        before = self.moments.use(self.place).total
        for what, plan, chain in self._changes():
            moments = self._moments(plan, chain)
            saved_bytes = before - moments.use(moments.at_peak[0]).total
            if saved_bytes > 0:
                yield Remedy(what=what, saved_bytes=saved_bytes)

    def _changes(self) -> Iterator[tuple[str, Plan, Chain]]:
        """Yield plans and chains that differ in one thing; only their memory is of interest."""
        for index in self.mine:
            stage = self.plan.stages[index]
            layers = self.chain.layers[slice(*stage.layers)]
            if stage.rematerialize is not True and all(layer.recomputable for layer in layers):
                changed = replace(stage, rematerialize=True)
                forward = sum(layer.forward_seconds for layer in layers)
                yield (
                    f"recompute stage {index}, for {format_seconds(forward)} more per micro-batch",
                    self._with(index, changed),
                    self.chain,
                )
            yield from self._moved(index)
        if (self.chain.micro_batch_size or 2) > 1:
            yield "half the micro-batch size", self.plan, divided(self.chain, 2)

    def _moved(self, index: int) -> Iterator[tuple[str, Plan, Chain]]:
        stages = self.plan.stages
        start, stop = stages[index].layers
        for other, layer in ((index - 1, start), (index + 1, stop - 1)):
            if stop - start < 2 or not 0 <= other < len(stages) or stages[other].device == self.device:
                continue
            first, last = min(index, other), max(index, other)
            middle = start + 1 if other < index else stop - 1
            moved = list(stages)
            for place, layers in (
                (first, (stages[first].layers[0], middle)),
                (last, (middle, stages[last].layers[1])),
            ):
                moved[place] = replace(
                    stages[place], layers=layers, rematerialize=stages[place].rematerialize is True
                )
            name = shown(self.chain.layers[layer].name)
            yield f"layer {name} in stage {other}", replace(self.plan, stages=tuple(moved)), self.chain

    def _with(self, index: int, stage: PlannedStage) -> Plan:
        stages = list(self.plan.stages)
        stages[index] = stage
        return replace(self.plan, stages=tuple(stages))


def memory_text(peaks: Sequence[DevicePeak]) -> str:
    """Return the explanation as lines of text, a block for each device."""
    lines = []
    for peak in peaks:
        lines.append(f"device {peak.device}: {format_bytes(peak.use.total)} at its peak, {peak.when}")
        for part in peak.parts:
            share = part.num_bytes / peak.use.total
            lines.append(f"  {format_bytes(part.num_bytes):>10} {share:>4.0%}  {part.term:<9}  {part.what}")
        for remedy in peak.remedies[:MOST_NAMED]:
            lines.append(f"  would save {format_bytes(remedy.saved_bytes)}: {remedy.what}")
    return "\n".join(lines) + "\n"
