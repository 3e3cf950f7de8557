"""The greedy scheduler of the source: any scheme, simulated event by event.

A worker that is free takes, of its jobs whose inputs have come, the one of the smallest priority; it never waits
for a better one. Messages travel beside computation, one at a time between two workers in the order in which they
were ready. Weights that another worker stores are fetched for each job; a worker asks for those of a job when the
job before it starts, which hides the fetch, and holds at most ``prefetch`` of them for jobs that have not begun.

Source: Rahimi, "Unifying Parallelization Schemes to Train Deep Nets", the scheduler with a thread that prefetches.
An addition to it: durations, bytes and links, a backward on another worker than its forward (which then sends what
it kept), and a limit of micro-batches in flight. Cost: O(S B log(S B)) for S stages and B micro-batches, times the
number of jobs that wait at a worker.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.schemes.scheme import Direction, Scheme

Job: TypeAlias = tuple[int, int, Direction]
"""Stage, micro-batch and direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeStage:
    """Cost of a stage for one micro-batch: seconds, or any unit of time, and bytes, or any unit of size."""

    forward_seconds: float = 1.0
    backward_seconds: float = 2.0
    weight_bytes: int = 1
    """Bytes of the weights; their gradients take as many."""
    output_bytes: int = 1
    """Bytes of the output, which the next stage needs; a gradient of this size comes back."""
    stash_bytes: int = 1
    """Bytes kept from the start of the forward to the end of the backward."""


