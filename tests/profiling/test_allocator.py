"""The allocator beneath CPU tensors on allocations that can be counted by hand. A float has 4 bytes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from deepspeed_partition.engine.pipeline.batch_attempt import OUT_OF_MEMORY
from deepspeed_partition.profiling import LiveBytes, allocator, counted_memory, limit_memory
from deepspeed_partition.profiling.allocator import room_under_limits

MANY = 1000


def test_every_byte_counts_from_its_allocation_until_it_is_freed():
    before = torch.zeros(1000)
    with counted_memory() as memory:
        a = torch.zeros(10)
        b = torch.empty(0, 7)
        assert (memory.current_bytes, memory.peak_bytes) == (40, 40)
        c = torch.zeros(20)
        views = [c.t(), c[3:5], c.detach()]
        del a, b, c
        assert (memory.current_bytes, memory.peak_bytes) == (80, 120)
        del before  # allocated by torch's own allocator, which frees it
        assert memory.current_bytes == 80
        memory.reset_peak()
        assert memory.peak_bytes == 80
        del views
        d = torch.zeros(5)
        assert (memory.current_bytes, memory.peak_bytes) == (20, 80)
    assert (memory.current_bytes, memory.peak_bytes) == (20, 80)
    outside = torch.zeros(100)
    del d, outside  # the first by this allocator, after its time
    assert (memory.current_bytes, memory.peak_bytes) == (20, 80)


def test_it_sees_what_operators_do_not_return():
    """Work space of a kernel (LAPACK's), and a storage that is resized."""
    rows = torch.randn(64, 64, dtype=torch.float64)
    with counted_memory() as memory, LiveBytes() as live:
        torch.linalg.inv(rows)
        assert memory.peak_bytes > live.peak_bytes > 0
        tensor = torch.zeros(10)
        tensor.untyped_storage().resize_(4000)
        assert memory.current_bytes == 4000
        del tensor
        assert memory.current_bytes == 0


def test_counters_within_counters_have_their_own_beginnings():
    with counted_memory() as outer:
        a = torch.zeros(10)
        with counted_memory() as inner:
            b = torch.zeros(20)
            assert (outer.current_bytes, inner.current_bytes) == (120, 80)
            del a
            assert (outer.current_bytes, inner.current_bytes) == (80, 80)
        del b
        assert (outer.current_bytes, inner.current_bytes) == (0, 80)
        outer.reset_peak()
        kept = torch.zeros(3)
        with outer.phase() as phase:
            assert (phase.current_bytes, phase.peak_bytes) == (12, 12)
            torch.zeros(100)
            del kept
        torch.zeros(200)
        assert (phase.current_bytes, phase.peak_bytes, outer.peak_bytes) == (0, 412, 800)
    for ended in (lambda: outer.reset_peak(), lambda: outer.phase().__enter__()):
        with pytest.raises(RuntimeError, match="has ended"):
            ended()


def test_threads_allocate_and_free_each_others_tensors():
    with counted_memory() as memory, ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda number: torch.empty(number % 7 + 1), range(MANY)))
        assert memory.current_bytes == sum(4 * (number % 7 + 1) for number in range(MANY))
        made = [[tensor] for tensor in made]
        for _ in threads.map(list.clear, made):
            pass
        gc.collect()
        assert memory.current_bytes == 0 < memory.peak_bytes


def test_one_thread_may_be_counted_alone():
    with counted_memory(this_thread=True) as mine, counted_memory() as all_of_them, ThreadPoolExecutor(1) as other:
        theirs = other.submit(torch.zeros, 10).result()
        own = [torch.zeros(20)]
        assert (mine.current_bytes, all_of_them.current_bytes) == (80, 120)
        other.submit(own.clear).result()
        del theirs
        assert (mine.current_bytes, mine.peak_bytes, all_of_them.current_bytes) == (0, 80, 0)


def test_a_backward_runs_on_another_thread_and_counts():
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)
    with counted_memory() as memory:
        layer(x).sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert memory.current_bytes == sum(4 * gradient.numel() for gradient in gradients)


def test_beyond_the_limit_it_refuses_as_a_gpu_does():
    with limit_memory(1000) as memory:
        kept = torch.zeros(100)
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.zeros(151)
        assert isinstance(caught.value, OUT_OF_MEMORY)
        assert "604 bytes were asked for, 400 bytes are in use, and the limit is 1000 bytes" in str(caught.value)
        assert (memory.current_bytes, memory.peak_bytes) == (400, 400)
        fits = torch.zeros(150)
        assert memory.peak_bytes == 1000
        del kept, fits
    assert torch.zeros(1000).sum() == 0
    with pytest.raises(ValueError, match="limit_bytes is -1"):
        limit_memory(-1).__enter__()


def test_two_threads_do_not_share_the_last_room():
    size, room = 4096, 10
    together, refused = threading.Barrier(8), []

    def allocate(_: int) -> list[torch.Tensor]:
        kept = []
        together.wait()
        for _ in range(room):
            try:
                kept.append(torch.empty(size, dtype=torch.uint8))
            except torch.cuda.OutOfMemoryError:
                refused.append(True)
        return kept

    with limit_memory(size * room) as memory, ThreadPoolExecutor(8) as threads:
        kept = list(threads.map(allocate, range(8)))
        assert sum(map(len, kept)) == room and len(refused) == 7 * room
        assert memory.peak_bytes == memory.current_bytes == size * room


def test_without_a_compiler_a_sentence_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"takes a C\+\+ compiler, and there is no c\+\+ here: install one"):
        allocator._compiled()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="there is no no-such-compiler here"):
        allocator._compiled()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(allocator, "SOURCE", tmp_path / "broken.cpp")
    allocator.SOURCE.write_text("this is no program")
    with pytest.raises(RuntimeError, match=r"cannot compile .*broken\.cpp"):
        allocator._compiled()
    assert [path.name for path in (tmp_path / "madpipe").iterdir()] == []


FORKED = """
import os, threading
import torch
from deepspeed_partition.profiling import counted_memory
with counted_memory() as memory:
    kept = torch.zeros(10)
    done = threading.Event()
    def allocate():
        while not done.is_set():
            torch.empty(8)
    thread = threading.Thread(target=allocate)
    thread.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            torch.zeros(20)
            os._exit(0 if memory.current_bytes >= 40 else 1)
        assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()
print("counted")
"""


def test_processes_compile_together_fork_and_end(tmp_path):
    """In a folder that nobody has compiled in; a fork while another thread allocates leaves the child usable."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, "counted\n"), errors
    [library] = (tmp_path / "madpipe").iterdir()
    assert library.name.startswith("counting_allocator-")


def test_the_limit_that_leaves_least_room_is_told():
    assert room_under_limits() is None
    with limit_memory(1000), limit_memory(800):
        kept = torch.empty(100, dtype=torch.uint8)
        assert room_under_limits() == (800, 700)
        del kept
        with counted_memory(limit_bytes=50):
            assert room_under_limits() == (50, 50)
    assert room_under_limits() is None
