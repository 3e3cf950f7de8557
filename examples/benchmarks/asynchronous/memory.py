"""Does a pipeline that never drains keep within the memory of its plan?

    torchrun --nproc_per_node=4 examples/benchmarks/asynchronous/memory.py --save

One stage of two linear layers per rank. Their bytes are measured as in any run, their times are given, so that all
ranks make the same plan. Each rank counts the bytes of all CPU tensors that it allocates while it trains, weights
included, and holds the peak against what the plan says of it. The data is made before and is not counted, as on a
GPU, which has of it what is loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition import Chain, Plan, Platform, make_plan, replay
from deepspeed_partition.engine.pipeline.drawn_data import OwnMemory
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.profiling import counted_memory, profile_chain

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from interleaved import engine_for_plan, environment

WIDTH, ROWS = 256, 128
NUM_BATCHES = 12
MODES = {"flush": 4, "stashing": 4, "stashing of each micro-batch": 1, "2bw": 4, "vertical-sync": 4}
"""Micro-batches of an update in each row."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def layers_for(num_ranks: int) -> list[LayerSpec]:
    """Return two layers for each rank, of which a rank builds its own."""
    return [LayerSpec(Layer) for _ in range(2 * num_ranks)]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, labels)


def measured_chain(num_ranks: int) -> Chain:
    """Return the layers with the bytes that they take; a forward counts as 1 s, a backward as 2."""
    data = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    chain = profile_chain(
        [each.build() for each in layers_for(num_ranks)], data, loss_fn=loss_fn, device="cpu", repeats=1,
        warm_up=1, progress=False, halves=False,
    )  # fmt: skip
    times = {"forward_seconds": 1.0, "backward_seconds": 2.0}
    unknown = {"forward_spread_seconds": None, "backward_spread_seconds": None}
    return replace(chain, layers=tuple(replace(layer, **times, **unknown) for layer in chain.layers))


def plan_of(chain: Chain, num_ranks: int, row: str) -> Plan:
    """Return the contiguous plan of a row."""
    mode = row.partition(" ")[0]
    platform = Platform(
        num_devices=num_ranks, memory_bytes=10**12, bandwidth=1e12, duplex="full", comm_buffers=4,
        # Weights, gradient and momentum, and where the pipeline never drains a second version.
        weight_copies=3 if mode == "flush" else 4,
    )  # fmt: skip
    return make_plan(
        chain, platform, [2 * rank for rank in range(num_ranks + 1)], num_micro_batches=MODES[row],
        recompute="never", weight_versions=mode,
    )  # fmt: skip


def measured(chain: Chain, row: str) -> dict[str, Any]:
    """Return the peaks of a row on all ranks, and those of its plan."""
    num_ranks = dist.get_world_size()
    plan = from_rank_0(lambda: plan_of(chain, num_ranks, row))
    micro_batches = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(4)]
    data = OwnMemory(itertools.cycle(micro_batches))  # or copies that wait would be counted
    with counted_memory() as counted:
        engine: Any = engine_for_plan(
            layers_for(num_ranks), plan, MODES[row], loss_fn, gradient_clipping=0.0,
            optimizer={"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
        )  # fmt: skip
        engine.train_batch(data)
        before = counted.current_bytes
        counted.reset_peak()
        for _ in range(NUM_BATCHES):
            engine.train_batch(data)
        peak = counted.peak_bytes
        engine.come_to_rest()
        engine.destroy()
    versions = plan.versions
    return {
        "ranks": num_ranks, "weight_versions": row, "micro_batches": MODES[row],
        "peak_bytes": gather_objects(peak), "planned_bytes": [use.total for use in replay(plan, chain).memory],
        "between_batches_bytes": gather_objects(before),
        "versions_planned": [1] * num_ranks if versions is None else [*map(versions.num_held, range(num_ranks))],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    measures = measured_chain(dist.get_world_size())  # on all ranks: each measures some of the layers
    chain = from_rank_0(lambda: measures)
    lines = [measured(chain, row) for row in MODES]
    if dist.get_rank() == 0:
        for line in lines:
            shares = [peak / use for peak, use in zip(line["peak_bytes"], line["planned_bytes"], strict=True)]
            planned = ", ".join(f"{each / 1e6:.2f}" for each in line["planned_bytes"])
            print(
                f"{line['weight_versions']:28} m={line['micro_batches']} planned {planned} MB, measured "
                f"{', '.join(f'{each:.3f}' for each in shares)} of it, versions {line['versions_planned']}"
            )
        if arguments.save:
            path = HERE / "results" / f"memory_{dist.get_world_size()}_ranks_{date.today():%Y%m}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in ({"environment": environment()}, *lines)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
