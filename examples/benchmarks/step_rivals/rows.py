"""Rows of results, one JSON object per line, each of them from a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; a torn last line is cut off, and its setting is done again."""
    if not path.exists():
        return []
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_jobs(path: Path, jobs: Iterable[tuple[Any, ...]], num_jobs: int) -> None:
    """Run each job in a new process, and write its row down."""
    context = get_context("spawn")
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
