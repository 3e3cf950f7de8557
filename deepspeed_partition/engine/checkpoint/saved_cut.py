"""The cut that a checkpoint was written on, in a file beside DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.plan import PLAN_FORMAT, Plan
from deepspeed_partition.planner.units import shown

FILE_NAME = "madpipe-plan.json"
BOUNDARIES_FORMAT = "madpipe-boundaries/1"
"""The format of the file that names the cut where it came without a plan."""

LONGEST_LATEST_BYTES = 4096
"""The most bytes that the file that names the latest checkpoint may have."""


@dataclass(frozen=True, slots=True)
class SavedCut:
    """The boundaries of a checkpoint's stages, and the plan that they came from if there was one."""

    boundaries: list[int]
    plan: Plan | None

    @property
    def num_ranks(self) -> int:
        """The number of ranks of a pipeline."""
        return len(self.boundaries) - 1 if self.plan is None else self.plan.platform.num_devices

    @property
    def allocation(self) -> Allocation:
        """The allocation: on which rank each layer was."""
        return Allocation.contiguous(self.boundaries) if self.plan is None else allocation_of(self.plan)


def save_cut(folder: str | os.PathLike[str], boundaries: Sequence[int], plan: Plan | None) -> None:
    """Write the cut into a checkpoint's folder, whole or not at all. A plan is written as a plan file.

    Raises:
        OSError: the folder cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    data: dict[str, Any] = {"format": BOUNDARIES_FORMAT} if plan is None else plan.to_dict()
    files.write_json(Path(folder) / FILE_NAME, {**data, "boundaries": list(boundaries)}, through_link=False)


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
    rises = all(start < stop for start, stop in pairwise(boundaries))
    if len(boundaries) < 2 or boundaries[0] != 0 or not rises:
        raise PlanFormatError(
            f"{path}: the boundaries {shown(boundaries)} do not rise from 0: take another checkpoint"
        )
    return SavedCut(boundaries, None)


def folder_to_load(load_dir: str, tag: str | None, *, universal: bool) -> Path | None:
    """The folder that DeepSpeed's ``load_checkpoint`` would read; None where no file names the latest.

    A ``tag`` that the program gives may be any path. What the file ``latest`` says came with the checkpoint, so it
    must lead to a folder in ``load_dir``: by a plain name, or by a link there with that name.

    Raises:
        PlanFormatError: ``latest`` is empty, is no name, or leads outside of ``load_dir``.
    """
    if tag is not None:
        return Path(load_dir) / str(tag)
    latest = Path(load_dir) / ("latest_universal" if universal else "latest")
    if not latest.is_file():
        return None
    tag = _named_by(latest)
    folder = Path(load_dir) / tag
    if not files.is_plain(tag) or not folder.parent.resolve().is_relative_to(Path(load_dir).resolve()):
        # What a link leads to is nobody's business.
        words = "what a link leads to" if latest.is_symlink() else shown(tag)
        raise PlanFormatError(
            f"{latest} names {words}, which is not the name of a folder in {load_dir}: {_choose(load_dir)}"
        )
    return folder


def check_exists(folder: Path, load_dir: str) -> None:
    """Refuse a checkpoint that is not there.

    Raises:
        PlanFormatError: it is not.
    """
    if not folder.is_dir():
        raise PlanFormatError(f"there is no checkpoint at {folder}: {_choose(load_dir)}")


def _named_by(latest: Path) -> str:
    try:
        with open(latest, "rb") as file:
            data = file.read(LONGEST_LATEST_BYTES + 1)
        tag = data.decode("utf-8").strip()
    except OSError as error:
        raise PlanFormatError(f"{latest} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        tag = "\0"
    if not tag:
        raise PlanFormatError(f"{latest} is empty and names no checkpoint: {_choose(str(latest.parent))}")
    if len(data) > LONGEST_LATEST_BYTES or not tag.isprintable():
        raise PlanFormatError(f"{latest} does not hold the name of a folder: {_choose(str(latest.parent))}")
    return tag


def _choose(load_dir: str) -> str:
    """The way out, with some of the checkpoints that are there."""
    try:
        found = [
            (entry.stat().st_mtime, entry.name)
            for entry in os.scandir(load_dir)
            if entry.is_dir() and not entry.name.startswith(".")
        ]
    except OSError:
        found = []
    newest = [shown(name) for _, name in sorted(found, reverse=True)[:3]]
    return f"give load_checkpoint a tag (the newest folders there: {', '.join(newest) or 'none'})"
