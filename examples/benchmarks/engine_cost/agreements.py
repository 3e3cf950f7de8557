"""What does it cost the processor that all ranks agree on a number, over sockets of one host and over gloo?

    torchrun --nproc_per_node=2 examples/benchmarks/engine_cost/agreements.py

Beside it what a rank takes to note where NumPy's generator is, as it does before each step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime import collectives
from deepspeed_partition.numpy_state import state_of

CALLS, ROUNDS = 50, 40


def microseconds(call: Callable[[], object]) -> list[float]:
    """Return the processor time of this process for one call, as each round has it in the mean of its calls."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        found.append(1e6 * (time.process_time() - began) / CALLS)
    return found


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    collectives.own_groups()
    agree = lambda: collectives.any_bits([1 << dist.get_rank()])  # noqa: E731
    figures = {"sockets": microseconds(agree)}
    with patch.dict(collectives._agreements, {dist.group.WORLD: None}):
        figures["gloo"] = microseconds(agree)
    figures["NumPy's generator, asked"] = microseconds(np.random.get_state)
    figures["NumPy's generator, read where it lies"] = microseconds(lambda: state_of(np.random.mtrand._rand))
    if dist.get_rank() == 0:
        for name, each in figures.items():
            median = f"median {statistics.median(each):.0f}"
            print(f"{dist.get_world_size()} ranks, {name}: {min(each):.0f} us at least, {median}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
