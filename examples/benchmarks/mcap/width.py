"""The widest AmoebaNet-D that trains under a memory limit, for each way to cut it: a bisection over real runs.

    python examples/benchmarks/mcap/width.py [--limit 60MB] [--only WORD ...] [--out FILE]

Each run is a training of a few steps on four processes, each of which a counter beneath torch's allocator refuses
more than the limit, as a GPU would. Widths are those at which AmoebaNet-D(L, F) can be built in steps of
``--step`` filters F; a width trains where all steps end. Cuts:

- ``uniform``, ``parameters``: DeepSpeed's ``PipelineModule`` and engine, with this ``partition_method``;
- ``time``: equal measured time, as torchgpipe's ``balance_by_time``, and ``mcap``: equal predicted peaks; both on
  our engine, whatever the planner says of their memory;
- ``madpipe``: ``partition_method="madpipe"`` and nothing else; it knows of the limit as it would of a GPU's.

``never`` recomputes nothing, ``all`` each layer (``activation_checkpoint_interval=1``), ``chosen`` what the plan
says.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from multiprocessing import connection
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from amoebanet import COPIES, layers, num_parameters
from deepspeed.pipe import PipelineModule as DeepSpeedsModule

import deepspeed_partition
from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan
from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.planner.units import format_bytes, parse_size
from deepspeed_partition.profiling import counted_memory, profile_chain

RANKS = 4
MICRO_BATCHES = 4
STEPS = 3
REPEATS = 5
SAYING_SECONDS = 2
OUT_OF_MEMORY, NOTHING_FITS = 3, 4
"""Exit statuses of a rank that ran out of memory, and of one whose planner says that nothing fits."""
WAYS = (
    ("time", "never"), ("madpipe", "chosen"), ("mcap", "never"), ("uniform", "never"), ("parameters", "never"),
    ("madpipe", "never"), ("time", "all"), ("mcap", "all"),
)  # fmt: skip
"""Cuts, and what is recomputed."""


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    num_layers: int
    pixels: int
    samples: int
    """Images of a micro-batch."""
    classes: int
    limit_bytes: int

    def micro_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and their classes."""
        images = torch.randn(self.samples, 3, self.pixels, self.pixels)
        return images, torch.randint(self.classes, (self.samples,))


@functools.cache
def chain_of(setting: Setting, width: int) -> Chain:
    """Return the layers with their times on one processor, so that other work on the machine does not count."""
    made = layers(setting.num_layers, width, setting.classes)
    chain = profile_chain(made, setting.micro_batch(), loss_fn=F.cross_entropy, repeats=1, warm_up=1)
    seconds = processor_seconds([each.build() for each in made], setting)
    timed = [
        replace(layer, forward_seconds=forward, backward_seconds=backward)
        for layer, (forward, backward) in zip(chain.layers, seconds, strict=True)
    ]
    return replace(chain, layers=tuple(timed))


def processor_seconds(modules: list[nn.Module], setting: Setting) -> list[tuple[float, float]]:
    """Return the least processor time of each layer's forward and backward."""
    least = [(inf, inf)] * len(modules)
    for _ in range(REPEATS):
        x: Any = setting.micro_batch()[0]
        for index, module in enumerate(modules):
            x = tree_map(lambda each: each.detach().requires_grad_(), x)
            started = time.process_time()
            y = module(x)
            forward = time.process_time() - started
            outputs = [each for each in tree_leaves(y) if each.grad_fn is not None]
            started = time.process_time()
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
            spent = forward, time.process_time() - started
            least[index] = tuple(map(min, least[index], spent))
            x = y
    return least


@functools.cache
def boundaries(cut: str, setting: Setting, width: int) -> list[int]:
    """Return where equal time or mcap cuts: from layers that are measured one by one."""
    chain = chain_of(setting, width)
    platform = Platform(num_devices=RANKS, memory_bytes=2**50, bandwidth=1e12, weight_copies=COPIES)
    algorithm = {"time": "pipedream-blind", "mcap": "mcap"}[cut]
    plan = make_plan(
        chain, platform, algorithm, num_micro_batches=MICRO_BATCHES, num_stages=RANKS, every_device_trains=True,
        recompute="never",
    )  # fmt: skip
    return list(plan.boundaries)


