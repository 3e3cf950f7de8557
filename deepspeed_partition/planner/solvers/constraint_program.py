"""How constraint programs are solved: CP-SAT of OR-tools, with one worker, within a limit of processor time.

CP-SAT knows limits of the wall's clock alone, by which a busy machine would find less; so a thread stops it.
OR-tools is an extra (``madpipe[exact]``) and imported where it is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import gcd
from typing import Any

from deepspeed_partition.planner.deadline import PATIENCE_FACTOR, PATIENCE_SECONDS

SHORTEST_WAIT_SECONDS = 0.001
"""Shortest time between two looks at how long a solver has worked."""


@cache
def is_installed() -> bool:
    """Return whether OR-tools can be imported."""
    return find_spec("ortools") is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a constraint program that minimizes a number."""

    bound: int
    """No solution has a smaller number; where there is none, the limit that was asked for. 0: nothing is known."""
    solver: Any
    """Solver that knows the values of a solution; None where none was found."""
    is_optimal: bool
    """Whether the search has come to its end: the solution is the best, or there is none below the limit."""


def minimized(model: Any, objective: Any, less_than: int, seconds: float) -> Outcome:
    """Return the solution of a model whose ``objective`` is least, among those that are ``less_than``.

    Args:
        model: a ``CpModel`` that minimizes ``objective``.
        less_than: limit of the objective, in the unit of the model.
        seconds: the most seconds for which this thread works; 0 or less for nothing.
    """
    from ortools.sat.python import cp_model

    if seconds <= 0:
        return Outcome(0, None, False)
    model.add(objective <= less_than - 1)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # in this thread, so that the deadline counts it
    if hasattr(time, "pthread_getcpuclockid"):
        solver.parameters.max_time_in_seconds = seconds * PATIENCE_FACTOR + PATIENCE_SECONDS
        with _stopped_after(solver, seconds):
            status = solver.solve(model)
    else:  # Windows: no thread can tell how long another one has worked
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Outcome(less_than, None, True)
    bound = max(0, round(solver.best_objective_bound))
    found = solver if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return Outcome(bound, found, status == cp_model.OPTIMAL)


@contextmanager
def _stopped_after(solver: Any, seconds: float) -> Iterator[None]:
    """Stop a solver that works in this thread when the thread has worked for so many seconds more."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
    until = time.clock_gettime(clock) + seconds
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            left = until - time.clock_gettime(clock)
            if left <= 0:
                solver.stop_search()  # again and again: one that has not begun yet does not hear it
            done.wait(max(left, SHORTEST_WAIT_SECONDS))

    watcher = threading.Thread(target=watch, name="madpipe-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def unit_of(numbers: Sequence[int], largest: int, most_steps: int) -> int:
    """Return a unit in which numbers are whole; where ``largest`` then has too many, one in which it has not."""
    common = gcd(*numbers) or 1
    return common if largest // common <= most_steps else -(-largest // most_steps)
