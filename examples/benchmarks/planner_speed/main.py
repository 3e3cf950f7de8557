"""How fast is the planner, beside the paper's program too, in how much memory, and what does importing it cost?

python examples/benchmarks/planner_speed/main.py [contiguous] [paper] [large] [graphs] [madpipe] [--save]

Without arguments all but ``madpipe``, which takes up to two hours: it plans until each proof is found or the time
is up.
``--save`` writes results/ and the tables of the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from against_paper import SIZES as PAPER_SIZES
from against_paper import against_paper, markdown, search
from instances import random_instance
from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan
from deepspeed_partition.planner.planning.problems import problem_of

HERE = Path(__file__).parent
PROFILES = HERE.parents[1] / "profiles" / "pipedream"
SIZES = {
    "contiguous": [(50, 8), (100, 8), (200, 8), (200, 16), (400, 16)],
    "madpipe": [(12, 4), (20, 4), (20, 8), (50, 4), (50, 8), (75, 4), (75, 8), (100, 4), (100, 8)],
}
MEMORY_SHARES = [0.2, 0.3, 0.5, 0.8, 1.5]
LARGE = [(100, 8), (200, 16), (400, 16)]
LARGE_SHARE = 0.5


def planning(algorithm: str, num_layers: int, num_devices: int, repeats: int, time_limit: float) -> dict[str, Any]:
    """Measure whole calls of ``make_plan``: search, proof, schedule and replay; a row for each instance."""
    calls = []
    for seed, share in enumerate(MEMORY_SHARES * repeats):
        chain, devices = random_instance(num_layers, num_devices, seed, share)
        wall, start = time.perf_counter(), time.process_time()
        call: dict[str, Any] = {"seed": seed, "memory_share": share, "proved": False, "class_gap": None}
        try:
            plan = make_plan(chain, devices, algorithm, time_limit_seconds=time_limit)
            call |= {"period_seconds": plan.period_seconds, "proved": plan.proved}
            if plan.class_lower_bound_seconds is not None:
                # Several devices with several stages may beat all of the class.
                call["class_gap"] = max(0.0, plan.period_seconds / plan.class_lower_bound_seconds - 1)
        except InfeasibleError:
            call["period_seconds"] = None
        call |= {"processor_seconds": time.process_time() - start, "wall_seconds": time.perf_counter() - wall}
        calls.append(call)
    return {"layers": num_layers, "devices": num_devices, "calls": calls}


def in_new_interpreter(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(what: str, num_layers: int, num_devices: int, time_limit: float) -> dict[str, Any]:
    """Measure one call in this interpreter, which did nothing before: processor seconds, and peak memory."""
    chain, devices = random_instance(num_layers, num_devices, 1, LARGE_SHARE)
    start = time.process_time()
    gap = None
    if what == "search":
        search(problem_of(chain, devices))
    elif what != "nothing":
        gap = make_plan(chain, devices, what, time_limit_seconds=time_limit).gap
    seconds = time.process_time() - start
    # Not ru_maxrss: that is no less than what the process that started this one had.
    status = Path("/proc/self/status").read_text()
    kilobytes = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    return {
        "what": what, "layers": num_layers, "devices": num_devices, "seconds": seconds, "gap": gap,
        "peak_bytes": 1024 * kilobytes,
    }  # fmt: skip


def large(time_limit: float) -> list[dict[str, Any]]:
    calls = [
        (what, *size) for size in LARGE for what in ("nothing", "contiguous", "search", "madpipe", "madpipe-paper")
    ]
    few = [call for call in calls if call[0] != "madpipe-paper" or call[1] == LARGE[0][0]]
    return [in_new_interpreter(*call, time_limit) for call in tqdm(few, desc="large chains", disable=None)]


def graphs() -> list[dict[str, Any]]:
    """Measure the published profiles: to a chain, and to a contiguous plan for 4 devices."""
    rows = []
    for path in sorted(PROFILES.glob("*.graph.txt")):
        start = time.process_time()
        chain = Chain.load(path)
        loaded = time.process_time()
        make_plan(chain, Platform(num_devices=4, memory_bytes=16e9, bandwidth=12e9), "contiguous")
        rows.append({
            "network": chain.name, "layers": chain.num_layers, "chain_seconds": loaded - start,
            "plan_seconds": time.process_time() - loaded,
        })  # fmt: skip
    return rows


def import_seconds(repeats: int) -> dict[str, float]:
    """Measure the seconds of ``import deepspeed_partition`` in an interpreter that has started."""
    script = "import time; t = time.perf_counter(); import deepspeed_partition; print(time.perf_counter() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return {"median_seconds": statistics.median(seconds), "max_seconds": max(seconds), "calls": repeats}


def planning_lines(rows: Iterable[dict[str, Any]], imported: dict[str, float]) -> list[str]:
    lines = [
        "| layers | devices | processor s, median | max | s on the clock, max | calls | nothing fits | proved "
        "| gap to the class, max |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        calls = row["calls"]
        seconds = [call["processor_seconds"] for call in calls]
        gaps = [call["class_gap"] for call in calls if call["class_gap"] is not None]
        lines.append(
            f"| {row['layers']} | {row['devices']} | {statistics.median(seconds):.3f} | {max(seconds):.3f} | "
            f"{max(call['wall_seconds'] for call in calls):.1f} | {len(calls)} | "
            f"{sum(call['period_seconds'] is None for call in calls)} | {sum(call['proved'] for call in calls)} | "
            f"{format(max(gaps), '.2%') if gaps else '-'} |"
        )
    return [
        *lines,
        "",
        f"`import deepspeed_partition` takes {imported['median_seconds']:.2f} s (median of {imported['calls']} "
        "new interpreters).",
    ]


def large_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [
        "| layers | devices | call | processor s | peak memory of the process | gap |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['layers']} | {row['devices']} | {row['what']} | {row['seconds']:.2f} | "
            f"{row['peak_bytes'] / 1e6:.0f} MB | {'-' if row['gap'] is None else format(row['gap'], '.1%')} |"
            for row in rows
        ),
    ]


def graph_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [
        "| network | layers | graph to chain, s | plan, s |",
        "|---|---|---|---|",
        *(
            f"| {row['network']} | {row['layers']} | {row['chain_seconds']:.3f} | {row['plan_seconds']:.3f} |"
            for row in rows
        ),
    ]


def measure(what: str, arguments: argparse.Namespace) -> tuple[Any, list[str]]:
    """Measure the figures; return them, and the lines of their table."""
    if what == "paper":
        rows: Any = [against_paper(*size, arguments.time_limit) for size in tqdm(PAPER_SIZES, disable=None)]
        return rows, markdown(rows)
    if what == "large":
        rows = large(arguments.time_limit)
        return rows, large_lines(rows)
    if what == "graphs":
        rows = graphs()
        return rows, graph_lines(rows)
    rows = [
        planning(what, *size, arguments.repeats, arguments.time_limit) for size in tqdm(SIZES[what], disable=None)
    ]
    imported = import_seconds(5)
    return {"planning": rows, "import": imported}, planning_lines(rows, imported)


def save(what: str, figures: Any, lines: list[str]) -> None:
    """Save the figures into results/, and their table into the README between its two marks."""
    path = HERE / "results" / f"{what}_{platform.machine()}_{date.today():%Y%m}.json"
    path.write_text(json.dumps({"python": platform.python_version(), what: figures}, indent=1) + "\n")
    readme = HERE / "README.md"
    text = readme.read_text()
    begin, end = f"<!-- {what} -->\n", f"<!-- end of {what} -->"
    before, rest = text.split(begin)
    readme.write_text(before + begin + "\n".join(["", *lines, "", end]) + rest.split(end)[1])
    print(f"saved {path.name}")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:  # a new interpreter of ``large``
        what, num_layers, num_devices, time_limit = sys.argv[2:]
        print(json.dumps(one(what, int(num_layers), int(num_devices), float(time_limit))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["contiguous", "paper", "large", "graphs"])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of one call of make_plan")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write results/ and the README beside this file")
    arguments = parser.parse_args()
    for what in arguments.what:
        if what not in (*SIZES, "paper", "large", "graphs"):
            parser.error(f"unknown {what!r}: there are {', '.join(SIZES)}, paper, large and graphs")
    for what in arguments.what:
        figures, lines = measure(what, arguments)
        Console(width=160).print(Markdown("\n".join([f"## {what}", "", *lines])))
        if arguments.save:
            save(what, figures, lines)


if __name__ == "__main__":
    main()
