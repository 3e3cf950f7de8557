"""mCAP's own predictor beside the planner's memory, on the ranks of the table.

    python examples/benchmarks/memory/beside_mcap.py profile   its statistics of VGG, 34 runs each
    python examples/benchmarks/memory/beside_mcap.py report FILE ...    on ranks that main.py wrote

mCAP knows contiguous cuts under 1F1B, so ranks with several stages or recomputation are passed over.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
from errors_in_words import errors_in_words
from models import MODELS, loss
from report import Row, measured, ratio

from deepspeed_partition.engine.incremental import profile_incrementally
from deepspeed_partition.planner.mcap_profile import McapProfile

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"type": "SGD", "params": {"lr": 1e-3}},
    "Adam": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
}
SAMPLES = 8


def model(micro_batch_size: int) -> tuple[list[Any], Any, Any]:
    """Return what incremental profiling runs."""
    assert micro_batch_size == SAMPLES
    return MODELS["VGG"].layers(), MODELS["VGG"].micro_batch(torch.float32), loss


def path_of(optimizer: str) -> Path:
    return HERE / f"results/mcap_vgg_fp32_{optimizer}_202611.json"


def profile() -> None:
    """Measure mCAP's statistics of each layer, in fp32, with each optimizer."""
    for name, optimizer in OPTIMIZERS.items():
        found = profile_incrementally(
            f"{Path(__file__).resolve()}:model", micro_batch_size=SAMPLES, config={"optimizer": optimizer},
            on_run=lambda done, total, name=name: print(f"{name}: {done} of {total} runs", file=sys.stderr),
        )  # fmt: skip
        path_of(name).write_text(json.dumps(found.to_dict(), indent=1) + "\n")


def predicted(row: Row) -> int | None:
    """Return what mCAP predicts of a rank; None where it cannot, or has no profile."""
    setting = row["model"], row["precision"], row["zero"], row["num_pipelines"], row["recompute"]
    several = len(row["devices"]) > row["num_devices"] or row["devices"] != sorted(row["devices"])
    if setting != ("VGG", "fp32", 0, 1, "none") or several or row["optimizer"] not in OPTIMIZERS:
        return None
    statistics_of_layers = McapProfile.from_dict(json.loads(path_of(row["optimizer"]).read_text()))
    [(start, stop)] = row["stages"]
    return statistics_of_layers.peak_bytes(start, stop, row["num_devices"] - row["device"])


def report(paths: list[Path]) -> None:
    """Print the errors of both on the ranks that both know."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    both = [(found / measured(row) - 1, ratio(row) - 1) for row in rows if (found := predicted(row)) is not None]
    for name, errors in zip(("mCAP", "planner"), zip(*both, strict=True), strict=True):
        print(f"{name}, {len(errors)} ranks: {errors_in_words(errors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("profile", "report"))
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "profile":
        profile()
    else:
        report(arguments.files)


if __name__ == "__main__":
    main()
