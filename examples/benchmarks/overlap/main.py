"""How much faster is a step whose transfers run beside computation, on the same cut as DeepSpeed's?

    torchrun --nproc_per_node=4 examples/benchmarks/overlap/main.py --rounds 5 [--save]
    torchrun --nproc_per_node=4 examples/benchmarks/overlap/main.py --rounds 5 --megabytes 1 4 [--save]

One layer per stage that sleeps for its forward and backward, and links that sleep: no computation, so that every
stage has a device of its own. The ratio is that of transfers to computation per micro-batch, 2c / (tF + tB). A
link carries one message in each direction at once.
With ``--megabytes`` activations of these sizes travel over the machine's loopback instead, at what that takes.

- ``DeepSpeed``: its own engine, whose transfers block.
- ``same depth``: ours, with DeepSpeed's order of computations.
- ``deep``: ours, with about twice as many micro-batches in flight.

A step of each in turn, so that noise hits all alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Platform
from deepspeed_partition.engine.runtime.transfers import Transfers

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulation import Links, over, slow_blocking_transfers
from even_stages import FORWARD_SECONDS, MICRO_BATCHES_PER_STAGE, engines_for, even_chain, measured, plans_for

RATIOS = [0.05, 0.1, 0.25, 0.5]
NUMBERS = 1024
"""The numbers in each activation: what really travels takes no time worth counting."""


class Within:
    """An engine whose steps run within a context."""

    def __init__(self, engine: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.engine, self.context = engine, context

    def train_batch(self, data: Iterator[Any]) -> Any:
        with self.context():
            return self.engine.train_batch(data)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, nargs="+", help="of activations that travel over loopback")
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    num_stages = dist.get_world_size()
    micro_batches = MICRO_BATCHES_PER_STAGE * num_stages
    ideal = {"without_transfers_seconds": (micro_batches + num_stages - 1) * 3 * FORWARD_SECONDS}
    platform = Platform(num_devices=num_stages, memory_bytes=10**12, bandwidth=1e9)
    rows: list[dict[str, Any]] = []
    if arguments.megabytes:
        for megabytes in arguments.megabytes:
            numbers = round(megabytes * 1e6 / 4)
            chain = even_chain(num_stages, numbers)
            engines = engines_for(chain, plans_for(chain, platform), Transfers)
            rows.append({"megabytes": megabytes, **ideal, **measured(engines, numbers, arguments.rounds)})
    else:
        chain = even_chain(num_stages, NUMBERS)
        links = Links([0.0] * (num_stages - 1), half_duplex=False)
        engines = engines_for(chain, plans_for(chain, platform), over(links))
        blocking = engines.pop("DeepSpeed")
        for ratio in RATIOS:
            seconds = ratio * 3 * FORWARD_SECONDS / 2
            links.seconds_of_cut[:] = [seconds] * (num_stages - 1)
            lasting = Within(blocking, partial(slow_blocking_transfers, seconds, NUMBERS))
            side_by_side = {"DeepSpeed": lasting, **engines}
            rows.append({"ratio": ratio, **ideal, **measured(side_by_side, NUMBERS, arguments.rounds)})
    if dist.get_rank() == 0:
        report(rows, num_stages, micro_batches, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: list[dict[str, Any]], num_stages: int, micro_batches: int, arguments: argparse.Namespace) -> None:
    table = Table(
        title=f"{num_stages} stages, {micro_batches} micro-batches: one step over that without transfers"
    )
    link = "megabytes" if "megabytes" in rows[0] else "ratio"
    for name in (link, "DeepSpeed", "same depth", "deep", "gain at same depth", "gain, deep"):
        table.add_column(name, justify="right")
    for row in rows:
        over = [f"{row[name]['seconds'] / row['without_transfers_seconds']:.2f}"
                for name in ("DeepSpeed", "same depth", "deep")]  # fmt: skip
        gains = [f"{row[name]['deepspeed_takes']:.2f}" for name in ("same depth", "deep")]
        table.add_row(f"{row[link]:g}", *over, *gains)
    Console(width=120).print(table)
    if arguments.save:
        name = f"{link}_{num_stages}_stages_{date.today():%Y%m}.json"
        path = Path(__file__).parent / "results" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"saved {path.name}")


if __name__ == "__main__":
    main()
