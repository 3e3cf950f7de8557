"""Print the table of ``main.py``: ``python sleeping_report.py [results/4_ranks_202611.jsonl ...]``."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def report(lines: Sequence[dict[str, Any]]) -> None:
    """Print a row for each engine: its ideals, its median, and that over them."""
    table = Table(title="wall time of a step over the ideal of its order")
    columns = ("ranks", "v", "transfer", "engine", "ms per op", "queued", "once", "ideal s", "median s",
               "over ideal", "least", "most", "with engine", "with queue")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name == "engine" else "right", no_wrap=True)
    for line in lines:
        over = [seconds / line["ideal_seconds"] for seconds in line["seconds"]]
        median = statistics.median(line["seconds"])
        table.add_row(
            str(line["ranks"]), str(line["stages_per_rank"]), f"{line['share']:.0%}", line["engine"],
            *(f"{1e3 * line[key]:.2f}" for key in ("worked_seconds", "queued_seconds", "once_seconds")),
            f"{line['ideal_seconds']:.4f}", f"{median:.4f}",
            f"{statistics.median(over):.3f}", f"{min(over):.3f}", f"{max(over):.3f}",
            *(f"{median / line[key]:.3f}" for key in ("with_engine_seconds", "with_queue_seconds")),
        )  # fmt: skip
    Console(width=170).print(table)


def main() -> None:
    paths = sys.argv[1:] or sorted((Path(__file__).parent / "results").glob("*.jsonl"))
    for path in paths:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        report([line for line in lines if "engine" in line])


if __name__ == "__main__":
    main()
