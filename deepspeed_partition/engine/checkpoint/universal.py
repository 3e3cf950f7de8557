"""Universal checkpoints, which DeepSpeed reads: what it leaves out without a word, and that it unpickles them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.planner.errors import PlanFormatError, PlanMismatchError
from deepspeed_partition.planner.units import counted

SETTINGS = Path("zero") / "optimizer_state.pt"
"""Where a universal checkpoint has the settings of the parameter groups: those of one rank."""


def refuse_pickles(load_dir: str, unpickle: bool | None) -> None:
    """Refuse a universal checkpoint where nothing may be unpickled. On every rank alike.

    Args:
        load_dir: Where it is to be looked for.
        unpickle: What the user allows.

    Raises:
        PlanFormatError: ``unpickle`` is False.
    """
    if unpickle is False:
        raise PlanFormatError(
            f"a universal checkpoint is to be loaded from {load_dir}, which DeepSpeed unpickles, and that can run "
            "any code: load the checkpoint that it was made of, which MadPipe reads as data and lays out for any "
            "cut, without load_universal; or, if you trust its source, give the option unpickle=True, or none"
        )


def refuse_other_groups(folder: Path, optimizer: Any) -> None:
    """Refuse a universal checkpoint for ranks with more, or fewer, parameter groups than it has. Collective.

    DeepSpeed pairs the groups of each rank with those of the file, and leaves the weights of others as they are.

    Args:
        folder: Of the checkpoint.
        optimizer: DeepSpeed's, of this rank.

    Raises:
        PlanMismatchError: some rank has another number of groups; on every rank.
    """

    def saved() -> int | None:
        file = folder / SETTINGS
        if not file.is_file():
            return None  # DeepSpeed says that it is missing
        # It has objects of DeepSpeed's, which unpickles it a moment later: refuse_pickles() was asked before.
        return len(torch.load(file, map_location="cpu", weights_only=False)["param_groups"])

    number = from_rank_0(saved)
    numbers = gather_objects(len(getattr(optimizer, "param_groups", ())))
    for rank, own in enumerate(numbers):
        if number is not None and own != number:
            raise PlanMismatchError(
                f"the universal checkpoint {folder} has the settings of {counted(number, 'parameter group')}, and "
                f"rank {rank} has {own}, of which DeepSpeed would leave weights as they are: load the checkpoint "
                "that it was made of, which MadPipe lays out for any cut, or give the optimizer one group of each "
                "rank's parameters"
            )
