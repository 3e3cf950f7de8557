"""Weights that a hook writes where DeepSpeed keeps flat fp32 copies of them, with which it makes its steps.

Under ``stage=1``, bf16 and fp16 a step makes the weights anew from these masters: what a hook has written into a
weight, by ``weight.clamp_(-1, 1)`` or ``weight.data = average``, would last until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def written_into_masters(module: nn.Module, written: Collection[str]) -> Iterator[None]:
    """Let the masters have what is written into weights meanwhile.

    Args:
        module: The LightningModule.
        written: The names of weights that may have been written, when this ends.
    """
    before = {name: (weight, weight.data) for name, weight in module.named_parameters()}
    yield
    here = dict(module.named_parameters()) if written else {}
    for name in written:
        weight, place = before.get(name, (None, None))
        if weight is not None and here.get(name) is weight:
            assert place is not None
            if weight.data_ptr() != place.data_ptr():  # which is a part of the flat weights
                place.copy_(weight.data)
                weight.data = place
            _into_master(weight)


def _into_master(weight: nn.Parameter) -> None:
    """Give the part of a master that this rank has the elements of its weight that are no roundings of it."""
    fragment = getattr(weight, "_hp_mapping", None)  # of DeepSpeed's; None: other replicas have it
    if fragment is None:
        return
    address, master = fragment.lp_fragment_address, fragment.get_hp_fragment().data
    low = weight.data.flatten()[address.start : address.start + address.numel].to(master.device)
    is_written = master.to(low.dtype) != low
    master.copy_(torch.where(is_written, low.to(master.dtype), master))
