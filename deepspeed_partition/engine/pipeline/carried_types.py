"""Types of parameters that DeepSpeed's optimizers and reductions do not carry: what training makes of them."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.units import counted

MOST_NAMED = 5


def why_types_are_not_carried(module: PipelineModule, config: Any, optimizer: Any) -> str:
    """Why ``module`` would not train as it is written under ``config``; empty where it does. Collective.

    DeepSpeed's ZeRO, bf16 and fp16 optimizers copy the parameters of a rank into one flat tensor, which gives all
    of them one type: which one depends on the layers of that rank, so on the cut. Gradients that several pipelines
    reduce are of the types that the accelerator can reduce.

    Args:
        module: Before an engine starts on it.
        config: DeepSpeed's, as it is read.
        optimizer: What the script gives. Without one, there and in ``config``, nothing is trained.
    """
    is_half = config.float16_config.enabled or config.bfloat16_config.enabled
    is_flat, num_pipelines = config.zero_enabled or is_half, module._grid.get_data_parallel_world_size()
    if not (is_flat or num_pipelines > 1) or (optimizer is None and config.optimizer_name is None):
        return ""
    here = {
        name: parameter.dtype
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not (is_half and parameter.is_floating_point())  # which DeepSpeed casts
    }
    ranks = module._grid.get_pipe_parallel_group()
    types = {name: dtype for each in gather_objects(here, ranks) for name, dtype in each.items()}
    reducible = set(get_accelerator().supported_dtypes())
    if is_half:
        others = types
    elif is_flat and len(set(types.values())) > 1:
        others = {name: dtype for name, dtype in types.items() if dtype != torch.float32}
    else:
        others = {name: dtype for name, dtype in types.items() if dtype not in reducible}
    if not others:
        return ""
    listed = [f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in sorted(others.items())]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    cause = (
        "ZeRO, bf16 and fp16 give all parameters of a rank one type"
        if is_flat
        else f"{counted(num_pipelines, 'pipeline')} side by side reduce gradients of other types"
    )
    return (
        f"DeepSpeed does not train parameters of these types as they are written: {', '.join(listed[:MOST_NAMED])}"
        f"{more}: {cause}; use ZeRO stage 0 in fp32 and one pipeline, or store them in float32 (a complex one "
        "with torch.view_as_real) and convert them in forward"
    )
