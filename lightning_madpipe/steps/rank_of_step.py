"""The rank that a step is told: that of the process which its pipeline stands for.

In one process ``if self.trainer.is_global_zero:`` in a step runs. In a pipeline the whole step runs on the last
stage, which is another rank than 0, so that what stands behind that condition would run nowhere. So all ranks of
the first pipeline are told 0 while a step runs, and those of another pipeline the number of that one. Hooks run on
each rank, and are told the true one.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.running_code import asks_for_its_rank
from lightning_madpipe.finding.step_call import LIBRARIES

DECORATORS = (
    ("lightning_utilities.core.rank_zero", "rank_zero_only"),
    ("torchmetrics.utilities.prints", "rank_zero_only"),
)
"""Where the functions are of which an attribute, ``rank``, decides."""

NOT_HERE = (
    "{step} raises {error} after it has asked for its rank: it runs on the last stage, on rank {own}, and is "
    "told rank {rank} there, as the process that its pipeline stands for. What the program has made on rank 0 "
    "alone, such as an open file or a run of wandb, is not on rank {own}: make it on each rank, or use it in a "
    "hook that is given what the step returns, such as on_train_batch_end, which rank 0 runs, too"
)

LOCAL_RANK = (
    "a step compares its local_rank at {line}: in a pipeline it runs on the last stage, whose local rank is "
    "{own}, by which it has its device, and never on local rank 0. self.trainer.is_global_zero and "
    "self.global_rank == 0 are as in one process there"
)
_COMPARED = re.compile(r"local_rank\s*(==|!=|<|>|in\b|not\b)|(==|!=|<|>|\bnot)\s*[\w.]*local_rank\b")


@contextmanager
def told_as_process(step: str, strategy: Any, rank: int) -> Iterator[None]:
    """Let code of the user's that this thread runs meanwhile be told ``rank`` when it asks for its own.

    Args:
        step: The name of the step.
        strategy: Lightning's.
    """
    own = dist.get_rank() if dist.is_initialized() else rank
    if own == rank:
        yield
        return
    decorators = [getattr(sys.modules[module], name) for module, name in DECORATORS if module in sys.modules]
    before = [getattr(each, "rank", None) for each in decorators]
    get_rank, before_in_step = dist.get_rank, strategy.rank_in_step

    def restore() -> None:
        dist.get_rank = get_rank
        for each, rank_before in zip(decorators, before, strict=True):
            each.rank = rank_before
        strategy.rank_in_step = before_in_step

    try:
        strategy.rank_in_step = rank
        for each in decorators:
            each.rank = rank
        dist.get_rank = _get_rank(get_rank, rank)
        yield
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and asks_for_its_rank(trace.tb_frame):
            warn_once(f"rank/{step}", NOT_HERE.format(step=step, error=type(error).__name__, own=own, rank=rank))
        raise
    finally:
        try:
            restore()
        finally:  # a signal handler may have raised within the former
            restore()


def tell_of_local_rank(own: int) -> None:
    """Tell once of code of the user's that a step runs and that compares its local rank with a number."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _NOT_OF_THE_USER:
        frame = frame.f_back
    if frame is None:
        return
    if _COMPARED.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        warn_once(f"local rank/{line}", LOCAL_RANK.format(line=line, own=own))


def _get_rank(get_rank: Callable[..., int], rank: int) -> Callable[..., int]:
    """A ``torch.distributed.get_rank`` that tells this thread's code of the user's ``rank``."""
    thread = threading.get_ident()

    @functools.wraps(get_rank)
    def told(group: Any = None) -> int:
        package = (sys._getframe(1).f_globals.get("__name__") or "").partition(".")[0]
        if group is not None or threading.get_ident() != thread or package in _NOT_OF_THE_USER:
            return get_rank(group)
        return rank

    return told


_NOT_OF_THE_USER = frozenset((*LIBRARIES, "deepspeed", "deepspeed_partition", "lightning_utilities"))
