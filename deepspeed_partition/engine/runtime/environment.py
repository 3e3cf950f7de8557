"""What the surroundings decide: the log, ``MADPIPE=0``, and how DeepSpeed starts on a CPU."""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TextIO, cast

import deepspeed
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch.distributed.distributed_c10d import _get_default_store

from deepspeed_partition import kept_values
from deepspeed_partition.quiet import without_lines_of_compilers

logger = logging.getLogger("deepspeed_partition.engine")

LAST_MEETING = timedelta(seconds=10)
"""How long a rank that has finished waits for the others."""


SAID_BY_HOSTS = ("SEED_LAYERS=", "Using topology:")
"""Beginnings of lines that DeepSpeed prints while a module is built, and that nobody can use."""


class _WithoutLines(io.TextIOBase):
    """Standard output without the lines that begin so."""

    def __init__(self, output: TextIO) -> None:
        self._output, self._in_line = output, False

    def write(self, text: str) -> int:
        if text.startswith(SAID_BY_HOSTS) or self._in_line:
            self._in_line = not text.endswith("\n")
        else:
            self._output.write(text)
        return len(text)

    def flush(self) -> None:
        self._output.flush()


@contextmanager
def without_lines_of_hosts() -> Iterator[None]:
    """Leave out what DeepSpeed prints while it builds a module; what else is printed is printed."""
    with redirect_stdout(cast(TextIO, _WithoutLines(sys.stdout))):
        yield


def clear_line() -> str:
    """Return what moves a terminal to the beginning of its line and clears it; nothing where there is none."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


class BesideProgressBars(logging.Handler):
    """Writes to standard error as it is when a line comes, above progress bars that are shown in the terminal.

    rich puts something of its own in the place of standard error while it shows a bar, and tqdm can put its bars
    aside; otherwise a line would begin behind a bar. The bar of rank 0 is not of this process on other ranks: they
    clear the line of the terminal that they find.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            with self._bars_aside():
                is_other = torch.distributed.is_initialized() and torch.distributed.get_rank() != 0
                print((clear_line() if is_other else "") + text, file=sys.stderr, flush=True)
        except Exception:  # as logging's own handlers: a line that cannot be written ends no training
            self.handleError(record)

    @staticmethod
    def _bars_aside() -> AbstractContextManager[object]:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None or not hasattr(tqdm, "tqdm") or not sys.stderr.isatty():
            return nullcontext()
        return cast(AbstractContextManager[object], tqdm.tqdm.external_write_mode(file=sys.stderr))


def announce(message: str, level: int = logging.INFO) -> None:
    """Log on rank 0 what the user asked to see.

    DeepSpeed's own logger is silent below warnings, and so is Python's without configuration. A program
    that configured logging gets the message there; otherwise it goes to standard error.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    log_here(message, level)


def warn_here(message: str) -> None:
    """Log a warning on whichever rank knows of it."""
    log_here(message, logging.WARNING)


def warn_once(key: str, message: str) -> None:
    """Log a warning on the rank that is the first to know of it, once in a job.

    Args:
        key: What the warning is known by; ranks may say it in other words.
    """
    if torch.distributed.is_initialized() and _get_default_store().add(f"madpipe/said/{key}", 1) > 1:
        return
    log_here(message, logging.WARNING)


kept_values.tell_once = warn_once


def log_here(message: str, level: int = logging.INFO) -> None:
    """:func:`announce` on whichever rank knows of it."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = BesideProgressBars()
        handler.setFormatter(logging.Formatter("[madpipe] %(message)s"))
        logger.addHandler(handler)
    logger.log(level, message)


def check_writable(path: str, option: str = "save_plan") -> None:
    """Refuse a path that cannot be written, before the layers are measured and not after.

    Raises:
        ValueError: the path of this option cannot be written.
    """
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"madpipe option {option!r} is {path!r}, which cannot be written: choose another path")


def planning_is_off() -> bool:
    """Whether ``MADPIPE=0`` asks for DeepSpeed's default cut."""
    return os.environ.get("MADPIPE", "").strip() == "0"


def prepare_cpu() -> None:
    """Let DeepSpeed start on a CPU without building its shared-memory extension.

    ``deepspeed.init_distributed`` builds that extension in C++ when it is first called: half a minute
    with a compiler, an error without one. gloo alone serves. Call this before ``init_distributed``;
    on other accelerators it changes nothing.
    """
    if get_accelerator().device_name() == "cpu":
        with without_lines_of_compilers():
            operations = deepspeed.ops.__compatible_ops__  # DeepSpeed finds out now which there are
        operations["deepspeed_shm_comm"] = False
        atexit.unregister(leave_together)
        atexit.register(leave_together)


def leave_together() -> None:
    """End the process groups at exit, no rank before the others.

    A rank that ends while another still holds its connection now and then aborts in gloo, after correct
    results, and the launcher then calls the job failed.
    """
    if not torch.distributed.is_initialized():
        return
    from deepspeed_partition.engine.runtime import (
        collectives,
        first_failure,
        watch,  # which log by this module
    )

    error = getattr(sys, "last_value", None)
    is_alone = error is not None and not first_failure.is_met_by_all(error)
    if not is_alone and not watch.watch.has_left:  # after an error of this rank, or a death, they may never come
        watch.watch.tell_that_this_rank_is_at_its_end()
        try:
            torch.distributed.monitored_barrier(collectives.made_group(), timeout=LAST_MEETING)
        except RuntimeError:  # enough waited: another one may have caught what ends this one
            is_alone = error is not None
    if is_alone and error is not None:
        watch.watch.say_who_left(first_failure.in_words(error))
        watch.watch.tell_that_this_rank_leaves(f"ended with {type(error).__name__}: {error}")
    watch.watch.stop()
    torch.distributed.destroy_process_group()
