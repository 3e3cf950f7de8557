"""What it takes to run each layer on parts of a few samples, forward and backward.

    python examples/benchmarks/checking_costs/layers.py

The layers are those of `examples/train_lightning.py`; the least of ten runs counts, on one thread.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from train_lightning import Digits

from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.layers_on_parts import few_samples, layers_on_parts

NUM_RUNS = 10


def main() -> None:
    torch.set_num_threads(1)
    module = Digits(epochs=1)
    images = torch.randn(4, 1, 32, 32)
    call, samples = (
        PipelineCall(layers=tuple(module.net), attribute="forward"),
        replace(few_samples((images,), (images[:2],)), more=torch.randn(8, 1, 32, 32)),
    )
    for name, in_training in (("forward", False), ("forward and backward", True)):
        with torch.set_grad_enabled(in_training):
            found = []
            for _ in range(NUM_RUNS):
                start = time.process_time()
                layers_on_parts(module, call, samples, device=torch.device("cpu"), dtype=None)
                found.append(time.process_time() - start)
        print(f"{name}: {1e3 * min(found):.0f} ms")
    start = time.process_time()
    module(torch.randn(32, 1, 32, 32)).sum().backward()
    print(f"a step of 32 pictures: {1e3 * (time.process_time() - start):.0f} ms")


if __name__ == "__main__":
    main()
