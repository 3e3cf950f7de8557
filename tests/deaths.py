"""Processes that kill themselves at a place that a test names, as the kernel or a scheduler would."""

from __future__ import annotations

import fnmatch
import functools
import os
import signal
from pathlib import Path
from typing import Any


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(module: Any, name: str, call: int | str) -> None:
    """Die when a function is called for the ``call``-th time from now on, or with a path like that."""
    function, num_calls = getattr(module, name), 0

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        paths = [str(arg) for arg in args if isinstance(arg, str | Path)]
        if num_calls == call or any(fnmatch.fnmatch(path, str(call)) for path in paths):
            kill()
        return function(*args, **kwargs)

    setattr(module, name, watched)
