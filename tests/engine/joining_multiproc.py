"""A rank that joins a job in its own way; see ``test_frozen.py``.

python joining_multiproc.py WHAT, once per rank, as a scheduler without torchrun starts them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch.distributed as dist

from deepspeed_partition.engine.runtime import joining, watch

what, rank, log = sys.argv[1], int(os.environ["RANK"]), Path(os.environ["LOGS"], "log0")


def wait_for(words: str) -> None:
    """Wait until rank 0 has written something; on a busy machine it may begin much later than this one."""
    until = time.monotonic() + 100
    while words not in log.read_text() and time.monotonic() < until:
        time.sleep(0.1)


joining.PATIENCE_SECONDS, watch.GRACE_SECONDS = 3.0, 3.0
if rank == 0:
    print("rank 0 begins", flush=True)
elif what == "dies":
    wait_for("rank 0 begins")
    time.sleep(2)  # rank 0 has joined, and has seen that this one was there
    sys.exit("this rank has had enough")
elif what == "late":
    wait_for("rank 0 has waited ")
deepspeed.init_distributed()
dist.barrier()
print("all are here")
