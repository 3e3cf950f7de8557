"""Where a program asks for the number of processes, outside of its steps: the environment, ``torch.distributed``.

A rate that is multiplied by it, as with ddp, is another one than in one process: the stages of a pipeline read the
same data. Functions of ``torch.distributed`` may have been imported by any name, and so may ``os.environ``:
replaced is what they ask themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from lightning_madpipe.steps.rank_of_step import SIZES, line_at, steps_here, users_frame

OF_A_MACHINE = ("LOCAL_WORLD_SIZE",)


class SizesAsked:
    """Watches from :meth:`begin` to :meth:`end`; within steps, ``rank_of_step`` tells of the same.

    Args:
        tell: Is given, once for each line of the program, what it asks for, the line, what it gets, and of what.
    """

    def __init__(self, tell: Callable[[str, str, int, str], None]) -> None:
        self._tell_host = tell
        self._told: set[str] = set()
        self._process = os.getpid()
        self._environment: Any = type(os.environ)
        self._before: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Watch from now on."""
        if self._before is not None:
            return
        self._process = os.getpid()
        getitem_before, group_before = self._environment.__getitem__, distributed_c10d._get_default_group
        self._before = getitem_before, group_before

        def getitem(environment: Any, key: str) -> str:
            value: str = getitem_before(environment, key)
            if key in SIZES and (frame := users_frame(sys._getframe(1), key)) is not None:
                self._tell(f"{key} of the environment", frame, value, " of a machine" * (key in OF_A_MACHINE))
            return value

        def default_group() -> Any:
            group, asking = group_before(), sys._getframe(1)
            caller = asking.f_back if asking.f_code.co_name == "_get_group_size" else None
            is_size = caller is not None and caller.f_code.co_name == "get_world_size"
            if caller is not None and is_size and (frame := users_frame(caller.f_back)) is not None:
                self._tell("torch.distributed.get_world_size()", frame, group.size(), "")
            return group

        self._environment.__getitem__ = getitem
        distributed_c10d._get_default_group = default_group

    def end(self) -> None:
        """Let the environment and ``torch.distributed`` go."""
        if self._before is not None:
            self._environment.__getitem__, distributed_c10d._get_default_group = self._before
            self._before = None

    def _tell(self, asked: str, frame: FrameType, size: Any, of: str) -> None:
        line = line_at(frame)
        if steps_here:
            return
        if line not in self._told and os.getpid() == self._process and str(size).isdecimal():
            self._told.add(line)
            self._tell_host(asked, line, int(size), of)
