"""What does it cost that layers, losses and ranks are watched? Fits with and without, in turn, in one run.

    torchrun --nproc_per_node=2 examples/benchmarks/checking_costs/main.py --rounds 3 --steps 130 [--save]

The digits network of ``examples/train_lightning.py`` is trained on a cut that is given, so that no fit plans.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from train_lightning import Digits, loaders

from deepspeed_partition.engine.runtime.collectives import gather_objects
from lightning_madpipe import MadPipeStrategy

MODES: dict[str, dict[str, Any]] = {
    "all": {},
    "check_layers=False": {"check_layers": False},
    "loss='mean'": {"loss": "mean"},
    "patience_seconds=0": {"patience_seconds": 0},
    "none": {"check_layers": False, "loss": "mean", "patience_seconds": 0},
}


def watcher_seconds() -> float:
    """Processor seconds of the thread that watches the other ranks, as Linux counts them; 0 without one."""
    for thread in threading.enumerate():
        if thread.name == "madpipe-watch":
            numbers = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            return int(numbers[0]) / 1e9
    return 0.0


class Times(pl.Callback):
    """Seconds of the wall and of the processor, of each step."""

    def __init__(self) -> None:
        self.ends = [(time.perf_counter(), time.process_time(), 0.0)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time(), watcher_seconds()))


def measured(mode: str, images: torch.Tensor, labels: torch.Tensor, num_steps: int) -> dict[str, float]:
    """Train from the same weights. All values are seconds; those of the processor are of this rank."""
    torch.manual_seed(7)
    times = Times()
    trainer = pl.Trainer(
        strategy=MadPipeStrategy(
            algorithm=[0, 4, 12], num_micro_batches=8, warmup_epochs=0, memory="2GB", bandwidth="1GB/s",
            latency_seconds=1e-4, **MODES[mode],
        ),
        accelerator="cpu", devices=2, max_epochs=1, logger=False, callbacks=[times], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(images.repeat(num_steps, 1, 1, 1), labels.repeat(num_steps))
    trainer.fit(Digits(1), DataLoader(data, batch_size=len(images)))
    ends = times.ends
    steps = [after[0] - before[0] for before, after in itertools.pairwise(ends[1:])]
    return {
        "until the first step has ended": ends[1][0] - ends[0][0],
        "a step, median": statistics.median(steps),
        "a step, mean": statistics.mean(steps),
        "processor, a step": (ends[-1][1] - ends[1][1]) / len(steps),
        "processor of the watcher, a second": (ends[-1][2] - ends[1][2]) / (ends[-1][0] - ends[1][0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="write the figures into results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)  # all ranks of a pipeline read the same batch
    images, labels = next(iter(loaders()[0]))
    images, labels = images[: arguments.batch], labels[: arguments.batch]
    rounds: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    measured("all", images, labels, 3)  # what is imported and compiled late
    for number in range(arguments.rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            of_ranks = gather_objects(measured(mode, images, labels, arguments.steps))
            rounds[mode].append({name: max(values[name] for values in of_ranks) for name in of_ranks[0]})
    if torch.distributed.get_rank() == 0:
        report(rounds, arguments)


def report(rounds: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    for name in rounds["none"][0]:
        print(f"{name}:")
        for mode, found in rounds.items():
            seconds = statistics.median(values[name] for values in found)
            beside = [values[name] / bare[name] for values, bare in zip(found, rounds["none"], strict=True)]
            print(
                f"    {mode:20} {seconds:.5f} s, {statistics.median(beside):.3f} times that of none in its round"
            )
    if arguments.save:
        (HERE / "results").mkdir(exist_ok=True)
        document = {"arguments": vars(arguments), "rounds": rounds}
        (HERE / "results" / "costs.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
