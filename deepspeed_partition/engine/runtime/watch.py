"""A thread that looks on: who waits for whom, who has failed, who has ended.

It wakes up once a second, asks the store of the job (a connection of its own) whether anything has happened, and
looks at where this process's main thread is: in the same call for transfers or collectives as before, and for how
long. Nothing is added to a step but the name of what runs.

    waits too long      the ranks say what they do; the one that waits for a rank which does not wait says so, once
    a rank fails        the others hear of it, and stop to compute for a batch that is lost (``batch_attempt.py``)
    a rank is lost      who waits, and can only wait for ever, ends with the reason

A rank that computes, loads data or compiles is never ended, only spoken of. On a GPU the host does not wait for
NCCL but for its device, wherever it asks for a number: a host that stands still, with a device that never gets
through its work, waits for a lost rank, too.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from deepspeed_partition.engine.runtime.accelerator import DeviceQueue
from deepspeed_partition.engine.runtime.environment import log_here
from deepspeed_partition.options import PATIENCE_SECONDS

TICK_SECONDS = 1.0
ANSWER_SECONDS = 3.0
"""The seconds in which a rank that runs says what it does."""
GRACE_SECONDS = 10.0
"""The seconds after the loss of a rank when a rank that still waits is ended. Where links break it ends by
itself."""
LAST_PATIENCE_SECONDS = 20.0
"""The seconds that a process which ends waits for its thread, where the store does not answer."""
MOMENT_SECONDS, GLANCE_SECONDS = 1.0, 0.02
"""For how long, at the most, rank 0 waits for others that are interrupted with it, and how often it looks."""
MOST_RANKS_ASKED = 256
ENDED, AT_END = -1, -2
"""What stands for the generation in notices of a rank whose process has ended, and of one at the end of its
program."""
STOPPED, GONE = "Tt", "ZX"
"""States of a process in ``/proc``: the letters of a stopped one, and of one that has ended."""

_WAITS_IN = (
    "torch/distributed/", "deepspeed/comm/", "threading.py", "contextlib.py", "engine/runtime/transfers.py",
    "engine/runtime/agreements.py", "engine/runtime/departures.py", "engine/runtime/receive_line.py",
    "engine/runtime/worker_thread.py", "engine/runtime/tracing.py", "engine/runtime/host_staging.py",
    "profiling/arrivals.py",
)  # fmt: skip
_NOT_THE_USERS = (
    "/torch/", "/deepspeed/", "/deepspeed_partition/", "/lightning_madpipe/", "/pytorch_lightning/", "/lightning/",
    "threading.py", "contextlib.py", "<",
)  # fmt: skip
_OPERATIONS = {
    "_exec_reduce_tied_grads": "the all-reduce of tied gradients",
    "_exec_reduce_grads": "the all-reduce of gradients",
    "clip_by_global_norm": "the norm of the gradients, for clipping",
    "scaled_global_norm": "the norm of the gradients, for clipping",
    "get_global_norm_of_tensors": "the norm of the gradients, for clipping",
    "get_grad_norm_direct": "the norm of the gradients, for clipping",
    "_exec_optimizer_step": "the optimizer step",
    "_aggregate_total_loss": "the loss of the batch",
    "_begin_batch": "the beginning of a batch",
    "agree": "the agreement at the end of a batch",
    "begin_together": "the beginning of a batch",
    "is_over": "the beginning of a batch",
    "compare_batches": "the beginning of an epoch",
    "share_with_pipeline": "what a batch has logged and returned",
    "save_checkpoint": "saving a checkpoint",
    "load_checkpoint": "loading a checkpoint",
    "measure_and_plan": "measuring and planning",
    "move_to": "moving layers",
    "init_process_group": "joining the job",
    "init_distributed": "joining the job",
    "monitored_barrier": "the end of the program",
}
"""What functions of this package and of DeepSpeed's are about, by their names."""


class Notice(NamedTuple):
    """A rank that does not come back to what it and others were doing."""

    rank: int
    generation: int
    """The generation of the rank's engines: a later engine has nothing to do with the notice. Or ``ENDED``, or
    ``AT_END``."""
    text: str


class Answer(NamedTuple):
    """What a rank says to the question what it does."""

    question: int
    waits: bool
    """Whether it waits for other ranks."""
    seconds: float
    """Since when it does that."""
    text: str


class Process(NamedTuple):
    """A process that can be looked up in ``/proc`` by all that share its namespace."""

    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process | None:
        with suppress(OSError):
            host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
            return cls(host, os.getpid(), _stat(os.getpid())[1])
        return None

    def state(self) -> str:
        """Return the letter that ``/proc`` has for the state; ``X`` where the process has ended."""
        with suppress(OSError):
            state, started = _stat(self.pid)
            return state if started == self.started else "X"
        return "X"


