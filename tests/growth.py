"""How often functions run, and which of them run more than in proportion to the size of a problem.

A clock does not tell on a machine that others use; counts of calls are the same each time, but for a few.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OWN = tuple(f"{ROOT / package}{os.sep}" for package in ("deepspeed_partition", "lightning_madpipe"))
OTHERS = (f"{os.sep}copy.py", f"{os.sep}inspect.py", f"{os.sep}pickle.py", "distributed_c10d.py")
"""Ends of the names of other files whose functions are counted: those that copy, inspect and send."""

Calls = Mapping[str, int]
"""Calls of each function, by its place."""


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of functions in this thread, and each item of what they generate."""
    by_code: Counter[Any] = Counter()
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            by_code[frame.f_code] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        for code, number in by_code.items():
            place = code.co_filename
            if place.startswith(OWN) or place.endswith(OTHERS):
                name = os.path.relpath(place, ROOT) if place.startswith(OWN) else Path(place).name
                calls[f"{name}:{code.co_firstlineno} {code.co_qualname}"] += number


def beyond_proportion(
    small: Calls, large: Calls, times: float, is_left_out: Callable[[str], bool] = lambda _: False
) -> dict[str, tuple[int, int]]:
    """The functions that run more often for a problem ``times`` as large than so many times as often.

    A half more is allowed, and some calls that do not depend on the size.
    """
    return {
        name: (small.get(name, 0), number)
        for name, number in large.items()
        if number > 1.5 * times * small.get(name, 0) + 100 and not is_left_out(name)
    }
