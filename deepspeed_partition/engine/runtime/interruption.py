"""Ctrl-C in a job of several ranks: one line for all of them, in the place of a traceback of each.

A terminal sends SIGINT to all ranks at once, and launchers send it once more. The first one ends a rank as it ends
any program of Python, with the same exit status; what comes with it within a moment does not disturb its end, and
one that is sent later ends the rank at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

import torch.distributed as dist

from deepspeed_partition.engine.runtime.environment import log_here, logger
from deepspeed_partition.engine.runtime.watch import place_in_words, watch

SAME_PRESS_SECONDS = 1.5
"""How long after an interruption another one is taken for the same, which the launcher has passed on."""
OF_SIGINT = 128 + signal.SIGINT

_by_others = sys.excepthook


def say_interruptions_in_one_line() -> None:
    """Let the ranks of a job that are interrupted say so once, where nobody catches it."""
    global _by_others
    if sys.excepthook is not _say and dist.is_initialized() and dist.get_world_size() > 1:
        _by_others = sys.excepthook
        sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _by_others(kind, error, trace)
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _later_ones_end_at_once(time.monotonic()))
    logger.debug("interrupted", exc_info=(kind, error, trace))
    if watch.is_first_to_say("interrupted"):
        where = place_in_words(_innermost(trace))
        log_here(f"interrupted: all ranks end. Rank {dist.get_rank()} was {where}", logging.WARNING)
    watch.end_with_others()


def _innermost(trace: TracebackType | None) -> FrameType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _later_ones_end_at_once(since: float) -> Callable[[int, FrameType | None], None]:
    def act(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - since > SAME_PRESS_SECONDS:
            os._exit(OF_SIGINT)

    return act
