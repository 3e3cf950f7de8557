"""What is set, chosen and counted before an accelerator is used; none is needed here."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import torch

from deepspeed_partition.engine import repairs
from deepspeed_partition.engine.runtime import accelerator as devices
from deepspeed_partition.engine.runtime import collectives, tracing
from deepspeed_partition.engine.warmup import run_plan, run_platform
from deepspeed_partition.options import Options

GIB = 2**30


class Accelerator:
    """What DeepSpeed's accelerators answer."""

    def __init__(self, name: str, *, current: int = 0, count: int = 4) -> None:
        self.name, self.current, self.count = name, current, count

    def device_name(self) -> str:
        return self.name

    def current_device(self) -> int:
        return self.current

    def current_device_name(self) -> str:
        return f"{self.name}:{self.current}"

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: int) -> None:
        self.current = device

    def total_memory(self) -> int:
        return 80 * GIB


@pytest.fixture
def accelerator(monkeypatch):
    def use(name: str, **options: int) -> Accelerator:
        chosen = Accelerator(name, **options)
        monkeypatch.setattr(devices, "get_accelerator", lambda: chosen)
        return chosen

    for name in (*devices.BEFORE_CUDA_STARTS, devices.WHAT_IS_KNOWN, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return use


# Settings


@pytest.mark.parametrize("name", ["cpu", "xpu"])
def test_nothing_is_set_without_cuda(accelerator, name):
    accelerator(name)
    assert devices.prepare_cuda() is None
    assert not devices.BEFORE_CUDA_STARTS.keys() & os.environ.keys()


def test_what_cuda_reads_when_it_starts(accelerator, monkeypatch):
    accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert devices.prepare_cuda() is None
    assert devices.BEFORE_CUDA_STARTS.items() <= os.environ.items()
    assert os.environ[devices.WHAT_IS_KNOWN] == "false", "each group of its own would be advised to be one"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert devices.prepare_cuda() is None, "nothing is missing"
    for name in devices.BEFORE_CUDA_STARTS:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_what_the_user_has_set_stays(accelerator, monkeypatch, name):
    accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv(name, "max_split_size_mb:128")
    monkeypatch.setenv(devices.WHAT_IS_KNOWN, "true")
    before = dict(os.environ)
    assert devices.prepare_cuda() is None
    assert dict(os.environ) == before


def test_cuda_that_has_started_already(accelerator, monkeypatch):
    accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # as torch sets it when it starts CUDA
    monkeypatch.setenv(devices.WHAT_IS_KNOWN, "false")
    before = dict(os.environ)
    words = devices.prepare_cuda()
    assert words is not None and dict(os.environ) == before
    assert "CUDA_MODULE_LOADING=EAGER" in words
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment" in words


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, True),
        ({"NCCL_BLOCKING_WAIT": "True"}, True),
        ({"TORCH_NCCL_BLOCKING_WAIT": "no", "NCCL_BLOCKING_WAIT": "1"}, False),
    ],
)
def test_waits_of_the_host(variables, refused):
    words = devices.why_not_blocking(variables)
    assert (words is not None) == refused
    if words is not None:
        [(name, value)] = variables.items()
        assert words.startswith(f"{name}={value} ") and f"unset {name}" in words


@pytest.mark.parametrize(("number", "warns"), [(None, False), ("1", True), ("8", False), ("32", False)])
def test_queues_that_streams_share(accelerator, number, warns):
    """Scripts in the manner of Megatron set 1."""
    variables = {} if number is None else {"CUDA_DEVICE_MAX_CONNECTIONS": number}
    accelerator("cuda")
    words = devices.why_streams_may_wait(variables)
    assert (words is not None) == warns
    assert words is None or words.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ")
    accelerator("cpu")
    assert devices.why_streams_may_wait(variables) is None


# The device of this rank


@pytest.mark.parametrize(
    ("current", "count", "local_rank", "chosen"),
    [(0, 4, "3", 3), (2, 4, "1", 2), (0, 1, "3", 0), (0, 4, None, 0)],
    ids=["of its own", "as somebody chose", "one visible to each rank", "no rank"],
)
def test_the_device_of_a_rank(accelerator, monkeypatch, current, count, local_rank, chosen):
    used = accelerator("cuda", current=current, count=count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    devices.before_communication()
    assert used.current == chosen


@pytest.mark.parametrize(("backend", "carried_on"), [("nccl", "meta"), ("gloo", "cpu")])
def test_tensors_of_the_host_travel_where_the_backend_knows_tensors(monkeypatch, backend, carried_on):
    """Seen on a GPU: Lightning has the module on the CPU when a run has ended, and saved it over NCCL."""
    chosen = SimpleNamespace(current_device_name=lambda: "meta")
    monkeypatch.setattr(collectives, "get_accelerator", lambda: chosen)
    monkeypatch.setattr(collectives, "own_groups", lambda: SimpleNamespace(tensors="all ranks"))
    monkeypatch.setattr(collectives.dist, "get_backend", lambda *_: backend)
    ends = []
    monkeypatch.setattr(collectives.dist, "send", lambda tensor, *_, **__: ends.append(tensor))
    monkeypatch.setattr(collectives.dist, "recv", lambda tensor, *_, **__: ends.append(tensor))
    collectives.send_bytes(torch.zeros(3, dtype=torch.bfloat16), 1)
    here = torch.device("meta" if backend == "nccl" else "cpu")  # meta has no values to bring to the CPU
    received = collectives.receive_bytes(torch.Size([3]), torch.bfloat16, here, 0)
    assert [end.device.type for end in ends] == [carried_on] * 2
    assert [end.numel() for end in ends] == [6, 6] and received.shape == (3,)


# Its memory


def test_a_plan_fills_what_is_free_less_a_margin(accelerator, monkeypatch):
    accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 15 * GIB)
    # 10 GiB are other processes' and CUDA's, 5 the allocator's and free, 12 those of training, 3 of something else
    assert devices.usable_bytes(1, 12 * GIB) == (50 * GIB + 5 * GIB + 12 * GIB - 4 * GIB, 4 * GIB)
    shared, margin = devices.usable_bytes(2, 12 * GIB)
    assert (shared, margin) == (55 * GIB // 2 + 12 * GIB - 2 * GIB, 2 * GIB)


def test_workspaces_of_products_are_counted_and_given_back(accelerator, monkeypatch):
    """They are in no tensor of training, and training takes them again: a small model's plan was 68 MB too low."""
    held = [3 * GIB, 2**26]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(held))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: held.pop(), raising=False)
    accelerator("cpu")
    assert devices.workspace_bytes() == 0 and len(held) == 2
    accelerator("cuda")
    assert devices.workspace_bytes() == 2**26 and held == [3 * GIB]
    measured = SimpleNamespace(
        training_bytes=8, weight_bytes=4, workspace_bytes=2**26, memory_bytes=GIB, needs=None, trial=None
    )
    nothing = SimpleNamespace(**{**vars(measured), "workspace_bytes": 0})
    platform = run_plan._platform(Options(), [nothing, measured], (), None)
    assert platform.fixed_bytes == 2**26


