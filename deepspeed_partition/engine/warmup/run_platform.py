"""The platform that this run has: memory of each device, and what an optimizer keeps per weight."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.repairs import reduction_buffer_bytes
from deepspeed_partition.engine.repartition.parameter_groups import another_like
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce, warn_once
from deepspeed_partition.engine.runtime.transfers import HEADER_SIZE
from deepspeed_partition.planner.units import format_bytes
from deepspeed_partition.profiling.allocator import room_under_limits
from deepspeed_partition.profiling.live_bytes import storages_of
from deepspeed_partition.tensor_values import num_bytes_of

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

CONTROL_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files in which Linux says how much memory this container may use; versions 2 and 1."""
STATES_OF_ADAM = 2
MARGIN_OF_LIMIT = 0.01
"""Share of a limit that is left free: how far a plan's memory may be too low."""


def device_memory_bytes(engine: MadPipeEngine) -> int:
    """The memory of this rank's device that a plan may fill; on a CPU the machine's, divided by its ranks.

    Collective over the whole job.
    """
    if get_accelerator().device_name() == "cpu":
        share = machine_memory_bytes() // gather_objects(socket.gethostname()).count(socket.gethostname())
        return min(share, _within_limits(engine) or share)
    device = accelerator.name_of_device()
    num_sharing = gather_objects(device).count(device)
    kept = _allocated(kept_tensors(engine))
    usable, margin = accelerator.usable_bytes(num_sharing, kept)
    if not engine.options.memory:
        announce(
            f"plans may fill {format_bytes(usable)} of this device: what is free now and what training has there, "
            f"less a margin of {format_bytes(margin)}; the option memory says another number"
        )
    return usable


def _within_limits(engine: MadPipeEngine) -> int | None:
    """The memory that ``limit_memory`` leaves this rank, and what training has of it; None without a limit."""
    found = room_under_limits()
    if found is None:
        return None
    limit, room = found
    kept = _allocated(kept_tensors(engine))
    margin = int(limit * MARGIN_OF_LIMIT)
    usable = max(1, min(limit, room + kept) - margin)
    if not engine.options.memory:
        announce(
            f"plans may fill {format_bytes(usable)} of the limit of {format_bytes(limit)} here: what is free now "
            f"and what training has there, less a margin of {format_bytes(margin)}"
        )
    return usable


def header_bytes() -> int:
    """What the headers of messages take of a device's memory: of a GPU's nothing, they are on the host.

    A rank has one for each direction of both of its neighbours at most.
    """
    return 4 * HEADER_SIZE * torch.int64.itemsize if get_accelerator().device_name() == "cpu" else 0


