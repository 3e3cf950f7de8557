"""Lines of other libraries that come because this package uses them, and that nobody can use, left out.

To be called before the library is imported; needs none of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

USELESS = ("Setting accelerator to CPU. If you have GPU",)
"""Beginnings of lines of DeepSpeed's logger: that there is no GPU, on a CPU that the user has asked for."""
OUTDATED = (r"`isinstance\(treespec, LeafSpec\)` is deprecated",)
"""Warnings of torch about code of Lightning, which each process repeats."""

WITHOUT_DATA = "Accessing the data pointer of FakeTensor"
"""A warning of torch, of which a user's function that is recorded without data knows nothing."""


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(USELESS)


def leave_out_useless_lines() -> None:
    """Leave out these lines from now on. A second call changes nothing."""
    of_deepspeed = logging.getLogger("DeepSpeed")
    if _is_of_use not in of_deepspeed.filters:
        of_deepspeed.addFilter(_is_of_use)
    for message in OUTDATED:
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("ignore", WITHOUT_DATA, module=r"deepspeed_partition\.capture\.")


@contextlib.contextmanager
def without_lines_of_compilers() -> Iterator[None]:
    """Hide what a compiler writes where DeepSpeed asks it which libraries there are.

    DeepSpeed hides that itself, in the file of ``sys.stderr``; a notebook puts another one there, and the compiler
    still writes to the standard error of the process.
    """
    standard_error = 2
    try:
        is_hidden = sys.stderr.fileno() == standard_error
    except (AttributeError, OSError):  # there is none, or it is no file
        is_hidden = False
    if is_hidden:
        yield
        return
    kept, nowhere = os.dup(standard_error), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, standard_error)
    try:
        yield
    finally:
        os.dup2(kept, standard_error)
        os.close(kept)
        os.close(nowhere)
