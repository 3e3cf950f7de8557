"""Names of files that a script makes on each rank for itself, such as by the time of day: those of rank 0 count.

Rank 0 writes the files. Another rank, whose script made the name a moment later, would look for files that are not
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deepspeed_partition.engine.runtime.environment import warn_once

NAMES = (
    "dirpath", "filename", "_default_root_dir", "_version", "_name", "_save_dir", "_root_dir", "_sub_dir",
)  # fmt: skip
"""The attributes of Lightning's Trainer, checkpoint callbacks and loggers (2.5 to 2.6) that are parts of paths."""


def take_names_from_rank_zero(trainer: Any, broadcast: Callable[[Any], Any]) -> None:
    """Let checkpoints and loggers of all ranks have the names that rank 0 has given them. Collective.

    So has a logger the version that rank 0 has chosen when it made its folder: others would choose the next one.
    """
    owners = [trainer, *trainer.checkpoint_callbacks, *trainer.loggers]
    mine = [(type(owner).__name__, _names_of(owner)) for owner in owners]
    theirs = broadcast(mine)
    if [kind for kind, _ in mine] != [kind for kind, _ in theirs]:
        return  # a callback of this rank alone has its own
    for owner, (_, own), (_, names) in zip(owners, mine, theirs, strict=True):
        for name in own.keys() & names.keys():
            if own[name] != names[name] is not None and (own[name] is not None or name == "_version"):
                setattr(owner, name, names[name])


def tell_of_other_path(own: Any, path: str, rank: int) -> None:
    """Say that a checkpoint is not where this rank takes it to be."""
    if os.path.abspath(own) != os.path.abspath(path):
        warn_once(
            "another path of a checkpoint",
            f"rank {rank} saves a checkpoint as {os.fspath(own)}, and rank 0, whose path counts, as {path}: what "
            f"rank {rank} keeps of it, such as best_model_path, names nothing. Make such a name before fit, where "
            "rank 0's counts, or by trainer.strategy.broadcast(name) on every rank",
        )


def _names_of(owner: Any) -> dict[str, str | int | None]:
    found = {name: vars(owner)[name] for name in NAMES if name in vars(owner)}
    return {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in found.items()
        if value is None or isinstance(value, str | int | os.PathLike)
    }
