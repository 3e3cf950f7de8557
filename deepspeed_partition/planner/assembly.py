"""Assembly of a plan: from what a solver found to a plan that the replay has checked.

A contiguous partition gets its 1F1B* schedule here; a pattern has its own. What neither shows, the replay counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.errors import BrokenPlanError
from deepspeed_partition.planner.memory import reserves_all_slots, stage_memory
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, Plan, PlannedStage, StepPlan
from deepspeed_partition.planner.recomputation import rematerialized
from deepspeed_partition.planner.schedule import Order, PeriodicSchedule
from deepspeed_partition.planner.simulate.replay import BELOW_BOUND, Replay, replay, replay_and_count
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous.recomputing import choice_at
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, Step, fits
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import CyclicPattern
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road
from deepspeed_partition.planner.solvers.pattern.shared_links import is_plain, placed_anew
from deepspeed_partition.planner.solvers.step.split_bounds import split_lower_bound
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.planner.solvers.uniform_recomputation import extra_ticks

PARTS = 10**6
"""Proofs hold to one part in so many."""


def assemble(
    problem: Problem,
    algorithm: str,
    answer: Answer,
    found: Cuts | Pattern | CyclicPattern,
    step: Step | None = None,
    chosen_period: int | None = None,
) -> tuple[Plan, Replay]:
    """Return the plan of a contiguous partition that has room, or of a pattern, and what its replay found.

    Args:
        algorithm: the name of the solver.
        answer: its answer, which says what is proved.
        found: the partition or pattern of the answer that the plan is made of.
        step: the synchronous step of the same allocation; None where none was asked for.
        chosen_period: ticks of the period of a partition; left out, the shortest that has room.

    Raises:
        BrokenPlanError: the replay refuses the plan, for another reason than its memory.
    """
    steady = _steady_state(problem, found, chosen_period, None if step is None else step.recomputed)
    is_cyclic = isinstance(found, CyclicPattern)
    if not is_plain(problem.platform) and chosen_period is None and not is_cyclic:
        pattern = placed_anew(Road(problem, steady.placement), problem.platform, steady.period)
        if pattern is not None:
            found, steady = pattern, _steady_state(problem, pattern, None, None)
    seconds, period_seconds = problem.times.clock.seconds, steady.schedule.period_seconds
    bound_seconds = seconds(lower_bound(problem))
    # A plan with a step is made for that one: what is proved of it is a part of it.
    proved_class = None if step is not None else _proved_class(problem, answer, steady.period)
    cuts = steady.placement.cuts
    plan = Plan(
        chain=ChainReference.of(problem.chain),
        platform=problem.platform,
        algorithm=algorithm,
        period_seconds=period_seconds,
        micro_batches_per_period=steady.schedule.micro_batches_per_period,
        lower_bound_seconds=bound_seconds,
        gap=period_seconds / bound_seconds - 1,
        proved=proved_class is not None,
        proved_class=proved_class,
        proved_of=None if proved_class is None else "period",
        class_lower_bound_seconds=_class_bound_seconds(problem, answer),
        stages=_planned_stages(problem, steady),
        operations=steady.schedule.operations,
        memory=steady.memory,
        peak_memory_bytes=tuple(use.total for use in steady.memory),
        step=None if step is None else _step_plan(problem, answer, steady.placement, step),
        data_parallel=problem.num_pipelines,
        zero_stage=problem.zero_stage if problem.num_pipelines else None,
        allreduce_seconds=tuple(problem.allreduce_seconds(cuts)) if problem.num_pipelines else (),
        **_versions_of(problem),
    )
    is_counted = (
        not isinstance(found, Pattern | CyclicPattern) and step is None and reserves_all_slots(problem.platform)
    )
    # A recomputing backward that takes no time needs its transient bytes when its micro-batch is gone.
    is_counted = is_counted and not any(stage.blocks for stage in plan.stages) and problem.versions is None
    if is_counted:
        replayed = replay(plan, problem.chain)
    else:
        # Only the timeline shows how many tensors wait at a boundary (more than its buffers before a slow link in
        # a step that fills and drains, fewer than two where less than two are reserved), and that a stage which
        # takes no time lets a micro-batch go the moment the next one comes, and how stages share a device.
        plan, replayed = replay_and_count(plan, problem.chain)
    _check_replay(plan, replayed)
    return plan, replayed


def _versions_of(problem: Problem) -> dict[str, Any]:
    """Return what a plan says of the versions of the weights, as arguments."""
    if problem.versions is None:
        return {}
    rule = problem.versions
    return {"weight_versions": rule.mode, "micro_batches_per_update": rule.micro_batches_per_update}


@dataclass(frozen=True, slots=True)
class _SteadyState:
    """Allocation in steady state, with what the planner counts of it."""

    placement: Placement
    period: int
    """Period, in ticks."""
    schedule: PeriodicSchedule
    in_flight: list[int]
    """Most micro-batches in flight of each stage; 1 where only the replay counts them."""
    memory: tuple[MemoryUse, ...]
    """Peak bytes of each device; 0 where only the replay counts them."""


def _steady_state(
    problem: Problem,
    found: Cuts | Pattern | CyclicPattern,
    chosen_period: int | None,
    recomputed: tuple[Blocks, ...] | None,
) -> _SteadyState:
    """Return a pattern as it is, or a contiguous partition under 1F1B*.

    Args:
        recomputed: what each stage of a partition recomputes; None: what suits it best.
    """
    times, platform = problem.times, problem.platform
    memory = [
        MemoryUse(weights=0, stash=0, buffers=0, transient=0, fixed=platform.fixed_bytes)
    ] * platform.num_devices
    if isinstance(found, CyclicPattern):
        in_flight = [1] * len(found.placement.devices)
        ticks = math.ceil(found.period)
        return _SteadyState(found.placement, ticks, found.schedule(), in_flight, tuple(memory))
    if isinstance(found, Pattern):
        in_flight = [1] * len(found.placement.devices)
        return _SteadyState(found.placement, found.period, found.schedule(times.clock), in_flight, tuple(memory))
    if recomputed is None:
        recomputed = choice_at(problem, found, chosen_period)
    placement = Placement.contiguous(found, recomputed)
    costs = problem.stage_costs(placement)
    extra = extra_ticks(times, placement)
    loads = one_f_one_b.pseudo_stage_loads(times, found, extra)
    room = [cost.most_in_flight for cost in costs]
    period = chosen_period or one_f_one_b.least_period(loads, room)
    assert period is not None, "a solver returned a partition without room"
    in_flight = one_f_one_b.in_flight(loads, period)
    memory[: len(in_flight)] = [
        stage_memory(problem.chain, platform, start, stop, count, (cost.stash, cost.transient))
        for (start, stop), count, cost in zip(pairwise(found), in_flight, costs, strict=True)
    ]
    schedule = one_f_one_b.schedule(times, found, period, extra)
    return _SteadyState(placement, period, schedule, in_flight, tuple(memory))


def _differs(problem: Problem) -> bool:
    """Return whether plans may do what no search that proves something has looked at."""
    return problem.per_micro_batch or problem.splits_backward


def _proved_class(problem: Problem, answer: Answer, period: int) -> str | None:
    """Return the allocations among which a period, in ticks, is proved to be the shortest; None for none."""
    if period <= math.ceil(lower_bound(problem)):
        return "any allocation"
    if not is_plain(problem.platform):
        return None  # the searches compared schedules of links that carry one transfer at a time
    if not _differs(problem) and answer.best_period == period and reserves_all_slots(problem.platform):
        return class_with_shared_weights(problem, answer.proved_class)
    return None


def class_with_shared_weights(problem: Problem, proved_class: str) -> str:
    """Return the allocations among which what is proved holds where layers share weights.

    The searches beyond contiguous partitions count shared weights on each stage of a device.

    Args:
        proved_class: the allocations that were searched.
    """
    return "contiguous" if problem.table.training.shares and proved_class else proved_class


def _class_bound_seconds(problem: Problem, answer: Answer) -> float | None:
    """Return the seconds below which no period of an answer's class is; None where that is not known."""
    if answer.class_bound is None or _differs(problem) or not is_plain(problem.platform):
        return None
    if problem.table.training.shares:
        return None  # an allocation that the search ruled out may fit (``class_with_shared_weights``)
    return problem.times.clock.seconds(answer.class_bound)


