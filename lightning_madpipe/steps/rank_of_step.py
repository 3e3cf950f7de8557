"""The rank that a step is told: that of the process which its pipeline stands for.

In one process ``if self.trainer.is_global_zero:`` in a step runs. In a pipeline the whole step runs on the last
stage, which is another rank than 0, so that what stands behind that condition would run nowhere. So all ranks of
the first pipeline are told 0 while a step runs, and those of another pipeline the number of that one: by the
Trainer, by ``torch.distributed`` and by the environment. Hooks run on each rank, and are told the true one.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepspeed_partition.code_names import is_installed
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
    "told rank {rank} there, as in one process. What the program has made on rank 0 alone (a file, a run of "
    "wandb) is not on rank {own}: make it on each rank, or use it in a hook that gets what the step returns, such "
    "as on_train_batch_end, which rank 0 runs, too"
)

LOCAL_RANK = (
    "a step compares its local_rank at {line}: in a pipeline it runs on the last stage, whose local rank is "
    "{own}, by which it has its device, and never on local rank 0. self.trainer.is_global_zero and "
    "self.global_rank == 0 are as in one process there"
)
LOCAL_VARIABLE = (
    "{step} reads {key} from the environment at {line}: in a pipeline it runs on the last stage, where that is "
    "{own}, and never where it is 0. self.trainer.is_global_zero and self.global_rank == 0 are as in one process "
    "there, and self.device is its device"
)
SIZE = (
    "{step} asks for {what} at {line}, and gets {size}: that counts all processes. The stages of a pipeline read "
    "the same data together, so that what is divided or multiplied by it, as with ddp, is another thing than in "
    "one process: the data are read in {parts} part{s}"
)
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables of the environment that hold the number of a process, by which programs know the first one."""
LOCAL_RANKS = (
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
VARIABLES = frozenset((*RANKS, *LOCAL_RANKS, *SIZES))
steps_here: list[str] = []
"""Steps that run on the rank that they are told, which is told of once, where they run on another one."""
_OF_A_DEVICE = re.compile("device|cuda", re.IGNORECASE)
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
        before_here = steps_here.copy()
        steps_here.append(step)
        try:
            yield
        finally:
            steps_here[:] = before_here
        return
    decorators = [getattr(sys.modules[module], name) for module, name in DECORATORS if module in sys.modules]
    before = [getattr(each, "rank", None) for each in decorators]
    told, before_in_step = _Told(step, strategy, rank, own), strategy.rank_in_step

    def restore() -> None:
        told.end()
        for each, rank_before in zip(decorators, before, strict=True):
            each.rank = rank_before
        strategy.rank_in_step = before_in_step

    try:
        strategy.rank_in_step = rank
        for each in decorators:
            each.rank = rank
        told.begin()
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
    if _COMPARED.search(_text_at(frame)):
        line = line_at(frame)
        warn_once(f"local rank/{line}", LOCAL_RANK.format(line=line, own=own))


class _Told:
    """What ``torch.distributed`` and the environment tell code of the user's that this thread runs.

    Functions of ``torch.distributed`` may have been imported by any name, and so may ``os.environ``: replaced is
    what they ask themselves.

    Args:
        step: The name of the step.
        strategy: Lightning's.
        rank: The rank that the code is told.
        own: The rank of this process.
    """

    def __init__(self, step: str, strategy: Any, rank: int, own: int) -> None:
        self._step, self._strategy, self._rank, self._own = step, strategy, rank, own
        self._thread = threading.get_ident()
        self._environment: Any = type(os.environ)
        self._getitem = self._environment.__getitem__
        self._default_group = distributed_c10d._get_default_group
        self._group = _ToldGroup(rank)

    def begin(self) -> None:
        """Tell it from now on."""
        told = self

        def getitem(environment: Any, key: str) -> str:
            value: str = told._getitem(environment, key)
            return told._variable(key, value) if threading.get_ident() == told._thread else value

        def default_group() -> Any:
            group = told._default_group()
            return told._of_group(group) if threading.get_ident() == told._thread else group

        self._environment.__getitem__ = getitem
        distributed_c10d._get_default_group = default_group

    def end(self) -> None:
        """Tell the truth again."""
        self._environment.__getitem__ = self._getitem
        distributed_c10d._get_default_group = self._default_group

    def _variable(self, key: str, value: str) -> str:
        if key not in VARIABLES or (frame := users_frame(sys._getframe(2), key)) is None:
            return value
        if key in RANKS:
            return str(self._rank)
        if key in SIZES:
            self._tell_of_size(f"{key} of the environment", value, frame)
        elif value != "0" and not _OF_A_DEVICE.search(_text_at(frame)):
            sentence = LOCAL_VARIABLE.format(step=self._step, key=key, line=line_at(frame), own=value)
            warn_once(f"local rank/{line_at(frame)}", sentence)
        return value

    def _of_group(self, group: Any) -> Any:
        asking = sys._getframe(2)
        name, caller = asking.f_code.co_name, asking.f_back
        if name == "_get_group_size" and caller is not None and caller.f_code.co_name == "get_world_size":
            if (frame := users_frame(caller.f_back)) is not None:
                self._tell_of_size("torch.distributed.get_world_size()", group.size(), frame)
        elif name == "get_rank" and users_frame(caller) is not None:
            return self._group
        return group

    def _tell_of_size(self, what: str, size: Any, frame: FrameType) -> None:
        parts = self._strategy.distributed_sampler_kwargs["num_replicas"]
        where = {"step": self._step, "line": line_at(frame)}
        sentence = SIZE.format(what=what, size=size, parts=parts, s="s" * (parts > 1), **where)
        warn_once(f"size/{line_at(frame)}", sentence)


class _ToldGroup:
    """The group of all processes, as ``torch.distributed.get_rank`` asks it for the rank of this one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        """The rank that code of the user's is told."""
        return self._rank


def users_frame(frame: FrameType | None, key: str | None = None) -> FrameType | None:
    """The frame of the user's code that asks, at ``frame``; None where a library does.

    Args:
        key: The variable of the environment that is asked for: who copies all of them asks for none.
    """
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_globals.get("__name__") or ""
    if name.partition(".")[0] in _NOT_OF_THE_USER or is_installed(name):
        return None
    around: FrameType | None = frame
    for _ in range(4):  # a helper may have been given the name
        if key is None or (around is not None and key in around.f_code.co_consts):
            return frame
        around = None if around is None else around.f_back
    return None


def _text_at(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def line_at(frame: FrameType) -> str:
    """The line that runs at ``frame``, in words."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_NOT_OF_THE_USER = frozenset((*LIBRARIES, "deepspeed", "deepspeed_partition", "lightning_utilities"))