def _stat(pid: int) -> tuple[str, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class Watch:
    """The watch of this process. Its thread begins with the first engine."""

    _job: Any = None
    doing: Any = None
    """The instruction that the main thread runs; or None."""

    def __init__(self) -> None:
        self.patience_seconds: float | None = PATIENCE_SECONDS
        self.generation = 0
        self.has_left = False
        """Whether others have been told that this rank does not go on with them."""
        self._is_at_end = self._has_said_who_left = False
        self._count = 0
        self._since = 0.0
        self._rank, self._world_size = 0, 1
        self._store: Any = None
        self._lost_store = False
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._failures_seen = self._failures_handled = 0
        self._bell = self._question = self._num_notices = 0
        self._notices: list[tuple[Notice, float]] = []
        self._neighbour: tuple[int, Process] | None = None
        # Where the main thread was at the last look, since when, and what was said of it.
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._seen_since = time.monotonic()
        self._asked: tuple[int, float] | None = None
        self._said = False
        self._device: DeviceQueue | None = None
        self._device_is_behind_since: float | None = None

    # What the main thread calls

    def start(self, patience_seconds: float | None = PATIENCE_SECONDS) -> None:
        """Look on from now on. With an engine that all ranks make, so that they count generations alike.

        Args:
            patience_seconds: None: nothing is said of who waits.
        """
        self.patience_seconds = patience_seconds
        self.begin_anew()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if self._thread is not None and self._thread.is_alive() and self._job is dist.group.WORLD:
            return
        self.stop()
        self._job = dist.group.WORLD
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._failures_seen = self._failures_handled = self._bell = self._question = self._num_notices = 0
        self._notices, self._neighbour, self._lost_store = [], None, False
        self._store = _connection()
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        self._device = DeviceQueue()
        self._thread = threading.Thread(
            target=self._look_on, args=(self._over,), name="madpipe-watch", daemon=True
        )
        self._thread.start()
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread: the process ends, or joins another job.

        One that comes back from the store while Python ends aborts the process: on a busy machine it may take
        seconds.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join(LAST_PATIENCE_SECONDS)
        self._thread = None

    def end_with_others(self) -> None:
        """End the thread; on rank 0, whose process may keep the job's store, when the others have ended theirs.

        It waits for a moment at most. Torch warns a rank whose question comes when the store has ended.
        """
        self.stop()
        if self._store is None:
            return
        until = time.monotonic() + MOMENT_SECONDS
        with suppress(RuntimeError):  # the store has ended
            num_ended = int(self._store.add("ended", 1))
            while self._rank == 0 and num_ended < self._world_size and time.monotonic() < until:
                time.sleep(GLANCE_SECONDS)
                num_ended = int(self._store.add("ended", 0))

    @property
    def is_looking(self) -> bool:
        return self._thread is not None

    def runs(self, instruction: Any) -> None:
        """Note that something else runs now."""
        self.doing = instruction
        self._count += 1
        self._since = time.monotonic()

    def runs_into(self, stamps: list[float]) -> Callable[[Any], None]:
        """Return what does as :meth:`runs`, and keeps the second of each call."""
        append, now = stamps.append, time.monotonic

        def runs(instruction: Any) -> None:
            self.doing = instruction
            self._count += 1
            self._since = since = now()
            append(since)

        return runs

    @property
    def has_heard_of_a_failure(self) -> bool:
        return self._failures_seen > self._failures_handled

    def tell_of_a_failure(self) -> int:
        """Let the others hear that the batch is lost; return which failure of the job this is."""
        if self._store is None:
            return 0
        try:
            number = int(self._store.add("failures", 1))
            self._store.add("bell", 1)
        except RuntimeError:  # the store has ended, and the job with it, which other calls will find out
            return 0
        return number

    def forget_failures(self) -> None:
        """Forget the failures that were told so far: all ranks know of them."""
        if self._store is not None:
            with suppress(RuntimeError):  # as above
                self._failures_handled = int(self._store.add("failures", 0))

    def begin_anew(self) -> None:
        """Begin something new together with all ranks: what has ended what they did before is over."""
        self.generation += 1
        self.has_left = self._has_said_who_left = False

    def tell_that_this_rank_leaves(self, text: str) -> None:
        """Let the others hear that this rank does not go on with what they do together.

        Args:
            text: why, as ``ended with ValueError: ...``.
        """
        if self._store is None or self.has_left:
            return
        self.has_left = True
        notice = Notice(self._rank, self.generation, f"rank {self._rank} {text}")
        with suppress(RuntimeError):  # as above
            self._publish(notice)

    def tell_that_this_rank_is_at_its_end(self) -> None:
        """Let the others hear that this rank's program is through: it will come to no call of theirs."""
        self._is_at_end = True
        if self._store is not None:
            with suppress(RuntimeError):  # as above
                text = f"rank {self._rank} has come to the end of its program"
                self._publish(Notice(self._rank, AT_END, text))

    def say_who_left(self, words: str) -> None:
        """Log once which rank has left what all do together, and with what, before an error of this one.

        From gloo a rank hears only that a connection is closed.

        Args:
            words: the error of this rank. Where it is the other's, or names it, nothing is said.
        """
        if self._store is None or self._has_said_who_left:
            return
        with suppress(RuntimeError):  # the store has ended: as above
            for number in range(1, int(self._store.add("notices", 0)) + 1):
                if not self._store.check([f"notice/{number}"]):
                    continue  # it is being written
                notice = Notice(*json.loads(self._store.get(f"notice/{number}")))
                if notice.rank == self._rank or notice.generation not in (ENDED, self.generation):
                    continue
                if (notice.text.partition(" with ")[2] or f"rank {notice.rank}") not in words:
                    self._has_said_who_left = True
                    log_here(f"rank {self._rank} cannot go on: {notice.text}", logging.ERROR)
                return

    def why_not_coming(self, rank: int) -> str | None:
        """The sentence about a rank that will come to no call any more; None where it may."""
        return next(
            (notice.text for notice, _ in self._notices if notice.rank == rank and notice.generation < 0), None
        )

    def ask(self) -> int:
        """Ask all ranks what they do; return the number of the question, 0 where nobody can answer."""
        if self._store is None or self._lost_store:
            return 0
        with suppress(RuntimeError):  # as above
            question = int(self._store.add("question", 1))
            self._store.add("bell", 1)
            return question
        return 0

    def waits_elsewhere(self, rank: int, question: int, seconds: float) -> str | None:
        """The sentence about a rank that has waited so long for other ranks in one place; None where it has not.

        Args:
            question: What :meth:`ask` has returned, some seconds ago.
        """
        if self._store is None:
            return None
        with suppress(RuntimeError):  # as above
            if not self._store.check([f"answer/{rank}"]):
                return None
            answer = Answer(*json.loads(self._store.get(f"answer/{rank}")))
            if answer.question >= question and answer.waits and answer.seconds >= seconds:
                return f"rank {rank} waits in {answer.text}"
        return None

    def is_first_to_say(self, key: str) -> bool:
        """Whether no rank of the job has asked this before; where the store has ended, whether none has left."""
        if self._store is None:
            return True
        try:
            return int(self._store.add(f"said/{key}", 1)) == 1
        except RuntimeError:
            return not self._notices

    @contextmanager
    def within(self, operation: str) -> Iterator[None]:
        """Name the operation that runs meanwhile."""
        self.runs(operation)
        try:
            yield
        finally:
            self.runs(None)

    # What the thread does

    def _publish(self, notice: Notice) -> None:
        number = int(self._store.add("notices", 1))
        self._store.set(f"notice/{number}", json.dumps(notice))
        self._store.add("bell", 1)

    def _look_on(self, over: threading.Event) -> None:
        own = Process.own()
        try:
            if own is not None:
                self._store.set(f"process/{self._rank}", json.dumps(own))
        except RuntimeError:
            self._lose_store()
        while not over.wait(TICK_SECONDS):
            try:
                self._listen()
                self._look_at_neighbour(own)
                stuck_seconds, operation, waits_for = self._look_at_main_thread()
                self._ask_and_say(stuck_seconds, operation, waits_for)
            except RuntimeError:
                self._lose_store()
                stuck_seconds, operation, _ = self._look_at_main_thread()
            if not over.is_set():
                self._end_if_lost(max(stuck_seconds, self._seconds_behind_device()), operation)

    def _lose_store(self) -> None:
        if not self._lost_store:
            self._lost_store = True
            text = "the process that keeps the job's store (rank 0, or the launcher) has ended"
            self._notices.append((Notice(-1, ENDED, text), time.monotonic()))

    def _listen(self) -> None:
        if self._lost_store:
            return
        bell = int(self._store.add("bell", 0))
        if bell == self._bell:
            return
        self._bell = bell
        self._failures_seen = int(self._store.add("failures", 0))
        for number in range(self._num_notices + 1, int(self._store.add("notices", 0)) + 1):
            if not self._store.check([f"notice/{number}"]):
                self._bell = -1  # it is being written: look again
                break
            self._num_notices = number
            notice = Notice(*json.loads(self._store.get(f"notice/{number}")))
            if notice.rank != self._rank:
                self._notices.append((notice, time.monotonic()))
        question = int(self._store.add("question", 0))
        if question != self._question:
            self._question = question
            self._store.set(f"answer/{self._rank}", json.dumps(self._answer(question)))

    def _answer(self, question: int) -> Answer:
        operation, waits, _ = self._place()
        seconds = time.monotonic() - max(self._since, self._seen_since if waits else self._since)
        return Answer(question, waits, seconds, f"{operation}, for {seconds:.0f} s" if self._since else operation)

    def _place(self) -> tuple[str, bool, list[int] | None]:
        """Return what the main thread does in words, whether it waits for other ranks, and for which."""
        frame = sys._current_frames().get(self._main or 0)
        waits, names, outside, num_inner = _reading(frame)
        doing = self.doing
        if waits and hasattr(doing, "message"):
            peers = [doing.rank_of_peer] if hasattr(doing, "rank_of_peer") else None
            return doing.in_words, True, self._ranks_of(doing) or peers
        # What the user's code calls within what we do, such as a collective in a layer, is its own.
        ours, around = (_known(each) for each in (names[:num_inner], names[num_inner:]))
        if waits:
            call = f"{names[0]}(), called at {outside}"
            return ours or (f"{call}, within {around}" if around else call), True, None
        known = ours or around
        if doing is not None:
            return getattr(doing, "in_words", str(doing)), False, None
        return known or outside, False, None

    def _ranks_of(self, instruction: Any) -> list[int] | None:
        ranks = self.pipeline_ranks
        return [ranks[instruction.peer]] if instruction.peer < len(ranks) else None

    pipeline_ranks: tuple[int, ...] = ()
    """The global ranks of this pipeline, by device."""

    def _look_at_main_thread(self) -> tuple[float, str, list[int] | None]:
        """Return for how many seconds the main thread waits for ranks (0: it does not), what it does, for whom."""
        frame = sys._current_frames().get(self._main or 0)
        place = (id(frame), -1 if frame is None else frame.f_lasti, self._count)
        now = time.monotonic()
        if place != self._seen:
            if self._said:
                log_here(f"rank {self._rank} goes on after {now - self._seen_since:.0f} s")
            self._seen, self._seen_since, self._said, self._asked = place, now, False, None
        operation, waits, waits_for = self._place()
        return (now - self._seen_since if waits else 0.0), operation, waits_for

    def _seconds_behind_device(self) -> float:
        """Return for how many seconds the main thread has stood still while the device was not through once."""
        now = time.monotonic()
        if self._device is None or self._device.is_through():
            self._device_is_behind_since = None
        elif self._device_is_behind_since is None:
            self._device_is_behind_since = now
        since = self._device_is_behind_since
        return 0.0 if since is None else now - max(since, self._seen_since)

    def _look_at_neighbour(self, own: Process | None) -> None:
        """Look at the next rank that shares this one's processes; each has one that looks at it."""
        if own is None or self._lost_store:
            return
        if self._neighbour is None:
            for step in range(1, min(self._world_size, MOST_RANKS_ASKED)):
                rank = (self._rank + step) % self._world_size
                if not self._store.check([f"process/{rank}"]):
                    return  # it has not begun: look again
                process = Process(*json.loads(self._store.get(f"process/{rank}")))
                if process.host == own.host:
                    self._neighbour = rank, process
                    break
            return
        rank, process = self._neighbour
        if process.state() in GONE and not any(
            notice.rank == rank and notice.generation == ENDED for notice, _ in self._notices
        ):
            notice = Notice(rank, ENDED, f"rank {rank} (process {process.pid}) has ended")
            self._notices.append((notice, time.monotonic()))
            self._publish(notice)

    def _ask_and_say(self, stuck_seconds: float, operation: str, waits_for: list[int] | None) -> None:
        patience, now = self.patience_seconds, time.monotonic()
        if not patience or stuck_seconds < patience or self._said or self._lost_store:
            return
        if self._asked is None or now - self._asked[1] > patience + ANSWER_SECONDS:
            self._asked = int(self._store.add("question", 1)), now
            self._store.add("bell", 1)
        elif now - self._asked[1] >= ANSWER_SECONDS:
            self._say(stuck_seconds, operation, waits_for, self._asked[0])

    def _say(self, stuck_seconds: float, operation: str, waits_for: list[int] | None, question: int) -> None:
        answers: dict[int, tuple[bool, str]] = {}
        for rank in range(min(self._world_size, MOST_RANKS_ASKED)):
            if rank == self._rank or not self._store.check([f"answer/{rank}"]):
                continue
            answer = Answer(*json.loads(self._store.get(f"answer/{rank}")))
            if answer.question >= question:
                answers[rank] = answer.waits, answer.text
        others = [rank for rank in range(min(self._world_size, MOST_RANKS_ASKED)) if rank != self._rank]
        free = [rank for rank in waits_for or others if not answers.get(rank, (False, ""))[0]]
        first_to_say = all(rank > self._rank for rank, (waits, _) in answers.items() if waits)
        waited = f"rank {self._rank} has waited {stuck_seconds:.0f} s"
        if free and (waits_for or first_to_say):
            said = "; ".join(f"rank {rank} {self._state(rank, answers)}" for rank in free)
            self._said = True
            log_here(f"{waited} for {_ranks(free)}, in {operation}: {said}", logging.WARNING)
        elif first_to_say and len(answers) == len(others) and all(waits for waits, _ in answers.values()):
            said = "; ".join(f"rank {rank} waits in {text}" for rank, (_, text) in answers.items())
            self._said = True
            log_here(
                f"{waited} in {operation}, and all ranks wait for each other: {said}. Where they are not at the "
                "same place, one of them has done what the others have not",
                logging.WARNING,
            )
        else:
            self._asked = None

    def _state(self, rank: int, answers: dict[int, tuple[bool, str]]) -> str:
        if rank in answers:
            return f"runs {answers[rank][1]}"
        own = Process.own()
        if own is not None and self._store.check([f"process/{rank}"]):
            process = Process(*json.loads(self._store.get(f"process/{rank}")))
            if process.host == own.host:
                state = process.state()
                if state in GONE:
                    return f"(process {process.pid}) has ended"
                if state in STOPPED:
                    return f"(process {process.pid}) is stopped, as by SIGSTOP"
                return f"(process {process.pid}) does not answer: something keeps Python's lock"
        return "does not answer: it is stopped, or its machine or the link to it is down"

    def _end_if_lost(self, stuck_seconds: float, operation: str) -> None:
        now = time.monotonic()
        # Who is at the end of its program may be missed by nobody; but all others together are.
        at_end = {notice.rank for notice, _ in self._notices if notice.generation < 0}
        counts = {ENDED, self.generation}
        if len(at_end) >= self._world_size - 1 and not self._is_at_end:
            counts.add(AT_END)
        lost = [
            (notice, since)
            for notice, since in self._notices
            if notice.generation in counts and now - since >= GRACE_SECONDS
        ]
        if not lost or stuck_seconds < GRACE_SECONDS:
            return
        text = lost[0][0].text
        log_here(f"rank {self._rank} ends: it waits in {operation}, and {text}", logging.ERROR)
        leave_at_once()


def leave_at_once() -> None:
    """End a process whose main thread waits where nothing can wake it up."""
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether the innermost call of a stack waits for other ranks."""
    return _reading(frame)[0]


def place_in_words(frame: FrameType | None) -> str:
    """What runs in the innermost frame of a stack, and where the user's code has called it."""
    _, names, outside, num_inner = _reading(frame)
    operation = _known(names[:num_inner])
    return f"at {outside}" if operation is None else f"in {operation}, called at {outside}"


def _known(names: list[str]) -> str | None:
    return next((_OPERATIONS[name] for name in names if name in _OPERATIONS), None)


def _reading(frame: FrameType | None) -> tuple[bool, list[str], str, int]:
    """Read a stack: return whether its innermost call waits for other ranks; the names of its functions, from the
    inside; where the first function stands that belongs to neither torch, DeepSpeed nor this package; and how many
    of the names are of functions that it calls."""
    names: list[str] = []
    waits: bool | None = None
    outside, num_inner = "", None
    while frame is not None:
        file = frame.f_code.co_filename
        if waits is None and not file.endswith(("threading.py", "contextlib.py")):
            waits = any(part in file for part in _WAITS_IN)
        if not outside and not any(part in file for part in _NOT_THE_USERS):
            num_inner = len(names)
            outside = f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    names = names or [""]
    return bool(waits), names, outside or "the main thread", len(names) if num_inner is None else num_inner


def _connection() -> Any:
    """Open a connection to the job's store for this thread: a call of another may wait there for minutes."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with suppress(RuntimeError, AttributeError, TypeError):
        if isinstance(store, dist.TCPStore):
            store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore("madpipe-watch", store)


watch = Watch()
"""The watch of this process."""
