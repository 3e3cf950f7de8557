"""Agreement between ranks: every rank gets the same value or raises the same error.

Nothing here goes over the default process group. What else communicates there, a signal handler of the host at any
instant, would come between two of our messages. And objects stay on the CPU, whatever device the ranks have.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.runtime import accelerator, host_staging
from deepspeed_partition.engine.runtime.agreements import Agreement, connected, job_timeout
from deepspeed_partition.engine.runtime.first_failure import met_by_all
from deepspeed_partition.tensor_values import bytes_view

T = TypeVar("T")


class OwnGroups(NamedTuple):
    """Process groups of all ranks that nobody else uses."""

    objects: dist.ProcessGroup
    """The group for objects, on gloo: its messages begin and end in the host's memory."""
    tensors: dist.ProcessGroup
    """The group for tensors, on the job's own backend; on gloo it is the group for objects."""


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement | None] = weakref.WeakKeyDictionary()
"""Sockets of one host by the default group; None: its ranks are not on one host."""
_groups_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, OwnGroups] = weakref.WeakKeyDictionary()
"""Own groups by the default group: a program may end that, and all others with it, and begin anew."""


def own_groups() -> OwnGroups:
    """The groups for everything that this package sends. The first call of a job is collective over it."""
    default = dist.group.WORLD
    assert default is not None, "a process group is initialized"
    if default not in _groups_beside:
        with accelerator.no_splitting():
            objects = dist.new_group(backend="gloo", timeout=job_timeout())
        tensors = objects if dist.get_backend() == "gloo" else dist.new_group(timeout=job_timeout())
        _groups_beside[default] = OwnGroups(objects, tensors)
        agreement = _agreements[default] = connected(objects)
        if agreement is not None:
            weakref.finalize(default, agreement.close)
    return _groups_beside[default]


def made_group() -> dist.ProcessGroup | None:
    """The group of :func:`own_groups` for objects, if they have been made; else None, the default group."""
    made = _groups_beside.get(dist.group.WORLD) if dist.group.WORLD is not None else None
    return None if made is None else made.objects


def portable(error: BaseException, keep: tuple[type[BaseException], ...] = ()) -> Exception:
    """``error`` as something that another process can raise.

    Args:
        keep: kinds that stay as they are, which the caller knows to mean what they say.
    """
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign exception's pickling does, its text is what matters
        copy = None
    if isinstance(error, StopIteration) and not isinstance(error, keep):
        return RuntimeError("the data iterator ended before the first micro-batch")
    if isinstance(copy, Exception):
        return copy
    return RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": "))


