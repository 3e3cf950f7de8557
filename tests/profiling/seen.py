"""What a layer does while it is measured, for tests: states that layers keep are put back behind a measurement."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

_NUMBERS = count()


def noting() -> tuple[str, list[Any]]:
    """Return the name of an event, and a list to which ``sys.audit(name, value)`` adds; it is never put back."""
    name, seen = f"tests.seen.{next(_NUMBERS)}", list[Any]()

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == name:
            seen.extend(values)

    sys.addaudithook(note)
    return name, seen
