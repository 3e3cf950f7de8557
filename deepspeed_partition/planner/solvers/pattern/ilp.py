"""The schedule of a fixed allocation, by integer linear programming (MadPipe paper, section 4.3).

The throughput is a variable: with tau the shortest conceivable period over the period, every duration is a
multiple of tau and everything is linear. Each operation has an instant t in [0, 1] of the period and an integer
shift h; each pair of operations on one resource has a binary that says which comes first in the period:

    t_b + h_b >= t_a + h_a + D_a tau                        b follows a on every micro-batch
    t_b >= t_a + D_a tau - (1 - y_ab)                       a before b, or
    t_a >= t_b + D_b tau - y_ab                             b before a in the period, and no overlap at its end

    in flight of stage j when the forward of stage i starts, on the same device:
        h(B_j) - h(F_j) + y(F_j, F_i) - y(B_j, F_i)         for i itself: h(B_i) - h(F_i) + 1 - y(B_i, F_i)

Nothing need wait a whole period before an operation: to start that operation and all later ones a period earlier
changes no instant of the pattern, and reduces what is in flight. Only the orders and the shifts are taken from
the solver; period and instants are computed from those in integers (``periodic_pattern.py``).

The first program leaves out the tensors that wait at the ends of boundaries. That can only shorten the period, so
its bound holds. Where more tensors wait than there are buffers for, and do not fit, a second program allows one
activation and one gradient at each end; its own bound is not used.

Exact to ``RESOLUTION``, where the deadline does not pass and the first program's pattern fits. Cost: one binary
variable for each two operations of a device or link, so O(S^2) of them for S stages; the time is exponential in
the worst case.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.pattern.branch_and_bound import least_unrefuted, refuted
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Resource, Road, pattern_of
from deepspeed_partition.planner.weight_versions import VERTICAL_SYNC

RESOLUTION = 1e-6
"""Smallest improvement that is looked for, relative to the period."""
LONGEST_SOLVE_SECONDS = 20.0
"""Longest time for a single schedule where others wait, in seconds."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Best pattern found for an allocation, and what is known about all its patterns."""

    pattern: Pattern | None
    """Pattern that was found. None: none was found whose period is shorter than asked for."""
    bound: int | None
    """Lower bound on the period of every pattern, in ticks (to ``RESOLUTION``). None: no pattern is as short as
    asked for."""


def schedule(road: Road, shorter_than: int | None, deadline: Deadline) -> Scheduled:
    """Find the shortest pattern of an allocation that fits into memory.

    Args:
        road: the allocation.
        shorter_than: only patterns of a shorter period are of interest, in ticks; None: any.
        deadline: where it passes, the answer is the best so far and its bound is weaker.
    """
    least = road.shortest_that_may_fit("pairs")
    most = (
        road.sequential
        if shorter_than is None
        else min(road.sequential, math.floor(shorter_than * (1 - RESOLUTION)))
    )
    if least is None or least > most or refuted(road, most, deadline):
        return Scheduled(None, None)
    least = least_unrefuted(road, least, most, deadline)
    relaxed = _solve(road, least, most, deadline, single_slots=False)
    if relaxed.pattern is None and relaxed.closed:
        return Scheduled(None, None)
    bound = least
    if relaxed.pattern is not None and relaxed.orders is not None and relaxed.shifts is not None:
        bound = relaxed.pattern.period if relaxed.closed else least
        pattern = pattern_of(road, relaxed.orders, relaxed.shifts, single_slots=True)
        if pattern is not None and pattern.period == relaxed.pattern.period:
            return Scheduled(pattern, bound)
        if relaxed.closed and road.fits_with_waiting(relaxed.pattern):
            return Scheduled(relaxed.pattern, bound)
    return Scheduled(_solve(road, bound, most, deadline, single_slots=True).pattern, bound)


@dataclass(frozen=True, slots=True)
class _Solution:
    """Result of one call of the solver."""

    pattern: Pattern | None = None
    orders: Mapping[Resource, list[int]] | None = None
    shifts: list[int] | None = None
    closed: bool = False
    """True: nothing better exists; without a pattern, nothing at all."""


