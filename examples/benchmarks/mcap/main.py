"""Does mCAP's predictor find the cut of VGG-11 that needs the least memory?

    python examples/benchmarks/mcap/main.py profile     27 runs: the statistics of each layer
    python examples/benchmarks/mcap/main.py measure [--best 12] [--sample 24]    trains cuts, and notes their peaks
    python examples/benchmarks/mcap/main.py report      predicted against measured, and the three searches

All run on four processes of this machine's CPU. Results are in ``results``; ``measure`` goes on where it was
interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
from errors_in_words import errors_in_words

from deepspeed_partition.engine.incremental import profile_incrementally
from deepspeed_partition.engine.incremental.profiler import FIRST_STEP, Setup, train
from deepspeed_partition.engine.incremental.runs import Run
from deepspeed_partition.planner.mcap_profile import McapProfile
from deepspeed_partition.planner.solvers.contiguous import mcap_search
from deepspeed_partition.planner.solvers.contiguous.mcap_search import all_cuts, peaks_of
from deepspeed_partition.planner.solvers.interface import Cuts

PROFILE, MEASURED = HERE / "results/vgg11_profile_202611.json", HERE / "results/vgg11_measured_202611.jsonl"
SETUP = Setup(
    factory=f"{HERE / 'vgg11.py'}:model", micro_batch_size=32,
    config={"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}}},
)  # fmt: skip
NUM_BEST, NUM_SAMPLED = 12, 24
AT_ONCE = 6
"""Cuts that one start of the processes trains."""


def profile() -> None:
    started = time.perf_counter()

    def tell(done: int, total: int) -> None:
        print(f"{done} of {total} runs, {time.perf_counter() - started:.0f} s", file=sys.stderr)

    found = profile_incrementally(
        SETUP.factory, micro_batch_size=SETUP.micro_batch_size, config=SETUP.config, on_run=tell
    )
    PROFILE.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
    print(f"{found.num_runs} runs in {time.perf_counter() - started:.0f} s")


def tables() -> list[np.ndarray]:
    """Return the predicted peaks of each device's stages, first device first."""
    found = McapProfile.from_dict(json.loads(PROFILE.read_text()))
    return [found.peaks(in_flight) for in_flight in range(SETUP.num_devices, 0, -1)]


def cuts_by_prediction() -> list[Cuts]:
    """Return all cuts, the one that mCAP takes first."""
    stages = tables()
    num_layers = stages[0].shape[0] - 1
    return sorted(all_cuts(num_layers, len(stages)), key=lambda cuts: (peaks_of(stages, cuts), cuts))


def measured(*why: str) -> dict[Cuts, list[int]]:
    """Return the peak of each device of the cuts that were trained, for these reasons alone if there are any."""
    rows = map(json.loads, MEASURED.read_text().splitlines() if MEASURED.exists() else ())
    return {tuple(row["boundaries"]): row["peaks"] for row in rows if not why or row["why"] in why}


def measure(num_best: int, num_sampled: int) -> None:
    best = dict.fromkeys(cuts_by_prediction()[:num_best], "best")
    sample = dict.fromkeys(random.Random(0).sample(sorted(cuts_by_prediction()), num_sampled), "sample")
    chosen = sample | best
    left = [cuts for cuts in chosen if cuts not in measured()]
    for first in range(0, len(left), AT_ONCE):
        runs = [Run(cuts, frozenset()) for cuts in left[first : first + AT_ONCE]]
        found = train(SETUP, runs, [FIRST_STEP, (SETUP.num_micro_batches, None)])
        assert found.shortage is None, f"{runs[len(found.peaks)].boundaries} ran out of memory"
        with MEASURED.open("a") as file:
            for run, peaks in zip(runs, found.peaks, strict=True):
                row = {
                    "why": chosen[run.boundaries],
                    "boundaries": run.boundaries,
                    "peaks": [each[-1] for each in peaks],
                }
                file.write(json.dumps(row) + "\n")
        print(f"{min(first + AT_ONCE, len(left))} of {len(left)}", file=sys.stderr)


def report() -> None:
    stages, order, real = tables(), cuts_by_prediction(), measured()
    print(f"{len(order)} cuts predicted, {len(real)} of them trained")
    searches = {
        "brute force": mcap_search.brute_force, "dynamic program": mcap_search.exact,
        "Bayesian optimization": mcap_search.bayesian,
    }  # fmt: skip
    for name, search in searches.items():
        started = time.process_time()
        cuts = search(stages)
        print(f"{name}: {_sizes(cuts)}, predicted {peaks_of(stages, cuts)[0] / 1e6:.2f} MB, place "
              f"{order.index(cuts) + 1}, {time.process_time() - started:.2f} s of the processor")  # fmt: skip
    by_peak = sorted(real, key=lambda cuts: sorted(real[cuts], reverse=True))
    for cuts in by_peak[:8]:
        print(f"{_sizes(cuts)}: measured {max(real[cuts]) / 1e6:.2f} MB, predicted "
              f"{peaks_of(stages, cuts)[0] / 1e6:.2f} MB, place {order.index(cuts) + 1}")  # fmt: skip
    below = sum(max(peaks) < max(real[order[0]]) for peaks in real.values())
    print(f"of the chosen cut {_sizes(order[0])} the measured peak is number {below + 1} of {len(real)}")
    sample = measured("sample")
    for words, chosen in (("sample", sample), ("all that were trained", real)):
        _errors(words, [(peaks_of(stages, cuts)[0], max(peaks)) for cuts, peaks in chosen.items()])
    _errors("sample, each device", [
        (int(table[stage]), peak)
        for cuts, peaks in sample.items()
        for table, stage, peak in zip(stages, pairwise(cuts), peaks, strict=True)
    ])  # fmt: skip


def _sizes(cuts: Cuts) -> str:
    return "-".join(str(stop - start) for start, stop in pairwise(cuts))


def _errors(words: str, both: list[tuple[int, int]]) -> None:
    print(f"{words}, {len(both)}: {errors_in_words(predicted / found - 1 for predicted, found in both)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("profile", "measure", "report"))
    parser.add_argument("--best", type=int, default=NUM_BEST, help="so many cuts with the lowest predicted peaks")
    parser.add_argument(
        "--sample", type=int, default=NUM_SAMPLED, help="so many others, by chance, always the same"
    )
    arguments = parser.parse_args()
    if arguments.what == "profile":
        profile()
    elif arguments.what == "measure":
        measure(arguments.best, arguments.sample)
    else:
        report()


if __name__ == "__main__":
    main()
