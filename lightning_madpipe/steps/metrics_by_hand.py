"""What a step writes into the Trainer's tables of logged values itself: ``trainer.callback_metrics["x"] = loss``.

The step runs on the last stage, once per micro-batch, and callbacks on every rank: others have no such value. What
``self.log`` is given comes to all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_madpipe.finding.step_call import LIBRARIES

TABLES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
BY_HAND = (
    "{step} writes trainer.{table}[{name!r}] itself: it runs on the last stage, once per micro-batch, so that the "
    "other ranks have no such value, and this one has that of the last micro-batch. Callbacks that decide by it, "
    "such as EarlyStopping and ModelCheckpoint, would decide otherwise on each rank. Use self.log({name!r}, ...)"
)


@contextmanager
def written_tables_told(
    trainer: Any, step: str, tell: Callable[[str, str], object], *, keeps: bool
) -> Iterator[None]:
    """Say meanwhile what is written into the tables by hand.

    Args:
        tell: Is given what a line is known by, and the line.
        keeps: Whether what is written stays.
    """
    connector = getattr(trainer, "_logger_connector", None)
    names = [table for table in TABLES if isinstance(getattr(connector, f"_{table}", None), dict)]
    before = {table: getattr(connector, f"_{table}") for table in names}
    noted = {table: _Noted(value) for table, value in before.items()}
    try:
        for table, value in noted.items():
            setattr(connector, f"_{table}", value)
        yield
    finally:
        for table, value in before.items():
            setattr(connector, f"_{table}", value)
            if keeps and noted[table] != value:
                value.clear()
                value.update(noted[table])
    for table, value in noted.items():
        for name in value.written if keeps else ():
            tell(f"by hand/{table}/{name}", BY_HAND.format(step=step, table=table, name=name))


class _Noted(dict[str, Any]):
    """A table that notes what is written into it by others than the host."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(table)
        self.written: dict[str, None] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.written[name] = None
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **more: Any) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] not in LIBRARIES:
            self.written.update(dict.fromkeys(dict(*others, **more)))
        super().update(*others, **more)