def test_a_full_device_has_room_for_nothing(accelerator, monkeypatch):
    accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    assert devices.usable_bytes(1, 0)[0] == 0


def test_ranks_that_share_a_device_divide_it(accelerator, monkeypatch):
    """The text that names a device is not its number, which depends on what a process may see."""
    accelerator("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    first = devices.name_of_device()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-2"))
    assert first != devices.name_of_device()
    monkeypatch.setattr(run_platform, "get_accelerator", devices.get_accelerator)
    monkeypatch.setattr(run_platform, "gather_objects", lambda mine: [mine, first, mine])
    monkeypatch.setattr(run_platform, "kept_tensors", lambda _: [torch.zeros(8), torch.zeros(8, device="meta")])
    monkeypatch.setattr(run_platform, "storages_of", lambda tensor: [tensor.untyped_storage()])  # of meta, too
    counted = Mock(return_value=(GIB, GIB))
    monkeypatch.setattr(devices, "usable_bytes", counted)
    engine = SimpleNamespace(options=SimpleNamespace(memory=None))
    assert run_platform.device_memory_bytes(engine) == GIB
    counted.assert_called_once_with(2, 32)


def test_whether_a_device_is_through_with_its_work(accelerator, monkeypatch):
    accelerator("cpu")
    assert devices.DeviceQueue().is_through()
    stream = Mock(query=Mock(side_effect=[False, True, RuntimeError("of an earlier kernel")]))
    accelerator("cuda").current_stream = lambda: stream
    queue = devices.DeviceQueue()
    assert [queue.is_through() for _ in range(3)] == [False, True, True]


# What it computes in


@pytest.mark.parametrize(
    ("optimizer", "name", "zero", "is_refused"),
    [
        ("Adam", None, False, True),
        (None, "Adam", False, True),
        (None, None, False, False),
        ("Adam", None, True, False),
    ],
)
def test_fp16_without_zero_is_refused_where_something_trains(optimizer, name, zero, is_refused):
    """An evaluation needs no optimizer, and had been refused."""
    enabled = SimpleNamespace(enabled=True)
    config = SimpleNamespace(float16_config=enabled, zero_enabled=zero, optimizer_name=name)
    assert bool(repairs.fp16_without_zero(config, optimizer, 2)) == is_refused
    autocast = SimpleNamespace(
        float16_config=SimpleNamespace(enabled=False), zero_enabled=zero, optimizer_name=name,
        torch_autocast_enabled=True, torch_autocast_dtype=torch.float16,
    )  # fmt: skip
    assert bool(repairs.fp16_without_zero(autocast, optimizer, 2)) == is_refused
    assert not repairs.fp16_without_zero(autocast, optimizer, 1)


# Streams


def test_arrivals_are_seen_on_one_stream_per_peer_in_all_steps(monkeypatch):
    class Streams:
        Event = staticmethod(lambda **_: Mock())
        current: object = None

        def stream(self, stream):
            self.entered.append(stream)
            return Mock(__enter__=Mock(), __exit__=Mock(return_value=False))

        entered: list[object] = []  # noqa: RUF012

    monkeypatch.setattr(tracing, "get_accelerator", Streams)
    made: dict[tuple[str, int], object] = {}
    transfers = SimpleNamespace(stream_for=lambda *which: made.setdefault(which, object()))
    for _ in range(10):  # steps that are recorded
        arrivals = tracing._DeviceArrivals(transfers)
        for peer in (1, 2, 1):
            assert arrivals.watch(peer, [Mock()], lambda _: None)
        arrivals.close()
    assert len(set(Streams.entered)) == 2


def test_norms_are_taken_of_pieces_where_a_gradient_is_large() -> None:
    """A piece is a kernel or two: a gradient that is small beside the others stays whole, a large one does not."""
    small, large, across = torch.rand(50, 1000), torch.rand(1000, 1000), torch.rand(1000, 1000).t()
    pieces = repairs.in_pieces([small, large, across])
    most = max(repairs.PIECE_NUMBERS, (small.numel() + 2 * large.numel()) // repairs.MOST_PIECES + 1)
    assert [len(each) for each in pieces] == [1, -(-large.numel() // most), 1]
    for gradient, each in zip((small, large), pieces[:2], strict=True):
        assert torch.equal(torch.cat([piece.view(-1) for piece in each]), gradient.view(-1))
        assert all(piece.numel() <= most for piece in each)
