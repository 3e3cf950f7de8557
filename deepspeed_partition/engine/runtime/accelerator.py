"""What must hold before an accelerator is used: its settings, the device of this rank, its free memory.

An NCCL transfer is a kernel that runs until the other rank has begun its end. Whatever waits for the whole device
then waits for another process: ``torch.cuda.synchronize()``, ``cudaFree`` (the allocator calls it when it has too
little memory), a kernel that is loaded when it first runs. ``transfers.py`` and ``postponing.py`` see to it that
this ends; the settings here let it happen less often.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

BEFORE_CUDA_STARTS = {
    # Streams that share a queue of the hardware wait for each other; 8 are the default, and 32 the most.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Kernels are loaded with the context, not when they first run: that waits for the whole device.
    "CUDA_MODULE_LOADING": "EAGER",
    # Segments grow and shrink without cudaFree, which waits for the whole device.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of the environment, and the values that they get where the user has not set them."""
FEWEST_QUEUES = 8
"""The fewest hardware queues that are enough without a warning. The hardware's default is as many."""
WHAT_IS_KNOWN = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""The variable that turns off torch's advice, of several lines for each group of NCCL with single messages:
messages that may pass each other should have groups of their own. They have them here."""
ALSO_SET_AS = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
"""The other name of a variable, since torch 2.9."""
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""The names of one variable; where both are set, torch follows the first."""
TRUE_TO_TORCH = ("y", "yes", "1", "t", "true")

MOST_AHEAD = 2
"""Computations that a device has been given and not ended, when its host gives it another one."""
MARGIN_FRACTION = 0.05
MARGIN_BYTES = 512 * 2**20
"""The share of a device's memory that no plan may fill, and its least size: for the buffers of NCCL's connections,
which are made later, and for what the allocator cannot use between its blocks."""


def prepare_cuda() -> str | None:
    """Set what CUDA and PyTorch's allocator read when they start, where the user has not set it.

    Returns:
        What is too late to be set, in a sentence; None if nothing is, or if there is no CUDA.
    """
    if get_accelerator().device_name() != "cuda":
        return None
    os.environ.setdefault(WHAT_IS_KNOWN, "false")
    missing = [
        name
        for name in BEFORE_CUDA_STARTS
        if name not in os.environ and ALSO_SET_AS.get(name, name) not in os.environ
    ]
    if not torch.cuda.is_initialized():
        os.environ.update({name: BEFORE_CUDA_STARTS[name] for name in missing})
        return None
    if os.environ.get("CUDA_MODULE_LOADING") == "LAZY":  # as torch sets it where nobody has, when it starts CUDA
        missing.append("CUDA_MODULE_LOADING")
    if not missing:
        return None
    settings = " and ".join(f"{name}={BEFORE_CUDA_STARTS[name]}" for name in sorted(missing))
    return (
        f"CUDA has started before this package was imported: set {settings} in the environment, or import it "
        "first, so that fewer things wait for the whole device while tensors are on their way"
    )


def why_streams_may_wait(variables: Mapping[str, str] = os.environ) -> str | None:
    """What is wrong with a small number of hardware queues, in a sentence; None where there are enough."""
    number = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if get_accelerator().device_name() != "cuda" or not number.isdigit() or int(number) >= FEWEST_QUEUES:
        return None
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS={number} lets streams wait for each other: computations then wait for "
        "tensors on their way that they do not need, which may never come; unset it, or set 32"
    )


def before_communication() -> None:
    """What a pipeline module needs before it makes process groups: the device of this rank, and gloo unbound."""
    _use_own_device()
    _unbind_gloo()


def _use_own_device() -> None:
    """Make the device of this rank the current one, where nobody has chosen one.

    NCCL would otherwise use the machine's first device on every rank. DeepSpeed chooses when its engine starts.
    """
    accelerator, local_rank = get_accelerator(), os.environ.get("LOCAL_RANK", "")
    if accelerator.device_name() == "cpu" or not local_rank.isdigit():
        return
    if accelerator.current_device() == 0 and int(local_rank) < accelerator.device_count():
        accelerator.set_device(int(local_rank))


def _unbind_gloo() -> None:
    """Let process groups be made where gloo serves devices.

    DeepSpeed binds the default group to a device with gloo, too. As of torch 2.13 gloo says that it can be split,
    and a rank outside of a new group then calls a method that gloo does not have (``perform_nocolor_split``).
    """
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is not None and dist.get_backend() == "gloo" and default.bound_device_id is not None:
        default.bound_device_id = None


