"""Schedules of ``torch.distributed.pipelining`` over links that sleep, and what their orders take at the least."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

sys.path[:0] = [str(Path(__file__).parents[1])]
from emulation import Links, over

Action = tuple[str, int, int]
"""F, I, W or B (both halves of a backward), the stage and the micro-batch."""
KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


class LinkedPipeline:
    """This rank's part of a pipeline that torch runs; its stages go round the ranks.

    Args:
        schedule: the name of torch's class.
        stage_modules: of all stages of the model.
        link_seconds: that a message takes on its way.
    """

    def __init__(
        self,
        schedule: str,
        stage_modules: Sequence[torch.nn.Module],
        num_micro_batches: int,
        link_seconds: float,
    ) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        number = len(stage_modules)
        own = range(rank, number, num_ranks)
        stages = [PipelineStage(stage_modules[stage], stage, number, torch.device("cpu")) for stage in own]
        kind = getattr(schedules, schedule)
        of_one = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(stages[0] if of_one else stages, num_micro_batches, loss_fn=_loss)
        links = over(Links([link_seconds] * (number - 1), half_duplex=False))
        self._transfers: Any = links(
            [list(range(num_ranks))], [stage % num_ranks for stage in range(number)], torch.device("cpu")
        )
        self._transfers._seconds = link_seconds
        weights = [each for stage in own for each in stage_modules[stage].parameters()]
        self._optimizer = torch.optim.SGD(weights, lr=1e-4)
        self._inputs = (torch.zeros(num_micro_batches, 1),) if own[0] == 0 else ()
        self._labels = {"target": torch.zeros(num_micro_batches)} if own[-1] == number - 1 else {}

    def step(self) -> None:
        """Run a training step."""
        with self._over_links():
            losses: list[torch.Tensor] = []
            self._schedule.step(*self._inputs, **(self._labels | {"losses": losses} if self._labels else {}))
        self._optimizer.step()
        self._optimizer.zero_grad()

    @contextmanager
    def _over_links(self) -> Iterator[None]:
        """Let the messages of torch's schedules take their time on the way."""

        def batch(operations: list[Any], desc: str | None = None) -> list[Any]:
            return [
                (self._transfers._start_sending if each.op is dist.isend else self._transfers._start_receiving)(
                    each.tensor, each.peer
                )
                for each in operations
            ]

        with patch.object(schedules, "_batch_p2p", batch):
            yield

    def close(self) -> None:
        self._transfers.close()


def _loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def actions_of(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each rank under one of torch's schedules of several stages."""
    here = torch.device("cpu")
    nothing = torch.nn.Identity()
    stages = [PipelineStage(nothing, each, num_stages, here) for each in range(0, num_stages, num_ranks)]
    orders = getattr(schedules, schedule)(stages, num_micro_batches, loss_fn=_loss).pipeline_order
    return [
        [
            (KINDS[each.computation_type.name], each.stage_index, each.microbatch_index)
            for each in orders[rank]
            if each is not None and each.computation_type.name in KINDS
        ]
        for rank in range(num_ranks)
    ]


def least_seconds(
    orders: Sequence[Sequence[Action]], stage_seconds: float, link_seconds: float, operation_seconds: float = 0.0
) -> float:
    """Return what a step takes where each action begins as soon as it may, and each direction of a link is one.

    Torch's first stage leaves both halves of its backward to the second one.

    Args:
        stage_seconds: of a forward; a backward takes twice that.
        operation_seconds: of each action beside its stage.
    """
    last = max(stage for order in orders for _, stage, _ in order)
    seconds = {"F": stage_seconds, "I": stage_seconds, "W": stage_seconds, "B": 2 * stage_seconds}
    arrived: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = {}
    now, at = [0.0] * len(orders), [0] * len(orders)

    def needs(kind: str, stage: int, number: int) -> list[Action]:
        if kind == "F":
            return [("F", stage - 1, number)] if stage else []
        if kind == "W":
            return []
        return [("I", stage + 1, number)] if stage < last else []

    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        ready = []
        for rank, order in enumerate(orders):
            if at[rank] < len(order) and all(each in arrived for each in needs(*order[at[rank]])):
                begin = max([now[rank], *(arrived[each] for each in needs(*order[at[rank]]))])
                ready.append((begin, rank))
        if not ready:
            raise ValueError("the order comes to a standstill")
        begin, rank = min(ready)
        kind, stage, number = orders[rank][at[rank]]
        duration = seconds[kind]
        if stage == 0 and kind in ("I", "W"):
            duration = 0.0 if kind == "I" else 2 * stage_seconds
        now[rank] = end = begin + duration + operation_seconds
        at[rank] += 1
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to <= last:
            link = rank, to % len(orders)
            free[link] = max(free.get(link, 0.0), end) + (link_seconds if link[0] != link[1] else 0.0)
            arrived["F" if kind == "F" else "I", stage, number] = free[link]
    return max(now)
