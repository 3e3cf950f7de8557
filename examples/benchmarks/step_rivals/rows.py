"""Rows of results, one JSON object per line, each of them from a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without a torn last line, and leave it as it is: another process may write it."""
    if not path.exists():
        return []
    whole = path.read_bytes()
    return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].decode().splitlines()]


def newest_rows(folder: Path, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return a plan for each setting and algorithm, from the first of the labels that has one, with its label."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for label in labels:
        for row in read_rows(folder / f"plans_{label}.jsonl"):
            found.setdefault((row["number"], row["algorithm"]), row | {"label": label})
    return list(found.values())


def cut_off_torn_line(path: Path) -> None:
    """Cut off a torn last line, whose setting is done again."""
    if path.exists():
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def run_jobs(path: Path, jobs: Iterable[tuple[Any, ...]], num_jobs: int) -> None:
    """Run each job in a new process, and write its row down."""
    context = get_context("spawn")
    cut_off_torn_line(path)
    with ProcessPoolExecutor(num_jobs, context, max_tasks_per_child=1) as pool, path.open("a") as file:
        try:
            futures = [pool.submit(*job) for job in jobs]
            for done, future in enumerate(as_completed(futures), 1):
                row = future.result()
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                file.flush()
                print(f"{done} of {len(futures)}: setting {row['number']}", file=sys.stderr)
        finally:
            pool.shutdown(cancel_futures=True)
