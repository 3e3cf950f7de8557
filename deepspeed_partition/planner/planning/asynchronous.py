"""Plans of pipelines that never drain: what is not planned for them, and versions that all stages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.solving import solve
from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.interface import Problem, Solver
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.solvers.step.step_search import StepSearch
from deepspeed_partition.planner.weight_versions import TWO_VERSIONS, VERTICAL_SYNC, VersionRule

IN_SYNC_SHARE, IN_SYNC_PART = 0.1, 0.6
"""The parts of the time that is left for each number of versions of the weights: for contiguous partitions, and
for any allocation."""
MOST_COMPARED = 20_000
"""Operations of a synchronous step up to which one is run, to be compared with a pipeline that never drains."""


def check_asynchronous(
    weight_versions: str, solver: Solver, platform: Platform, given: Mapping[str, object]
) -> None:
    """Refuse what is not planned for a pipeline that never drains.

    Args:
        given: other arguments of ``make_plan`` by name, None where they are left out.

    Raises:
        ValueError: one of them is there, the devices are unlike, or the algorithm plans nothing of the kind.
    """
    for what, value in given.items():
        if value is not None:
            raise ValueError(
                f"weight_versions is {weight_versions!r}, a pipeline that never drains, and {what} is not planned "
                "for one: leave one of the two out"
            )
    if not platform.is_alike:
        raise ValueError(
            f"weight_versions is {weight_versions!r}, which is planned for devices and links that are alike: give "
            "num_devices, memory_bytes and bandwidth in the place of machines"
        )
    if isinstance(solver, PaperMadPipe):
        raise ValueError(
            f"{solver.name} counts three times the weights alone: leave weight_versions out, or use madpipe"
        )
    if platform.weight_copies < 1 and weight_versions != TWO_VERSIONS:
        raise ValueError(
            f"weight_copies is {platform.weight_copies:g}, and with weight_versions {weight_versions!r} two "
            "versions of the weights are among them: give 2 at least, and 1 more for the gradients"
        )


def never_draining(problem: Problem, weight_versions: str, num_versions: int = 1) -> Problem:
    """Return the problem of the shortest period of a pipeline that never drains.

    Args:
        problem: its ``num_micro_batches`` become those of an update; None: 1.
        num_versions: versions that each stage may hold under ``"vertical-sync"``.
    """
    rule = VersionRule.of(weight_versions, problem.num_micro_batches or 1, num_versions)
    return replace(
        problem, num_micro_batches=None, versions=rule, table=StageTable(problem.chain, problem.platform, rule)
    )


def solve_in_sync(problem: Problem, solver: Solver) -> Plan:
    """Return the plan of the shortest period under ``"vertical-sync"``.

    What stage 0 has in flight decides how many versions of the weights all stages hold. With a number of versions
    that is given the problem is that of other modes, so each number is tried: with contiguous partitions, exactly,
    and the best of them with the solver.
    """
    assert problem.versions is not None
    per_update = problem.versions.micro_batches_per_update
    of_partitions = Contiguous() if isinstance(solver, MadPipe) else solver
    found: list[tuple[Plan, Problem]] = []
    refusal: InfeasibleError | ValueError | None = None
    # A contiguous partition has one group in flight for each stage and boundary at the most.
    numbers = range(1, 2 + -(-(2 * problem.constraints.max_stages - 2) // per_update))
    for number in numbers:
        given = never_draining(replace(problem, num_micro_batches=per_update), VERTICAL_SYNC, number)
        given = replace(given, is_one_of_many=number > 1, deadline=problem.deadline.part(IN_SYNC_SHARE))
        try:
            found.append((solve(given, of_partitions), given))
        except (InfeasibleError, ValueError) as error:
            refusal = refusal or error
            if isinstance(error, InfeasibleError) and number > 1:
                break  # more versions take more memory
    if not found:
        if not isinstance(solver, MadPipe):
            raise refusal or AssertionError("no number of versions was tried")
        return solve(never_draining(replace(problem, num_micro_batches=per_update), VERTICAL_SYNC), solver)
    best, given = min(found, key=lambda each: each[0].period_seconds)
    proved = all(plan.proved for plan, _ in found)
    if not proved and best.proved_class != "any allocation":
        best = replace(best, proved=False, proved_class=None, proved_of=None)
    best = replace(best, algorithm=solver.name)
    if not isinstance(solver, MadPipe) or best.proved_class == "any allocation":
        return best
    # Versions are counted for the whole pipeline, and a device with several stages may hold fewer: what is proved
    # with a number of them is not proved of the mode.
    number = given.versions.num_versions if given.versions is not None else 1
    for more in sorted({number, number + 1, numbers[-1]}):
        if problem.deadline.passed():
            break
        given = never_draining(replace(problem, num_micro_batches=per_update), VERTICAL_SYNC, more)
        given = replace(given, deadline=problem.deadline.part(IN_SYNC_PART), is_one_of_many=True)
        try:
            free = solve(given, solver)
        except InfeasibleError:
            break
        if free.period_seconds < best.period_seconds:
            best = free
            if best.proved_class == "any allocation":
                break
            best = replace(best, proved=False, proved_class=None, proved_of=None, class_lower_bound_seconds=None)
    return best


def flush_step_seconds(problem: Problem, plan: Plan) -> float | None:
    """Return the seconds of a synchronous step of the allocation of a plan; None if none fits or is run."""
    assert problem.num_micro_batches is not None
    if 2 * len(plan.stages) * problem.num_micro_batches > MOST_COMPARED:
        return None
    devices = tuple(stage.device for stage in plan.stages)
    placement = Placement(tuple(plan.boundaries), devices).recomputing(
        tuple(stage.blocks for stage in plan.stages)
    )
    ticks = StepSearch(problem).ticks_of(placement)
    return None if ticks is None else problem.times.clock.seconds(ticks)
