"""What a backward that failed leaves in memory."""

from __future__ import annotations

import torch


def forget_failed_backward() -> None:
    """Free the graph of a backward that an error ended on this thread.

    On a CPU autograd runs a backward on the thread that asks for it. What it has not come to when an error ends
    it, such as lack of memory, stays in the queue of that thread, with all that its graph keeps, until the next
    one (torch 2.13, ``torch/csrc/autograd/engine.cpp``: ``local_ready_queue``). So here is one, of one number.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()