@dataclass(frozen=True, slots=True)
class Wires:
    """Speeds of workers and links. Left out, all workers are alike and messages take no time."""

    transfer_seconds: Callable[[int, int, int], float] | None = None
    """Function of source, destination and bytes: the seconds of a message. None: 0."""
    speed: Callable[[int], float] = field(default=lambda worker: 1.0)
    """Function of the worker, which divides the seconds of stages."""
    prefetch: int = 1
    """Sets of weights that a worker may hold for jobs that have not begun; 0: it asks for weights only once it has
    chosen the job, and waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRun:
    """Result of a simulated scheme; lists have an entry for each worker."""

    latency_seconds: float
    """Seconds until the last backward has ended."""
    busy_seconds: tuple[float, ...]
    activations_received: tuple[int, ...]
    """Outputs and their gradients that come from other workers, and stashes where a backward is on another worker
    than its forward."""
    activation_bytes_received: tuple[int, ...]
    weights_received: tuple[int, ...]
    """Stages whose weights were fetched, once for each job."""
    weight_bytes_received: tuple[int, ...]
    gradients_sent: tuple[int, ...]
    """Gradients of weights that go to the worker which stores these, once for each backward."""
    peak_activations: tuple[int, ...]
    """Most stages of micro-batches in flight at once, from the start of a forward to the end of its backward."""
    peak_activation_bytes: tuple[int, ...]
    stages_stored: tuple[tuple[int, ...], ...]
    """Stages whose weights the worker stores for good."""
    weights_stored: tuple[int, ...]
    """How many they are."""
    weight_bytes_stored: tuple[int, ...]
    peak_fetched: tuple[int, ...]
    """Most fetched sets of weights at once, on top of those stored for good."""
    jobs: tuple[tuple[Job, int, float, float], ...]
    """Each job with its worker, start and end in seconds, in the order of their starts."""


def simulate(
    scheme: Scheme, stages: Sequence[SchemeStage], num_micro_batches: int, wires: Wires | None = None
) -> SchemeRun:
    """Run one step of a scheme on ``stages`` and return what it took.

    Raises:
        ValueError: there are no stages or micro-batches, or a function of the scheme gives no worker.
    """
    if not stages or num_micro_batches < 1:
        raise ValueError(
            f"{len(stages)} stages and {num_micro_batches} micro-batches: a scheme has at least one of each"
        )
    return _Simulation(scheme, stages, num_micro_batches, wires or Wires()).run()


class _Simulation:
    """State of a run. Times are integer ticks, so that equal instants are equal."""

    def __init__(
        self, scheme: Scheme, stages: Sequence[SchemeStage], num_micro_batches: int, wires: Wires
    ) -> None:
        self.scheme, self.stages, self.count, self.wires = scheme, stages, num_micro_batches, wires
        numbers = range(num_micro_batches)
        self.worker: dict[Job, int] = {
            (s, b, d): _checked(scheme.w_compute(s, b, d), f"w_compute({s}, {b}, {d!r})")
            for s in range(len(stages))
            for b in numbers
            for d in ("F", "B")
        }  # fmt: skip
        self.holder = {
            (s, b): _checked(scheme.w_weights(s, b), f"w_weights({s}, {b})")
            for s in range(len(stages))
            for b in numbers
        }
        self.num_workers = 1 + max(*self.worker.values(), *self.holder.values())
        total = sum(
            (Fraction(each.forward_seconds) + Fraction(each.backward_seconds) for each in stages), Fraction(0)
        )
        self.clock = Clock.resolving(total * num_micro_batches)
        self.missing = {job: len(self._messages(job)) + (self._before(job) is not None) for job in self.worker}
        """Inputs of each job that have not come, its predecessor included, its weights excluded."""
        self.ready: list[set[Job]] = [set() for _ in range(self.num_workers)]
        self.wanted: list[set[Job]] = [set() for _ in range(self.num_workers)]
        """Jobs that begin next or soon, whose weights have not been asked for."""
        self.ahead: list[set[Job]] = [set() for _ in range(self.num_workers)]
        """Jobs whose weights were asked for, and which have not begun."""
        self.has_weights: set[Job] = set()
        self.running: list[Job | None] = [None] * self.num_workers
        self.link_free: dict[tuple[int, int], int] = defaultdict(int)
        self.in_flight: dict[tuple[int, int], int] = defaultdict(int)
        """Micro-batches in flight, by worker and stage."""
        self.events: list[tuple[int, int, str, Job]] = []
        self.pushed = 0
        self.stashes: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self.num_workers)]
        self.copies: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self.num_workers)]
        """Changes at each worker: tick, whether it is an increase, number and bytes."""
        self.received = [[0] * 2 for _ in range(self.num_workers)]
        self.fetched = [[0] * 2 for _ in range(self.num_workers)]
        self.gradients = [0] * self.num_workers
        self.done: list[tuple[Job, int, int, int]] = []

    def run(self) -> SchemeRun:
        for job in sorted(self.worker):
            if not self.missing[job]:
                self._want(job)
                self.ready[self.worker[job]].add(job)
        self._begin_all(0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, what, job = heapq.heappop(self.events)
                {"end": self._end, "message": self._arrive, "weights": self._fetched}[what](job, now)
            self._begin_all(now)
        assert len(self.done) == len(self.worker), "a scheme waits in a circle"
        return self._result()

    def _before(self, job: Job) -> Job | None:
        stage, number, direction = job
        if direction == "F":
            return (stage - 1, number, "F") if stage else None
        return (stage + 1, number, "B") if stage + 1 < len(self.stages) else (stage, number, "F")

    def _after(self, job: Job) -> Job | None:
        stage, number, direction = job
        if direction == "B":
            return (stage - 1, number, "B") if stage else None
        return (stage + 1, number, "F") if stage + 1 < len(self.stages) else (stage, number, "B")

    def _messages(self, job: Job) -> list[tuple[int, int]]:
        """Return the source and bytes of each message from another worker that a job needs."""
        stage, number, direction = job
        here, before, found = self.worker[job], self._before(job), []
        if before is not None and self.worker[before] != here and before[0] != stage:
            boundary = min(stage, before[0])
            found.append((self.worker[before], self.stages[boundary].output_bytes))
        forward = self.worker[stage, number, "F"]
        if direction == "B" and forward != here:
            found.append((forward, self.stages[stage].stash_bytes))
        return found

    def _push(self, at: int, what: str, job: Job) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (at, self.pushed, what, job))

    def _send(self, now: int, source: int, job: Job, num_bytes: int, what: str) -> int:
        """Put a message on its link and return when it starts there."""
        here = self.worker[job]
        link = min(source, here), max(source, here)
        start = max(now, self.link_free[link])
        seconds = self.wires.transfer_seconds
        end = start + (self.clock.ticks(seconds(source, here, num_bytes)) if seconds else 0)
        self.link_free[link] = end
        if end == now and what == "weights":
            self.has_weights.add(job)
        else:
            self._push(end, what, job)
        return start

    def _want(self, job: Job) -> None:
        if self.holder[job[:2]] == self.worker[job]:
            self.has_weights.add(job)
        else:
            self.wanted[self.worker[job]].add(job)

    def _fetch(self, job: Job, now: int) -> None:
        here, size = self.worker[job], self.stages[job[0]].weight_bytes
        self.wanted[here].discard(job)
        self.ahead[here].add(job)
        start = self._send(now, self.holder[job[:2]], job, size, "weights")
        self.fetched[here][0] += 1
        self.fetched[here][1] += size
        self.copies[here].append((start, 1, 1, size))

    def _fetched(self, job: Job, now: int) -> None:
        self.has_weights.add(job)

    def _arrive(self, job: Job, now: int) -> None:
        self.missing[job] -= 1
        if not self.missing[job]:
            self.ready[self.worker[job]].add(job)

    def _begin_all(self, now: int) -> None:
        for worker in range(self.num_workers):
            if self.running[worker] is None:
                self._begin(worker, now)
        for worker in range(self.num_workers):
            self._prefetch(worker, now)

    def _prefetch(self, worker: int, now: int) -> None:
        """Ask for weights ahead, in the order of priority."""
        while len(self.ahead[worker]) < self.wires.prefetch and self.wanted[worker]:
            self._fetch(min(self.wanted[worker], key=self._key), now)

    def _key(self, job: Job) -> tuple[tuple[int, ...], Job]:
        return self.scheme.priority(*job), job

    def _begin(self, worker: int, now: int) -> None:
        """Begin the first job that could start, if there is one."""
        could = [job for job in self.ready[worker] if self._has_room(job)]
        if not could:
            return
        best = min(could, key=self._key)
        if best in self.wanted[worker] and (self.wires.prefetch or not self.ahead[worker]):
            self._fetch(best, now)  # an idle worker asks for these whatever it holds ahead, or two might wait
        job = min((job for job in could if job in self.has_weights), key=self._key, default=None)
        if job is None or (not self.wires.prefetch and self.ahead[worker] - {job}):
            return
        stage, _, direction = job
        self.ready[worker].discard(job)
        self.ahead[worker].discard(job)
        self.running[worker] = job
        cost = self.stages[stage]
        seconds = cost.forward_seconds if direction == "F" else cost.backward_seconds
        end = now + self.clock.ticks(seconds / self.wires.speed(worker))
        if direction == "F":
            self.in_flight[worker, stage] += 1
            self.stashes[worker].append((now, 1, 1, cost.stash_bytes))
        self.done.append((job, worker, now, end))
        self._push(end, "end", job)
        after = self._after(job)
        if after is not None:
            self._want(after)

    def _has_room(self, job: Job) -> bool:
        limit, (stage, _, direction) = self.scheme.most_in_flight, job
        if limit is None or direction == "B":
            return True
        return self.in_flight[self.worker[job], stage] < limit(stage)

    def _end(self, job: Job, now: int) -> None:
        worker, (stage, number, direction) = self.worker[job], job
        cost = self.stages[stage]
        self.running[worker] = None
        if self.holder[stage, number] != worker:
            self.copies[worker].append((now, 0, 1, cost.weight_bytes))
            self.gradients[worker] += direction == "B"
        if direction == "B":
            self.in_flight[self.worker[stage, number, "F"], stage] -= 1
            self.stashes[worker].append((now, 0, 1, cost.stash_bytes))
        after = self._after(job)
        if after is None:
            return
        there = self.worker[after]
        if direction == "F" and (backward := self.worker[stage, number, "B"]) != worker:
            self._hand_over(now, worker, (stage, number, "B"), cost.stash_bytes)
            self.stashes[worker].append((now, 0, 1, cost.stash_bytes))
            self.stashes[backward].append((now, 1, 1, cost.stash_bytes))
        if there != worker and after[0] != stage:
            self._hand_over(now, worker, after, self.stages[min(stage, after[0])].output_bytes)
        self._arrive(after, now)

    def _hand_over(self, now: int, source: int, job: Job, num_bytes: int) -> None:
        here = self.worker[job]
        self.received[here][0] += 1
        self.received[here][1] += num_bytes
        self._send(now, source, job, num_bytes, "message")

    def _result(self) -> SchemeRun:
        seconds, workers = self.clock.seconds, range(self.num_workers)
        stored: list[set[int]] = [set() for _ in workers]
        for (stage, _), holder in self.holder.items():
            stored[holder].add(stage)
        busy = [sum(end - start for _, place, start, end in self.done if place == worker) for worker in workers]
        return SchemeRun(
            latency_seconds=seconds(max(end for *_, end in self.done)),
            busy_seconds=tuple(map(seconds, busy)),
            activations_received=tuple(count for count, _ in self.received),
            activation_bytes_received=tuple(size for _, size in self.received),
            weights_received=tuple(count for count, _ in self.fetched),
            weight_bytes_received=tuple(size for _, size in self.fetched),
            gradients_sent=tuple(self.gradients),
            peak_activations=tuple(_peak(changes, 2) for changes in self.stashes),
            peak_activation_bytes=tuple(_peak(changes, 3) for changes in self.stashes),
            stages_stored=tuple(tuple(sorted(mine)) for mine in stored),
            weights_stored=tuple(map(len, stored)),
            weight_bytes_stored=tuple(sum(self.stages[stage].weight_bytes for stage in mine) for mine in stored),
            peak_fetched=tuple(_peak(changes, 2) for changes in self.copies),
            jobs=tuple((job, worker, seconds(start), seconds(end)) for job, worker, start, end in self.done),
        )


def _checked(worker: object, where: str) -> int:
    if isinstance(worker, bool) or not isinstance(worker, int) or worker < 0:
        raise ValueError(f"{where} is {worker!r}: it must be the number of a worker, 0 or more")
    return worker


def _peak(changes: list[tuple[int, int, int, int]], column: int) -> int:
    """Return the most at once; what ends at an instant is gone when something begins there."""
    now = most = 0
    for change in sorted(changes):
        now += change[column] if change[1] else -change[column]
        most = max(most, now)
    return most
