"""Planned against measured, for a pipeline that is training: step time, and live tensor bytes of each stage."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Plan
from deepspeed_partition.planner.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    step_seconds: tuple[float, ...]
    """Seconds of whole optimizer steps, the first ones left out."""
    peak_bytes: int = 0
    """The most that live tensors took at once during one step: parameters, gradients, optimizer states,
    activations, messages."""
    pipeline_seconds: tuple[float, ...] = ()
    """Seconds of those steps from the first forward to the last backward, where the engine was asked for them."""

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def gathered(mine: Measured) -> list[Measured]:
    """Gather what each rank measured, on every rank."""
    everyone: list[Measured | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [each for each in everyone if each is not None]


def tensors_that_stay(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> list[torch.Tensor]:
    """What is alive before a step begins: parameters, gradients, buffers, optimizer states."""
    parameters = list(module.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *module.buffers(), *states]


def print_report(plan: Plan, ranks: list[Measured], step_seconds: float) -> None:
    """Print the promises of the plan beside what the run did.

    Args:
        ranks: in the order of the plan's devices.
        step_seconds: from the first forward to the last backward of a step, which is what a plan speaks of.
    """
    title = "planned against measured"
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (title, "planned", "measured", "measured / planned"):
        table.add_column(name, justify="left" if name == title else "right")
    planned = plan.step_seconds or 0.0
    table.add_row("step", format_seconds(planned), format_seconds(step_seconds), f"{step_seconds / planned:.2f}")
    whole = max(rank.median_seconds for rank in ranks)
    table.add_row("with data and the optimizer", "", format_seconds(whole), "")
    for device, (promised, rank) in enumerate(zip(plan.peak_memory_bytes, ranks, strict=False)):
        table.add_row(f"live tensor bytes of rank {device}", format_bytes(promised),
                      format_bytes(rank.peak_bytes), f"{rank.peak_bytes / promised:.2f}")  # fmt: skip
    Console(width=80).print(table)
