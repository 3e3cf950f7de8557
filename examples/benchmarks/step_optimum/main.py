"""How near the search for a step comes to the shortest step of all, on a hundred tiny instances.

    python examples/benchmarks/step_optimum/main.py [--seeds 0 100] [-o results.json]

Each instance of ``tiny.py`` is planned twice, without recomputation: by the search alone, and with the exact
program after it, which looks at every allocation and every order (``madpipe[exact]``). Nothing runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny import SEEDS, Instance, instance

from deepspeed_partition import Plan, make_plan
from deepspeed_partition.planner.solvers.constraint_program import is_installed
from deepspeed_partition.planner.solvers.step import exact_step

EQUAL = 1e-9
"""Relative difference below which two steps are equal."""


@contextmanager
def search_alone() -> Iterator[None]:
    """Plan without the exact program."""
    most = exact_step.MOST_OPERATIONS
    exact_step.MOST_OPERATIONS = 0
    try:
        yield
    finally:
        exact_step.MOST_OPERATIONS = most


def planned(given: Instance, algorithm: str = "madpipe") -> tuple[Plan, float]:
    """Return the plan of an instance and the seconds of the processor that it took."""
    began = time.process_time()
    plan = make_plan(
        given.chain,
        given.platform,
        algorithm,
        num_micro_batches=given.num_micro_batches,
        recompute="never",
    )
    return plan, time.process_time() - began


def row_of(seed: int) -> dict[str, Any]:
    """Return what the search found, the optimum, and what the bounds are worth."""
    given = instance(seed)
    with search_alone():
        found, search_seconds = planned(given)
        contiguous, _ = planned(given, "contiguous")
    best, seconds = planned(given)
    assert found.step and best.step and contiguous.step
    return {
        "seed": seed,
        "layers": given.chain.num_layers,
        "devices": given.platform.num_devices,
        "micro_batches": given.num_micro_batches,
        "optimum_seconds": best.step.step_seconds,
        "proved": best.step.proved,
        "ratio": found.step.step_seconds / best.step.step_seconds,
        "ratio_of_contiguous": contiguous.step.step_seconds / best.step.step_seconds,
        "bound_below_optimum": best.step.step_seconds / found.step.lower_bound_seconds - 1,
        "gap_of_contiguous": contiguous.step.gap,
        "stages_of_optimum": [[*stage.layers, stage.device] for stage in best.stages],
        "order_of_optimum": [[f"{name}.{number}" for name, number in order] for order in best.step.order],
        "search_seconds": round(search_seconds, 3),
        "exact_seconds": round(seconds - search_seconds, 3),
    }


def report(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the summary."""
    proved = [row for row in rows if row["proved"]]
    missed = [row for row in proved if row["ratio"] > 1 + EQUAL]
    yield f"{len(rows)} instances, {len(proved)} with a proved optimum"
    yield (
        f"search: equal in {len(proved) - len(missed)}, "
        f"at most {max(row['ratio'] for row in rows) - 1:.2%} longer, "
        f"within 3 % in {sum(row['ratio'] <= 1.03 for row in rows)}"
    )
    of_contiguous = [row["ratio_of_contiguous"] for row in rows]
    yield (
        f"the best contiguous step found: equal in {sum(ratio <= 1 + EQUAL for ratio in of_contiguous)}, "
        f"at most {max(of_contiguous) - 1:.1%} longer"
    )
    gaps = [row["gap_of_contiguous"] for row in rows]
    yield (
        f"its gap to the bound of contiguous partitions: median {statistics.median(gaps):.2%}, "
        f"largest {max(gaps):.1%}, proved in {sum(gap <= 1e-6 for gap in gaps)}"
    )
    bounds = [row["bound_below_optimum"] for row in rows]
    yield (
        f"optimum above the lower bound of any allocation: median {statistics.median(bounds):.1%}, "
        f"largest {max(bounds):.1%}, least {min(bounds):.1%}"
    )
    seconds = [row["exact_seconds"] for row in rows]
    yield f"exact program: median {statistics.median(seconds):.2f} s of the processor, most {max(seconds):.2f} s"
    for row in missed:
        stages = " ".join(f"{start}..{stop}@{device}" for start, stop, device in row["stages_of_optimum"])
        yield (
            f"missed: seed {row['seed']}, {row['layers']} layers, {row['devices']} devices, "
            f"{row['micro_batches']} micro-batches: {row['ratio'] - 1:.2%} longer than {stages}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, nargs=2, default=(SEEDS.start, SEEDS.stop), help="from, to (excluded)"
    )
    parser.add_argument("-o", "--output", type=Path, help="file for the rows, as JSON")
    arguments = parser.parse_args()
    if not is_installed():
        parser.error("the exact program needs OR-tools: pip install 'madpipe[exact]'")
    planned(instance(0))  # OR-tools is imported here, and not counted
    rows = [row_of(seed) for seed in range(*arguments.seeds)]
    print("\n".join(report(rows)))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
