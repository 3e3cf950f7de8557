"""Models of 7, 13 and 70 billion parameters on 8 to 64 A100, every scheme without tensor parallelism.

Chains are those of ``examples/profiles/transformers/llama2.py`` with whole layers on each device. Eight devices of
a node have NVLink, 300 GB/s each way; nodes have a port of 200 Gbit/s for each device, 25 GB/s (NVIDIA's DGX A100,
as in Narayanan et al. 2021, section 5). A step has 128 sequences of 4,096 tokens; 16 bytes are kept per parameter.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_partition import Platform
from deepspeed_partition.planner.cluster.scheme_choice import rank_schemes
from deepspeed_partition.planner.machines import DeviceGroup, LinkLevel, Machines

sys.path.insert(0, str(Path(__file__).parents[2] / "profiles" / "transformers"))
import llama2

RESULTS = Path(__file__).parent / "results"
MICRO_BATCHES, WEIGHT_COPIES, TOKENS = 128, 8, 4096
PRICE_PER_DEVICE_HOUR = 3.5
"""Price that stands for one of a rented A100; other prices scale the column."""
MACHINES = Machines(
    devices=(DeviceGroup(count=64, name="A100-80GB", memory_bytes=80 * 10**9),),
    links=(
        LinkLevel(group=8, bandwidth=300e9, latency_seconds=5e-6),
        LinkLevel(bandwidth=25e9, latency_seconds=2e-5),
    ),
)


def rank_published(models: Sequence[str], numbers: Sequence[int], time_limit_seconds: float) -> None:
    """Rank the schemes of some models on each number of devices, and save each ranking beside this file."""
    RESULTS.mkdir(exist_ok=True)
    for sizes in llama2.MODELS:
        if sizes.name not in models:
            continue
        chain = llama2.chain_of(replace(sizes, tensor_parallel=1))
        for number in numbers:
            began = time.process_time()
            platform = Platform.on(MACHINES.first(number), weight_copies=WEIGHT_COPIES)
            ranking = rank_schemes(chain, [platform], MICRO_BATCHES, time_limit_seconds=time_limit_seconds)
            data = ranking.to_dict() | {"processor_seconds": time.process_time() - began}
            path = RESULTS / f"{sizes.name}_{number}_a100_202611.json"
            path.write_text(json.dumps(data, indent=1) + "\n")
            print(f"{sizes.name} on {number}: {ranking.why()}", flush=True)


def table(ranking_files: Sequence[Path]) -> str:
    """Return a row for each saved ranking: the fastest that runs, and the best of the other families."""
    lines = [
        "| model | GPUs | fastest that runs | step | tokens/s | memory | per 1e6 tokens | the best MadPipe "
        "| the best ZeRO or DDP |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in ranking_files:
        data = json.loads(path.read_text())
        rows = [row for row in data["schemes"] if row["runs"]]
        model, number = path.stem.split("_")[:2]
        if not rows:
            lines.append(f"| {model} | {number} | nothing fits | - | - | - | - | - | - |")
            continue
        best = rows[0]

        def first(names: tuple[str, ...], rows: list[dict] = rows, best: dict = best) -> str:
            row = next((row for row in rows if row["scheme"].startswith(names)), None)
            return (
                "none fits"
                if row is None
                else f"{row['scheme']}: {row['step_seconds'] / best['step_seconds']:.2f}"
            )

        rate = MICRO_BATCHES * TOKENS / best["step_seconds"]
        price = int(number) * PRICE_PER_DEVICE_HOUR / 3600 / rate * 1e6
        cells = [
            best["scheme"], f"{best['step_seconds']:.2f} s", f"{rate:,.0f}",
            f"{best['memory_bytes'] / 1e9:.0f} GB", f"{price:.2f}", first(("MadPipe",)), first(("ZeRO", "DDP")),
        ]  # fmt: skip
        lines.append(f"| {model} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def saved() -> list[Path]:
    """Return the saved rankings, by model and number of devices."""
    order = [sizes.name for sizes in llama2.MODELS]
    return sorted(
        RESULTS.glob("*_a100_202611.json"),
        key=lambda path: (order.index(path.stem.split("_")[0]), int(path.stem.split("_")[1])),
    )
