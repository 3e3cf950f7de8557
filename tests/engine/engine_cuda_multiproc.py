"""One step after the other over NCCL, or over gloo between devices; writes what became of each case as JSON.

torchrun --nproc_per_node=2 engine_cuda_multiproc.py FOLDER BACKEND
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition import Plan
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.warmup.run_platform import device_memory_bytes
from tests.engine import plans
from tests.engine.pipelines import mlp, train_alone
from tests.engine.running import NUM_MICRO_BATCHES, adam, batches, same, start, train

NUM_STEPS = 4
DIGITS = 1e-4
"""How near the losses of a GPU are to those of a CPU."""


def plan_of(where: tuple[int, ...], cuts: list[int]) -> Plan:
    orders = plans.depth_first(where, NUM_MICRO_BATCHES, 3)
    return plans.plan_of(plans.chain_of(cuts[-1]), plans.platform_of(2), cuts, where, orders=orders)


ONE_STAGE_EACH, TWO_STAGES_EACH = plan_of((0, 1), [0, 3, 8]), plan_of((0, 1, 0, 1), [0, 1, 4, 6, 8])


class Synchronizing(nn.Module):
    """Waits for its whole device, in its forward and in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _synchronize()
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda _: _synchronize())
        return x


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def begin(specs: list[Any], plan: Plan, **options: Any) -> MadPipeEngine:
    engine, _, _ = start(specs, None, plan=plan, **options)
    return engine


def every_plan_trains_like_one_process(_: Path) -> None:
    data = batches(NUM_STEPS)
    for plan in (ONE_STAGE_EACH, TWO_STAGES_EACH):
        for options in ({}, {"dynamic_shape": True}, {"config": {"zero_optimization": {"stage": 1}}}):
            same(train(begin(mlp(), plan, **options), data), train_alone(mlp(), data, adam), DIGITS)


def layers_that_wait_for_every_device(_: Path) -> None:
    """Before each layer, on all ranks at once."""
    data = batches(NUM_STEPS)
    specs = [each for spec in mlp() for each in (LayerSpec(Synchronizing), spec)]
    cuts = [2 * cut for cut in (0, 1, 4, 6, 8)]
    plan = plan_of((0, 1, 0, 1), cuts)
    same(train(begin(specs, plan), data), train_alone(specs, data, adam), DIGITS)


def a_timeline_and_a_move(folder: Path) -> None:
    data = batches(NUM_STEPS)
    config = {"pipeline": {"madpipe": {"save_timeline": str(folder / "timeline.json")}}}
    engine = begin(mlp(), TWO_STAGES_EACH, config=config)
    losses = train(engine, data[:2])
    engine.recut(ONE_STAGE_EACH)
    same([*losses, *train(engine, data[2:])], train_alone(mlp(), data, adam), DIGITS)


def memory_that_a_plan_may_fill(_: Path) -> None:
    """What is free counts, not what somebody else holds: here a tensor of 64 MiB that is no part of training."""
    engine = begin(mlp(), ONE_STAGE_EACH)
    before = device_memory_bytes(engine)
    held = torch.zeros(2**26, dtype=torch.uint8, device=engine.device)
    after = device_memory_bytes(engine)
    if engine.device.type == "cuda":
        assert 0 < after < before < torch.cuda.mem_get_info()[1], (after, before)
    del held


def memory_that_is_kept_in_steps(_: Path) -> None:
    """After four steps the peak is that of the first ones: nothing waits to be given back for ever.

    The first two lack 512 bytes that come with the optimizer's first states.
    """
    engine = begin(mlp(), TWO_STAGES_EACH)
    peaks = []
    for _ in range(3):
        train(engine, batches(2))
        if engine.device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated())
    assert not peaks or peaks[-1] == peaks[1], peaks


def waits_of_the_host_for_nccl(_: Path) -> None:
    if dist.get_backend() != "nccl":
        return
    with patch.dict(os.environ, {accelerator.BLOCKING_WAIT[0]: "1"}):
        try:
            begin(mlp(), ONE_STAGE_EACH)
        except ValueError as error:
            assert f"unset {accelerator.BLOCKING_WAIT[0]}" in str(error)
        else:
            raise AssertionError("it was not refused")


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (
        every_plan_trains_like_one_process, layers_that_wait_for_every_device, a_timeline_and_a_move,
        memory_that_a_plan_may_fill, memory_that_is_kept_in_steps, waits_of_the_host_for_nccl,
    )
}  # fmt: skip


def main() -> None:
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    deepspeed.init_distributed(backend)
    for name, case in CASES.items():
        case(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).write_text(json.dumps("done"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
