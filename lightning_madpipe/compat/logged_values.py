"""Values that hooks log for single layers go with these when they move: a rank shows none of one that has left.

Lightning keeps the last value of each name, also where nothing logs it any more.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from deepspeed_partition.engine.runtime.collectives import gather_objects

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


def _results(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop.epoch_loop
    return {"train": loop._results, "validate": loop.val_loop._results}


def _tables(trainer: Any) -> list[dict[str, Any]]:
    connector = trainer._logger_connector  # as in 2.5 to 2.6, like the results of its loops
    return [connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics]


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
