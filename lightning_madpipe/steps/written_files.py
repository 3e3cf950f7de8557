"""Files that a step writes: it runs once per micro-batch, on the first stage up to its call, and in trials."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def writing_told(step: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say of a file that is opened for writing meanwhile how often that happens."""
    opened = builtins.open

    def watched(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if set(mode) & set("wax+"):
            say(
                f"{step} opens {str(file)!r} for writing, and a step runs on the last stage once per micro-batch, "
                "up to its call of the layers on the first one, and in trials: each of these writes. Write in a "
                "hook, such as on_train_batch_end, on one rank"
            )
        return opened(file, mode, *arguments, **keywords)

    of_io = io.open
    try:
        builtins.open = io.open = watched
        yield
    finally:
        builtins.open, io.open = opened, of_io
