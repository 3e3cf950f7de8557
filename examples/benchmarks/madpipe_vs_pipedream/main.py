"""How much is a plan worth that counts memory? The evaluation of the MadPipe paper, section 5.

python examples/benchmarks/madpipe_vs_pipedream/main.py [--networks ResNet-50 ...] [--devices 2 4 8]
    [--memory 3 5 8 12 16] [--bandwidth 12 24] [--kept input autograd] [--time-limit 10] [--save]

The chains are computed from operations and bytes (``computed.py``), so the figures are those of the planner's
model, not of a run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from computed import Roofline, computed_chain
from vision_networks import NETWORKS

from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan

DEVICE = Roofline("12 TFLOP/s, 900 GB/s", flops_per_second=12e12, bytes_per_second=900e9)
MICRO_BATCH_SIZE = 8
ALGORITHMS = ("pipedream-blind", "pipedream", "contiguous", "madpipe")


def chains(names: Iterable[str], kept: Iterable[str]) -> dict[tuple[str, str], Chain]:
    """Each network twice: keeping what autograd keeps, or only the inputs of its layers, as the paper counts."""
    found = {}
    for name in tqdm(list(names), desc="computing chains", disable=None):
        chain = computed_chain(name, NETWORKS[name], MICRO_BATCH_SIZE, DEVICE)
        inputs_only = replace(chain, layers=tuple(replace(layer, stash_bytes=None) for layer in chain.layers))
        found[name, "autograd"], found[name, "input"] = chain, inputs_only
    return {key: chain for key, chain in found.items() if key[1] in kept}


def solve(chain: Chain, platform: Platform, algorithm: str, time_limit: float) -> dict[str, Any]:
    try:
        plan = make_plan(chain, platform, algorithm, time_limit_seconds=time_limit)
    except InfeasibleError:
        return {"period_seconds": None}
    return {
        "period_seconds": plan.period_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "proved_class": plan.proved_class if plan.proved else None,
        "contiguous": plan.is_contiguous,
        "planning_seconds": plan.planning_seconds,
    }


def sweep(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each network, platform and way of counting, with what each algorithm makes of it."""
    settings = list(
        itertools.product(
            chains(arguments.networks, arguments.kept).items(),
            arguments.devices,
            arguments.memory,
            arguments.bandwidth,
        )
    )
    rows = []
    for ((name, kept), chain), devices, memory, bandwidth in tqdm(settings, desc="planning", disable=None):
        platform = Platform(num_devices=devices, memory_bytes=int(memory * 1e9), bandwidth=bandwidth * 1e9)
        rows.append({
            "network": name, "kept": kept, "num_devices": devices, "memory_gb": memory, "bandwidth_gb": bandwidth,
            "sequential_seconds": chain.compute_seconds,
            **{each: solve(chain, platform, each, arguments.time_limit) for each in ALGORITHMS},
        })  # fmt: skip
    return rows


def ratios(rows: Iterable[dict[str, Any]], algorithm: str) -> list[float]:
    """Periods over madpipe's, where both have one."""
    pairs = ((row[algorithm]["period_seconds"], row["madpipe"]["period_seconds"]) for row in rows)
    return [period / best for period, best in pairs if period is not None and best is not None]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(rows: list[dict[str, Any]]) -> Table:
    """Figure 7 of the paper: geometric means over devices and bandwidths, by network and memory, and over all."""
    shown = Table("kept", "network", "memory", *(f"{name} / madpipe" for name in ALGORITHMS[:-1]), "proved", "gap")
    for kept in sorted({row["kept"] for row in rows}):
        of_kept = [row for row in rows if row["kept"] == kept]
        for name, memory in sorted({(row["network"], row["memory_gb"]) for row in of_kept}):
            group = [row for row in of_kept if (row["network"], row["memory_gb"]) == (name, memory)]
            shown.add_row(kept, name, str(memory), *cells(group))
        shown.add_row(kept, "all", "all", *cells(of_kept), end_section=True)
    return shown


def cells(rows: list[dict[str, Any]]) -> list[str]:
    """Ratios to madpipe's period, with their maximum, and what is proved of it, over the settings that it fits."""
    fitting = [row["madpipe"] for row in rows if row["madpipe"]["period_seconds"] is not None]
    found = []
    for name in ALGORITHMS[:-1]:
        to_best = ratios(rows, name)
        mean = f"{geometric_mean(to_best):.2f} (max {max(to_best):.2f}, " if to_best else "- ("
        found.append(f"{mean}{len(to_best)} of {len(fitting)})")
    proved = sum(plan["proved_class"] is not None for plan in fitting)
    gaps = [plan["period_seconds"] / plan["lower_bound_seconds"] for plan in fitting]
    return [*found, f"{proved} of {len(fitting)}", f"{geometric_mean(gaps) - 1:.0%}" if gaps else "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--devices", nargs="+", type=int, default=list(range(2, 9)))
    parser.add_argument("--memory", nargs="+", type=float, default=list(range(3, 17)), help="GB per device")
    parser.add_argument("--bandwidth", nargs="+", type=float, default=[12, 24], help="GB/s")
    parser.add_argument("--kept", nargs="+", default=["input", "autograd"], choices=["input", "autograd"])
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each plan")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rows = sweep(arguments)
    Console(width=150).print(table(rows))
    if arguments.save:
        path = HERE / "results" / f"computed_v100_{date.today():%Y%m}.json"
        path.parent.mkdir(exist_ok=True)
        lines = ",\n".join(map(json.dumps, rows))
        path.write_text(f'{{"device": {json.dumps(DEVICE.name)}, "rows": [\n{lines}\n]}}\n')
        print(f"saved {path}")


if __name__ == "__main__":
    main()
