"""The cut that a checkpoint was written on, in a file beside DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_partition.engine.stages import allocation_of
from deepspeed_partition.planner import files
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.plan import PLAN_FORMAT, Plan

FILE_NAME = "madpipe-plan.json"
BOUNDARIES_FORMAT = "madpipe-boundaries/1"
"""Of the file where the cut came without a plan."""


@dataclass(frozen=True, slots=True)
class SavedCut:
    """The boundaries of a checkpoint's stages, and the plan that they came from if there was one."""

    boundaries: list[int]
    plan: Plan | None

    @property
    def num_ranks(self) -> int:
        """Of a pipeline."""
        return len(self.boundaries) - 1 if self.plan is None else self.plan.platform.num_devices

    @property
    def allocation(self) -> Allocation:
        """Where the layers were."""
        return Allocation.contiguous(self.boundaries) if self.plan is None else allocation_of(self.plan)


def save_cut(folder: str | os.PathLike[str], boundaries: Sequence[int], plan: Plan | None) -> None:
    """Write the cut into a checkpoint's folder, whole or not at all. A plan is written as a plan file.

    Raises:
        OSError: the folder cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    data: dict[str, Any] = {"format": BOUNDARIES_FORMAT} if plan is None else plan.to_dict()
    files.write_json(Path(folder) / FILE_NAME, {**data, "boundaries": list(boundaries)})


def read_cut(folder: str | os.PathLike[str]) -> SavedCut | None:
    """The cut of the checkpoint in ``folder``; None where DeepSpeed alone wrote it.

    Raises:
        PlanFormatError: the file is damaged, or of another version.
    """
    path = Path(folder) / FILE_NAME
    if not path.exists():
        return None
    data = files.read_json(path, error=PlanFormatError)
    kind = data.get("format") if isinstance(data, dict) else None
    if kind == PLAN_FORMAT:
        plan = Plan.from_dict(data, where=str(path))
        return SavedCut(plan.boundaries, plan)
    boundaries = data.get("boundaries") if kind == BOUNDARIES_FORMAT else None
    if not isinstance(boundaries, list) or not all(type(cut) is int for cut in boundaries):
        raise PlanFormatError(f"{path}: neither a plan nor the boundaries of one, of a version known here")
    return SavedCut(boundaries, None)


def folder_to_load(load_dir: str, tag: str | None, *, universal: bool) -> Path | None:
    """The folder that DeepSpeed's ``load_checkpoint`` would read; None where no file names the latest."""
    if tag is None:
        latest = Path(load_dir) / ("latest_universal" if universal else "latest")
        if not latest.is_file():
            return None
        tag = latest.read_text(encoding="utf-8").strip()
    return Path(load_dir) / str(tag)
