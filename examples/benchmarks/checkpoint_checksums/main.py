"""What do the checksums of a checkpoint cost?

    torchrun --nproc_per_node=2 examples/benchmarks/checkpoint_checksums/main.py --rounds 5 --width 2048 [--save]

A pipeline of linear layers with Adam and ZeRO-1 is saved and loaded with ``checkpoint_checksums`` on and off, in
turn, so that noise hits both alike. Seconds of the clock are those of the slowest rank; those of the processor are
added up. Files stay in the page cache: where a disk has to be read first, the share of checksums is smaller.
Algorithms that were weighed are timed on the same machine at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from rich.console import Console
from rich.table import Table
from torch import nn

from deepspeed_partition.engine import PipelineModule, initialize
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import prepare_cpu

ALGORITHMS: dict[str, Callable[[bytes], Any]] = {
    "crc32 (zlib)": zlib.crc32,
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
    "md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048, help="of the linear layers: 4 width**2 bytes each")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", help="where checkpoints are written for a while; left out, a temporary folder")
    parser.add_argument("--save", action="store_true", help="write the figures into results/")
    return parser.parse_args()


def engine_with(checksums: bool, width: int, num_layers: int) -> Any:
    """A pipeline that has taken one step, so that the optimizer has its states."""
    size = dist.get_world_size()
    cut = [num_layers * stage // size for stage in range(size + 1)]
    specs = [LayerSpec(nn.Linear, width, width) for _ in range(num_layers)]
    module = PipelineModule(layers=specs, num_stages=size, loss_fn=nn.functional.mse_loss, partition_method=cut)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": size, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
        "pipeline": {"madpipe": {"checkpoint_checksums": checksums}},
    }  # fmt: skip
    optimizer = torch.optim.Adam(module.parameters())
    engine, *_ = initialize(model=module, config=config, optimizer=optimizer)
    engine.train_batch(iter([(torch.randn(1, width), torch.randn(1, width))] * size))
    return engine


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of the slowest rank, and of all processors."""
    dist.barrier()
    began, busy = time.monotonic(), time.process_time()
    work()
    mine = time.monotonic() - began, time.process_time() - busy
    of_all = gather_objects(mine)
    return {
        "seconds": max(seconds for seconds, _ in of_all),
        "processor_seconds": sum(seconds for _, seconds in of_all),
    }


def gigabytes_per_second(digest: Callable[[bytes], Any], data: bytes) -> float:
    """Measure the speed of ``digest`` in gigabytes per second of processor time, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        digest(data)
        best = min(best, time.process_time() - began)
    return len(data) / best / 1e9


def main() -> None:
    arguments = parse_arguments()
    prepare_cpu()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    folder = Path(gather_objects(tempfile.mkdtemp(dir=arguments.folder) if rank == 0 else "")[0])
    engines = {checksums: engine_with(checksums, arguments.width, arguments.layers) for checksums in (True, False)}
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds + 1):
        row: dict[str, Any] = {}
        for checksums, engine in engines.items():
            where, name = str(folder / str(checksums)), "with" if checksums else "without"
            row[f"save {name}"] = measured(
                lambda engine=engine, where=where: engine.save_checkpoint(where, tag="x")
            )
            row[f"load {name}"] = measured(lambda engine=engine, where=where: engine.load_checkpoint(where))
        rounds += [row] if number else []  # the first one finds nothing to replace
    if rank == 0:
        num_bytes = sum(file.stat().st_size for file in (folder / "True").rglob("*") if file.is_file())
        sample = os.urandom(2**26)
        speeds = {name: gigabytes_per_second(digest, sample) for name, digest in ALGORITHMS.items()}
        report(num_bytes, rounds, speeds)
        if arguments.save:
            results = Path(__file__).parent / "results"
            results.mkdir(exist_ok=True)
            path = results / f"{dist.get_world_size()}_processes_{date.today():%Y%m}.json"
            figures = {"bytes": num_bytes, "rounds": rounds, "gigabytes_per_processor_second": speeds}
            path.write_text(json.dumps({"torch": torch.__version__, **figures}, indent=1) + "\n")
        shutil.rmtree(folder)
    dist.barrier()


def report(num_bytes: int, rounds: list[dict[str, Any]], speeds: dict[str, float]) -> None:
    """Print what a reader wants to know, medians over the rounds."""
    table = Table(title=f"a checkpoint of {num_bytes / 1e6:.0f} MB")
    for column in ("", "without", "with", "more", "processor seconds more per GB"):
        table.add_column(column, justify="left" if not column else "right")
    for verb in ("save", "load"):
        kinds = ("without", "with")
        clock = {kind: statistics.median(row[f"{verb} {kind}"]["seconds"] for row in rounds) for kind in kinds}
        extra = statistics.median(
            row[f"{verb} with"]["processor_seconds"] - row[f"{verb} without"]["processor_seconds"]
            for row in rounds
        )
        table.add_row(
            verb,
            f"{clock['without']:.2f} s",
            f"{clock['with']:.2f} s",
            f"{100 * (clock['with'] / clock['without'] - 1):.0f} %",
            f"{extra / (num_bytes / 1e9):.2f}",
        )
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {speed:.2f} GB/s" for name, speed in speeds.items()), "of processor time")


if __name__ == "__main__":
    main()