def from_rank_0(compute: Callable[[], T]) -> T:
    """What ``compute`` returns on rank 0, on every rank of the job.

    Raises:
        Exception: what ``compute`` raised on rank 0, on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [compute(), None]
        except Exception as raised:
            outcome = [None, portable(raised)]
    value, error = broadcast_object(outcome, 0)
    if error is not None:
        raise error
    return value


def broadcast_object(value: T, source: int, group: dist.ProcessGroup | None = None) -> T:
    """``value`` of the rank ``source`` of the job, on each rank of ``group``; left out: of the job. Collective."""
    group = own_groups().objects if group is None else group
    if not _is_on_the_host(group):
        box = [value]
        dist.broadcast_object_list(box, source, group)
        return box[0]
    is_source = dist.get_rank() == source
    data = pickle.dumps(value) if is_source else b""
    first = _first_of(data)
    dist.broadcast(first, source, group)
    length, begin = _read(first)
    if length <= len(begin):
        return value if is_source else pickle.loads(begin[:length])
    rest = _bytes(data[len(begin) :]) if is_source else torch.empty(length - len(begin), dtype=torch.uint8)
    dist.broadcast(rest, source, group)
    return value if is_source else pickle.loads(begin + rest.numpy().tobytes())


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of every rank of ``group``, in the order of its ranks, on each of them; left out: of the job."""
    group = own_groups().objects if group is None else group
    size = dist.get_world_size(group)
    if not _is_on_the_host(group):
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, value, group=group)
        return gathered
    data = pickle.dumps(value)
    firsts = [torch.empty(FIRST_BYTES, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(firsts, _first_of(data), group)
    lengths, begins = zip(*map(_read, firsts), strict=True)
    num_more = max(lengths) - len(begins[0])
    if num_more > 0:
        rests = [torch.empty(num_more, dtype=torch.uint8) for _ in range(size)]
        dist.all_gather(rests, _bytes(data[len(begins[0]) :].ljust(num_more, b"\0")), group)
        begins = tuple(begin + rest.numpy().tobytes() for begin, rest in zip(begins, rests, strict=True))
    return [pickle.loads(begin[:length]) for length, begin in zip(lengths, begins, strict=True)]


FIRST_BYTES = 1024
"""Bytes of the first message of an object, which holds the object's length and, nearly always, all of it.

Torch's own functions send two, each with a wait for all ranks: these take a third of their time on a CPU.
"""
_LENGTH_BYTES = 8


def _is_on_the_host(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


def _first_of(data: bytes) -> torch.Tensor:
    begin = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: FIRST_BYTES - _LENGTH_BYTES]
    return _bytes(begin.ljust(FIRST_BYTES, b"\0"))


def _read(first: torch.Tensor) -> tuple[int, bytes]:
    """The length of an object, and its first bytes, with zeros up to the end of the message."""
    data = first.numpy().tobytes()
    return int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def raised_together(compute: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``compute`` returns on this rank, if it raises on no rank of ``group``.

    Raises:
        Exception: what it raised on the first such rank, on every rank.
    """
    own: Exception | None = None
    try:
        value = compute()
    except Exception as error:  # of the user's code; every rank must hear of it
        own = portable(error)
    raise_first(own, group)
    return value


def raise_first(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the error of the first rank of ``group`` that has one, on all of them. Collective."""
    for found in gather_objects(error, group):
        if found is not None:
            raise met_by_all(found)


def refused_together(compute: Callable[[], T]) -> T:
    """What ``compute`` returns on this rank, if it raises on no rank of the job.

    Raises:
        ValueError: what the first rank with an exception met, in words, on every rank.
    """
    value, message = None, None
    try:
        value = compute()
    except Exception as error:
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    for found in gather_objects(message):
        if found is not None:
            raise met_by_all(ValueError(found))
    return value  # type: ignore[return-value]


def reduced(values: Sequence[int], operation: Any) -> list[int]:
    """Each of ``values`` over all ranks, by an operation such as ``dist.ReduceOp.MIN``, on every rank."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=operation, group=own_groups().objects)
    return tensor.tolist()


def any_bits(values: Sequence[int]) -> list[int]:
    """Each of ``values``, with the bits set that are set on any rank, on every rank. Up to 63 bits each.

    Over gloo, which serves ranks on several hosts, one number is one message between two ranks of its ring, where
    several are as many.
    """
    default = dist.group.WORLD
    if default is None or default not in _agreements:
        own_groups()
    if default is not None and (agreement := _agreements[default]) is not None:
        return agreement.any_bits(values)
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=own_groups().objects)
    return tensor.tolist()


def send_object(value: Any, rank: int) -> None:
    """Send anything that can be pickled to a rank that waits for it."""
    dist.send_object_list([value], rank, group=own_groups().objects)


def receive_object(rank: int) -> Any:
    """What :func:`send_object` sends."""
    box = [None]
    dist.recv_object_list(box, rank, group=own_groups().objects)
    return box[0]


def send_bytes(tensor: torch.Tensor, rank: int) -> None:
    """Send the values of ``tensor``, of any type and from any device, to a rank that knows its shape."""
    if tensor.numel():
        by = functools.partial(dist.send, group=own_groups().tensors)
        host_staging.send(bytes_view(tensor.detach().to(_device_that_carries(tensor.device))), rank, by=by)


def receive_bytes(shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int) -> torch.Tensor:
    """The tensor that :func:`send_bytes` sends, on ``device``, whatever device it had there."""
    tensor = torch.empty(shape, dtype=dtype, device=_device_that_carries(device))
    if tensor.numel():
        by = functools.partial(dist.recv, group=own_groups().tensors)
        host_staging.receive(tensor.view(-1).view(torch.uint8), rank, by=by)
    return tensor.to(device)


def _device_that_carries(device: torch.device) -> torch.device:
    """Where a message begins or ends whose tensor is on ``device``: NCCL knows no tensors of the host."""
    if device.type != "cpu" or dist.get_backend(own_groups().tensors) == "gloo":
        return device
    return torch.device(get_accelerator().current_device_name())