def _solve(road: Road, least: int, most: int, deadline: Deadline, *, single_slots: bool) -> _Solution:
    """Find the shortest pattern with a period from ``least`` to ``most`` ticks."""
    if deadline.passed():
        return _Solution()
    import pulp  # not at the top, so that importing the planner stays cheap

    try:
        model = _Model(pulp, road, least, most, deadline, single_slots=single_slots)
    except DeadlinePassed:
        return _Solution()
    model.problem.solve(_solver(pulp, deadline))
    status = model.problem.sol_status  # not .status: that is Optimal at the time limit, too
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return _Solution(closed=model.problem.status == pulp.LpStatusInfeasible)
    if _value(model.tau) < least / most * (1 - RESOLUTION):
        return _Solution()  # stopped before it had any solution, which PuLP reports as a feasible one of zeros
    orders, shifts = model.orders_and_shifts()
    pattern = pattern_of(road, orders, shifts, single_slots=single_slots)
    if pattern is None or pattern.period > most or not road.fits(pattern):
        return _Solution()  # operations so short that the solver's tolerance reorders them
    return _Solution(pattern, orders, shifts, status == pulp.LpSolutionOptimal)


def _solver(pulp: Any, deadline: Deadline) -> Any:
    """HiGHS where it is installed, else the CBC that comes with PuLP; one thread, so that answers repeat.

    HiGHS counts the seconds on the wall, so it has no limit of its own but asks the deadline.
    """
    deadline = Deadline(LONGEST_SOLVE_SECONDS, within=deadline)
    gap = RESOLUTION / 10
    tolerances = {"primal_feasibility_tolerance": 1e-9, "mip_feasibility_tolerance": 1e-9}
    highs = pulp.HiGHS(msg=False, gapRel=gap, threads=1, **tolerances)
    if not highs.available():
        seconds, options = deadline.remaining_seconds(), ["primalT 1e-9", "integerT 1e-9"]
        return pulp.PULP_CBC_CMD(
            msg=False, gapRel=gap, threads=1, timeLimit=seconds, timeMode="cpu", options=options
        )
    import highspy

    _let_highs_start(highspy)

    def interrupt(kind: Any, message: str, found: Any, answer: Any, data: Any) -> None:
        # Running Python now and then also lets signal handlers run, such as one that stops the deadline.
        answer.user_interrupt = deadline.passed()

    kinds = highspy.cb.HighsCallbackType
    highs.callbackTuple = (interrupt, None)
    highs.callbacksToActivate = [kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt]
    return highs


@functools.cache
def _let_highs_start(highspy: Any) -> None:
    """Make a first solver of HiGHS where nobody reads what it prints: its version (1.16), to standard output.

    There the plan belongs, which a program may read.
    """
    sys.stdout.flush()
    try:
        output = os.dup(1)
    except OSError:  # there is none
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            highspy.Highs()
    finally:
        os.dup2(output, 1)
        os.close(output)


