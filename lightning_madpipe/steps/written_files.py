"""Files that a step writes: it runs once per micro-batch, on the first stage up to its call, and in trials."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterator, Mapping
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


OPENED_BEFORE = (
    "{step} writes to {names}, opened before it, and a step runs on the last stage once per micro-batch and in "
    "trials, up to its call of the layers on the first one, too: each of these writes, and files that other ranks "
    "have opened get nothing. Write in a hook, such as on_train_batch_end, on one rank"
)
"""What is said once of a step that writes to files that were open when it began."""


def places_of(files: Mapping[str, io.IOBase]) -> dict[str, tuple[io.IOBase, int]]:
    """Where each file is that can say so."""
    found = {}
    for name, file in files.items():
        try:
            found[name] = file, file.tell()
        except (OSError, ValueError):  # a terminal, or one that was closed
            continue
    return found


def written_since(places: Mapping[str, tuple[io.IOBase, int]]) -> list[str]:
    """The names of the files that are elsewhere now."""
    now = places_of({name: file for name, (file, _) in places.items()})
    return [name for name, (_, place) in places.items() if name in now and now[name][1] != place]
