"""The table of predicted against measured peaks, from files that ``main.py`` wrote.

    python examples/benchmarks/memory/report.py FILE ... [--worst 20]

A rank is near where its plan is within 3 % + 1 MiB of what was measured, and too low where it says more than 1 %
less.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NEAR_SHARE, NEAR_BYTES = 0.03, 2**20
TOO_LOW_SHARE = 0.01
PARTS = ("training", "reduction", "optimizer")
Row = dict[str, Any]


def measured(row: Row) -> int:
    """Return the most bytes that a rank had in use during its steps."""
    return max(row["measured"][part] for part in PARTS)


def ratio(row: Row) -> float:
    """Return planned over measured bytes."""
    return float(row["planned"]["peak"] / measured(row))


def is_near(row: Row) -> bool:
    """Return whether a plan is within 3 % + 1 MiB of what was measured."""
    return abs(row["planned"]["peak"] - measured(row)) <= NEAR_SHARE * measured(row) + NEAR_BYTES


def is_too_low(row: Row) -> bool:
    """Return whether a plan says more than 1 % less than what was measured."""
    return bool(row["planned"]["peak"] < (1 - TOO_LOW_SHARE) * measured(row))


def by(rows: Iterable[Row], *keys: str) -> Iterator[tuple[str, list[Row]]]:
    """Group rows by the values of ``keys``, in words."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[", ".join(f"ZeRO {row[key]}" if key == "zero" else str(row[key]) for key in keys)].append(row)
    yield from sorted(groups.items())


def table(rows: list[Row]) -> Table:
    """Make the table of all groups."""
    made = Table()
    for name in ("", "ranks", "within 3 % + 1 MiB", "more than 1 % too low", "least", "median", "most"):
        made.add_column(name, justify="left" if not name else "right")
    groups = [("all", rows)]
    for keys in (("model",), ("precision", "optimizer", "zero"), ("num_devices", "num_pipelines"), ("cut",),
                 ("recompute",)):  # fmt: skip
        groups += by(rows, *keys)
    for name, members in groups:
        ratios = sorted(map(ratio, members))
        near, low = sum(map(is_near, members)), sum(map(is_too_low, members))
        made.add_row(
            name, str(len(members)), f"{near / len(members):.1%}", str(low),
            *(f"{each:.3f}" for each in (ratios[0], ratios[len(ratios) // 2], ratios[-1])),
        )  # fmt: skip
    return made


def worst(rows: list[Row], number: int) -> Table:
    """Make the table of the ranks whose plans say too little, and of those whose say too much."""
    made = Table(title="the worst, in MB")
    for name in ("case", "rank", "planned", "weights", "stash", "buffers", "transient", *PARTS, "at the peak"):
        made.add_column(name, justify="left" if name in ("case", "at the peak") else "right")
    ordered = sorted(rows, key=ratio)
    half = min(number, len(ordered)) // 2
    for row in [*ordered[:half], *ordered[len(ordered) - half :]]:
        case = ", ".join(map(str, (row["model"], row["precision"], row["optimizer"], f"ZeRO {row['zero']}",
                                   row["cut"], row["recompute"])))  # fmt: skip
        planned, seen = row["planned"], row["measured"]
        top = max(PARTS, key=lambda part: seen[part])
        made.add_row(
            case, f"{row['device']} of {row['num_devices']}",
            *(f"{planned.get(key, 0) / 1e6:.2f}" for key in ("peak", "weights", "stash", "buffers", "transient")),
            *(f"{seen[part] / 1e6:.2f}" for part in PARTS), row["moments"][top],
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--worst", type=int, default=20)
    arguments = parser.parse_args()
    rows = [json.loads(line) for path in arguments.files for line in path.read_text().splitlines()]
    console = Console(width=180)
    console.print(table(rows), worst(rows, arguments.worst))


if __name__ == "__main__":
    main()
