"""From a chain and a platform to a plan that has been replayed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from deepspeed_partition.planner.allocation import check_boundaries
from deepspeed_partition.planner.clock import Clock, TimedChain
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import BrokenPlanError, InfeasibleError
from deepspeed_partition.planner.memory import StageTable, buffer_slots, stage_memory
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, Plan, PlannedStage, StepPlan
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, Platform
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.simulate import Replay, replay
from deepspeed_partition.planner.solvers import baselines, one_f_one_b
from deepspeed_partition.planner.solvers.contiguous import Contiguous
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
from deepspeed_partition.planner.step import blocking_step, one_f_one_b_order, overlapping_step
from deepspeed_partition.planner.units import exact_bytes, format_bytes, shown

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
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """Decide where and when every layer runs.

    Args:
        chain: the layers, measured for one micro-batch.
        platform: the devices and their links.
        algorithm: a name of ``ALGORITHMS``, boundaries such as ``[0, 3, 8]``, or a solver.
        num_micro_batches: of one synchronous step, after which the pipeline drains. The plan then has a
            ``step``, and its memory is that of the step at DeepSpeed's depth.
        num_stages: exactly so many stages; left out, at most one per device.
        every_stage_trains: no stage without trainable parameters.
        time_limit_seconds: for searches that prove nothing; exact ones need none.
        deadline: another end for those searches, which may come at any moment; the plan is then the best so far.

    Raises:
        InfeasibleError: no plan fits in memory; it says what is missing and what would do.
        ValueError: an argument that is malformed, or that no plan could follow.
    """
    started = time.perf_counter()
    solver = solver_of(algorithm)
    problem = problem_of(
        chain, platform, num_micro_batches, num_stages, every_stage_trains, time_limit_seconds, deadline
    )
    plan = _solve(problem, solver)
    return replace(plan, planning_seconds=time.perf_counter() - started)


def _solve(problem: Problem, solver: Solver) -> Plan:
    answer = solver.solve(problem)
    if not answer.cuts:
        raise _infeasible(problem, solver)
    too_large: list[int] = []
    for cuts in answer.cuts:
        plan, replayed = _assemble(problem, solver, answer, cuts)
        over = max(use.total for use in replayed.memory)
        if over > problem.platform.memory_bytes:
            too_large.append(over)  # tensors that pile up before a slow link, which only the step shows
            continue
        return plan
    raise _piles_up(problem, min(too_large))


def solver_of(algorithm: str | Sequence[int] | Solver) -> Solver:
    """The solver that a name or a list of boundaries stands for.

    Raises:
        ValueError: an unknown name, or no boundaries.
    """
    if isinstance(algorithm, str):
        text = algorithm.strip()
        if text in ("madpipe", "contiguous"):
            return Contiguous(text)
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
    if time_limit_seconds is not None and not time_limit_seconds > 0:
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
        deadline=Deadline(time_limit_seconds or DEFAULT_TIME_LIMIT_SECONDS, within=deadline),
    )


def _assemble(problem: Problem, solver: Solver, answer: Answer, cuts: Cuts) -> tuple[Plan, Replay]:
    """The plan of a contiguous cut that has room, and what its replay found."""
    times, platform = problem.times, problem.platform
    loads = one_f_one_b.pseudo_stage_loads(times, cuts)
    room = [int(problem.table.max_in_flight[stage]) for stage in pairwise(cuts)]
    period = one_f_one_b.least_period(loads, room)
    assert period is not None, "a solver returned a cut without room"
    pattern = one_f_one_b.schedule(times, cuts, period)
    in_flight = one_f_one_b.in_flight(loads, period)
    step = None
    if problem.num_micro_batches is not None:
        in_flight = [problem.depth(len(cuts) - 1 - stage) for stage in range(len(cuts) - 1)]
        step = _step_plan(problem, cuts, problem.num_micro_batches)
    idle = platform.num_devices - len(in_flight)
    memory = [
        stage_memory(problem.chain, platform, start, stop, count)
        for (start, stop), count in zip(pairwise(cuts), in_flight, strict=True)
    ] + [MemoryUse(weights=0, stash=0, buffers=0, transient=0)] * idle
    bound = lower_bound_seconds(problem.chain, platform)
    reached = pattern.period_seconds <= bound
    best = answer.best_period == period and platform.comm_buffers >= buffer_slots(platform)
    plan = Plan(
        chain=ChainReference.of(problem.chain),
        platform=platform,
        algorithm=solver.name,
        period_seconds=pattern.period_seconds,
        lower_bound_seconds=bound,
        gap=pattern.period_seconds / bound - 1,
        proved=reached or best,
        proved_class="any allocation" if reached else "contiguous" if best else None,
        stages=tuple(
            PlannedStage(
                layers=(start, stop),
                layer_names=tuple(layer.name for layer in problem.chain.layers[start:stop]),
                device=device,
                in_flight=in_flight[device],
                num_trainable_parameters=sum(
                    layer.num_trainable_parameters or 0 for layer in problem.chain.layers[start:stop]
                ),
            )
            for device, (start, stop) in enumerate(pairwise(cuts))
        ),
        operations=pattern.operations,
        memory=tuple(memory),
        peak_memory_bytes=tuple(use.total for use in memory),
        step=step,
    )
    found = replay(plan, problem.chain)
    if found.memory and (step is not None or platform.comm_buffers < buffer_slots(platform)):
        # Only the timeline shows how many tensors wait at a cut (more than its buffers before a slow link in a
        # step that fills and drains, fewer than two where less than two are reserved), and that a stage which
        # takes no time lets a micro-batch go the moment the next one comes.
        plan = _as_replayed(plan, found)
        found = replay(plan, problem.chain)
    broken = [violation for violation in found.violations if "bytes short" not in violation]
    if broken or not found.memory:
        raise BrokenPlanError(
            f"MadPipe made a plan for {problem.chain.name!r} that its own replay refuses, which is a bug: "
            f"{'; '.join(broken)}"
        )
    return plan, found


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
    seconds = problem.times.clock.seconds
    return StepPlan(
        num_micro_batches=num_micro_batches,
        step_seconds=seconds(overlapping_step(problem.times, cuts, range(num_stages), order, slots)),
        blocking_step_seconds=seconds(blocking_step(problem.times, cuts, num_micro_batches)),
        order=order + idle,
    )


def lower_bound_seconds(chain: Chain, platform: Platform) -> float:
    """No schedule of any allocation has a shorter period: the largest of three bounds.

    - The mean computation of a device, and the computation of one layer.
    - The mean memory. A micro-batch is in flight in layer l at least while all later layers compute on it, so
      by Little's law the devices together hold, on average over time, ``stash(l) * U(l, L) / T`` bytes of it,
      next to all weights; that must fit into all devices.
    """
    clock = Clock.of(chain, platform)  # as the period is counted: rounding must not put the bound above it
    computes = [clock.ticks(layer.forward_seconds) + clock.ticks(layer.backward_seconds) for layer in chain.layers]
    bound = max(Fraction(sum(computes), platform.num_devices), Fraction(max(computes)))
    below = stashed = 0
    for layer, compute in zip(reversed(chain.layers), reversed(computes), strict=True):
        below += compute
        stashed += chain.stash(layer) * below
    weights = platform.weights_bytes(sum(layer.weight_bytes for layer in chain.layers))
    room = platform.num_devices * platform.memory_bytes - weights
    if room > 0:
        bound = max(bound, Fraction(stashed, room))
    return clock.seconds(bound)


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


def _enough_for_step(problem: Problem, solver: Solver, memory_bytes: int) -> int:
    """The memory with which a step really fits, tensors that pile up before a slow link included."""
    while memory_bytes <= LARGEST_MEMORY_BYTES:
        platform = replace(problem.platform, memory_bytes=memory_bytes)
        more = replace(problem, platform=platform, table=StageTable(problem.chain, platform))
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
