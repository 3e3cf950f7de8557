"""A program ends with its exit status however long gloo's threads take to let its tensors go."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from deepspeed_partition.engine.runtime.gloo_threads import wait_for_gloo_threads
from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("gloo_threads_multiproc.py")
on_linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked up in /proc")


@on_linux
@pytest.mark.parametrize("attempt", range(2))
def test_no_rank_aborts(tmp_path: Path, attempt: int) -> None:
    log = tmp_path / "log"
    assert run_ranks(SCRIPT, [], 2, log, timeout_seconds=120) == 0, log.read_text()[-3000:]


class Named:
    """A thread with the name of one of gloo's that runs until it is told to end, and then for a while."""

    def __init__(self, name: bytes, seconds: float) -> None:
        self.ended, self._name, self._seconds = False, name, seconds
        self._began = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._began.wait(10)

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(15, self._name)  # PR_SET_NAME
        self._began.set()
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            pass
        self.ended = True


@on_linux
def test_a_thread_that_runs_is_waited_for() -> None:
    thread = Named(b"pt_gloo_runloop", 0.3)
    wait_for_gloo_threads()
    assert thread.ended


@on_linux
def test_other_threads_are_not_waited_for() -> None:
    thread = Named(b"mine", 3.0)
    wait_for_gloo_threads()
    assert not thread.ended


@on_linux
def test_patience_ends() -> None:
    thread = Named(b"pt_gloo_runloop", 3.0)
    wait_for_gloo_threads(0.05)
    assert not thread.ended
