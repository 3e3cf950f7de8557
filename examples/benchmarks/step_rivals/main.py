"""Is a published schedule ever faster than the step that the planner finds? 200 settings, judged by the replay.

    python examples/benchmarks/step_rivals/main.py rivals [--numbers 0 1 2 ...] [--jobs 1]
    python examples/benchmarks/step_rivals/main.py plans [--algorithms madpipe contiguous] [--time-limit 20]
        [--numbers ...] [--jobs 1] [--label NAME]
    python examples/benchmarks/step_rivals/main.py report [--label NAME] [--others NAME ...]
    python examples/benchmarks/step_rivals/main.py bounds [--label NAME] [--others NAME ...]

``rivals`` finds the best of each published schedule (``rivals.py``). ``plans`` asks the planner, in a new process
for each plan. ``report`` writes ``results/report_NAME.md``. ``bounds`` computes the lower bounds anew, and writes
how far the steps of the plans are above them: ``results/gaps_NAME.md``. Both take the plans of the labels
``--others``, the first that has one, for settings and algorithms that ``--label`` has none of. A line is written
as soon as it is known, and what ``results/`` has is not done again: a run may be stopped, continued and split. To
plan again, give another label.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from bounds_now import bound_row
from judge import check
from rivals import FAMILIES, best_of
from rows import newest_rows, read_rows, run_jobs
from settings import Setting, chain_of, read_settings
from step_report import gaps, report

from deepspeed_partition import InfeasibleError, make_plan

RESULTS = HERE / "results"
ALGORITHMS = ("madpipe", "contiguous")


def rivals_row(setting: Setting) -> dict[str, Any]:
    """Return the best of each family in a setting."""
    chain, found = chain_of(setting.network), {}
    started = time.process_time()
    for family in FAMILIES:
        winner = best_of(chain, setting.platform, setting.num_micro_batches, family)
        if winner is not None:
            rival = winner.rival
            found[family] = {
                "step_seconds": winner.step_seconds,
                "peak_bytes": winner.peak_bytes,
                "chunks": rival.chunks,
                "cuts": list(rival.cuts),
                "recomputes": rival.recomputes,
                "most_alive": rival.most_alive,
            }
    return {"number": setting.number, "rivals": found, "processor_seconds": time.process_time() - started}


def plan_row(setting: Setting, algorithm: str, time_limit: float) -> dict[str, Any]:
    """Plan once, in a process that did nothing before; return what the replay finds, and what planning took."""
    chain = chain_of(setting.network)
    if chain.digest() != setting.digest:
        raise ValueError(f"setting {setting.number} was drawn for another {setting.network}: run settings.py")
    row: dict[str, Any] = {"number": setting.number, "algorithm": algorithm, "time_limit_seconds": time_limit}
    started = time.process_time()
    try:
        plan = make_plan(
            chain,
            setting.platform,
            algorithm,
            num_micro_batches=setting.num_micro_batches,
            time_limit_seconds=time_limit,
        )
    except InfeasibleError as refusal:
        row["refusal"] = str(refusal)
        plan = None
    row["processor_seconds"] = time.process_time() - started
    row["most_bytes"] = _most_bytes()
    if plan is not None:
        assert plan.step is not None
        found = check(plan, chain)
        row |= {
            "step_seconds": found.step_seconds,
            "peak_bytes": found.peak_bytes,
            "cuts": plan.boundaries,
            "devices": [stage.device for stage in plan.stages],
            "in_flight": [stage.in_flight for stage in plan.stages],
            "recomputes": any(stage.blocks for stage in plan.stages),
        }
        for key in ("step_lower_bound_seconds", "step_proved"):
            value = getattr(plan, key, None)
            if value is None:
                value = getattr(plan.step, key.removeprefix("step_"), None)
            if value is not None:
                row[key] = value
    return row


def write_gaps(settings: Sequence[Setting], label: str, others: Sequence[str]) -> None:
    """Compute all bounds, and write them and the gaps of the plans of a label, and of others beside."""
    bounds = [bound_row(each) for each in settings]
    (RESULTS / "bounds.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in bounds), encoding="utf-8")
    text = gaps([asdict(each) for each in settings], newest_rows(RESULTS, (label, *others)), bounds)
    (RESULTS / f"gaps_{label}.md").write_text(text, encoding="utf-8")
    print(text)


def _most_bytes() -> int | None:
    """Return the most memory that this process had; None where the system does not say (Linux does)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rivals", "plans", "report", "bounds"))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--time-limit", type=float, default=20.0, help="processor seconds of each plan")
    parser.add_argument("--numbers", nargs="+", type=int, help="of the settings, in this order; left out: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--label", default="202611", help="name of the plans in results/")
    parser.add_argument(
        "--others", nargs="*", default=[], help="labels of plans in settings without one of --label"
    )
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    known = {each.number: each for each in read_settings()}
    settings = [known[number] for number in arguments.numbers or known]
    rivals_path, plans_path = RESULTS / "rivals.jsonl", RESULTS / f"plans_{arguments.label}.jsonl"
    if arguments.what == "rivals":
        done = {row["number"] for row in read_rows(rivals_path)}
        run_jobs(rivals_path, [(rivals_row, each) for each in settings if each.number not in done], arguments.jobs)
    elif arguments.what == "plans":
        planned = {(row["number"], row["algorithm"]) for row in read_rows(plans_path)}
        run_jobs(
            plans_path,
            [
                (plan_row, each, algorithm, arguments.time_limit)
                for algorithm in arguments.algorithms
                for each in settings
                if (each.number, algorithm) not in planned
            ],
            arguments.jobs,
        )
    elif arguments.what == "bounds":
        write_gaps(settings, arguments.label, arguments.others)
    else:
        plans = newest_rows(RESULTS, (arguments.label, *arguments.others))
        text = report([asdict(each) for each in settings], read_rows(rivals_path), plans)
        (RESULTS / f"report_{arguments.label}.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
