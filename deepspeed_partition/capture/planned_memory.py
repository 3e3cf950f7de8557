"""What the planner would count for layers before anybody has measured them: its own memory model, on a recording.

A recording knows the bytes of weights, of what crosses each boundary and of what autograd keeps, and about how
much work each call is. So an order of the calls, and boundaries between them, are a chain of the planner. Its
``memory.py`` counts what the stages of a pipeline need: weights, what is kept for each micro-batch in flight, and
buffers at both boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch

from deepspeed_partition.capture.partition import Crossing, Flow, crossings
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, LayerProfile, Platform
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.partition_search import best_partition
from deepspeed_partition.planner.solvers.interface import Constraints, Problem

NUM_DEVICES = (2, 4, 8)
"""The pipelines for which layers are judged; how many devices there will be is not known."""
SECONDS_PER_OPERATION = 1e-12
BYTES_PER_SECOND = 1e15
"""No link is known, and none should decide: the work of stages does."""


class PlannedMemory:
    """The memory that pipelines of a flow's calls need, in the order in which they stand."""

    def __init__(self, flow: Flow, places: Sequence[Crossing] | None = None) -> None:
        self.flow = flow
        self.places = crossings(flow) if places is None else places

    def chain(self, boundaries: Sequence[int]) -> Chain:
        """The chain of the layers between boundaries, each of which is behind the call at this place."""
        edges = [-1, *boundaries, len(self.flow.main) - 1]
        stashes = self._stashes(edges)
        return Chain(
            input_bytes=sum(self.flow.graph.values[value].num_bytes for value in self.flow.graph.inputs),
            layers=tuple(
                LayerProfile(
                    name=f"{start + 1}..{stop}",
                    forward_seconds=work * SECONDS_PER_OPERATION,
                    backward_seconds=2 * work * SECONDS_PER_OPERATION,
                    weight_bytes=self._weight_bytes(start, stop),
                    output_bytes=self.places[stop].num_bytes if stop < edges[-1] else 0,
                    stash_bytes=stash,
                )
                for (start, stop), stash in zip(pairwise(edges), stashes, strict=True)
                for work in [1 + sum(node.work for node in self.flow.main[start + 1 : stop + 1])]
            ),
        )

    def _stashes(self, edges: Sequence[int]) -> list[int]:
        """What each layer keeps for the backward; what several keep counts in the last one, as in a profile."""
        found = [0] * (len(edges) - 1)
        keeper: dict[int, tuple[int, int]] = {}
        for layer, (start, stop) in enumerate(pairwise(edges)):
            for node in self.flow.main[start + 1 : stop + 1]:
                kept = node.call.effects.kept
                if node.call.recomputed:
                    values = [self.flow.graph.values[value] for value in node.reads]
                    kept = {value.storage: value.num_bytes for value in values}
                keeper |= {storage: (layer, num_bytes) for storage, num_bytes in kept.items()}
        for layer, num_bytes in keeper.values():
            found[layer] += num_bytes
        return found

    def _weight_bytes(self, start: int, stop: int) -> int:
        names = {name for node in self.flow.main[start + 1 : stop + 1] for name in node.attributes}
        return sum(self._bytes_of_weight[name] for name in names)

    @cached_property
    def _bytes_of_weight(self) -> dict[str, int]:
        return {
            name: tensor.numel() * tensor.element_size() if isinstance(tensor, torch.nn.Parameter) else 0
            for name, tensor in self.flow.graph.recording.attributes.items()
        }

    def least(self, boundaries: Sequence[int], num_devices: int) -> int:
        """Bytes of the largest device of the pipeline that needs least memory."""
        return self._smallest(self._problem(boundaries, num_devices))[1]

    def boundaries_used(self, boundaries: Sequence[int], num_devices: int) -> list[list[int]]:
        """The boundaries that pipelines of this many devices use: the one of least memory, and the fastest."""
        problem = self._problem(boundaries, num_devices)
        fastest = best_partition(problem.times, problem.table, problem.constraints, problem.deadline)
        cuts = [self._smallest(problem)[0], *([fastest.cuts] if fastest else [])]
        return [[boundaries[layer - 1] for layer in each[1:-1]] for each in cuts]

    def _problem(self, boundaries: Sequence[int], num_devices: int) -> Problem:
        chain = self.chain(boundaries)
        platform = Platform(num_devices=num_devices, memory_bytes=LARGEST_MEMORY_BYTES, bandwidth=BYTES_PER_SECOND)
        return Problem(
            chain=chain, platform=platform, constraints=Constraints(max_stages=num_devices),
            times=TimedChain(chain, platform), table=StageTable(chain, platform), in_deepspeed=True,
        )  # fmt: skip

    @staticmethod
    def _smallest(problem: Problem) -> tuple[tuple[int, ...], int]:
        found = Contiguous().smallest_memory(problem)
        assert found is not None  # a single stage always is one
        return found
