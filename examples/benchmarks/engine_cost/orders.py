"""Plans that run in the order of torch's schedules, so that only the engines differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from deepspeed_partition import Plan, Platform, make_plan
from deepspeed_partition.planner.buffers import MORE_BUFFERS
from deepspeed_partition.planner.plan import PlannedStage
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.step import one_f_one_b_order

sys.path[:0] = [str(Path(__file__).parents[1])]
from even_stages import even_chain


def orders_of(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> tuple[Order, ...]:
    """Return 1F1B, or torch's interleaved one where a rank has several stages, which go round the ranks."""
    if stages_per_rank == 1:
        return tuple(one_f_one_b_order(rank, num_ranks - rank, num_micro_batches) for rank in range(num_ranks))
    number = num_ranks * stages_per_rank
    here = torch.device("cpu")
    stages = [PipelineStage(nn.Identity(), each, number, here) for each in range(0, number, num_ranks)]
    order = ScheduleInterleaved1F1B(stages, num_micro_batches).pipeline_order
    return tuple(_order(order[rank]) for rank in range(num_ranks))


def _order(actions: Sequence) -> Order:
    found = []
    for each in actions:
        if each is None:
            continue
        stage, kind, number, *_ = each
        found.append((f"{'F' if kind.name == 'FORWARD' else 'B'}{stage}", number))
    return tuple(found)


def interleaved_plan(num_ranks: int, stages_per_rank: int, num_micro_batches: int, numbers: int = 16) -> Plan:
    """Return a plan of even stages in that order, with the room for messages that a run has in so much memory."""
    number = num_ranks * stages_per_rank
    chain = even_chain(number, numbers)
    platform = Platform(num_devices=num_ranks, memory_bytes=10**12, bandwidth=1e9, comm_buffers=max(MORE_BUFFERS))
    plan = make_plan(
        chain, platform, [stages_per_rank * rank for rank in range(num_ranks + 1)],
        num_micro_batches=num_micro_batches, recompute="never",
    )  # fmt: skip
    assert plan.step is not None
    stages = tuple(
        PlannedStage(layers=(stage, stage + 1), device=stage % num_ranks, in_flight=num_micro_batches)
        for stage in range(number)
    )
    step = replace(plan.step, order=orders_of(num_ranks, stages_per_rank, num_micro_batches))
    return replace(plan, stages=stages, step=step)
