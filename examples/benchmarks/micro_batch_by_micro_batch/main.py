"""What it gains to decide micro-batch by micro-batch, to split backwards, and to repeat several micro-batches.

    python main.py bounds      the published bound: exact values; against the shortest steps of 200 random cases
    python main.py patterns    periodic patterns: the published ones; 50 random chains against an integer program
    python main.py steps       steps of identical stages: each way to recompute, and the bound
    python main.py unequal     steps of random chains of unequal layers: each way to recompute
    python main.py grid        periods on the evaluation grid of madpipe_vs_pipedream; --minutes: then it stops
    python main.py report      the tables, from results/

Rows go to results/, one line each; a run goes on where the last one ended. The grid is planned in an order
drawn at random from all its settings, the same in every run, so what is planned is a fair sample whenever it
stops: the report counts the settings from the first of that order to the first without a row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent / "madpipe_vs_pipedream")]

from computed import computed_chains
from sweep import Setting, counted, read

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Plan, Platform, make_plan, replay
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.planning.problems import problem_of, with_recomputation
from deepspeed_partition.planner.solvers.identical_stages import identical_stages_bound
from deepspeed_partition.planner.solvers.pattern.cyclic_program import CyclicProgram
from deepspeed_partition.planner.solvers.step.micro_batch_orders import StepRoad
from deepspeed_partition.planner.solvers.step.micro_batch_program import MicroBatchProgram
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound

RESULTS = HERE / "results"
FREE = 2.0**1000
"""A bandwidth at which transfers take no time."""
VALUES = [
    (5, 3, 15, 1, 2), (5, 3, 60, 1, 2), (8, 4, 64, 1, 2), (16, 6, 256, 1, 2), (4, 2, 12, 1, 2), (8, 2, 32, 1, 1),
    (6, 3, 100, 2, 3), (3, 2, 14, 1, 1),
]  # fmt: skip
"""Stages, slots, micro-batches, forward, backward."""
STEPS = [(5, 3, 15), (5, 3, 30), (5, 3, 60), (4, 2, 30), (8, 4, 32), (8, 4, 64)]
PATTERNS = [(5, 3), (8, 4), (4, 2)]
SEED_OF_GRID = 19
NUM_BOUNDS, NUM_PATTERNS, NUM_UNEQUAL = 200, 50, 60
SECONDS_EACH = {"steps": 8.0, "unequal": 4.0, "grid": 2.0}
"""Most seconds of the processor for a plan."""
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"recompute": "never"},
    "several": {"recompute": "micro-batch", "only": "several"},
    "halves": {"recompute": "never", "split_backward": True},
    "block": {"recompute": "block"},
    "micro-batch": {"recompute": "micro-batch"},
    "all": {"recompute": "micro-batch", "split_backward": True},
}
"""Arguments of ``make_plan``; ``several``: several micro-batches per period, and nothing is recomputed."""


def chain_of(layers: Sequence[tuple[float, float, int, int]]) -> Chain:
    """Return a chain of layers with forward and backward seconds, stash and output bytes."""
    return Chain(
        input_bytes=0, name="layers", layers=tuple(
            LayerProfile(
                name=f"layer{index}", forward_seconds=forward, backward_seconds=backward, weight_bytes=0,
                output_bytes=output, stash_bytes=stash,
            )
            for index, (forward, backward, stash, output) in enumerate(layers)
        ),
    )  # fmt: skip


def bounds() -> Iterator[dict[str, Any]]:
    """Yield the bound of random steps, and the shortest step that a constraint program proves."""
    for stages, slots, m, forward, backward in VALUES:
        bound = identical_stages_bound(stages, slots, m, forward, backward)
        yield {"value": [stages, slots, m, forward, backward], "bound": str(bound)}
    for seed in range(NUM_BOUNDS):
        pick = random.Random(seed)
        size, m = pick.randint(2, 3), pick.randint(2, 5)
        chain = chain_of([
            (pick.randint(1, 3), pick.randint(1, 4), pick.randint(1, 4), pick.randint(0, 1)) for _ in range(size)
        ])  # fmt: skip
        most = max(layer.stash_bytes or 0 for layer in chain.layers)
        platform = Platform(
            num_devices=size, memory_bytes=pick.randint(most, 2 * most) + 4 * m, comm_buffers=2 * m,
            bandwidth=pick.choice([0.5, 2.0, FREE]),
        )  # fmt: skip
        problem = with_recomputation(problem_of(chain, platform, m), "block")
        problem = replace(problem, per_micro_batch=True)
        road = StepRoad(problem, Placement.contiguous(tuple(range(size + 1))))
        solved = MicroBatchProgram(road, m).solve(2**62, 1.0)
        one_each = replace(problem.constraints, max_stages=size, exactly=True)
        bound = step_lower_bound(replace(problem, constraints=one_each), contiguous=True)
        yield {
            "seed": seed, "bound": problem.times.clock.seconds(bound), "proved": solved.is_optimal,
            "optimum": problem.times.clock.seconds(solved.bound) if solved.orders else None,
        }  # fmt: skip


def patterns() -> Iterator[dict[str, Any]]:
    """Yield published patterns as planned, and patterns of random chains held against a joint program."""
    from tests.planner.test_per_micro_batch import has_pattern, random_case, road_of

    for stages, slots in PATTERNS:
        chain = chain_of([(1, 2, 1, 0)] * stages)
        platform = Platform(num_devices=stages, memory_bytes=slots, bandwidth=FREE)
        plan = make_plan(chain, platform, recompute="micro-batch", time_limit_seconds=20)
        assert not replay(plan, chain).violations
        yield {
            "value": [stages, slots], "seconds": round(plan.pattern_seconds),
            "number": plan.micro_batches_per_period, "peaks": list(plan.peak_memory_bytes),
        }  # fmt: skip
    for seed in range(NUM_PATTERNS):
        chain, platform = random_case(seed, transfers=False)
        number = 1 + seed % 2
        road = road_of(chain, platform, number)
        solved = CyclicProgram(road, recomputes=True).solve(10**18, 20)
        length = round(solved.bound * 10.0**road.clock.exponent)
        equal = has_pattern(chain, platform, number, length) and not has_pattern(
            chain, platform, number, length - 1
        )
        yield {"seed": seed, "number": number, "length": length, "proved": solved.is_optimal, "equal": equal}


def steps() -> Iterator[dict[str, Any]]:
    """Yield steps of identical stages: always recomputed, never, by stage, 1F1B as deep as fits, one by one."""
    for stages, slots, m in STEPS:
        chain = chain_of([(1, 2, 1, 0)] * stages)
        platform = Platform(num_devices=stages, memory_bytes=slots, bandwidth=FREE)
        row: dict[str, Any] = {"value": [stages, slots, m]}
        row["bound"] = float(identical_stages_bound(stages, slots, m, 1, 2))
        cuts = list(range(stages + 1))
        row["never"] = _step(chain, platform, cuts, m, recompute="never")
        row["stage"] = _step(chain, platform, "contiguous", m, recompute="stage")
        row["always"] = float((m + stages - 1) * 4)
        row["micro-batch"] = _step(chain, platform, "contiguous", m, recompute="micro-batch")
        yield row


def _step(
    chain: Chain, platform: Platform, algorithm: Any, m: int, part: str = "steps", **how: Any
) -> float | None:
    try:
        plan = make_plan(
            chain, platform, algorithm, num_micro_batches=m, time_limit_seconds=SECONDS_EACH[part], **how
        )
    except InfeasibleError:
        return None
    assert not replay(plan, chain).violations
    return plan.step_seconds


def unequal() -> Iterator[dict[str, Any]]:
    """Yield steps of random chains of unequal layers, in each way to recompute, and their bound."""
    for seed in range(NUM_UNEQUAL):
        pick = random.Random(seed)
        devices, m = pick.randint(2, 6), pick.choice([4, 8, 12, 16, 24])
        chain = chain_of([
            (pick.uniform(1, 3), pick.uniform(1, 6), pick.randint(10, 40), pick.randint(0, 4))
            for _ in range(devices * pick.randint(1, 3))
        ])  # fmt: skip
        kept = [layer.stash_bytes or 0 for layer in chain.layers]
        platform = Platform(
            num_devices=devices, bandwidth=pick.choice([2.0, 20.0, FREE]), comm_buffers=2,
            memory_bytes=int(pick.uniform(1.2, 4) * max(max(kept), sum(kept) / devices)) + 16,
        )  # fmt: skip
        row: dict[str, Any] = {"seed": seed, "devices": devices, "layers": len(kept), "micro_batches": m}
        for way in ("never", "stage", "block", "micro-batch"):
            row[way] = _step(chain, platform, "contiguous", m, "unequal", recompute=way)
        row["all"] = _step(
            in_halves(chain), platform, "contiguous", m, "unequal", recompute="micro-batch", split_backward=True
        )
        yield row


def grid() -> Iterator[dict[str, Any]]:
    """Yield the periods of contiguous partitions in each way, on the settings that have no row."""
    chains = {chain.name: chain for chain in computed_chains()}
    done = {tuple(row["setting"]) for row in rows_of("grid")}
    for setting in settings_of_grid():
        if tuple(vars_of(setting)) in done:
            continue
        chain = in_halves(counted(chains[setting.network], setting.kept))
        row: dict[str, Any] = {"setting": vars_of(setting)}
        for way, arguments in WAYS.items():
            row[way] = _period(chain, setting.platform, dict(arguments))
        yield row


def settings_of_grid() -> list[Setting]:
    """Return all settings of the evaluation grid, under both ways of counting, in an order drawn at random."""
    path = next((HERE.parent / "madpipe_vs_pipedream" / "results").glob("*/contiguous.jsonl"))
    settings = sorted(read(path)[1])
    random.Random(SEED_OF_GRID).shuffle(settings)
    return settings


def sample_of_grid() -> list[dict[str, Any]]:
    """Return the rows of the settings from the first of the order of the grid to the first without a row."""
    rows = {tuple(row["setting"]): row for row in rows_of("grid")}
    order = (tuple(vars_of(setting)) for setting in settings_of_grid())
    return [rows[each] for each in itertools.takewhile(rows.__contains__, order)]


def vars_of(setting: Setting) -> list[Any]:
    return [setting.network, setting.kept, setting.num_devices, setting.memory_gb, setting.bandwidth_gb]


def in_halves(chain: Chain) -> Chain:
    """Return the chain with both halves of each backward as long: as many operations, for convolutions."""
    layers = tuple(
        replace(
            layer,
            backward_input_seconds=layer.backward_seconds / 2,
            backward_weight_seconds=layer.backward_seconds / 2,
        )
        for layer in chain.layers
    )
    return replace(chain, layers=layers)


def _period(chain: Chain, platform: Platform, how: dict[str, Any]) -> dict[str, Any] | None:
    if how.pop("only", None):
        chain = replace(chain, layers=tuple(replace(layer, recomputable=False) for layer in chain.layers))
    begun = time.process_time()
    try:
        plan: Plan = make_plan(chain, platform, "contiguous", time_limit_seconds=SECONDS_EACH["grid"], **how)
    except InfeasibleError:
        return None
    assert not replay(plan, chain).violations
    return {
        "period": plan.period_seconds, "gap": plan.gap, "proved": plan.proved, "class": plan.proved_class,
        "number": plan.micro_batches_per_period, "seconds": round(time.process_time() - begun, 2),
        "kinds": "".join(sorted({each.operation[0] for each in plan.operations} - {"S"})),
    }  # fmt: skip


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "bounds": bounds, "patterns": patterns, "steps": steps, "unequal": unequal, "grid": grid,
}  # fmt: skip


def run(part: str, minutes: float) -> None:
    """Write the rows of a part, behind those that are there, and begin none after so many minutes."""
    path = RESULTS / f"{part}.jsonl"
    done = len(rows_of(part))
    until = time.monotonic() + 60 * minutes
    with path.open("a") as file:
        for number, row in enumerate(PARTS[part]()):
            if part == "grid" or number >= done:  # the grid begins behind what is there
                file.write(json.dumps(row) + "\n")
                file.flush()
            if time.monotonic() > until:
                break


def rows_of(part: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{part}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report() -> None:
    """Print the tables."""
    for row in rows_of("bounds"):
        if "value" in row:
            print("| N={} K={} m={} tF={} tB={}".format(*row["value"]), "|", Fraction(row["bound"]), "|")
    random_rows = [row for row in rows_of("bounds") if "seed" in row and row["optimum"] is not None]
    proved = [row for row in random_rows if row["proved"]]
    above = sum(row["bound"] > row["optimum"] * (1 + 1e-9) for row in random_rows)
    print(f"random steps: {len(random_rows)} ({len(proved)} proved), bound above: {above}")
    if proved:
        gaps = sorted(row["optimum"] / row["bound"] - 1 for row in proved)
        met = sum(gap < 1e-9 for gap in gaps)
        print(f"bound met: {met}, median gap {gaps[len(gaps) // 2]:.1%}, largest {gaps[-1]:.1%}")
    for row in rows_of("patterns"):
        if "value" in row:
            print(
                "| N={} K={}".format(*row["value"]), f"| {row['seconds']}/{row['number']} | {max(row['peaks'])} |"
            )
    held = [row for row in rows_of("patterns") if "seed" in row]
    both = [sum(row[key] for row in held) for key in ("proved", "equal")]
    print("random patterns: {}, proved {}, equal {}".format(len(held), *both))
    for row in rows_of("steps"):
        one, bound = row["micro-batch"], row["bound"]
        cells = (row["always"], row["never"], row["stage"], one, round(bound, 2), f"{one / bound - 1:.1%}")
        print("| {}, {}, {} |".format(*row["value"]), " | ".join(map(str, cells)), "|")
    unequal_rows = rows_of("unequal")
    for way, base in (("micro-batch", "never"), ("micro-batch", "stage"), ("micro-batch", "block"),
                      ("all", "micro-batch"), ("all", "block")):  # fmt: skip
        found = [row[way] / row[base] for row in unequal_rows if row[way] and row[base]]
        if found:
            shorter = sum(ratio < 1 - 1e-9 for ratio in found)
            mean = math.exp(math.fsum(map(math.log, found)) / len(found))
            cells = f"{shorter} of {len(found)}", f"{mean:.3f}", f"{min(found):.3f}", f"{max(found):.3f}"
            print(f"| {way} over {base} |", " | ".join(cells), "|")
    sample = sample_of_grid()
    print(f"grid: {len(sample)} of {len(settings_of_grid())} settings, drawn at random")
    report_periods(sample)
    small = rows_of("grid_small")
    print(f"grid: {len(small)} settings, small ones first, by an earlier planner")
    report_periods(small)


def report_periods(table: list[dict[str, Any]]) -> None:
    """Print what each way gains over another one in some settings of the grid."""
    for way, base in (("several", "whole"), ("halves", "whole"), ("micro-batch", "block"), ("all", "block")):
        both = [(row[way], row[base]) for row in table if row[way] and row[base]]
        ratios = sorted(mine["period"] / other["period"] for mine, other in both)
        gained = [ratio for ratio in ratios if ratio < 1 - 1e-6]
        if not both:
            continue
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        more = sum(1 for row in table if row[way] and not row[base])
        gaps = sorted(mine["gap"] for mine, _ in both)
        print(
            f"| {way} over {base} | {len(gained)} of {len(both)} | {mean:.3f} | {ratios[0]:.3f} | {more} | "
            f"{sum(mine['proved'] for mine, _ in both)} | {gaps[len(gaps) // 2]:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no row is begun")
    arguments = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    report() if arguments.part == "report" else run(arguments.part, arguments.minutes)


if __name__ == "__main__":
    main()
