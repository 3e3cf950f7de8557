"""Lines of other libraries that come because this package uses them, and that nobody can use, left out.

To be called before the library is imported; needs none of them.
"""

from __future__ import annotations

import logging
import warnings

USELESS = ("Setting accelerator to CPU. If you have GPU",)
"""Beginnings of lines of DeepSpeed's logger: that there is no GPU, on a CPU that the user has asked for."""
OUTDATED = (r"`isinstance\(treespec, LeafSpec\)` is deprecated",)
"""Warnings of torch about code of Lightning, which each process repeats."""


def _is_of_use(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(USELESS)


def leave_out_useless_lines() -> None:
    """Leave out these lines from now on. A second call changes nothing."""
    of_deepspeed = logging.getLogger("DeepSpeed")
    if _is_of_use not in of_deepspeed.filters:
        of_deepspeed.addFilter(_is_of_use)
    for message in OUTDATED:
        warnings.filterwarnings("ignore", message)
