"""What a rank meets alone becomes an error on every rank; otherwise the others would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deepspeed_partition.engine.runtime.collectives import gather_objects

T = TypeVar("T")


def on_every_rank(compute: Callable[[], T]) -> T:
    """``compute()``, which no rank may leave with an exception while others go on. Collective.

    Raises:
        ValueError: what the first rank with an exception met, on every rank.
    """
    value, flaw = None, None
    try:
        value = compute()
    except Exception as error:
        flaw = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    flaws = [theirs for theirs in gather_objects(flaw) if theirs is not None]
    if flaws:
        raise ValueError(flaws[0])
    return value  # type: ignore[return-value]
