"""How fast is the planner, and what does importing the package cost?

python examples/benchmarks/planner_speed/main.py [contiguous | madpipe] [--time-limit 60] [--save]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan

SIZES = {
    "contiguous": [(50, 8), (100, 8), (200, 8), (200, 16), (400, 16)],
    "madpipe": [(12, 4), (20, 4), (20, 8), (50, 8)],
}
MEMORY_SHARES = [0.2, 0.3, 0.5, 0.8, 1.5]
"""Memory of all devices together, as a share of what the layers store once."""


def random_chain(num_layers: int, seed: int) -> Chain:
    pick = random.Random(seed)
    return Chain(
        input_bytes=10**6,
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                forward_seconds=pick.uniform(0.001, 0.02),
                backward_seconds=pick.uniform(0.002, 0.04),
                weight_bytes=pick.randrange(10**6),
                output_bytes=pick.randrange(10**7),
                stash_bytes=pick.randrange(10**8),
            )
            for index in range(num_layers)
        ),
    )


def planning_seconds(
    algorithm: str, num_layers: int, num_devices: int, repeats: int, time_limit: float
) -> dict[str, float]:
    """Of whole calls of ``make_plan``: search, proof, schedule and replay."""
    seconds, infeasible, proved = [], 0, 0
    for seed, share in enumerate(MEMORY_SHARES * repeats):
        chain = random_chain(num_layers, seed)
        stored = sum(layer.stash_bytes + 3 * layer.weight_bytes for layer in chain.layers)
        devices = Platform(num_devices=num_devices, memory_bytes=int(share * stored), bandwidth=1e9)
        start = time.perf_counter()
        try:
            proved += make_plan(chain, devices, algorithm, time_limit_seconds=time_limit).proved
        except InfeasibleError:
            infeasible += 1
        seconds.append(time.perf_counter() - start)
    return {
        "layers": num_layers,
        "devices": num_devices,
        "median_seconds": statistics.median(seconds),
        "max_seconds": max(seconds),
        "calls": len(seconds),
        "infeasible": infeasible,
        "proved": proved,
    }


def import_seconds(repeats: int) -> dict[str, float]:
    """Of ``import deepspeed_partition`` in a new interpreter, without what the interpreter itself takes."""
    script = "import time; t = time.perf_counter(); import deepspeed_partition; print(time.perf_counter() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return {"median_seconds": statistics.median(seconds), "max_seconds": max(seconds), "calls": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", nargs="?", choices=list(SIZES), default="contiguous")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of one call")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    rows = [
        planning_seconds(arguments.algorithm, *size, arguments.repeats, arguments.time_limit)
        for size in SIZES[arguments.algorithm]
    ]
    imported = import_seconds(5)
    table = Table(title=f"make_plan(..., {arguments.algorithm!r}): seconds")
    for name in ("layers", "devices", "median", "max", "calls", "infeasible", "proved"):
        table.add_column(name, justify="right")
    for row in rows:
        seconds = [f"{row[key]:.3f}" for key in ("median_seconds", "max_seconds")]
        table.add_row(
            str(row["layers"]),
            str(row["devices"]),
            *seconds,
            *(str(row[key]) for key in ("calls", "infeasible", "proved")),
        )
    Console().print(table)
    seconds = [
        f"{name} {imported[key]:.3f} s" for name, key in (("median", "median_seconds"), ("max", "max_seconds"))
    ]
    print(f"import deepspeed_partition: {', '.join(seconds)}")
    if arguments.save:
        machine = platform.machine()
        path = Path(__file__).parent / "results" / f"{arguments.algorithm}_{machine}_{date.today():%Y%m}.json"
        path.write_text(
            json.dumps({"planning": rows, "import": imported, "python": platform.python_version()}, indent=1)
            + "\n"
        )
        print(f"saved {path.name}")


if __name__ == "__main__":
    main()
