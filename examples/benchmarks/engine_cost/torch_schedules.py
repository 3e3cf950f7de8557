"""Schedules of ``torch.distributed.pipelining`` on layers given as a list, with torch's SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle


class TorchPipeline:
    """This rank's part of a pipeline that torch runs.

    Args:
        schedule: the name of torch's class, such as ``Schedule1F1B``.
        layers: one for each stage; with several stages per rank they go round in turn.
        batch: inputs and labels of a step.
    """

    def __init__(
        self,
        schedule: str,
        layers: Sequence[nn.Module],
        num_micro_batches: int,
        batch: torch.Tensor,
        loss: Callable[..., torch.Tensor],
    ) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        own = range(rank, len(layers), num_ranks)
        stages = [PipelineStage(layers[stage], stage, len(layers), torch.device("cpu")) for stage in own]
        kind = getattr(pipelining, schedule)
        of_one = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(stages[0] if of_one else stages, num_micro_batches, loss_fn=loss)
        self._optimizer = torch.optim.SGD([each for stage in own for each in layers[stage].parameters()], lr=1e-4)
        self._inputs = (batch[0],) if own[0] == 0 else ()
        self._labels: dict[str, Any] = {"target": batch[1]} if own[-1] == len(layers) - 1 else {}

    def step(self) -> None:
        """Run a training step."""
        losses: list[torch.Tensor] = []
        self._schedule.step(*self._inputs, **(self._labels | {"losses": losses} if self._labels else {}))
        self._optimizer.step()
        self._optimizer.zero_grad()
