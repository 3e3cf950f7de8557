"""What recomputation is worth: the least memory of models with and without it, and steps in tight memory.

    python examples/benchmarks/recomputation/main.py [--times 1]

Layers are measured here, on this machine; then everything is planned, and nothing trained.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.pipe import LayerSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "memory"))

from models import MODELS

from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan
from deepspeed_partition.planner.recomputation import MODES
from deepspeed_partition.profiling import profile_chain

NAMES = ("ViT", "ResNet-50", "GPT")
PLATFORM = Platform(num_devices=4, memory_bytes=2**40, bandwidth=1e9, weight_copies=4)
NUM_MICRO_BATCHES = 8
TIGHT = 1.05
"""Memory of the steps, relative to the least with which a step fits without recomputation."""


def least_memory(chain: Chain, mode: str) -> int:
    """Return the bytes per device of the least memory with which a step fits."""
    try:
        make_plan(chain, replace(PLATFORM, memory_bytes=1), recompute=mode, num_micro_batches=NUM_MICRO_BATCHES)
    except InfeasibleError as error:
        assert error.smallest_memory_bytes is not None
        return error.smallest_memory_bytes
    raise AssertionError("a step fits into one byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="of the 4 samples of a micro-batch: how many times")
    times = parser.parse_args().times
    print("| model | least memory, never | stage | block | at | step, never | stage | block | auto |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in NAMES:
        torch.manual_seed(0)
        model = MODELS[name]
        inputs = torch.cat([model.micro_batch(torch.float32)[0] for _ in range(times)])
        layers = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in model.layers()]
        chain = profile_chain(layers, inputs)
        least = {mode: least_memory(chain, mode) for mode in ("never", "stage", "block")}
        memory = int(least["never"] * TIGHT)
        given = replace(PLATFORM, memory_bytes=memory)
        steps = {}
        for mode in MODES:
            plan = make_plan(chain, given, recompute=mode, num_micro_batches=NUM_MICRO_BATCHES)
            assert plan.step is not None
            steps[mode] = plan.step.step_seconds
        cells = [f"{least[mode] / 1e6:.1f} MB" for mode in ("never", "stage", "block")]
        cells += [f"{memory / 1e6:.1f} MB"]
        cells += [f"{steps[mode] * 1e3:.1f} ms" for mode in ("never", "stage", "block", "auto")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
