"""Measurement of one chain by several ranks, each a share of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_partition.profiling.arrivals import wait_for_all
from deepspeed_partition.profiling.boundaries import Boundary, from_span, span, tensors_of
from deepspeed_partition.profiling.measure import MeasuredLayer, measure_layers, run_layers
from deepspeed_partition.profiling.run import Conditions, Loss
from deepspeed_partition.profiling.sources import LayerSource, said

_Result = list[MeasuredLayer] | Exception

SHARES = (
    "the ranks of a group share the layers, so that each of them must call it; one alone measures all of them "
    "with group=torch.distributed.new_group([{rank}], use_local_synchronization=True)"
)


def share_of(num_layers: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the layers of one rank, half-open: consecutive, as many as the others' or one more."""
    return rank * num_layers // num_ranks, (rank + 1) * num_layers // num_ranks


def measure_shared(
    layers: Sequence[LayerSource],
    boundary: Boundary,
    conditions: Conditions,
    finish: Loss | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    on_layer: Callable[[], object] | None = None,
) -> list[MeasuredLayer]:
    """Measure all layers; every rank of ``group`` calls this, and every rank gets all measurements.

    First each rank runs its share once and hands the output to the next, then all measure at the same time.

    Args:
        boundary: the input of the chain; that of the group's first rank is used.

    Raises:
        ValueError, MemoryError: one rank met this error; it is raised on all ranks.
        RuntimeError: another error on one rank, or a rank has not called this for five minutes.
    """
    wait_for_all("profile_chain", SHARES.format(rank=dist.get_rank()), group)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    start, stop = share_of(len(layers), rank, num_ranks)
    share = layers[start:stop]
    given: Boundary | None = boundary if rank == 0 else _receive_boundary(rank - 1, conditions, group)
    result: _Result = []
    if rank + 1 < num_ranks:
        onward = None
        if given is not None:
            try:
                onward = run_layers(share, given, conditions, layers)
            except Exception as error:
                result = error
        _send_boundary(onward, rank + 1, conditions, group)
    # Without an input, a rank before this one has failed; it says so below.
    if given is not None and not isinstance(result, Exception) and share:
        try:
            ends = stop == len(layers)
            loss = finish if ends else None
            result, _ = measure_layers(share, given, conditions, loss, of_chain=layers, on_layer=on_layer)
        except Exception as error:
            result = error
    return _gather(result, num_ranks, group)


def _gather(mine: _Result, num_ranks: int, group: dist.ProcessGroup | None) -> list[MeasuredLayer]:
    # An exception travels as its message: the others wait for it, and not every one can be pickled.
    portable: Any = mine
    if isinstance(mine, ValueError | MemoryError):
        portable = (ValueError if isinstance(mine, ValueError) else MemoryError, str(mine))
    elif isinstance(mine, Exception):
        portable = (RuntimeError, said(mine))
    parts: list[Any] = [None] * num_ranks
    dist.all_gather_object(parts, portable, group=group)
    for part in parts:
        if isinstance(part, tuple):
            error_type, message = part
            raise error_type(message) from (mine if isinstance(mine, Exception) else None)
    return [layer for part in parts for layer in part]


def _carrier(conditions: Conditions, group: dist.ProcessGroup | None) -> torch.device:
    """Return the device where tensors lie when they are sent: the GPU for NCCL, the CPU for gloo."""
    return conditions.device if "nccl" in dist.get_backend(group) else torch.device("cpu")


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _send_boundary(
    boundary: Boundary | None, to: int, conditions: Conditions, group: dist.ProcessGroup | None
) -> None:
    """Send a boundary to the next rank; ``None`` tells it that there is nothing to go on with."""
    device, peer = _carrier(conditions, group), _global_rank(to, group)
    tensors = [] if boundary is None else list(tensors_of(boundary))
    header = [
        None
        if boundary is None
        else (
            isinstance(boundary, tuple),
            [(t.dtype, tuple(t.shape), torch.Tensor.stride(t), span(t).numel(), t.requires_grad) for t in tensors],
        )
    ]
    dist.send_object_list(header, dst=peer, group=group, device=device)
    for tensor in tensors:
        flat = span(tensor)
        if flat.numel():
            dist.send(flat.view(torch.uint8).to(device), dst=peer, group=group)


def _receive_boundary(sender: int, conditions: Conditions, group: dist.ProcessGroup | None) -> Boundary | None:
    device, peer = _carrier(conditions, group), _global_rank(sender, group)
    header: list[Any] = [None]
    dist.recv_object_list(header, src=peer, group=group, device=device)
    if header[0] is None:
        return None
    is_tuple, descriptions = header[0]
    tensors = []
    for dtype, size, stride, num_elements, requires_grad in descriptions:
        flat = torch.empty(num_elements, dtype=dtype, device=device)
        if num_elements:
            dist.recv(flat.view(torch.uint8), src=peer, group=group)
        tensor = from_span(flat.to(conditions.device), size, stride)
        tensors.append(tensor.requires_grad_(requires_grad))
    return tuple(tensors) if is_tuple else tensors[0]
