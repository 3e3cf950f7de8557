"""Gradients that weights have between two steps, such as those of a penalty on them: they go with their weights.

DeepSpeed adds up in a step onto what is there, and starts without gradients when layers have moved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from deepspeed_partition.engine.pipeline.parts import all_that_moves
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.pipeline.tied_copies import parameter_names
from deepspeed_partition.engine.runtime.collectives import gather_objects, receive_bytes, send_bytes
from deepspeed_partition.planner.allocation import Allocation

ATTRIBUTES = ("grad", "grad_accum")
"""Where a weight has its gradient: torch's, and that of DeepSpeed's ZeRO where it adds up in another type."""


class _Form(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    num_sparse: int | None
    """The number of sparse dimensions; None of a dense gradient."""


class GivenGradients:
    """The gradients on this rank, on their way from one cut to another. Made before a move; collective.

    A tied weight has gradients on several ranks, which a step adds up: their sum stays what it is.

    Args:
        module: With the layers where they are.
        allocation: Where they are to be.
    """

    def __init__(self, module: PipelineModule, allocation: Allocation) -> None:
        grid, current = module.mpu(), allocation_of(module)
        rank = grid.get_stage_id()
        self._found = {
            (name, attribute): gradient.detach()
            for parameter, name in parameter_names(module).items()
            for attribute in ATTRIBUTES
            if (gradient := getattr(parameter, attribute, None)) is not None
        }
        forms = {place: _form_of(gradient) for place, gradient in self._found.items()}
        of_ranks = gather_objects(forms, grid.get_pipe_parallel_group())
        for part in all_that_moves(module) if any(of_ranks) else ():
            before, after = part.owners(current), part.owners(allocation)
            if before == after:
                continue
            for source in before:
                of_part = {place: form for place, form in of_ranks[source].items() if _is_in(part.name, place)}
                for place, form in of_part.items() if source != after[0] else ():
                    if rank == source:
                        send_bytes(_dense(self._found.pop(place)), grid.stage_to_global(stage_id=after[0]))
                    elif rank == after[0]:
                        self._add(place, _received(form, grid.stage_to_global(stage_id=source)))

    def _add(self, place: tuple[str, str], gradient: torch.Tensor) -> None:
        self._found[place] = self._found[place] + gradient if place in self._found else gradient

    def give_to(self, module: PipelineModule) -> None:
        """Give the weights that are here now their gradients."""
        for parameter, name in parameter_names(module).items():
            for attribute in ATTRIBUTES:
                if (gradient := self._found.pop((name, attribute), None)) is not None:
                    setattr(parameter, attribute, gradient)


def _form_of(gradient: torch.Tensor) -> _Form:
    return _Form(gradient.shape, gradient.dtype, gradient.sparse_dim() if gradient.is_sparse else None)


def _is_in(part: str, place: tuple[str, str]) -> bool:
    return place[0].startswith(f"{part}.")


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()


def _received(form: _Form, rank: int) -> torch.Tensor:
    here: Any = get_accelerator().current_device_name()
    gradient = receive_bytes(form.shape, form.dtype, torch.device(here), rank)
    return gradient if form.num_sparse is None else gradient.to_sparse(form.num_sparse)
