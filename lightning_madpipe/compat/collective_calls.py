"""Collectives of ``torch.distributed`` where the ranks of the other stages do not come to them.

A step runs on the last stage, up to its call of the layers on the first one, and a layer where it is. A collective
over ranks of other stages would wait there for ever, so it is refused where it is called.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_madpipe.finding.step_call import LIBRARIES

NAME = "_rank_not_in_group"
"""The function of ``distributed_c10d`` (torch 2.4 to 2.13) that each collective asks first, by whatever name a
program has imported the collective."""

IN_A_STEP = (
    "{step} calls torch.distributed.{name} at {line}, which the ranks {ranks} would have to call, too, and the "
    "step runs on those of the last stage. Use self.all_gather(...), self.trainer.strategy.reduce(...) or "
    "self.log(..., sync_dist=True), or call it in a hook, such as on_train_batch_end, on every rank"
)

IN_A_LAYER = (
    "forward() or a layer calls torch.distributed.{name} at {line}, which the ranks {ranks} would have to call, "
    "too. They do not all run that layer: it runs on the rank that has it, once per micro-batch. Leave the call "
    "out of the layer, or do it in a hook, such as on_train_batch_end, on every rank"
)


@contextmanager
def collectives_refused(
    refuse: Callable[[str, str, str], None], peers: Callable[[], Collection[int]]
) -> Iterator[None]:
    """Refuse collectives that this thread calls meanwhile over other ranks than ``peers``.

    Args:
        refuse: What raises, given the name of the function, the line of the user's code and the group's ranks.
        peers: Gives the ranks that run the same code at the same time, this one among them.
    """
    is_outside = getattr(distributed_c10d, NAME, None)
    if is_outside is None or not dist.is_initialized():
        yield
        return
    thread = threading.get_ident()

    def watched(group: Any) -> bool:
        caller: Any = sys._getframe(1)
        while caller.f_code is watched.__code__:  # one of these within another
            caller = caller.f_back
        if threading.get_ident() == thread and _communicates(caller.f_code.co_name) and not is_outside(group):
            members = dist.get_process_group_ranks(group)
            if not {*peers()}.issuperset(members):
                refuse(caller.f_code.co_name, _line_of(caller), ", ".join(map(str, members)))
        return bool(is_outside(group))

    try:
        setattr(distributed_c10d, NAME, watched)
        yield
    finally:
        setattr(distributed_c10d, NAME, is_outside)


def _communicates(function: str) -> bool:
    return not function.startswith(("get_", "_"))


def _line_of(frame: FrameType | None) -> str:
    """The line of the user's code that calls the function at ``frame``."""
    libraries = (*LIBRARIES, "deepspeed", "deepspeed_partition")
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in libraries:
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
