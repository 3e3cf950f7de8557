"""A step of three stages on two ranks (0-1-0) over links that sleep; rank 0 writes down when every layer slept."""

from __future__ import annotations

import json
import sys
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime.collectives import gather_objects

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
import deepspeed
from emulation import Links, over, sleeping_layers
from interleaved import engine_for_plan, step_seconds

from tests.engine.plans import chain_of, packed, platform_of

NUM_MICRO_BATCHES = 4
LAYER_SECONDS, LINK_SECONDS = 0.001, 0.005


def main() -> None:
    deepspeed.init_distributed()
    chain = chain_of(3, [(LAYER_SECONDS, LAYER_SECONDS)] * 3)
    plan = packed(chain, platform_of(2, bandwidth=4 / LINK_SECONDS), [0, 1, 2, 3], [0, 1, 0])
    links = Links.of(plan, chain)
    assert links.seconds_of_cut == [LINK_SECONDS] * 2
    layers = sleeping_layers(chain, output_numel=1)
    engine = engine_for_plan(layers, plan, NUM_MICRO_BATCHES, lambda outputs, _: outputs.sum(), over(links))
    step_seconds({"engine": engine}, lambda: repeat((torch.zeros(1, 1), torch.zeros(1))), 0)  # its warm-up
    everywhere = gather_objects([layer.naps for layer in layers])
    if dist.get_rank() == 0:
        naps = [next(each for each in of_layer if each["F"]) for of_layer in zip(*everywhere, strict=True)]
        Path(sys.argv[1]).write_text(json.dumps(naps))
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
