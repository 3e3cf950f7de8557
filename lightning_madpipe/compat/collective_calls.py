"""Collectives of ``torch.distributed`` that are called over ranks of several stages.

A step runs on the last stage, up to its call of the layers on the first one, and a layer where it is. A collective
over ranks of other stages would wait there for ever, so it is refused where it is called. Hooks run on all ranks,
and those of a pipeline have the same data: a sum of them counts each once for each stage, which is told.
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

ENGINES = ("deepspeed", "deepspeed_partition", "lightning_madpipe")
"""Packages whose collectives are no sums of a program's data."""

IN_A_STEP = (
    "{step} calls torch.distributed.{name} at {line}, which the ranks {ranks} would have to call, too, and the "
    "step runs on those of the last stage. Use self.all_gather(...), self.trainer.strategy.reduce(...) or "
    "self.log(..., sync_dist=True), or call it in a hook, such as on_train_batch_end, on every rank, where the "
    "ranks of a pipeline have the same data, so that a sum counts them once for each stage"
)

IN_A_LAYER = (
    "forward() or a layer calls torch.distributed.{name} at {line}, which the ranks {ranks} would have to call, "
    "too. They do not all run that layer: it runs on the rank that has it, once per micro-batch. Leave the call "
    "out of the layer, or do it in a hook, such as on_train_batch_end, on every rank"
)

SUMMED_OVER_STAGES = (
    "{hook} calls torch.distributed.{name} at {line} over the ranks {ranks}. Ranks of a pipeline have the same "
    "data in hooks: a sum of numbers of data counts each once for each stage, {number} times as much as in one "
    "process (a sum of parts of the weights or gradients is right). self.trainer.strategy.reduce(tensor, "
    "reduce_op='sum') counts each once"
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

    def look(caller: FrameType, members: Collection[int]) -> None:
        if not {*peers()}.issuperset(members):
            refuse(caller.f_code.co_name, _line_of(caller), ", ".join(map(str, members)))

    is_outside = getattr(distributed_c10d, NAME, None)
    if is_outside is None or not dist.is_initialized():
        yield
        return
    # Not in a context of its own, which an error that a signal raises as it is entered would leave open.
    try:
        setattr(distributed_c10d, NAME, _seen(is_outside, look))
        yield
    finally:
        setattr(distributed_c10d, NAME, is_outside)


@contextmanager
def sums_told(tell: Callable[[str, str, str], None], pipeline: Collection[int]) -> Iterator[None]:
    """Tell of each sum that the program asks for meanwhile, on this thread, over several ranks of a pipeline.

    Args:
        tell: Is given the name of the function, the line of the user's code and the group's ranks.
        pipeline: The global ranks of this rank's pipeline.
    """

    def look(caller: FrameType, members: Collection[int]) -> None:
        name = caller.f_code.co_name
        is_sum = name in ("all_reduce", "reduce") and caller.f_locals.get("op") == dist.ReduceOp.SUM
        if is_sum and len({*pipeline}.intersection(members)) > 1 and not _is_of_an_engine(caller):
            tell(name, _line_of(caller), ", ".join(map(str, members)))

    is_outside = getattr(distributed_c10d, NAME, None)
    if is_outside is None or not dist.is_initialized():
        yield
        return
    # Not in a context of its own, which an error that a signal raises as it is entered would leave open.
    try:
        setattr(distributed_c10d, NAME, _seen(is_outside, look))
        yield
    finally:
        setattr(distributed_c10d, NAME, is_outside)


def _seen(is_outside: Callable[[Any], Any], look: Callable[[FrameType, Collection[int]], None]) -> Any:
    """``is_outside``, which also shows the frame of each collective of this thread, and the ranks of its group."""
    thread = threading.get_ident()

    def watched(group: Any) -> bool:
        caller: Any = sys._getframe(1)
        while caller.f_code is watched.__code__:  # one of these within another
            caller = caller.f_back
        if threading.get_ident() == thread and _communicates(caller.f_code.co_name) and not is_outside(group):
            look(caller, dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        return bool(is_outside(group))

    return watched


def _is_of_an_engine(frame: FrameType) -> bool:
    """Whether it is not the program that calls a collective, but what trains its model, as where it saves."""
    caller = frame.f_back
    while caller is not None and (
        _module_of(caller).startswith(("torch.", "deepspeed.comm"))
        or caller.f_code.co_name == "__torch_function__"
    ):
        caller = caller.f_back
    return caller is not None and _module_of(caller).partition(".")[0] in ENGINES


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _communicates(function: str) -> bool:
    return not function.startswith(("get_", "_"))


def _line_of(frame: FrameType | None) -> str:
    """The line of the user's code that calls the function at ``frame``."""
    libraries = (*LIBRARIES, *ENGINES)
    while frame is not None and _module_of(frame).partition(".")[0] in libraries:
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
