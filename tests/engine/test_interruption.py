"""Ctrl-C in a terminal: one line of ours for all ranks, and no process that stays behind."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from deepspeed_partition.engine.runtime import interruption
from deepspeed_partition.engine.runtime import watch as watch_module
from deepspeed_partition.engine.runtime.watch import Watch, place_in_words
from tests.engine.test_scripts import PATH, launched

SCRIPT = Path(__file__).with_name("interrupted_multiproc.py")


def rank_of(store: dist.Store, number: int) -> Watch:
    watch = Watch()
    watch._store, watch._rank = store, number
    return watch


@contextlib.contextmanager
def as_rank(watch: Watch, number: int, said: list[str]):
    before = signal.getsignal(signal.SIGINT)
    with (
        patch.object(interruption, "watch", watch),
        patch.object(interruption, "log_here", lambda text, level: said.append(text)),
        patch.object(dist, "get_rank", lambda: number),
    ):
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def interrupted() -> KeyboardInterrupt:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        return error


def test_the_first_rank_that_is_interrupted_says_it_for_all():
    store, said = dist.HashStore(), []
    for number in (1, 0):
        with as_rank(rank_of(store, number), number, said):
            error = interrupted()
            interruption._say(KeyboardInterrupt, error, error.__traceback__)
    [line] = said
    assert line.startswith("interrupted: all ranks end. Rank 1 was at test_interruption.py:")


def test_the_store_stays_until_no_rank_asks_it():
    """Torch warned a rank whose watch asked when rank 0 had ended, at times: "recvVector failed"."""
    store = dist.HashStore()
    first, second = rank_of(store, 0), rank_of(store, 1)
    first._world_size = second._world_size = 2
    with patch.object(watch_module, "MOMENT_SECONDS", 60):
        waits = threading.Thread(target=first.end_with_others)
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        second.end_with_others()
        waits.join(30)
    assert not waits.is_alive()


def test_other_errors_are_told_as_before():
    seen = []
    with patch.object(interruption, "_by_others", lambda *error: seen.append(error)):
        interruption._say(ValueError, ValueError("mine"), None)
    assert [str(error) for _, error, _ in seen] == ["mine"]


def test_the_same_press_from_a_launcher_is_no_second_one():
    ended = []
    with as_rank(rank_of(dist.HashStore(), 0), 0, []), patch.object(os, "_exit", ended.append):
        interruption._say(KeyboardInterrupt, interrupted(), None)
        signal.raise_signal(signal.SIGINT)
        assert not ended
        later = time.monotonic() + 2
        with patch.object(time, "monotonic", lambda: later):
            signal.raise_signal(signal.SIGINT)
    assert ended == [130]


def test_a_place_is_named_without_a_stack():
    assert place_in_words(None) == "at the main thread"
    assert place_in_words(sys._getframe()).startswith("at test_interruption.py:")


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_ctrl_c_in_a_terminal_ends_all_ranks(launcher: str, tmp_path: Path) -> None:
    command, environment = launched(launcher, 2, tmp_path)
    process, terminal = pty.fork()
    if process == 0:
        os.execve(command[0], [*command, str(SCRIPT)], {**environment, "PYTHONPATH": PATH})
    try:
        before = read_until(terminal, "it may be interrupted")
        os.write(terminal, b"\x03")
        after = read_until(terminal, None)
        _, status = os.waitpid(process, 0)
        until = time.monotonic() + 20
        while (left := processes_of(process)) and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        for each in processes_of(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    assert "it may be interrupted" in before, before[-2000:]
    assert os.waitstatus_to_exitcode(status) != 0 and not left
    assert after.count("[madpipe]") <= 1 and "terminate called" not in after and "[rank" not in after, after


def read_until(terminal: int, text: str | None) -> str:
    """Return what a terminal shows until ``text`` comes, or until it is closed."""
    seen, until = "", time.monotonic() + 120
    while (text is None or text not in seen) and select.select([terminal], [], [], until - time.monotonic())[0]:
        try:
            data = os.read(terminal, 2**16)
        except OSError:  # closed
            break
        if not data:
            break
        seen += data.decode(errors="replace")
    return seen


def processes_of(session: int) -> list[int]:
    found = []
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, _, _, of = (each / "stat").read_text().rpartition(")")[2].split()[:4]
            if each.name.isdigit() and int(of) == session and state != "Z":
                found.append(int(each.name))
    return found
