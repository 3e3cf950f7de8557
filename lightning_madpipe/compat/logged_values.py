"""Lightning's tables of logged values, as ``trainer.callback_metrics``, which keep the last value of each name.

Values that hooks log for single layers go with these when they move: a rank shows none of one that has left.
Within a window of ``accumulate_grad_batches`` nothing of its batches has run yet: who reads one is told that, and
so is who reads in the first window what the step returns.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from deepspeed_partition.engine.runtime.collectives import gather_objects

TABLES = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Attributes of Lightning's connector (2.5 to 2.6), like the results of its loops."""
UNKNOWN_YET = (
    "trainer.{table} has no {key!r} after this batch: with accumulate_grad_batches={number} all batches of a "
    "window run at its end, and what training_step logs is known then. `trainer.{table}.get({key!r})` is None "
    "until the first window has ended; or do not accumulate"
)
RETURNED_LATER = (
    "the outputs that on_train_batch_end is given have no {key!r} after this batch: with "
    "accumulate_grad_batches={number} all batches of a window run at its end, and what training_step returns is "
    "known then. `outputs.get({key!r})` is None until the first window has ended; or do not accumulate"
)

Place = tuple[str, str]
"""The loop and Lightning's own key of a value."""

State = tuple[Any, tuple[bool, str | None], dict[str, Any]]
"""How a value is logged, how ranks reduce it, and what is collected of it."""


def hand_values_over(trainer: Any, group: dist.ProcessGroup) -> None:
    """Hide what some ranks of a pipeline have logged and others have not, until a rank logs it again. Collective.

    Every rank then has what was collected of an epoch so far, and goes on with it where the layer is now. What
    was logged with ``rank_zero_only`` stays as it is.
    """
    results, tables = _results(trainer), _tables(trainer)
    mine = dict(_shown(results, tables))
    everyone = gather_objects(set(mine), group)
    partial = set[Place]().union(*everyone) - everyone[0].intersection(*everyone)
    handed = {place: _state(mine[place]) for place in partial & mine.keys()}
    for states in gather_objects(handed, group) if partial else ():
        for place, state in states.items():
            if place not in mine:
                _take(results, place, state, trainer)
    for kind, key in partial:
        item = results[kind][key]
        for table, name in itertools.product(tables, _names(results[kind], item)):
            table.pop(name, None)
        item.has_reset, item._forward_cache = True, None


class NotRunYetError(KeyError):
    """A hook reads what a batch logs that waits for the end of its window."""

    def __str__(self) -> str:
        return str(self.args[0])


class TableOfWindows(dict[str, Any]):
    """One of Lightning's tables, which says why it lacks a value while the batches of a window wait.

    A copy of it is a plain dict.
    """

    name = ""
    number = 0
    """Batches of a window; 0 where none waits."""

    def __missing__(self, key: str) -> Any:
        if self.number:
            raise NotRunYetError(UNKNOWN_YET.format(table=self.name, key=key, number=self.number))
        raise KeyError(key)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def note_waiting_batches(trainer: Any, number: int) -> None:
    """Let Lightning's tables say that batches wait for the end of their window of so many; 0: none does."""
    connector = trainer._logger_connector
    for name in TABLES:
        table = getattr(connector, name)
        if not isinstance(table, TableOfWindows):
            if not number:
                continue
            table = TableOfWindows(table)  # Lightning makes its tables anew when a loop begins
            table.name = name.removeprefix("_")
            setattr(connector, name, table)
        table.number = number


class OutputsOfWindow(dict[str, Any]):
    """What hooks are given for a batch of the first window, which says why it has no results of the step."""

    number = 0
    """Batches of the window."""

    def __missing__(self, key: str) -> Any:
        raise NotRunYetError(RETURNED_LATER.format(key=key, number=self.number))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def note_first_window(trainer: Any, number: int) -> None:
    """Let the outputs of batches say that they wait for the end of the first window, of so many; 0: none does."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    vars(loop).pop("output_result_cls", None)
    if number:
        loop.output_result_cls = _results_that_wait(type(loop).output_result_cls, number)


@functools.cache
def _results_that_wait(kind: Any, number: int) -> type:
    """Lightning's class for the result of a closure (2.5 to 2.6), which gives hooks ``OutputsOfWindow``."""

    def asdict(result: Any) -> OutputsOfWindow:
        outputs = OutputsOfWindow(kind.asdict(result))
        outputs.number = number
        return outputs

    return type(kind.__name__, (kind,), {"asdict": asdict})


def _results(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop.epoch_loop
    return {"train": loop._results, "validate": loop.val_loop._results}


def _tables(trainer: Any) -> list[dict[str, Any]]:
    return [getattr(trainer._logger_connector, name) for name in TABLES]


def _names(of_loop: Any, item: Any) -> set[str]:
    return {*of_loop._forked_name(item, True), *of_loop._forked_name(item, False)}


def _shown(results: dict[str, Any], tables: list[dict[str, Any]]) -> Iterator[tuple[Place, Any]]:
    for kind, of_loop in results.items():
        for key, item in of_loop.items():
            if not item.is_tensor or item.meta.sync.rank_zero_only:
                continue
            pairs = itertools.product(tables, _names(of_loop, item))
            if not item.has_reset or any(name in table for table, name in pairs):
                yield (kind, key), item


def _state(item: Any) -> State:
    sync = item.meta.sync
    collected = {name: getattr(item, name).cpu() for name in item._defaults}
    return replace(item.meta, _sync=None), (sync.should, sync.op), collected


def _take(results: dict[str, Any], place: Place, state: State, trainer: Any) -> None:
    kind, key = place
    meta, (should, op), collected = state
    lightning = sys.modules[type(results[kind]).__module__]
    meta.sync = lightning._Sync(_should=should, fn=trainer.strategy.reduce, _op=op)
    item = results[kind][key] = lightning._ResultMetric(meta, True).to(trainer.strategy.root_device)
    for name, value in collected.items():
        setattr(item, name, value.to(item.device))