def train(
    rank: int, port: int, cut: str, recompute: str, setting: Setting, width: int, method: Any, folder: str
) -> None:
    """Train for a few steps on one rank, and write its peak."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    torch.manual_seed(1)
    data = [setting.micro_batch() for _ in range(MICRO_BATCHES)]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.samples, "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}},
    }  # fmt: skip
    if cut == "madpipe" and recompute == "never":
        config["pipeline"] = {"madpipe": {"recompute": "never"}}
    kind: Any = DeepSpeedsModule
    if cut not in ("uniform", "parameters"):
        deepspeed_partition.install()
        kind = PipelineModule
    with counted_memory(limit_bytes=setting.limit_bytes) as memory:
        try:
            torch.manual_seed(0)
            module = kind(
                layers(setting.num_layers, width, setting.classes), num_stages=RANKS, loss_fn=F.cross_entropy,
                partition_method=method, activation_checkpoint_interval=int(recompute == "all"),
            )  # fmt: skip
            engine, *_ = deepspeed.initialize(
                model=module, config=config,
                model_parameters=[each for each in module.parameters() if each.requires_grad],
            )  # fmt: skip
            losses = [float(engine.train_batch(iter(list(data)))) for _ in range(STEPS)]
        except (torch.OutOfMemoryError, MemoryError) as error:
            print(f"rank {rank}: {str(error).splitlines()[0]}", flush=True)
            os._exit(OUT_OF_MEMORY)
        except InfeasibleError as error:
            print(f"rank {rank}: {error}", flush=True)
            os._exit(NOTHING_FITS)
    result: dict[str, Any] = {"peak_bytes": memory.peak_bytes, "losses": losses}
    result["boundaries"] = [int(part) for part in engine.module.parts]
    plan = getattr(engine, "plan", None)
    if cut == "madpipe" and plan is not None:
        result["planned_peak_bytes"] = list(plan.peak_memory_bytes)
        result["stages"] = [[*stage.layers, stage.device, stage.rematerialize] for stage in plan.stages]
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)


def run(cut: str, recompute: str, setting: Setting, width: int) -> dict[str, Any]:
    """Train one width on processes of their own, and return how it ended and what each rank needed."""
    method = boundaries(cut, setting, width) if cut in ("time", "mcap") else cut
    started = time.perf_counter()
    row: dict[str, Any] = {"cut": cut, "recompute": recompute, "width": width}
    row["parameters"] = num_parameters(setting.num_layers, width, setting.classes)
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["__main__"])  # what takes long to import is imported once
        processes = [
            context.Process(target=train, args=(rank, port, cut, recompute, setting, width, method, folder))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        statuses = _ended(processes)
        if OUT_OF_MEMORY in statuses or NOTHING_FITS in statuses:
            row["outcome"] = "out of memory" if OUT_OF_MEMORY in statuses else "nothing fits"
        elif any(statuses):
            raise RuntimeError(f"{cut}, {recompute}, {width}: ranks ended with {statuses}")
        else:
            ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
            row |= {"outcome": "trains", "peak_bytes": [each["peak_bytes"] for each in ranks]}
            row |= {key: value for key, value in ranks[-1].items() if key != "peak_bytes"}
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _ended(processes: list[Any]) -> list[int]:
    """Return how processes ended; where one failed, the others, which wait for it, are ended too."""
    while any(each.exitcode is None for each in processes):
        connection.wait([each.sentinel for each in processes if each.exitcode is None])
        if any(each.exitcode for each in processes):
            for each in processes:
                each.join(SAYING_SECONDS)  # one that lost its neighbour ends first at times
            statuses = [each.exitcode or 0 for each in processes]
            for each in processes:
                each.kill()
                each.join()
            return statuses
    return [0] * len(processes)


def widest(trains: Callable[[int], bool], first: int, step: int) -> int | None:
    """Return the largest multiple of ``step`` that trains, where no wider one does; None where none does.

    Args:
        first: the width to begin with; from there steps double until one trains and one does not.
    """
    low, high, stride = 0, 0, 1
    probe = max(1, first // step)
    while not (low and high):
        if trains(probe * step):
            low, probe = probe, probe + stride
        else:
            high, probe = probe, max(probe - stride, 1)
            if high == 1:
                return None
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(middle * step) else (low, middle)
    return low * step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18, help="normal cells")
    parser.add_argument("--pixels", type=int, default=64, help="of an image, in each direction")
    parser.add_argument("--samples", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--limit", type=parse_size, default=parse_size("80MB"), help="of each rank")
    parser.add_argument("--first", type=int, default=56, help="the filters to begin with")
    parser.add_argument("--step", type=int, default=4, help="filters between two widths; multiples of 4")
    parser.add_argument("--only", nargs="+", default=(), help="ways, such as time/never")
    parser.add_argument("--out", type=Path, default=Path("width.jsonl"), help="one line for each run")
    arguments = parser.parse_args()
    setting = Setting(arguments.layers, arguments.pixels, arguments.samples, arguments.classes, arguments.limit)
    torch.set_num_threads(1)
    print(f"{RANKS} ranks of {format_bytes(setting.limit_bytes)}")
    first = arguments.first
    for cut, recompute in WAYS:
        if arguments.only and f"{cut}/{recompute}" not in arguments.only:
            continue

        def trains(width: int, cut: str = cut, recompute: str = recompute) -> bool:
            row = {**asdict(setting), **run(cut, recompute, setting, width)}
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{cut}/{recompute} {width}: {row['outcome']} {row.get('peak_bytes', '')}", flush=True)
            return row["outcome"] == "trains"

        found = widest(trains, first, arguments.step)
        first = found or first
        if found is None:
            print(f"{cut}/{recompute}: no width trains")
        else:
            parameters = num_parameters(setting.num_layers, found, setting.classes)
            print(f"{cut}/{recompute}: {found} filters, {parameters / 1e6:.2f} million parameters", flush=True)


if __name__ == "__main__":
    main()