def machine_memory_bytes() -> int:
    """The memory of this machine, or of the container that this process runs in."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTROL_GROUP_LIMITS:
        limit = Path(path)
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes)


def training_bytes(engine: MadPipeEngine) -> tuple[int, int]:
    """What this rank keeps for its weights while it trains, and the weights alone; ``weight_copies`` is the ratio.

    Counted from what DeepSpeed has allocated (weights, master copies, gradients in full precision), with what
    the first step will add (gradients in the precision of the weights, a buffer to reduce them in, and the
    optimizer's states).
    """
    parameters = list(engine.module.parameters())
    allocated = _allocated(_weights(engine))
    gradients = sum(num_bytes_of(parameter) for parameter in parameters if parameter.requires_grad)
    states = 0
    if engine.basic_optimizer is not None:
        states = state_bytes(engine.basic_optimizer)
    buffer, _ = reduction_buffer_bytes(engine.optimizer)
    return allocated + gradients + buffer + states, sum(map(num_bytes_of, parameters))


def kept_tensors(engine: MadPipeEngine) -> list[torch.Tensor]:
    """All that this rank keeps between two steps and has by now: weights, gradients, buffers, optimizer states."""
    tensors = [*_weights(engine), *engine.module.buffers()]
    if engine.basic_optimizer is not None:
        tensors += _tensors_in(engine.basic_optimizer.state.values())
    return tensors + [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]


def _weights(engine: MadPipeEngine) -> list[torch.Tensor]:
    """Return the weights with their master copies, and what else DeepSpeed's optimizer holds."""
    tensors: list[torch.Tensor] = list(engine.module.parameters())
    if engine.basic_optimizer is not None:
        tensors += [member for group in engine.basic_optimizer.param_groups for member in group["params"]]
    if engine.optimizer is not engine.basic_optimizer:
        tensors += _tensors_in(vars(engine.optimizer).values())
    return tensors


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of what an optimizer keeps for its parameters: what is there, and what first steps will add."""
    known: dict[tuple[torch.Size, torch.dtype], int] = {}
    total, copies = 0, None
    for group in optimizer.param_groups:
        for member in group["params"]:
            if not is_on_device(member):
                continue
            kept = sum(map(num_bytes_of, _kept_for(optimizer, member)))
            if not kept:
                # Trying an optimizer out takes a step of it: once is enough.
                copies = num_states(optimizer) if copies is None else copies
                kept = round(copies * num_bytes_of(member))
                if copies == OTHER_SHAPES:
                    form = member.shape, member.dtype
                    if form not in known:
                        known[form] = _bytes_tried(optimizer, member)
                    kept = known[form]
            total += kept
    return total


OTHER_SHAPES = -1
"""What :func:`num_states` returns of an optimizer that keeps tensors of other shapes than the weight's."""


def num_states(optimizer: torch.optim.Optimizer) -> int:
    """Count the tensors of a weight's size that ``optimizer`` keeps for it: tried out on a few numbers."""
    found: set[int] = set()
    reason: Exception | None = None
    for shape in ((2,), (2, 3)):  # Muon takes matrices alone
        try:
            trial, weight = _tried(optimizer, torch.zeros(shape))
        except Exception as error:  # somebody else's optimizer, on an input that it never expected
            reason = reason or error
        else:
            sizes = [tensor.numel() for tensor in _kept_for(trial, weight)]
            found.add(len(sizes) if all(size == weight.numel() for size in sizes) else OTHER_SHAPES)
    if not found:
        _say_untried(optimizer, reason)
        return STATES_OF_ADAM
    return found.pop() if len(found) == 1 else OTHER_SHAPES


def _bytes_tried(optimizer: torch.optim.Optimizer, member: torch.Tensor) -> int:
    """The bytes that an optimizer keeps for a parameter like this one: tried out on another one of its shape."""
    try:
        trial, weight = _tried(optimizer, torch.zeros(member.shape, dtype=member.dtype))
    except Exception as error:
        _say_untried(optimizer, error)
        return STATES_OF_ADAM * num_bytes_of(member)
    return sum(map(num_bytes_of, _kept_for(trial, weight)))


def _tried(
    optimizer: torch.optim.Optimizer, values: torch.Tensor
) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """An optimizer of the same class and settings that has made a step, and the parameter that it has."""
    weight = torch.nn.Parameter(values.to(get_accelerator().current_device_name()))
    weight.grad = torch.zeros_like(weight)
    trial = another_like(optimizer, [weight])
    trial.step()
    return trial, weight


def _kept_for(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of an optimizer's state for a weight, but for single numbers such as its count of steps."""
    return [tensor for tensor in _tensors_in([optimizer.state.get(weight)]) if tensor.numel() > 1]


def _say_untried(optimizer: torch.optim.Optimizer, error: Exception | None) -> None:
    kind = type(optimizer).__name__
    warn_once(
        f"states of {kind}",
        f"the optimizer {kind} could not be tried out ({error}). It is taken to keep {STATES_OF_ADAM} states "
        "per weight, as Adam does; the option weight_copies says better",
    )


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if torch.is_tensor(value):
            if value.device.type != "meta":  # ZeRO has shapes of the weights there, without memory
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of this rank's device; what ``offload_optimizer`` leaves to the CPU has not."""
    return get_accelerator().device_name() == "cpu" or tensor.device.type != "cpu"


def _allocated(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the device's memory that tensors have, that which they share once."""
    storages = (storage for tensor in tensors if is_on_device(tensor) for storage in storages_of(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
