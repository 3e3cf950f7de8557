"""Repairs of DeepSpeed's wrapping optimizers, for stages that a planned cut may make.

Both concern the norm of the gradients over all stages, where DeepSpeed 0.19.8 takes for granted that stages
are alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def let_stages_differ(optimizer: Any, stages: dist.ProcessGroup, device: torch.device) -> None:
    """Repair what ``optimizer`` cannot do on this rank's stage. Collective over the ranks of ``stages``."""
    if isinstance(optimizer, BF16_Optimizer):
        _allow_nothing_to_count(optimizer, device)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        num_groups = torch.tensor(len(optimizer.bit16_groups), device=device)
        dist.all_reduce(num_groups, op=dist.ReduceOp.MAX, group=stages)
        _take_part_in_norms(optimizer, int(num_groups) - len(optimizer.bit16_groups))


def _take_part_in_norms(optimizer: DeepSpeedZeroOptimizer, num_missing: int) -> None:
    """ZeRO-1 adds up the norm over all stages one group after the other; a stage with fewer groups than another
    (only an embedding, say, whose weight decays, and nothing that does not) would leave it waiting for ever.
    """
    if not num_missing:
        return
    norm_of_own_groups = optimizer.scaled_global_norm

    def norm_of_all_groups(norm_type: int = 2) -> torch.Tensor:
        norms = [norm_of_own_groups(norm_type)]
        norms += [optimizer.get_grad_norm_direct([], [], norm_type) for _ in range(num_missing)]
        return combine_grad_norm_groups(norms, norm_type)

    optimizer.scaled_global_norm = norm_of_all_groups


def _allow_nothing_to_count(optimizer: BF16_Optimizer, device: torch.device) -> None:
    """The norm counts tied weights on one stage. Another one that has nothing else stacks an empty list."""
    gradients_of = optimizer.get_grads_for_norm

    def gradients_or_zero(for_clipping: bool = False) -> Any:
        found = gradients_of(for_clipping)
        if for_clipping or found[0]:
            return found
        return [torch.zeros(1, device=device)], found[1]

    optimizer.get_grads_for_norm = gradients_or_zero
