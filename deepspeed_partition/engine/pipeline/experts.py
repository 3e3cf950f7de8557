"""Layers of DeepSpeed's mixture of experts (``MoE``) in a pipeline, and what is refused beside them.

With an ``ep_size`` above 1 pipelines hold different experts, and a layer sends samples to its stage of others.
DeepSpeed makes the groups of ranks for that when an engine starts, and numbers files of experts by their places
on a rank: layers of such a model stay where the engine has started.
"""

from __future__ import annotations

from typing import Any

from deepspeed.moe.layer import MoE
from torch import nn

from deepspeed_partition.engine.runtime.collectives import gather_objects

STAY_WHERE_THEY_ARE = (
    "the model has layers of DeepSpeed's MoE, so all layers stay on their ranks: DeepSpeed sets the ranks that an "
    "MoE layer sends samples to once, and one that is measured alone would wait for other pipelines. Give the cut "
    "from the start, PipelineModule(..., partition_method=[0, ..., {num_layers}]) or PipelineModule(..., "
    "plan=...), in Lightning MadPipeStrategy(plan=...), and no recut()"
)
"""Sentence for whatever would move layers of a model with experts."""


def has_experts(module: Any) -> bool:
    """Return whether any rank has layers of experts. Collective over all ranks, before an engine starts.

    Raises:
        ValueError: on every rank, where the cut is not DeepSpeed's: layers would move to their planned ranks; or
            not every rank has experts of the same ``ep_size``, for which DeepSpeed's start would wait for ever.
    """
    own = dict.fromkeys(each.expert_group_name for each in module.modules() if isinstance(each, MoE))
    groups_of_rank = gather_objects(list(own))
    if not any(groups_of_rank):
        return False
    cut = getattr(module, "madpipe_cut", None)
    if cut is None or module.num_stages == 1:
        return True
    if cut.origin == "trial":
        raise ValueError(why_they_stay(module))
    first = next(groups for groups in groups_of_rank if groups)
    for rank, groups in enumerate(groups_of_rank):
        if groups != first:
            raise ValueError(
                f"at the cut {module.parts} rank {rank} has {_listed(groups)}, and another one {_listed(first)}: "
                "DeepSpeed makes the groups of such layers when it meets them, all ranks together, and they would "
                "wait for one another. Give boundaries with MoE layers of the same ep_size, in the same order, in "
                "every stage: partition_method=[...]"
            )
    return True


def why_they_stay(module: nn.Module) -> str:
    """Return the sentence that refuses a move of layers."""
    return STAY_WHERE_THEY_ARE.format(num_layers=module._num_layers)


def _listed(groups: list[str]) -> str:
    sizes = ", ".join(group.removeprefix("ep_size_") for group in groups)
    return f"MoE layers of ep_size {sizes}" if groups else "no MoE layers"
