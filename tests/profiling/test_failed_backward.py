"""A backward that failed keeps nothing in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed_partition.profiling.failed_backward import forget_failed_backward
from tests.in_backward import in_backward


def raises(gradient: torch.Tensor) -> torch.Tensor:
    raise MemoryError("for want of memory")


def fail() -> StorageWeakRef:
    """Run a backward that fails in one branch, before the other one, and return what the other one keeps."""
    x = torch.ones(10, requires_grad=True)
    kept = x.exp()
    reference = StorageWeakRef(kept.untyped_storage())
    loss = kept.sum() + in_backward(x, raises).sum()
    del kept
    with pytest.raises(MemoryError):
        loss.backward()
    return reference


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_graph_of_a_failed_backward_is_freed(mode: Any) -> None:
    reference = fail()
    assert not reference.expired(), "torch itself keeps it"
    with mode():
        forget_failed_backward()
    assert reference.expired()
