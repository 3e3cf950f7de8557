"""A rank that ends while a thread of gloo's still has a tensor to let go; see ``test_gloo_threads.py``.

The thread runs where nothing else wants the processor, and a process on that processor wants it all the time. The
program refers to its process group to the end, as DeepSpeed does to some.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

import deepspeed_partition.engine  # noqa: F401  what it does at exit

HOG_SECONDS = 60


def hog(processor: int) -> None:
    """Keep a processor busy from another process, until this one has ended."""
    parent = os.getpid()
    if os.fork() == 0:
        os.sched_setaffinity(0, {processor})
        while os.getppid() == parent and os.times().user < HOG_SECONDS:
            pass
        os._exit(0)


def main() -> None:
    dist.init_process_group("gloo")
    processor = min(os.sched_getaffinity(0))
    hog(processor)
    for name in Path("/proc/self/task").glob("*/comm"):
        if name.read_text().startswith("pt_gloo"):
            thread = int(name.parent.name)
            os.sched_setaffinity(thread, {processor})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    group = dist.group.WORLD
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
    # Something of Python's refers to it until Python ends.
    main.__dict__["group"] = group


if __name__ == "__main__":
    main()