def _planned_stages(problem: Problem, steady: _SteadyState) -> tuple[PlannedStage, ...]:
    stages = []
    placement = steady.placement
    for (layers, device), blocks, in_flight in zip(
        placement.stages, placement.blocks, steady.in_flight, strict=True
    ):
        held = problem.chain.layers[slice(*layers)]
        stages.append(
            PlannedStage(
                layers=layers,
                layer_names=tuple(layer.name for layer in held),
                device=device,
                rematerialize=rematerialized(blocks, layers),
                in_flight=in_flight,
                num_trainable_parameters=sum(layer.num_trainable_parameters or 0 for layer in held),
            )
        )
    return tuple(stages)


def _step_plan(problem: Problem, answer: Answer, placement: Placement, step: Step) -> StepPlan:
    assert problem.num_micro_batches is not None
    seconds = problem.times.clock.seconds
    blocking = None
    in_deepspeed = replace(problem, in_deepspeed=True, recomputation=None)  # it runs no recomputation of ours
    if placement.is_contiguous and not placement.recomputed and fits(in_deepspeed, placement.cuts):
        blocking = seconds(problem.blocking_step(placement.cuts, problem.num_micro_batches))
    idle: tuple[Order, ...] = ((),) * (problem.platform.num_devices - len(step.orders))
    least = split_lower_bound if problem.splits_backward else step_lower_bound
    bound = max(step.bound, least(problem, contiguous=_makes_contiguous_alone(problem, answer)))
    step_seconds, bound_seconds = seconds(step.ticks), seconds(bound)
    return StepPlan(
        num_micro_batches=problem.num_micro_batches,
        step_seconds=step_seconds,
        blocking_step_seconds=blocking,
        order=step.orders + idle,
        lower_bound_seconds=bound_seconds,
        gap=step_seconds / bound_seconds - 1,
        proved=(step.ticks - bound) * PARTS <= step.ticks,
    )


def _makes_contiguous_alone(problem: Problem, answer: Answer) -> bool:
    """Return whether the algorithm chooses among contiguous partitions, and among no others."""
    constraints = problem.constraints
    return constraints.exactly or constraints.every_stage_trains or answer.step_search == "contiguous"


def _check_replay(plan: Plan, replayed: Replay) -> None:
    """Refuse a plan that the replay refuses; that it is too large is for the caller to say."""
    broken = [violation for violation in replayed.violations if "bytes short" not in violation]
    if len(broken) < len(replayed.violations):  # what has no room may be faster than all that has
        broken = [violation for violation in broken if BELOW_BOUND not in violation]
    if broken or not replayed.memory:
        raise BrokenPlanError(
            f"MadPipe made a plan for {plan.chain.name!r} that its own replay refuses, which is a bug: "
            f"{'; '.join(broken)}"
        )
