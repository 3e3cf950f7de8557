"""A rank that joins a job in its own way; see ``test_frozen.py``.

python joining_multiproc.py WHAT, once per rank, as a scheduler without torchrun starts them.
"""

from __future__ import annotations

import os
import sys
import time

import deepspeed
import torch.distributed as dist

from deepspeed_partition.engine.runtime import joining, watch

what, rank = sys.argv[1], int(os.environ["RANK"])
joining.PATIENCE_SECONDS, watch.GRACE_SECONDS = 3.0, 3.0
if what == "dies" and rank == 1:
    time.sleep(2)  # rank 0 has joined, and has seen that this one was there
    sys.exit("this rank has had enough")
if what == "late" and rank == 1:
    time.sleep(8)
deepspeed.init_distributed()
dist.barrier()
print("all are here")
