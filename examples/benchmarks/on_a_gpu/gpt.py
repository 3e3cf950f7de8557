"""A GPT on one GPU, which all ranks share: does it need the memory and the time that its plan says?

    python examples/benchmarks/on_a_gpu/launch.py 1 nccl examples/benchmarks/on_a_gpu/gpt.py --precision bf16
    python examples/benchmarks/on_a_gpu/launch.py 2 nccl examples/benchmarks/on_a_gpu/gpt.py --memory 7GB --cap 7.5

``--cap`` is what PyTorch's allocator may take of the GPU, in GB; ``--default`` trains on DeepSpeed's own cut.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed_partition.engine  # before CUDA starts: it sets what that reads  # isort: skip
import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
import train_deepspeed as example

VOCABULARY = 32768
STEPS, MEASURED_STEPS, WARM_UP_STEPS = 8, 3, 3
ON_A_GPU = os.environ.get("BACKEND", "nccl") != "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "width": 1024, "blocks": 24, "context": 1024, "micro-batch": 8, "micro-batches": 8,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--memory", help="that a plan may fill, as 7GB")
    parser.add_argument("--cap", type=float, help="GB that the allocator of each rank may take")
    parser.add_argument("--default", action="store_true", help="DeepSpeed's own engine and cut")
    parser.add_argument("--save-plan", help="where the plan, and the chain that was measured, are written")
    return parser.parse_args()


def begun(how: argparse.Namespace) -> Any:
    """Return an engine that trains the GPT of ``examples/train_deepspeed.py``, made larger."""
    example.WIDTH, example.BLOCKS, example.CONTEXT = how.width, how.blocks, how.context
    example.MICRO_BATCH, example.MICRO_BATCHES = how.micro_batch, how.micro_batches
    example.HEADS, example.VOCABULARY = max(1, how.width // 64), VOCABULARY
    options = {"warmup_steps": WARM_UP_STEPS, "memory": how.memory, "save_plan": how.save_plan}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": how.micro_batch,
        "gradient_accumulation_steps": how.micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    }
    if how.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if not how.default:
        config["pipeline"] = {"madpipe": {key: value for key, value in options.items() if value is not None}}
        deepspeed_partition.install()
    module = deepspeed.PipelineModule(
        layers=example.layers(),
        num_stages=dist.get_world_size(),
        loss_fn=example.loss_of,
        partition_method="parameters" if how.default else "madpipe",
    )
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return engine


def trained(engine: Any, how: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what this rank saw of the last steps."""
    tokens = torch.randint(VOCABULARY, (400_000,), generator=torch.Generator().manual_seed(3))
    batches = example.micro_batches(tokens, seed=1)
    if not how.default:
        engine.watch_steps()
    seconds, in_pipeline = [], []
    for step in range(STEPS):
        if ON_A_GPU and step == STEPS - MEASURED_STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        engine.train_batch(batches)
        if ON_A_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        figures = None if how.default else engine.figures_of_steps()  # None in a warm-up
        in_pipeline.append(None if figures is None else figures.step_seconds)
    told = [each for each in in_pipeline[-MEASURED_STEPS:] if each is not None]
    return {
        "whole_seconds": statistics.median(seconds[-MEASURED_STEPS:]),
        "seconds": statistics.median(told) if told else None,
        "allocated": torch.cuda.max_memory_allocated() if ON_A_GPU else 0,
        "reserved": torch.cuda.max_memory_reserved() if ON_A_GPU else 0,
    }


def main() -> None:
    how = arguments()
    if how.cap is not None and ON_A_GPU:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(how.cap * 1e9 / total)
    deepspeed.init_distributed("gloo" if os.environ.get("BACKEND") in ("gloo", "cpu") else "nccl")
    torch.manual_seed(0)
    try:
        engine = begun(how)
        mine = trained(engine, how)
    except torch.OutOfMemoryError as error:
        print(f"rank {dist.get_rank()} ran out of memory: {str(error)[:120]}", flush=True)
        os._exit(3)  # the others wait for this rank, and are ended by who has started them
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        plan = None if how.default else engine.plan
        if plan is not None:
            print(plan.summary())
            print(f"step planned {plan.step_seconds or 0:.4f} s, measured {every[0]['seconds']:.4f} s")
        for rank, each in enumerate(every):
            planned = 0 if plan is None else plan.peak_memory_bytes[rank]
            print(
                f"rank {rank}: step with the optimizer {each['whole_seconds']:.4f} s, peak {each['allocated']:,} "
                f"bytes, planned {planned:,}, reserved {each['reserved']:,}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