class _Model:
    """Integer linear program of an allocation, with periods from ``least`` to ``most`` ticks."""

    def __init__(
        self, pulp: Any, road: Road, least: int, most: int, deadline: Deadline, *, single_slots: bool
    ) -> None:
        self.road, self.deadline, self.sum = road, deadline, pulp.lpSum
        self.problem = problem = pulp.LpProblem("schedule", pulp.LpMaximize)
        self.tau = pulp.LpVariable("tau", least / most, 1)
        problem += self.tau
        names = [operation.name for operation in road.operations]
        self.length = [operation.ticks / least * self.tau for operation in road.operations]
        self.instant = [0, *(pulp.LpVariable(f"t_{name}", 0, 1) for name in names[1:])]
        carry = [pulp.LpVariable(f"d_{name}", 0, 2, pulp.LpInteger) for name in names[1:]]
        self.carry: list[Any] = [0, *carry]
        for index, periods in enumerate(carry, start=1):
            before = index - 1
            wait = self.instant[index] + periods - self.instant[before] - self.length[before]
            problem += wait >= 0
            problem += wait <= 1
        self.first: dict[tuple[int, int], Any] = {}
        for users in road.users.values():
            for index, one in enumerate(users):
                for other in users[index + 1 :]:
                    self._exclude(pulp, one, other)
        self._count_versions(pulp)
        self._memory(most)
        if single_slots:
            self._slots()

    def _exclude(self, pulp: Any, one: int, other: int) -> None:
        """Forbid that two operations of one resource overlap, over the end of the period too."""
        self.deadline.check()
        names = [self.road.operations[index].name for index in (one, other)]
        # F0 begins every period.
        y = 1 if one == 0 else pulp.LpVariable(f"y_{names[0]}_{names[1]}", cat=pulp.LpBinary)
        self.first[one, other], self.first[other, one] = y, 1 - y
        apart = self.instant[other] - self.instant[one]
        self.problem += apart + 1 - y >= self.length[one]
        self.problem += y - apart >= self.length[other]

    def _in_flight(self, stage: int, at: int) -> Any:
        """Expression for a stage's micro-batches in flight when an operation of its device starts."""
        forward, backward = self.road.position[f"F{stage}"], self.road.position[f"B{stage}"]
        begun = 1 if at == forward else self.first[forward, at]
        ended = 0 if at == backward else self.first[backward, at]
        return self._periods(forward, backward) + begun - ended

    def _periods(self, one: int, other: int) -> Any:
        """Expression for the periods from an operation to a later one on the path of a micro-batch."""
        return self.sum(self.carry[one + 1 : other + 1])

    def _memory(self, most: int) -> None:
        road = self.road
        fewest = road.fewest_in_flight(most)
        for device in road.memory:
            # A backward meets no more stashes than the forward before it left, so it is only checked where its
            # transient bytes are more than another stage's.
            plain = min(road.transient[stage] for stage in device.stages)
            part = road.part_of_versions(device.stages)
            for stage in device.stages:
                forward, backward = road.position[f"F{stage}"], road.position[f"B{stage}"]
                self.problem += self._in_flight(stage, forward) >= fewest[stage]
                events = [forward] if road.transient[stage] <= plain else [forward, backward]
                for event in events:
                    self._fit(device.stages, event, device.room - part - road.transient[stage])

    def _fit(self, stages: tuple[int, ...], event: int, room: int) -> None:
        road = self.road
        each = [road.kept[stage] + road.version_bytes[stage] + road.gradient_bytes[stage] for stage in stages]
        largest = max(each)
        # No stage has more in flight than there are operations, since no wait is longer than a period.
        if room < sum(each) * 2 * len(road.operations):
            self.problem += self._kept(stages, event, largest) <= room / largest

    def _kept(self, stages: tuple[int, ...], event: int, unit: int) -> Any:
        """Expression for what stages hold on a device when an operation starts there, in ``unit`` bytes."""
        self.deadline.check()
        road = self.road
        stashes = (road.kept[stage] / unit * self._in_flight(stage, event) for stage in stages)
        further = (
            num_bytes / unit * number for stage in stages for num_bytes, number in self.further.get(stage, ())
        )
        return self.sum([*stashes, *further])

    def _count_versions(self, pulp: Any) -> None:
        """Count versions of the weights and gradients beyond one, as in ``weight_versions.py``.

        A stage holds 1 + ceil((lag - lead) / M) versions, and 1 + ceil(lead / M) gradients, with the lag and the
        lead of its pattern.
        """
        road, rule = self.road, self.road.versions
        self.further: dict[int, list[tuple[int, Any]]] = {}
        """For each stage the bytes of something that it may have more than once, and how often beyond that."""
        if rule is None:
            return
        per_update = rule.micro_batches_per_update

        def beyond(kind: str, stage: int, needed: Any) -> Any:
            number = pulp.LpVariable(f"{kind}_{stage}", 0, None, pulp.LpInteger)
            self.problem += per_update * number >= needed
            return number

        for device in road.memory:
            last = road.position[f"B{device.stages[0]}"]
            for stage in device.stages:
                forward, backward = road.position[f"F{stage}"], road.position[f"B{stage}"]
                lag = self._periods(forward, last) - self.first[last, forward]
                lead = 0 if backward == last else self._periods(backward, last) - self.first[last, backward]
                if rule.most_in_flight is not None and (rule.mode != VERTICAL_SYNC or stage == 0):
                    self.problem += lag <= rule.most_in_flight - 1
                further = self.further.setdefault(stage, [])
                if road.version_bytes[stage]:
                    further.append((road.version_bytes[stage], beyond("v", stage, lag - lead)))
                if road.gradient_bytes[stage]:
                    further.append((road.gradient_bytes[stage], beyond("g", stage, lead)))

    def _slots(self) -> None:
        """Require that a tensor leaves the sender within a period of its coming, and the receiver likewise."""
        for index, operation in enumerate(self.road.operations):
            if operation.name.startswith("S"):
                producer, consumer = index - 1, index + 1
                sent, taken = self.instant[index], self.instant[consumer] + self.carry[consumer]
                ready = self.instant[producer] + self.length[producer]
                self.problem += sent + self.carry[index] + self.length[index] <= ready + 1
                self.problem += taken <= sent + 1

    def orders_and_shifts(self) -> tuple[dict[Resource, list[int]], list[int]]:
        """Return the order of each resource and the shift of each operation in the solver's answer."""
        shifts = list(accumulate(round(_value(periods)) for periods in self.carry))
        orders = {
            resource: sorted(
                users,
                key=lambda one: sum(round(_value(self.first[other, one])) for other in users if other != one),
            )
            for resource, users in self.road.users.items()
        }
        return orders, shifts


def _value(expression: Any) -> float:
    return float(expression if isinstance(expression, int) else expression.value())
