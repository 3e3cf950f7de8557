"""What holds where ranks have devices, without any: streams and events that write down what they are asked."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from deepspeed_partition import Plan
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.pipeline.batch_programs import program_of
from deepspeed_partition.engine.pipeline.plan_engine import AnyPlanEngine
from deepspeed_partition.engine.runtime import accelerator as devices
from deepspeed_partition.engine.runtime import collectives, host_staging, transfers
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects, reduced
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.schedule.instructions import Compute, Instruction, Message, Transfer
from tests.engine import plans
from tests.engine.pipelines import mlp, train_alone
from tests.engine.running import NUM_MICRO_BATCHES, adam, batches, raised, same, start, train

DEVICES, CUTS = (0, 1, 0, 1), [0, 1, 4, 6, 8]


def two_stages_each() -> Plan:
    orders = plans.depth_first(DEVICES, NUM_MICRO_BATCHES, 3)
    return plans.plan_of(plans.chain_of(CUTS[-1]), plans.platform_of(2), CUTS, DEVICES, orders=orders)


def begin() -> MadPipeEngine:
    """An engine of two ranks with two stages each, every activation with its shapes."""
    engine, _, _ = start(mlp(), None, plan=two_stages_each())
    assert engine.runs_lists and engine.dynamic_shape
    return engine


def instructions_of(engine: MadPipeEngine) -> tuple[Instruction, ...]:
    return engine.program(engine.micro_batches, trains=True).lists[engine.stage_id]


class Streams:
    """An accelerator with streams, on which everything is done at once."""

    def __init__(self) -> None:
        self.of_thread = threading.local()
        self.made: list[object] = []
        self.waited_in: list[str] = []
        """The names of the threads that waited for an event."""
        self.recorded: list[tuple[torch.Tensor, object]] = []
        self.device = 0

    def device_name(self) -> str:
        return "streams"

    def current_device(self) -> int:
        return self.device

    def set_device(self, device: int) -> None:
        self.device = device

    def device_count(self) -> int:
        return dist.get_world_size()

    def Stream(self) -> object:
        self.made.append(Mock(spec=["wait_event"]))
        return self.made[-1]

    def current_stream(self) -> object:
        return getattr(self.of_thread, "stream", "computes")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.of_thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.of_thread.stream = before

    def Event(self, **_: Any) -> Event:
        return Event(self)


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.stream = streams, None

    def record(self) -> None:
        self.stream = self.streams.current_stream()

    def synchronize(self) -> None:
        assert self.stream == "computes", "an event that was recorded where the engine computes"
        self.streams.waited_in.append(threading.current_thread().name)


@contextmanager
def streams() -> Iterator[Streams]:
    """In place of the CPU, for what an engine sends."""
    accelerator = Streams()

    class OnStreams(Transfers):
        def _find_computing_stream(self) -> None:
            self._on_streams, self._computes_on = True, accelerator.current_stream()

    def record(tensor: torch.Tensor, stream: object) -> None:
        accelerator.recorded.append((tensor, stream))

    with (
        patch.object(devices, "get_accelerator", lambda: accelerator),
        patch.object(transfers, "get_accelerator", lambda: accelerator),
        patch.object(torch.Tensor, "record_stream", record),
        patch.object(AnyPlanEngine, "transfers_class", OnStreams),
    ):
        yield accelerator


def messages_that_both_hosts_have_come_to(_: Path) -> None:
    """Threads give them to the device, from streams that are the same ones in every step."""
    data = batches(3)
    for told_each_time in (True, False):
        with streams() as accelerator:
            engine = begin()
            engine.dynamic_shape = told_each_time
            losses = train(engine, data)
            transfers_here = [each for each in instructions_of(engine) if isinstance(each, Transfer)]
            posted = [each for each in transfers_here if each.kind == "R"]
            sent = [each for each in transfers_here if each.kind == "S"]
            waited = [name for name in accelerator.waited_in if name.startswith("madpipe-receives-from-")]
            assert len(waited) == len(data) * len(posted)
            sending, receiving = (engine._transfers.stream_for(each, 1 - engine.stage_id) for each in STREAMS)
            assert accelerator.made in ([sending, receiving], [receiving, sending])
            assert sending.wait_event.call_count == len(data) * len(sent)
            assert len(accelerator.recorded) >= len(waited)
            assert all(stream == "computes" for _, stream in accelerator.recorded)
        same(losses, train_alone(mlp(), data, adam))


STREAMS = ("sends", "receives")


def nothing_is_given_to_a_device_before_both_hosts_are_there(_: Path) -> None:
    """A rank comes to its end of a transfer late: the other end begins when it does, and not before."""
    ranks = list(range(dist.get_world_size()))
    message, begun = Message("F", 0, 0), []
    with streams():
        found = AnyPlanEngine.transfers_class([ranks], [0, 1], torch.device("cpu"))
        start_sending, start_receiving = found._start_sending, found._start_receiving

        def sending(*arguments: Any, **options: Any) -> Any:
            begun.append(time.monotonic())
            return start_sending(*arguments, **options)

        def receiving(*arguments: Any, **options: Any) -> Any:
            begun.append(time.monotonic())
            return start_receiving(*arguments, **options)

        found._start_sending, found._start_receiving = sending, receiving
        for late in (0, 1):
            begun.clear()
            found.start(program_of(None, 2, 1, trains=False), trains=True, shapes_may_differ=True)
            dist.barrier()
            if dist.get_rank() == late:
                time.sleep(0.3)
                assert not begun
            came = time.monotonic()  # of the machine, so the same on all ranks
            if dist.get_rank() == 0:
                found.send(message, 1, torch.full((3,), 7.0))
            else:
                found.post(message, 0)
                assert found.take(message, 0).tolist() == [7.0] * 3
            found.finish()
            everybody = gather_objects(came)
            assert len(begun) == 1 and begun[0] >= max(everybody), (begun, everybody)
        found.close()


def a_host_that_is_not_far_ahead(_: Path) -> None:
    data = batches(2)
    with streams() as accelerator:
        engine = begin()
        engine._pace._has_streams = True
        losses = train(engine, data)
        num_computations = sum(isinstance(each, Compute) for each in instructions_of(engine))
        waited = [name for name in accelerator.waited_in if not name.startswith("madpipe-")]
        assert len(waited) == len(data) * num_computations - devices.MOST_AHEAD
    same(losses, train_alone(mlp(), data, adam))


def a_device_that_is_chosen_before_anything_is_sent(folder: Path) -> None:
    """A plan file is read by rank 0 for all of them, before DeepSpeed chooses."""
    file = folder / "plan.json"
    if dist.get_rank() == 0:
        two_stages_each().save(file)
    dist.barrier()
    with streams() as accelerator:
        seen: list[int] = []

        def broadcast(*arguments: Any, **options: Any) -> None:
            seen.append(accelerator.device)
            _broadcast(*arguments, **options)

        with patch.object(dist, "broadcast", broadcast):
            PipelineModule(mlp(), num_stages=2, plan=file)
    assert seen and set(seen) == {dist.get_rank()}, seen


_broadcast = dist.broadcast


def gloo_that_is_bound_to_a_device(_: Path) -> None:
    """As DeepSpeed binds it where the accelerator is CUDA: a torch that splits then makes no other group."""
    default = dist.group.WORLD
    data = batches(2)
    default.bound_device_id = torch.device("cuda", dist.get_rank())
    try:
        engine = begin()
        assert default.bound_device_id is None
        same(train(engine, data), train_alone(mlp(), data, adam))
        default.bound_device_id = torch.device("cuda", dist.get_rank())
        with devices.no_splitting():
            first = dist.new_group([0], backend="gloo")
        assert default.bound_device_id == torch.device("cuda", dist.get_rank())
        assert (first is dist.GroupMember.NON_GROUP_MEMBER) == (dist.get_rank() > 0)
    finally:
        default.bound_device_id = None


def others_use_the_default_group(_: Path) -> None:
    """A signal handler of the host, for one, at any instant: here a thread that never stops."""
    num_rounds, size = 40, 2000
    errors: list[Exception] = []

    def broadcast() -> None:
        try:
            for number in range(num_rounds):
                box = ["x" * size * number if dist.get_rank() == 0 else None]
                dist.broadcast_object_list(box, src=0)
                assert len(box[0]) == size * number
        except Exception as error:
            errors.append(error)

    collectives.own_groups()
    other = threading.Thread(target=broadcast)
    other.start()
    ranks = list(range(dist.get_world_size()))
    for number in range(num_rounds):
        assert from_rank_0(lambda number=number: number) == number
        assert gather_objects((dist.get_rank(), number)) == [(rank, number) for rank in ranks]
        assert reduced([dist.get_rank(), 1], dist.ReduceOp.SUM) == [sum(ranks), len(ranks)]
    other.join()
    assert not errors, errors


def objects_of_any_length(_: Path) -> None:
    """Those that fill their first message, or need a second one, on each rank and on one of them alone.

    Red where a length is cut to the first message, or a rank that has sent all goes on without the others.
    """
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    room = collectives.FIRST_BYTES - collectives._LENGTH_BYTES - len(pickle.dumps(b""))
    for length in (0, room - 9, *range(room - 2, room + 3), 100_000):
        value = b"x" * length
        assert gather_objects(value) == [value for _ in ranks]
        for long in ranks:
            found = gather_objects((rank, value if rank == long else None))
            assert found == [(each, value if each == long else None) for each in ranks]
            assert collectives.broadcast_object(value if rank == long else rank, long) == value


def waits_of_the_host_for_nccl(_: Path) -> None:
    """On one rank alone: every rank says so, and nothing hangs."""
    variables = {"TORCH_NCCL_BLOCKING_WAIT": "1"} if dist.get_rank() == 1 else {}
    with patch.dict(os.environ, variables), patch.object(host_staging, "goes_through_host", lambda _: False):
        words = "TORCH_NCCL_BLOCKING_WAIT=1 lets a rank wait", "unset TORCH_NCCL_BLOCKING_WAIT"
        with raised(ValueError, *words):
            Transfers([list(range(dist.get_world_size()))], [0, 1], torch.device("meta"))


CASES = (
    messages_that_both_hosts_have_come_to, nothing_is_given_to_a_device_before_both_hosts_are_there,
    a_host_that_is_not_far_ahead, gloo_that_is_bound_to_a_device, a_device_that_is_chosen_before_anything_is_sent,
    others_use_the_default_group, objects_of_any_length, waits_of_the_host_for_nccl,
)  # fmt: skip
