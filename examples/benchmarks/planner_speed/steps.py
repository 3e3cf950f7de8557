"""What does it cost to plan a step? Time and memory over layers, devices and micro-batches.

    python examples/benchmarks/planner_speed/steps.py [--time-limit 20] [--kinds equal uneven]
        [--sizes 98x64x256 ...] [--save]

Each plan is made in a new process. Chains are an embedding, blocks and a head, as a transformer; the blocks are
equal, or uneven. A device has 1.5 times the memory that its share of the weights and P micro-batches need. With
``--save`` the table is kept in ``results/`` and in the README.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan

HERE = Path(__file__).parent
SIZES = (
    (34, 4, 16), (98, 8, 32), (98, 64, 256), (250, 16, 64), (500, 32, 128), (1000, 64, 64), (1000, 64, 256),
    (2048, 64, 256), (2048, 128, 256),
)  # fmt: skip
KINDS = ("equal", "uneven")
WEIGHT_COPIES = 8


def transformer(num_layers: int, kind: str) -> Chain:
    """Return an embedding, blocks and a head; the sizes are those of a small transformer."""
    pick = random.Random(num_layers)

    def block(index: int) -> LayerProfile:
        factor = 1.0 if kind == "equal" else round(pick.uniform(0.5, 2.0), 3)
        return LayerProfile(
            name=f"block{index}",
            type="Block",
            forward_seconds=0.01 * factor,
            backward_seconds=0.02 * factor,
            weight_bytes=int(400e6 * factor),
            output_bytes=32 * 2**20,
            stash_bytes=int(600e6 * factor),
        )

    embedding = LayerProfile(
        name="embedding", forward_seconds=0.001, backward_seconds=0.002, weight_bytes=260_000_000,
        output_bytes=32 * 2**20, stash_bytes=2**15,
    )  # fmt: skip
    head = LayerProfile(
        name="head", forward_seconds=0.007, backward_seconds=0.014, weight_bytes=260_000_000, output_bytes=4,
        stash_bytes=600_000_000,
    )  # fmt: skip
    blocks = (block(index) for index in range(num_layers - 2))
    return Chain(name=f"{kind}-{num_layers}", input_bytes=2**15, layers=(embedding, *blocks, head))


def devices_for(chain: Chain, num_devices: int) -> Platform:
    weights = WEIGHT_COPIES * sum(layer.weight_bytes for layer in chain.layers)
    kept = sum(layer.stash_bytes or 0 for layer in chain.layers)
    return Platform(
        num_devices=num_devices,
        memory_bytes=int(1.5 * (weights / num_devices + kept)),
        bandwidth=25e9,
        weight_copies=WEIGHT_COPIES,
    )


def one(kind: str, num_layers: int, num_devices: int, num_micro_batches: int, limit: float) -> dict[str, Any]:
    """Plan in this process, which did nothing before; measure processor seconds and its most memory (Linux)."""
    chain = transformer(num_layers, kind)
    devices = devices_for(chain, num_devices)
    before, started = _most_bytes(), time.process_time()
    row: dict[str, Any] = {
        "kind": kind, "layers": num_layers, "devices": num_devices, "micro_batches": num_micro_batches,
        "time_limit_seconds": limit,
    }  # fmt: skip
    try:
        plan = make_plan(chain, devices, num_micro_batches=num_micro_batches, time_limit_seconds=limit)
        # Every device busy all the time, as if the chain could be cut anywhere.
        ideal = num_micro_batches * chain.compute_seconds / num_devices
        row |= {"step_seconds": plan.step_seconds, "ideal_seconds": ideal, "stages": len(plan.stages)}
        bound = getattr(plan, "step_lower_bound_seconds", None)
        row |= {} if bound is None else {"step_lower_bound_seconds": bound}
    except InfeasibleError as refusal:
        row["refusal"] = str(refusal)
    row |= {
        "processor_seconds": time.process_time() - started,
        "bytes_before": before,
        "most_bytes": _most_bytes(),
    }
    return row


def _most_bytes() -> int:
    # Not ru_maxrss: that is no less than what the process that started this one had.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def in_new_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, arguments))}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| blocks | layers | devices | micro-batches | limit | processor s | peak memory of the process | stages "
        "| step / busy all the time | gap to its bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, bound = row.get("step_seconds"), row.get("step_lower_bound_seconds")
        cells = [
            row["kind"], row["layers"], row["devices"], row["micro_batches"], f"{row['time_limit_seconds']:g} s",
            f"{row['processor_seconds']:.1f}", f"{row['most_bytes'] / 1e6:.0f} MB", row.get("stages", "none fits"),
            f"{found / row['ideal_seconds']:.3f}" if found else "-",
            f"{found / bound - 1:.1%}" if found and bound else "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def save(rows: list[dict[str, Any]]) -> None:
    """Save the figures into results/, and their table into the README between its two marks."""
    path = HERE / "results" / f"steps_{platform.machine()}_{date.today():%Y%m}.json"
    path.write_text(json.dumps({"python": platform.python_version(), "steps": rows}, indent=1) + "\n")
    readme = HERE / "README.md"
    before, rest = readme.read_text().split("<!-- steps -->\n")
    after = rest.split("<!-- end of steps -->")[1]
    readme.write_text(
        "\n".join([before + "<!-- steps -->", "", *table(rows), "", "<!-- end of steps -->"]) + after
    )


def main() -> None:
    if sys.argv[1:2] == ["--one"]:  # a new process of this one
        kind, *sizes, limit = sys.argv[2:]
        print(json.dumps(one(kind, *map(int, sizes), limit=float(limit))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=20.0, help="processor seconds of each plan")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--sizes", nargs="+", default=["x".join(map(str, size)) for size in SIZES])
    parser.add_argument("--save", action="store_true", help="write results/ and the README beside this file")
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.kinds:
        for size in arguments.sizes:
            rows.append(in_new_process(kind, *size.split("x"), arguments.time_limit))
            print("\n".join(table(rows)[-1:] if len(rows) > 1 else table(rows)), flush=True)
    if arguments.save:
        save(rows)


if __name__ == "__main__":
    main()
