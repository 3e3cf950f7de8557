"""Comparison of several algorithms on one problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_partition.planner.data_parallel import (
    Split,
    bytes_sent,
    bytes_sent_without_pipeline,
    check_zero_stage,
    seconds_of,
    splits_of,
)
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.algorithms import solver_of
from deepspeed_partition.planner.planning.asynchronous import check_asynchronous, never_draining
from deepspeed_partition.planner.planning.make_plan import check_split, make_plan
from deepspeed_partition.planner.planning.problems import (
    SHORTEST_TIME_LIMIT_SECONDS,
    problem_of,
    time_limit,
    with_recomputation,
)
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.replication import Replicated, partition_replicated
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous.replicated import MOST_REPLICAS
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.solvers.step.split_bounds import split_lower_bound
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.planner.training_bytes import TrainingBytes
from deepspeed_partition.planner.units import exact_bytes, format_bytes, format_seconds
from deepspeed_partition.planner.weight_versions import FLUSH
from deepspeed_partition.planner.weight_versions import checked_mode as checked_weight_versions

COMPARED = ("madpipe", "contiguous", "pipedream", "pipedream-blind", "mcap", "uniform", "parameters")
"""Algorithms that ``compare`` always shows."""
SEARCH_LONG = ("contiguous", "madpipe-paper", "madpipe")
"""Algorithms that search long, in the order in which they run: the one that takes longest comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Result of one algorithm on the problem: a plan, or the reason why there is none."""

    algorithm: str
    plan: Plan | None = None
    reason: str | None = None
    smallest_memory_bytes: int | None = None
    """Bytes per device with which the algorithm would have a plan. None: it has a plan, or memory is not what it
    lacks."""
    is_left_out: bool = False
    """Whether it was not run, for lack of time."""

    @property
    def seconds(self) -> float:
        """Seconds that are compared: the period, or the step (transfers overlapped) where one was asked for."""
        assert self.plan is not None
        return seconds_of(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The contenders in the order in which they were named."""

    chain: Chain
    platform: Platform
    contenders: tuple[Contender, ...]
    lower_bound_seconds: float
    """Seconds; no schedule of any allocation, in any number of pipelines that was asked for, has a shorter
    period."""
    replicated: Replicated | None
    """Result of PipeDream's partitioner where it may replicate stages. None: there are more than
    ``MOST_REPLICAS`` devices, links have a latency, which it does not count, devices or links are not alike, or
    the time was up."""
    step_lower_bound_seconds: float | None = None
    """Seconds; no order of any allocation has a shorter step. None: no step was asked for, or several
    pipelines share it, and each number of them has a bound of its own."""

    @property
    def fitting(self) -> list[Contender]:
        return [contender for contender in self.contenders if contender.plan is not None]

    def bytes_sent(self, contender: Contender) -> float:
        """Return the bytes a contender sends over all links in one step, or without a step per micro-batch."""
        assert contender.plan is not None
        return bytes_sent(contender.plan, self.chain)

    def bytes_sent_without_pipeline(self, contender: Contender) -> float:
        """Return the bytes that plain data parallelism on all devices sends, counted as in ``bytes_sent``."""
        assert contender.plan is not None
        num_devices, per_step = self.platform.num_devices, contender.plan.step is not None
        return bytes_sent_without_pipeline(self.chain, num_devices, per_step=per_step)

    def ratio_to_best(self, contender: Contender) -> float:
        """Return the time of a contender divided by that of the best one: 1 for the best."""
        return contender.seconds / min(each.seconds for each in self.fitting)

    def nothing_fits(self) -> InfeasibleError:
        """Return the error that says why no contender has a plan."""
        needs = [
            (contender.smallest_memory_bytes, contender.algorithm)
            for contender in self.contenders
            if contender.smallest_memory_bytes is not None
        ]
        memory = format_bytes(self.platform.memory_bytes)
        if not needs:
            return InfeasibleError(f"none of the algorithms has a plan for {memory} per device")
        smallest, name = min(needs, key=lambda need: need[0])
        would_do = f"{exact_bytes(smallest)} ({format_bytes(smallest)})"
        # Of allocations that share weights, the least memory is not known.
        shares = TrainingBytes(self.chain, self.platform).shares
        would_do = f"{would_do} would do" if shares else f"the smallest memory that would do is {would_do}"
        return InfeasibleError(
            f"no plan of any of the algorithms fits into {memory} per device; {would_do}, for {name}: give more "
            "memory or devices, or use a smaller micro-batch",
            smallest_memory_bytes=smallest,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, in seconds and bytes."""
        of_step = self.step_lower_bound_seconds
        return {
            "chain": {
                "name": self.chain.name, "num_layers": self.chain.num_layers, "digest": self.chain.digest(),
            },
            "platform": self.platform.to_dict(),
            "lower_bound_seconds": self.lower_bound_seconds,
            **({} if of_step is None else {"step_lower_bound_seconds": of_step}),
            "pipedream_replicated": None if self.replicated is None else self.replicated.to_dict(),
            "algorithms": [self._row(contender) for contender in self.contenders],
        }  # fmt: skip

    def _row(self, contender: Contender) -> dict[str, Any]:
        plan = contender.plan
        if plan is None:
            return {
                "algorithm": contender.algorithm, "fits": False, "reason": contender.reason,
                "smallest_memory_bytes": contender.smallest_memory_bytes,
            }  # fmt: skip
        row: dict[str, Any] = {
            "algorithm": contender.algorithm,
            "fits": True,
            "boundaries": plan.boundaries,
            "devices": [stage.device for stage in plan.stages],
            "period_seconds": plan.period_seconds,
            "ratio_to_best": self.ratio_to_best(contender),
            "gap": plan.gap,
            "proved": plan.proved,
            "bytes_sent": self.bytes_sent(contender),
            "bytes_sent_by_data_parallelism": self.bytes_sent_without_pipeline(contender),
            "peak_memory_bytes": list(plan.peak_memory_bytes),
            "planning_seconds": plan.planning_seconds,
        }
        if plan.proved_class is not None:
            row["proved_class"] = plan.proved_class
            row["proved_of"] = plan.proved_of
        if plan.is_asynchronous:
            row["weight_versions"] = plan.weight_versions
            row["num_micro_batches"] = plan.micro_batches_per_update
            row["update_seconds"] = plan.update_seconds
            row["flush_step_seconds"] = plan.flush_step_seconds
        if plan.data_parallel is not None:
            row["data_parallel"] = plan.data_parallel
            row["weight_copies"] = plan.platform.weight_copies
        if plan.step is not None:
            row["num_micro_batches"] = plan.step.num_micro_batches
            row["step_seconds"] = plan.step.step_seconds
            row["blocking_step_seconds"] = plan.step.blocking_step_seconds
            row["step_lower_bound_seconds"] = plan.step.lower_bound_seconds
            row["step_gap"] = plan.step.gap
            row["step_proved"] = plan.step.proved
        return row


def compare(
    chain: Chain,
    platform: Platform,
    algorithms: Sequence[str] = COMPARED,
    *,
    num_micro_batches: int | None = None,
    data_parallel: int | str | None = None,
    zero_stage: int | None = None,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
    recompute: str = "auto",
    split_backward: bool = False,
    weight_versions: str = FLUSH,
    may_leave_out: bool = False,
    planned: Plan | None = None,
) -> Comparison:
    """Plan with each of the algorithms. An algorithm without a plan is listed with the reason.

    Args:
        time_limit_seconds: the limit for all of them together; those that search long get what the others leave.
            It is for searches: the replay that checks each plan comes besides.
        deadline: another end of all searches.
        recompute: what may run its forward again, as in ``make_plan``.
        split_backward: whether backwards may be two operations, as in ``make_plan``.
        weight_versions: what becomes of the weights in all rows, as in ``make_plan``.
        may_leave_out: keep the limit with the replays, too: an algorithm for which too little is left of it is not
            run, and its reason says so. The first one always runs.
        planned: a plan of this problem that there is already, which stands for its algorithm. Nothing is planned
            with that one, and where it is none of ``algorithms`` it comes first. What it does, the others may do,
            too: backwards in two operations, and recomputation micro-batch by micro-batch.

    Raises:
        ValueError: an algorithm is unknown, or none of them takes the problem, whatever the memory.
    """
    names = list(dict.fromkeys(algorithms))
    for name in names:
        solver_of(name)
    if planned is not None:
        # Without it a plan could be shorter than what stands beside it as a lower bound.
        kinds = _kinds_of(planned)
        split_backward = split_backward or "W" in kinds
        recompute = "micro-batch" if recompute == "auto" and "f" in kinds else recompute
    check_zero_stage(zero_stage)
    check_split(split_backward, chain)
    # Errors in the problem are raised here; what is refused below is an algorithm that does not suit it.
    splits = [Split(None, platform, num_micro_batches)]
    if data_parallel is not None:
        splits = splits_of(platform, num_micro_batches, data_parallel, zero_stage)
    is_asynchronous = checked_weight_versions(weight_versions) != FLUSH

    def problem_for(platform: Platform, num_micro_batches: int | None) -> Problem:
        problem = problem_of(chain, platform, num_micro_batches, time_limit_seconds=time_limit_seconds)
        problem = with_recomputation(replace(problem, splits_backward=split_backward), recompute)
        return never_draining(problem, weight_versions) if is_asynchronous else problem

    if is_asynchronous:
        check_asynchronous(weight_versions, solver_of("madpipe"), platform, {})
    problem = problem_for(platform, num_micro_batches)
    overall = Deadline(time_limit(time_limit_seconds), within=deadline)
    replicated = _replicated(chain, platform, overall.part(1 / (len(names) + 1))) if platform.is_alike else None
    contenders: dict[str, Contender] = {}
    if planned is not None:
        names = list(dict.fromkeys([planned.algorithm, *names] if planned.algorithm not in names else names))
        contenders[planned.algorithm] = Contender(algorithm=planned.algorithm, plan=planned)
    missing = sorted((name for name in names if name not in contenders), key=_patience)
    quickest = 0.0
    refusals: list[ValueError] = []
    # Algorithms that search long come last, and get the time that the others leave.
    for num_left, name in zip(range(len(missing), 0, -1), missing, strict=True):
        left = overall.remaining_seconds()
        if may_leave_out and left < quickest:
            contenders[name] = Contender(
                algorithm=name, reason=_left_out(overall, left, quickest), is_left_out=True
            )
            continue
        # What each of them takes besides its search is not for searches.
        share = max(left / num_left - quickest * may_leave_out, SHORTEST_TIME_LIMIT_SECONDS)
        make = partial(
            make_plan,
            chain,
            platform,
            name,
            num_micro_batches=num_micro_batches,
            data_parallel=data_parallel,
            zero_stage=zero_stage,
            time_limit_seconds=share,
            deadline=deadline,
            recompute=recompute,
            split_backward=split_backward,
            weight_versions=weight_versions,
        )
        began = time.thread_time()
        contenders[name] = _contender(name, make, refusals)
        if contenders[name].plan is not None:
            took = time.thread_time() - began
            quickest = min(quickest or took, took)
    if len(refusals) == sum(not each.is_left_out for each in contenders.values()):
        raise refusals[0]  # no memory would help
    # Where nothing fits, no step is long enough to be bounded.
    of_step = num_micro_batches is not None and data_parallel is None and not is_asynchronous
    of_step = of_step and any(each.plan is not None for each in contenders.values())
    if platform.is_alike:
        # Each number of pipelines has its own devices, copies of the weights and micro-batches of an update.
        problems = [problem_for(split.platform, split.num_micro_batches) for split in splits]
        bound = min(each.times.clock.seconds(lower_bound(each)) for each in problems)
        bound_of = split_lower_bound if split_backward else step_lower_bound
        step_bound = problem.times.clock.seconds(bound_of(problem, contiguous=False)) if of_step else None
    else:
        plans = [each.plan for each in contenders.values() if each.plan is not None and each.plan is not planned]
        if recompute != "never":  # the bounds of plans that recompute nothing do not hold for the others
            plans = [plan for plan in plans if not isinstance(solver_of(plan.algorithm), PaperMadPipe)]
        bound, step_bound = _bounds_of(chain, platform, plans if data_parallel is None else [], num_micro_batches)
    return Comparison(
        chain=chain,
        platform=platform,
        contenders=tuple(contenders[name] for name in names),
        replicated=replicated,
        lower_bound_seconds=bound,
        step_lower_bound_seconds=step_bound if of_step else None,
    )


def _kinds_of(plan: Plan) -> set[str]:
    """Return the letters of the operations that a plan runs, in its pattern or in its step: ``F``, ``B``, ..."""
    in_step = (name for row in plan.step.order for name, _ in row) if plan.step is not None else ()
    return {name[0] for name in (*(each.operation for each in plan.operations), *in_step)}


def _bounds_of(
    chain: Chain, platform: Platform, plans: Sequence[Plan], num_micro_batches: int | None
) -> tuple[float, float]:
    """Return lower bounds of the period and of the step where devices are not alike, in seconds.

    They are what all devices together need for the layers, or the largest bound of a plan that may choose any
    allocation.

    Args:
        plans: plans of the problem; each may recompute all that any plan of the comparison may.
    """
    least = chain.compute_seconds / sum(platform.speed_of(device) for device in range(platform.num_devices))
    steps = [
        plan.step.lower_bound_seconds or 0.0 for plan in plans if plan.step and plan.algorithm != "contiguous"
    ]
    period = max([least, *(plan.lower_bound_seconds for plan in plans)])
    return period, max([least * (num_micro_batches or 1), *steps])


def _contender(algorithm: str, make: Callable[[], Plan], refusals: list[ValueError]) -> Contender:
    """Return the plan of an algorithm, or the reason why it has none.

    Args:
        refusals: a list to which a reason is added that is not a lack of memory.
    """
    try:
        return Contender(algorithm=algorithm, plan=make())
    except InfeasibleError as error:
        smallest = error.smallest_memory_bytes
        return Contender(algorithm=algorithm, reason=str(error), smallest_memory_bytes=smallest)
    except ValueError as error:
        refusals.append(error)
        return Contender(algorithm=algorithm, reason=str(error))


def _left_out(overall: Deadline, left: float, quickest: float) -> str:
    """Return the reason why an algorithm was not run."""
    if overall.stopped:
        return "left out: the comparison was stopped"
    return (
        f"left out: {format_seconds(left)} of the time limit was left, and the quickest of the others took "
        f"{format_seconds(quickest)}: give more time"
    )


def _patience(name: str) -> int:
    """Return the place of an algorithm in the order in which they run: what DeepSpeed would do comes first."""
    if name in SEARCH_LONG:
        return SEARCH_LONG.index(name) + 1
    return -1 if name in ("uniform", "parameters") else 0


def _replicated(chain: Chain, platform: Platform, deadline: Deadline) -> Replicated | None:
    if platform.num_devices > MOST_REPLICAS or platform.latency_seconds:
        return None
    try:
        return partition_replicated(chain, platform, deadline=deadline)
    except DeadlinePassed:
        return None
