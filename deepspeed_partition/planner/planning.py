"""From a chain and a platform to a plan that has been replayed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from deepspeed_partition.planner.allocation import check_boundaries
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.data_parallel import Split, seconds_of, splits_of
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import BrokenPlanError, InfeasibleError
from deepspeed_partition.planner.memory import StageTable, buffer_slots, stage_memory
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, Plan, PlannedStage, StepPlan
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, Platform
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.simulate import Replay, replay
from deepspeed_partition.planner.solvers import baselines, least_memory, one_f_one_b
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous import Contiguous
from deepspeed_partition.planner.solvers.madpipe import MadPipe
from deepspeed_partition.planner.solvers.mcap import MemoryBalanced
from deepspeed_partition.planner.solvers.pipedream import PipeDream
from deepspeed_partition.planner.solvers.problem import (
    Answer,
    Constraints,
    Cuts,
    Problem,
    Solver,
    bytes_needed,
)
from deepspeed_partition.planner.solvers.road import Pattern, Placement, Road
from deepspeed_partition.planner.step import one_f_one_b_order, overlapping_step
from deepspeed_partition.planner.units import exact_bytes, format_bytes, format_seconds, shown

ALGORITHMS = (
    "madpipe", "contiguous", "pipedream", "pipedream-blind", "mcap", "uniform", "parameters", "type:REGEX",
    "a list of boundaries",
)  # fmt: skip
MOST_MICRO_BATCHES = 10_000
MOST_LAYERS = 2048
"""The planner looks at every pair of layers: this many take a gigabyte."""
DEFAULT_TIME_LIMIT_SECONDS = 60.0


def make_plan(
    chain: Chain,
    platform: Platform,
    algorithm: str | Sequence[int] | Solver = "madpipe",
    *,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    every_stage_trains: bool = False,
    data_parallel: int | str | None = None,
    period_seconds: float | None = None,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """Decide where and when every layer runs.

    ``"madpipe"`` searches all allocations: a device may run several stages. Where ``num_stages``,
    ``every_stage_trains`` or ``num_micro_batches`` is given, as by the hosts, which run one stage per rank, it is
    the best contiguous cut.

    Args:
        chain: the layers, measured for one micro-batch.
        platform: the devices and their links.
        algorithm: a name of ``ALGORITHMS``, boundaries such as ``[0, 3, 8]``, or a solver.
        num_micro_batches: of one synchronous step, after which the pipeline drains. The plan then has a
            ``step``, and its memory is that of the step at DeepSpeed's depth.
        num_stages: exactly so many stages; left out, at most one per device.
        every_stage_trains: no stage without trainable parameters.
        data_parallel: so many identical pipelines share the devices and the micro-batches of a step, or
            ``"auto"``: the number with which a step is shortest. The plan is that of one pipeline, and its
            step includes the all-reduce of the gradients.
        period_seconds: plan for this period, or a shorter one, in as little memory as possible; left out, for the
            shortest period in the memory that there is. ``proved`` then speaks of the memory.
        time_limit_seconds: for searches that may end without a proof; 60 where left out.
        deadline: another end for those searches, which may come at any moment; the plan is then the best so far.

    Raises:
        InfeasibleError: no plan fits in memory; it says what is missing and what would do.
        ValueError: an argument that is malformed, or that no plan could follow.
    """
    started = time.perf_counter()
    solver = solver_of(algorithm)
    if data_parallel is None:
        splits = [Split(None, platform, num_micro_batches)]
    else:
        splits = splits_of(platform, num_micro_batches, data_parallel)
    total = DEFAULT_TIME_LIMIT_SECONDS if time_limit_seconds is None else time_limit_seconds
    limit = total / len(splits)
    plans: list[Plan] = []
    refusals: list[InfeasibleError | ValueError] = []
    for split in splits:
        try:
            problem = problem_of(
                chain, split.platform, split.num_micro_batches, num_stages, every_stage_trains, limit, deadline
            )
            problem = replace(problem, num_pipelines=split.num_pipelines)
            if period_seconds is None:
                plan = _solve(problem, solver)
            else:
                plan = _solve_at(problem, solver, period_seconds)
        except (InfeasibleError, ValueError) as refusal:
            refusals.append(refusal)
        else:
            plans.append(plan)
    if not plans:
        raise next((refusal for refusal in refusals if isinstance(refusal, InfeasibleError)), refusals[0])
    return replace(min(plans, key=seconds_of), planning_seconds=time.perf_counter() - started)


def _solve(problem: Problem, solver: Solver) -> Plan:
    answer = solver.solve(problem)
    if not answer.cuts and not answer.patterns:
        raise _infeasible(problem, solver)
    too_large: list[int] = []
    answers: tuple[Cuts | Pattern, ...] = (*answer.patterns, *answer.cuts)
    for found in answers:
        plan, replayed = _assemble(problem, solver, answer, found)
        over = max(use.total for use in replayed.memory)
        if over > problem.platform.memory_bytes:
            too_large.append(over)  # tensors that pile up before a slow link, which only the step shows
            continue
        return plan
    raise _piles_up(problem, min(too_large))


def _solve_at(problem: Problem, solver: Solver, period_seconds: float) -> Plan:
    """The plan of a chosen period that needs least memory."""
    if problem.num_micro_batches is not None:
        raise ValueError(
            f"period_seconds is {period_seconds}: a period is of the steady state, and num_micro_batches asks for "
            "a step that drains; leave one of them out"
        )
    if isinstance(period_seconds, bool) or not isinstance(period_seconds, int | float) or not period_seconds > 0:
        raise ValueError(f"period_seconds is {period_seconds!r}: it is more than 0")
    clock, memory = problem.times.clock, problem.platform.memory_bytes
    period = min(clock.ticks(float(period_seconds)), problem.longest_period)
    roomy = problem.with_memory(LARGEST_MEMORY_BYTES)
    if isinstance(solver, MadPipe | Contiguous):
        answer = least_memory.answer_at(problem, period, special=isinstance(solver, MadPipe))
    else:
        answer = solver.solve(roomy)
        loads = [one_f_one_b.pseudo_stage_loads(problem.times, cuts) for cuts in answer.cuts]
        answer = Answer(tuple(cuts for cuts, load in zip(answer.cuts, loads, strict=True) if max(load) <= period))
    every: tuple[Cuts | Pattern, ...] = (*answer.patterns, *answer.cuts)
    found = every[0] if every else None
    if found is None:
        best = make_plan(problem.chain, roomy.platform, solver)
        raise InfeasibleError(
            f"no plan of {solver.name} has a period of {format_seconds(period_seconds)} in any memory: the "
            f"shortest is {format_seconds(best.period_seconds)}"
        )
    plan, replayed = _assemble(roomy, solver, answer, found, period)
    plan = replace(plan, platform=problem.platform)
    needs = max(use.total for use in replayed.memory)
    if needs > memory:
        raise InfeasibleError(
            f"a period of {format_seconds(period_seconds)} takes {exact_bytes(needs)} ({format_bytes(needs)}) per "
            f"device at the least, {exact_bytes(needs - memory)} more than there are: choose a longer period or "
            "give more memory",
            short_bytes=needs - memory,
            smallest_memory_bytes=needs,
        )
    return plan


def solver_of(algorithm: str | Sequence[int] | Solver) -> Solver:
    """The solver that a name or a list of boundaries stands for.

    Raises:
        ValueError: an unknown name, or no boundaries.
    """
    if isinstance(algorithm, str):
        text = algorithm.strip()
        if text == "madpipe":
            return MadPipe()
        if text == "contiguous":
            return Contiguous()
        if text in ("pipedream", "pipedream-blind"):
            return PipeDream(text, tests_memory=text == "pipedream")
        if text == "mcap":
            return MemoryBalanced()
        if text == "uniform":
            return baselines.FixedCut(text, baselines.uniform)
        if text == "parameters":
            return baselines.FixedCut(text, baselines.parameters)
        if text.startswith("type:"):
            pattern = text.removeprefix("type:")
            return baselines.FixedCut(text, lambda chain, stages: baselines.by_type(chain, stages, pattern))
        if text and set(text) <= set("0123456789, -"):
            return solver_of(_boundaries_in(text))
        raise ValueError(f"unknown algorithm {shown(algorithm)}: known are {', '.join(ALGORITHMS)}")
    if not isinstance(algorithm, Iterable) and not hasattr(algorithm, "solve"):
        raise ValueError(f"algorithm is {shown(algorithm)}: it is one of {', '.join(ALGORITHMS)}")
    if isinstance(algorithm, Iterable):
        cuts = tuple(algorithm)
        name = ",".join(map(str, cuts))
        return baselines.FixedCut(name, lambda chain, stages: check_boundaries(cuts, chain))
    return algorithm


def _boundaries_in(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{shown(text)} is no list of boundaries: write it like 0,3,8") from None


def problem_of(
    chain: Chain,
    platform: Platform,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    every_stage_trains: bool = False,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Problem:
    """What a solver is given, from the arguments of ``make_plan``.

    Raises:
        ValueError: an argument that is malformed, or that no plan could follow.
    """
    if chain.num_layers > MOST_LAYERS:
        raise ValueError(
            f"chain {chain.name!r} has {chain.num_layers} layers and the planner takes {MOST_LAYERS}: group layers"
        )
    for key, number in (("num_micro_batches", num_micro_batches), ("num_stages", num_stages)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"{key} is {number!r}, not a whole number")
    if num_micro_batches is not None and not 1 <= num_micro_batches <= MOST_MICRO_BATCHES:
        raise ValueError(f"num_micro_batches is {num_micro_batches}: it is from 1 to {MOST_MICRO_BATCHES}")
    if num_stages is not None and not 1 <= num_stages <= platform.num_devices:
        raise ValueError(f"num_stages is {num_stages}: it is from 1 to {platform.num_devices}, the devices")
    if num_stages is not None and num_stages > chain.num_layers:
        raise ValueError(
            f"{num_stages} stages need at least {num_stages} layers and the chain has {chain.num_layers}: "
            "use fewer stages, or split the layers more finely"
        )
    training = sum(1 for layer in chain.layers if layer.num_trainable_parameters)
    if every_stage_trains and training < (num_stages or 1):
        raise ValueError(
            f"{num_stages or 1} stages with trainable parameters each need as many such layers and the chain "
            f"has {training}: use fewer stages"
        )
    if time_limit_seconds is None:
        time_limit_seconds = DEFAULT_TIME_LIMIT_SECONDS
    if not time_limit_seconds > 0:
        raise ValueError(f"time_limit_seconds is {time_limit_seconds}: it is more than 0")
    return Problem(
        chain=chain,
        platform=platform,
        constraints=Constraints(
            max_stages=num_stages or platform.num_devices,
            exactly=num_stages is not None,
            every_stage_trains=every_stage_trains,
        ),
        times=TimedChain(chain, platform),
        table=StageTable(chain, platform),
        num_micro_batches=num_micro_batches,
        deadline=Deadline(time_limit_seconds, within=deadline),
    )


def _assemble(
    problem: Problem, solver: Solver, answer: Answer, found: Cuts | Pattern, chosen_period: int | None = None
) -> tuple[Plan, Replay]:
    """The plan of a contiguous cut that has room, or of a pattern, and what its replay found."""
    times, platform = problem.times, problem.platform
    step = None
    memory = [MemoryUse(weights=0, stash=0, buffers=0, transient=0)] * platform.num_devices
    if isinstance(found, Pattern):
        placement, period = found.placement, found.period
        pattern = found.schedule(times.clock)
        in_flight = [1] * len(placement.devices)  # until the replay has counted
    else:
        placement = Placement.contiguous(found)
        loads = one_f_one_b.pseudo_stage_loads(times, found)
        room = [int(problem.table.max_in_flight[stage]) for stage in pairwise(found)]
        least = chosen_period or one_f_one_b.least_period(loads, room)
        assert least is not None, "a solver returned a cut without room"
        period = least
        pattern = one_f_one_b.schedule(times, found, period)
        in_flight = one_f_one_b.in_flight(loads, period)
        if problem.num_micro_batches is not None:
            in_flight = [problem.depth(len(found) - 1 - stage) for stage in range(len(found) - 1)]
            step = _step_plan(problem, found, problem.num_micro_batches)
        memory[: len(in_flight)] = [
            stage_memory(problem.chain, platform, start, stop, count)
            for (start, stop), count in zip(pairwise(found), in_flight, strict=True)
        ]
    bound = lower_bound(problem)
    bound_seconds = times.clock.seconds(bound)
    reached = period <= math.ceil(bound)
    best = answer.best_period == period and platform.comm_buffers >= buffer_slots(platform)
    plan = Plan(
        chain=ChainReference.of(problem.chain),
        platform=platform,
        algorithm=solver.name,
        period_seconds=pattern.period_seconds,
        lower_bound_seconds=bound_seconds,
        gap=pattern.period_seconds / bound_seconds - 1,
        proved=reached or best,
        proved_class="any allocation" if reached else answer.proved_class if best else None,
        class_lower_bound_seconds=None if answer.class_bound is None else times.clock.seconds(answer.class_bound),
        stages=tuple(
            PlannedStage(
                layers=(start, stop),
                layer_names=tuple(layer.name for layer in problem.chain.layers[start:stop]),
                device=device,
                in_flight=count,
                num_trainable_parameters=sum(
                    layer.num_trainable_parameters or 0 for layer in problem.chain.layers[start:stop]
                ),
            )
            for (start, stop), device, count in zip(
                pairwise(placement.cuts), placement.devices, in_flight, strict=True
            )
        ),
        operations=pattern.operations,
        memory=tuple(memory),
        peak_memory_bytes=tuple(use.total for use in memory),
        step=step,
        data_parallel=problem.num_pipelines,
        allreduce_seconds=tuple(problem.allreduce_seconds(placement.cuts)) if problem.num_pipelines else (),
    )
    replayed = replay(plan, problem.chain)
    counted = isinstance(found, Pattern) or step is not None or platform.comm_buffers < buffer_slots(platform)
    if replayed.memory and counted:
        # Only the timeline shows how many tensors wait at a cut (more than its buffers before a slow link in a
        # step that fills and drains, fewer than two where less than two are reserved), and that a stage which
        # takes no time lets a micro-batch go the moment the next one comes, and how stages share a device.
        plan = _as_replayed(plan, replayed)
        replayed = replay(plan, problem.chain)
    broken = [violation for violation in replayed.violations if "bytes short" not in violation]
    if broken or not replayed.memory:
        raise BrokenPlanError(
            f"MadPipe made a plan for {problem.chain.name!r} that its own replay refuses, which is a bug: "
            f"{'; '.join(broken)}"
        )
    return plan, replayed


def _as_replayed(plan: Plan, found: Replay) -> Plan:
    stages = tuple(
        replace(stage, in_flight=count) for stage, count in zip(plan.stages, found.in_flight, strict=True)
    )
    peaks = tuple(use.total for use in found.memory)
    return replace(plan, stages=stages, memory=found.memory, peak_memory_bytes=peaks)


def _step_plan(problem: Problem, cuts: Cuts, num_micro_batches: int) -> StepPlan:
    """One step in DeepSpeed's order, in its own engine and in one that overlaps transfers."""
    num_stages = len(cuts) - 1
    idle: tuple[Order, ...] = ((),) * (problem.platform.num_devices - num_stages)
    order = tuple(
        one_f_one_b_order(stage, problem.depth(num_stages - stage), num_micro_batches)
        for stage in range(num_stages)
    )
    slots = max(1, problem.platform.comm_buffers // 2)
    clock = problem.times.clock
    allreduce = [clock.ticks(seconds) for seconds in problem.allreduce_seconds(cuts)]
    step = overlapping_step(problem.times, cuts, range(num_stages), order, slots, allreduce)
    return StepPlan(
        num_micro_batches=num_micro_batches,
        step_seconds=clock.seconds(step),
        blocking_step_seconds=clock.seconds(problem.blocking_step(cuts, num_micro_batches)),
        order=order + idle,
    )


def _infeasible(problem: Problem, solver: Solver) -> InfeasibleError:
    """Which stage lacks how much, in the cut that needs least, and what would do."""
    found = solver.smallest_memory(problem)
    memory = problem.platform.memory_bytes
    if found is None:
        return InfeasibleError(
            f"no cut into {problem.constraints.max_stages} stages gives each stage trainable parameters: "
            "use fewer stages"
        )
    cuts, smallest = found
    if isinstance(cuts, Placement):
        return _infeasible_shared(problem, cuts, smallest)
    if problem.num_micro_batches is not None:
        smallest = _enough_for_step(problem, solver, smallest)
    needs = bytes_needed(problem, cuts)
    would_do = f"{exact_bytes(smallest)} ({format_bytes(smallest)})"
    if smallest > LARGEST_MEMORY_BYTES:
        return InfeasibleError(
            f"no plan fits into {format_bytes(memory)} per device, nor into any device there may be: the "
            f"cut that needs least takes {format_bytes(smallest)}"
        )
    if max(needs) <= memory:
        return InfeasibleError(
            f"no cut passes the memory test of {solver.name} with {format_bytes(memory)} per device, though "
            f"there is room for one; the smallest memory with which one does is {would_do}: give more memory or "
            "devices, or another algorithm",
            smallest_memory_bytes=smallest,
        )
    stage = max(range(len(needs)), key=needs.__getitem__)
    start, stop = cuts[stage], cuts[stage + 1]
    names = [layer.name for layer in problem.chain.layers[start:stop]]
    which = (
        f"layer {shown(names[0])} alone"
        if len(names) == 1
        else f"layers {start} to {stop} ({shown(names[0])} to {shown(names[-1])})"
    )
    step = problem.num_micro_batches
    depth = f" with {problem.depth(len(needs) - stage)} micro-batches in flight" if step else ""
    return InfeasibleError(
        f"no plan fits into {format_bytes(memory)} per device: stage {stage}, {which}, needs "
        f"{format_bytes(needs[stage])}{depth}, {exact_bytes(needs[stage] - memory)} more than there are; "
        f"the smallest memory that would do is {would_do}: give more memory or devices, or use a smaller "
        "micro-batch",
        stage=stage,
        short_bytes=needs[stage] - memory,
        smallest_memory_bytes=smallest,
    )


def _infeasible_shared(problem: Problem, placement: Placement, smallest: int) -> InfeasibleError:
    """The same where the allocation that needs least has several stages on a device."""
    memory = problem.platform.memory_bytes
    device = max(Road(problem, placement).memory, key=lambda each: each.bytes_for_one)
    stages = [placement.cuts[stage : stage + 2] for stage in device.stages]
    return InfeasibleError(
        f"no plan fits into {format_bytes(memory)} per device: layers "
        f"{' and '.join(f'{start} to {stop}' for start, stop in stages)} on one device need "
        f"{format_bytes(smallest)}, {exact_bytes(smallest - memory)} more than there are; the "
        f"smallest memory that would do is {exact_bytes(smallest)} ({format_bytes(smallest)}): give more memory "
        "or devices, or use a smaller micro-batch",
        stage=device.stages[0],
        short_bytes=smallest - memory,
        smallest_memory_bytes=smallest,
    )


def _enough_for_step(problem: Problem, solver: Solver, memory_bytes: int) -> int:
    """The memory with which a step really fits, tensors that pile up before a slow link included."""
    while memory_bytes <= LARGEST_MEMORY_BYTES:
        more = problem.with_memory(memory_bytes)
        try:
            _solve(more, solver)
        except InfeasibleError as error:
            more_bytes = error.smallest_memory_bytes or LARGEST_MEMORY_BYTES + 1
            assert more_bytes > memory_bytes
            memory_bytes = more_bytes
        else:
            break
    return memory_bytes


def _piles_up(problem: Problem, smallest: int) -> InfeasibleError:
    memory = problem.platform.memory_bytes
    return InfeasibleError(
        f"no plan fits into {format_bytes(memory)} per device: tensors pile up before a slow link "
        f"and need {exact_bytes(smallest - memory)} more than there are; {exact_bytes(smallest)} "
        f"({format_bytes(smallest)}) "
        "would do: give more memory or bandwidth, or fewer micro-batches",
        short_bytes=smallest - memory,
        smallest_memory_bytes=smallest,
    )
