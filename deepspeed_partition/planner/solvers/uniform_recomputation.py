"""A planning problem with every layer recomputed: the two uniform choices that every search begins with.

A chain of which all layers are recomputed is a chain with longer backwards and other bytes, so each search runs on
it unchanged. Recomputed are the layers that may be, each as a block of its own, which has the least transient
bytes; or each stage as one block, which keeps the least. Cost: O(L^2) for L layers, as for a table of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.interface import Problem

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Uniform:
    """A uniform choice of recomputation, and the problem in which it is part of times and bytes."""

    problem: Problem
    """Problem without a choice: its times and its table are those of the recomputing stages."""
    recomputation: Recomputation
    whole_stages: bool

    def blocks(self, stage: tuple[int, int]) -> Blocks:
        """Return what is recomputed of a stage, given as layers (half-open)."""
        return _blocks(self.recomputation, self.whole_stages, stage)

    def chosen(self, placement: Placement) -> Placement:
        """Return an allocation of ``problem`` as one of the problem that it was made from."""
        return placement.recomputing(tuple(self.blocks(stage) for stage, _ in placement.stages))


def uniform_choices(problem: Problem) -> Iterator[Uniform]:
    """Yield the uniform choices of a problem with recomputation; none where none of its layers may run twice."""
    recomputation = problem.recomputation
    if recomputation is None:
        return
    if recomputation.recomputes_all:
        yield _uniform(problem, recomputation, whole_stages=True)
    if recomputation.mode != "stage" and recomputation.recomputes_any:
        yield _uniform(problem, recomputation, whole_stages=False)


def _uniform(problem: Problem, costs: Recomputation, *, whole_stages: bool) -> Uniform:
    again = np.diff(costs.forbidden) == 0
    times, table = copy(problem.times), copy(problem.table)
    times.__dict__.pop("compute", None)  # a cached sum
    times.backward = times.backward + _prefix(np.where(again, np.diff(times.forward), 0))
    if whole_stages:
        table.stash, transient, forward = _whole_stages(costs, table)
    else:
        table.stash, transient, forward = _single_layers(costs, table, again)
    transient, forward = table.with_update(transient), table.with_update(forward)
    table.fixed = table.fixed - table.transient + transient
    table.transient, table.forward_transient = transient, forward
    table = table.with_memory(table.memory_bytes)
    # No method of the choice, which has the table: in a circle, large tables would outlive their use.
    table.recomputed = partial(_blocks, costs, whole_stages)
    return Uniform(replace(problem, times=times, table=table, recomputation=None), costs, whole_stages)


def _blocks(costs: Recomputation, whole_stages: bool, stage: tuple[int, int]) -> Blocks:
    if whole_stages:
        return (stage,)
    return tuple((layer, layer + 1) for layer in range(*stage) if costs.allows(layer, layer + 1))


def _single_layers(costs: Recomputation, table: StageTable, again: NDArray[np.bool_]) -> tuple[Integers, ...]:
    """Return stash, transient and forward transient bytes of layers k to l, [k, l]; each layer is a block."""
    own = np.diff(costs.stash)
    kept = _prefix(np.where(again, costs.input, own))
    at_cut = np.append(0, np.where(again, 0, costs.at_cut[1:]))
    stash = np.where(table.is_stage, kept[None, :] - kept[:, None] + at_cut[None, :], 0)
    largest = np.where(again, np.maximum(own - costs.input, 0), 0)
    transient, forward = np.zeros_like(stash), np.zeros_like(stash)
    for start in range(len(own)):
        before = kept[start:-1] - kept[start]
        held, forth = costs.running[start:] + before, costs.forth[start:] + before
        blocks = np.maximum.accumulate(largest[start:])
        _fill(costs, start, stash, (held, transient, blocks), (forth, forward, np.zeros_like(blocks)))
    return stash, transient, forward


def _whole_stages(costs: Recomputation, table: StageTable) -> tuple[Integers, ...]:
    """Return the same where each stage is one block."""
    inputs = np.append(costs.input, 0)
    stash = np.where(table.is_stage, inputs[:, None], 0)
    transient, forward = np.zeros_like(stash), np.zeros_like(stash)
    for start in range(len(costs.input)):
        inner = np.arange(len(costs.input) - start) > 0
        again = np.where(inner, np.maximum(costs.stash[start:-1] - costs.stash[start], inputs[start]), 0)
        held = costs.running[start:] + again
        forth = costs.forth[start:] + np.where(inner, inputs[start], 0)
        blocks = np.maximum(costs.stash[start + 1 :] - costs.stash[start] - inputs[start], 0)
        _fill(costs, start, stash, (held, transient, blocks), (forth, forward, np.zeros_like(blocks)))
    return stash, transient, forward


def _fill(costs: Recomputation, start: int, stash: Integers, *each: tuple[Integers, Integers, Integers]) -> None:
    """Fill in the transient bytes of the stages that begin at a layer.

    Args:
        each: bytes in use in each layer, measured ones alone count; the table to fill in; and what comes on top of
            the transient bytes of those that are not measured.
    """
    is_measured = costs.is_measured[start:]
    some = costs.unmeasured[start + 1 :] > costs.unmeasured[start]
    working = np.maximum.accumulate(costs.working[start:])
    for held, table, on_top in each:
        peak = np.maximum.accumulate(np.where(is_measured, held, 0)) - stash[start, start + 1 :]
        table[start, start + 1 :] = np.maximum(np.maximum(peak, 0), np.where(some, working + on_top, 0))


def _prefix(values: Integers) -> Integers:
    result: Integers = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
    return result


def extra_ticks(times: TimedChain, placement: Placement) -> list[int]:
    """Return the ticks by which recomputation makes the backward of each stage of an allocation longer."""
    return [sum(times.forward_ticks(*block) for block in blocks) for blocks in placement.blocks]
