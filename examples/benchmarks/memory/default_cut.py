"""A model that runs out of memory on DeepSpeed's default cut trains on MadPipe's, with nothing else changed.

    python examples/benchmarks/memory/default_cut.py [--ranks 2] [--model VGG] [--limit 60MB] [--out FILE]

Each of four runs starts processes of its own: DeepSpeed's ``PipelineModule`` as it is (``partition_method`` left
out, which balances parameters), and MadPipe's with ``partition_method="madpipe"``; both without a limit, and then
under one (``--limit``; left out, 85 % of what DeepSpeed's largest rank needed), which refuses what is beyond as a
GPU would. Losses under the limit are those without it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from multiprocessing import connection
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[3]))
from deepspeed.pipe import PipelineModule as DeepSpeedsModule
from models import MODELS, loss

import deepspeed_partition
from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.planner.units import format_bytes, parse_size
from deepspeed_partition.profiling import counted_memory

STEPS = 3
SHARE = 0.85
OUT_OF_MEMORY = 3
"""Exit status of a rank that ran out of memory."""


def train(rank: int, kind: str, model: str, ranks: int, limit: int | None, folder: str) -> None:
    """Train for a few steps on one rank, and write losses and the peak."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
    }
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = MODELS[model]
    deepspeed.init_distributed()
    torch.manual_seed(1)
    data = [made.micro_batch(torch.float32) for _ in range(2 * ranks)]
    with counted_memory(limit_bytes=limit) as memory:
        try:
            if kind == "madpipe":
                deepspeed_partition.install()
                module: Any = PipelineModule(
                    made.layers(), num_stages=ranks, loss_fn=loss, partition_method="madpipe"
                )
            else:
                module = DeepSpeedsModule(made.layers(), num_stages=ranks, loss_fn=loss)
            engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=[each for each in module.parameters() if each.requires_grad],
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": len(data),
                    "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
                },
            )
            losses = [float(engine.train_batch(iter(list(data)))) for _ in range(STEPS)]
        except torch.OutOfMemoryError as error:
            print(f"rank {rank}: {error}", flush=True)
            os._exit(OUT_OF_MEMORY)
    result = {
        "losses": losses,
        "peak_bytes": memory.peak_bytes,
        "parts": [int(part) for part in engine.module.parts],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def run(kind: str, model: str, ranks: int, limit: int | None = None) -> list[dict[str, Any]] | None:
    """Return what each rank wrote; None where one ran out of memory."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        processes = [
            context.Process(target=train, args=(rank, kind, model, ranks, limit, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        waiting = list(processes)
        while waiting:
            connection.wait([process.sentinel for process in waiting])
            if any(process.exitcode == OUT_OF_MEMORY for process in processes):
                for process in processes:
                    process.kill()
                    process.join()
                return None
            waiting = [process for process in waiting if process.exitcode is None]
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"{kind}: ranks ended with {[process.exitcode for process in processes]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="VGG", choices=sorted(MODELS))
    parser.add_argument("--limit", type=parse_size, help="of each rank; left out: a share of DeepSpeed's need")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"model": arguments.model, "ranks": arguments.ranks}
    peaks = {}
    for kind in ("deepspeed", "madpipe"):
        ranks = found[kind] = run(kind, arguments.model, arguments.ranks)
        assert ranks is not None, "without a limit nobody runs out of memory"
        peaks[kind] = max(each["peak_bytes"] for each in ranks)
        print(
            f"{kind}: parts {ranks[0]['parts']}, at most {format_bytes(peaks[kind])}, losses {ranks[0]['losses']}"
        )
    limit = found["limit_bytes"] = arguments.limit or int(SHARE * peaks["deepspeed"])
    for kind in ("deepspeed", "madpipe"):
        ranks = found[f"{kind}_limited"] = run(kind, arguments.model, arguments.ranks, limit)
        if ranks is None:
            print(f"{kind} under {format_bytes(limit)}: out of memory")
        else:
            same = ranks[0]["losses"] == found[kind][0]["losses"]
            most = format_bytes(max(each["peak_bytes"] for each in ranks))
            print(f"{kind} under {format_bytes(limit)}: trains, at most {most}, the same losses: {same}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