@contextmanager
def no_splitting() -> Iterator[None]:
    """Make new process groups of gloo without NCCL meanwhile. Collective over the job.

    Where the default group is bound to a device, torch lets the ranks outside of a new group take part in a split
    of NCCL's communicator. The ranks in a group of gloo take part in none, and the others would wait for them.
    """
    default = dist.group.WORLD
    assert default is not None
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def group_options(timeout: timedelta | None = None) -> Any:
    """Options for a process group that carries messages between two ranks: its stream is of high priority.

    Streams are given out in turns, 32 of each priority, and two communicators on one stream would wait for each
    other. Those of high priority nobody else asks for, so as many directions as that can never share one.

    Args:
        timeout: that of the group; None: of its backend.
    """
    if get_accelerator().device_name() != "cuda" or "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout  # or torch warns that the two differ
    return options


def mark() -> Any:
    """Return an event where the current stream is now. A thread that waits for it sleeps."""
    accelerator = get_accelerator()
    event = accelerator.Event(**({"blocking": True} if accelerator.device_name() == "cuda" else {}))
    event.record()
    return event


class DeviceQueue:
    """The stream that this thread computes on, which any thread may ask whether it is through."""

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._stream: Any = accelerator.current_stream() if accelerator.device_name() == "cuda" else None

    def is_through(self) -> bool:
        """Whether all is done that the device has been given there; without waiting."""
        try:
            return self._stream is None or bool(self._stream.query())
        except RuntimeError:  # of an earlier kernel: who computes hears of it
            return True


class Pace:
    """Lets a host be a few computations ahead of its device, and not a whole batch.

    Memory that NCCL sends from or receives into is not given to anybody else before the device is done with it. A
    host that runs ahead would ask for room for all messages of a batch, with those that it has let go still there.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_streams = device.type != "cpu"
        self._marks: deque[Any] = deque()

    def step(self) -> None:
        """Wait until the device has done all but ``MOST_AHEAD`` computations; another one is queued."""
        if not self._has_streams:
            return
        self._marks.append(mark())
        if len(self._marks) > MOST_AHEAD:
            self._marks.popleft().synchronize()


def why_not_blocking(variables: Mapping[str, str] = os.environ) -> str | None:
    """Why transfers cannot run if NCCL lets the host wait for each of them; None if it does not."""
    name = next((name for name in BLOCKING_WAIT if name in variables), None)
    if name is None or variables[name].lower() not in TRUE_TO_TORCH:
        return None
    return (
        f"{name}={variables[name]} lets a rank wait for each tensor where it asks for it, while others wait for "
        f"what it would send after that: unset {name}; a rank that does not answer is found without it"
    )


def workspace_bytes() -> int:
    """The memory that products of matrices have taken for themselves on this rank's device; it is given back here.

    cuBLAS gets a workspace for each thread that multiplies on a stream, 32 MiB on an H100: one for forwards, and
    one for torch's thread of backwards. Training takes them again: this much is in its peak, beside all tensors.
    """
    give_back = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # torch has it for captured graphs
    if get_accelerator().device_name() != "cuda" or give_back is None:
        return 0
    before = torch.cuda.memory_allocated()
    give_back()
    return before - torch.cuda.memory_allocated()


def usable_bytes(num_processes: int, kept_bytes: int) -> tuple[int, int]:
    """The memory of this rank's device that a plan may fill, and the margin that it leaves.

    That is what is free now, and what the plan counts of what this process holds; less a margin of
    ``MARGIN_FRACTION`` of the device, ``MARGIN_BYTES`` at the least. Workspaces of cuBLAS are given back first: a
    plan counts them where they are measured. Memory of other processes, of CUDA itself and of tensors that do not
    belong to training is not in it.

    Args:
        num_processes: that share the device, of this job.
        kept_bytes: of the tensors on the device that the plan counts: weights, gradients, optimizer states.
    """
    accelerator = get_accelerator()
    total = int(accelerator.total_memory())
    if accelerator.device_name() == "cuda":
        free, _ = torch.cuda.mem_get_info()
        workspace_bytes()
        # The allocator's blocks that hold nothing can be used again.
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    else:
        free = total - kept_bytes
    margin = max(int(total * MARGIN_FRACTION), MARGIN_BYTES) // num_processes
    return max(0, free // num_processes + kept_bytes - margin), margin


def name_of_device() -> str:
    """Name this rank's device: ranks of a machine get the same text exactly where they share a device."""
    accelerator = get_accelerator()
    name = str(accelerator.current_device_name())
    if accelerator.device_name() == "cuda":  # whose numbers depend on CUDA_VISIBLE_DEVICES
        name = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", name))
    return f"{socket.gethostname()} {name}"
