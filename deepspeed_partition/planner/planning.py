"""Planning: from a chain and a platform to a plan that has been replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from deepspeed_partition.planner.allocation import Placement, checked_partition
from deepspeed_partition.planner.assembly import assemble
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.data_parallel import Split, check_zero_stage, seconds_of, splits_of
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.infeasible import infeasible, no_room_for_flush, out_of_time, piles_up
from deepspeed_partition.planner.machine_planning import plan_on_machines
from deepspeed_partition.planner.memory import StageTable, reserves_all_slots
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, Platform
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH, Recomputation, checked_mode
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous import deepspeed_partitions
from deepspeed_partition.planner.solvers.contiguous.mcap import MCAP_SEARCHES, MemoryBalanced
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.per_micro_batch import best_pattern, partitions
from deepspeed_partition.planner.solvers.contiguous.pipedream import PipeDream
from deepspeed_partition.planner.solvers.contiguous.replicated import REPLICATED
from deepspeed_partition.planner.solvers.interface import (
    Answer,
    Constraints,
    Cuts,
    Problem,
    Solver,
    Step,
)
from deepspeed_partition.planner.solvers.non_contiguous import min_memory_allocation
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.pattern.shared_links import is_plain
from deepspeed_partition.planner.solvers.step.best_step import (
    fixed_step,
    memory_of_flush,
    with_best_step,
)
from deepspeed_partition.planner.solvers.step.exact_step import with_exact_step
from deepspeed_partition.planner.solvers.step.micro_batch_step import shorter_step, with_buffers
from deepspeed_partition.planner.solvers.step.split_step import shorter_split_step
from deepspeed_partition.planner.solvers.step.step_search import StepSearch, step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import in_order
from deepspeed_partition.planner.solvers.step.step_simulator import one_f_one_b as one_f_one_b_orders
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices
from deepspeed_partition.planner.units import exact_bytes, format_bytes, format_seconds, shown
from deepspeed_partition.planner.weight_versions import FLUSH, TWO_VERSIONS, VERTICAL_SYNC, VersionRule
from deepspeed_partition.planner.weight_versions import checked_mode as checked_weight_versions

ALGORITHMS = (
    "madpipe", "contiguous", "pipedream", "pipedream-blind", "mcap", "mcap-bf", "mcap-bo", "uniform", "parameters",
    "type:REGEX", "madpipe-paper", REPLICATED, "a list of boundaries",
)  # fmt: skip
MOST_MICRO_BATCHES = 10_000
MOST_LAYERS = 2048
"""Largest number of layers: the planner looks at every pair of them, and this many take a gigabyte."""
DEFAULT_TIME_LIMIT_SECONDS = 60.0
LONGEST_PERIOD_SECONDS = 1e15
FEW_BUFFERS_SHARE = 0.3
"""The part of the time for steps that decide micro-batch by micro-batch with no more buffers than asked for."""
IN_SYNC_SHARE, IN_SYNC_PART = 0.1, 0.6
"""The parts of the time that is left for each number of versions of the weights: for contiguous partitions, and
for any allocation."""
MOST_COMPARED = 20_000
"""Operations of a synchronous step up to which one is run, to be compared with a pipeline that never drains."""
WHOLE_SHARE = 0.6
"""The part of the time for steps of whole backwards, where halves are looked for from the best of them on."""
SHORTEST_TIME_LIMIT_SECONDS = 1e-3
"""Seconds that are left to a search when the time is up, since a deadline is more than 0 seconds away."""


def make_plan(
    chain: Chain,
    platform: Platform,
    algorithm: str | Sequence[int] | Solver = "madpipe",
    *,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    every_stage_trains: bool = False,
    every_device_trains: bool = False,
    data_parallel: int | str | None = None,
    zero_stage: int | None = None,
    flushes: Sequence[int] | None = None,
    period_seconds: float | None = None,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
    recompute: str = "auto",
    split_backward: bool = False,
    weight_versions: str = FLUSH,
) -> Plan:
    """Decide where and when every layer runs.

    ``"madpipe"`` searches all allocations: a device may run several stages. Where ``num_stages`` or
    ``every_stage_trains`` is given, as for DeepSpeed's own engine, which runs one stage per rank, it returns the
    best contiguous partition, and a step is that of this engine at its depth.

    Source: the MadPipe paper, section 4, for ``"madpipe"``; ``planner/solvers`` names the source of each
    algorithm.

    Args:
        chain: the layers, measured for one micro-batch.
        platform: the devices and their links.
        algorithm: a name of ``ALGORITHMS``, boundaries such as ``[0, 3, 8]``, or a solver.
        num_micro_batches: micro-batches of one synchronous step, after which the pipeline drains. The plan then
            has a ``step``, as short as is found in an engine that overlaps transfers, and its memory is the
            step's.
        num_stages: exactly this many stages; left out, at most one per device.
        every_stage_trains: allow no stage without trainable parameters.
        every_device_trains: allow no device without trainable parameters, and so none without a stage.
        data_parallel: the number of identical pipelines that share the devices and the micro-batches of a step,
            or ``"auto"``: the number with which a step is shortest. The plan is that of one pipeline, and its
            step includes the all-reduce of the gradients.
        zero_stage: 1 where these pipelines share the optimizer's states (ZeRO-1): of ``weight_copies`` all but 2,
            the weights and their gradients, counts once per number of pipelines. ``weight_copies`` of the plan's
            platform is what one of them keeps. It changes nothing else: reducing the gradients to where the
            states are and gathering the weights from there sends as much as an all-reduce. Left out: 0.
        flushes: the number of micro-batches of each batch, where a step consists of batches whose loss is
            computed once on all outputs of a batch. The last stage then begins no backward of a batch before all
            of its forwards are done (GPipe's flush), so that every stage has all micro-batches of a batch in
            flight.
        period_seconds: plan for this period, or a shorter one, in as little memory as possible; left out, for the
            shortest period in the memory that there is. ``proved`` then speaks of the memory.
        time_limit_seconds: seconds in which a processor works for searches that may end without a proof, for all
            pipelines together; 60 where left out. What other programs do meanwhile does not count.
        deadline: another end of those searches, which may come at any moment; the plan is then the best so far.
        recompute: what may run its forward again in the backward, to keep less: ``"never"``: nothing;
            ``"stage"``: each stage as a whole; ``"block"``: any ranges of layers within a stage; ``"auto"``:
            whatever of these is fastest within memory; ``"micro-batch"``: what ``"block"`` allows, and besides
            stages may keep some micro-batches and recompute others, in a pattern of several of them (of other
            algorithms than ``"madpipe"`` and ``"contiguous"``, as ``"block"``).
            Layers that are not ``recomputable`` never do. A step of DeepSpeed's own engine (``num_stages`` or
            ``every_stage_trains``), which cannot, and ``"madpipe-paper"`` are planned without.
        split_backward: let backwards be two operations where that makes the period or the step shorter: the
            gradient of the input, sent on at once, and the gradients of the weights, at any later time on the same
            device. Layers whose ``backward_input_seconds`` are not known keep one operation, and so do stages with
            such a layer.
        weight_versions: what becomes of the weights. ``"flush"``: the pipeline drains before each update.
            Otherwise it never drains, micro-batches use older versions of the weights, and the plan is that of the
            shortest period: ``"stashing"``: on each stage the newest version that is there when the forward
            begins; ``"2bw"``: the version before the last update, so that two are enough; ``"vertical-sync"``: on
            all stages the version that stage 0 used. ``num_micro_batches`` is then the number of micro-batches of
            an update, 1 where left out, and ``weight_copies`` of the platform count two versions.

    Returns:
        A plan that the replay has checked; its times are in seconds and its sizes in bytes.

    Raises:
        InfeasibleError: no plan fits in memory; it says what is missing and what would help.
        ValueError: an argument is malformed, or no plan could follow it.
    """
    started = time.perf_counter()
    solver = solver_of(algorithm)
    checked_mode(recompute)
    check_zero_stage(zero_stage)
    check_split(split_backward, chain, period_seconds, num_stages or every_stage_trains)
    if checked_weight_versions(weight_versions) != FLUSH:
        given: dict[str, object] = {
            "num_stages": num_stages,
            "every_stage_trains": every_stage_trains or None,
            "flushes": flushes,
            "period_seconds": period_seconds,
            "split_backward": split_backward or None,
            "zero_stage=1": zero_stage or None,
            f"recompute={PER_MICRO_BATCH!r}": recompute == PER_MICRO_BATCH or None,
        }
        check_asynchronous(weight_versions, solver, platform, given)
    if data_parallel is None:
        splits = [Split(None, platform, num_micro_batches)]
    else:
        splits = splits_of(platform, num_micro_batches, data_parallel, zero_stage)
    if zero_stage == 1 and len({split.platform.weight_copies for split in splits} | {platform.weight_copies}) > 1:
        _check_shareable(chain)
    flush_sizes = _checked_flushes(
        flushes, num_micro_batches, others=bool(data_parallel or num_stages or every_stage_trains)
    )

    def problem_for(
        chain: Chain, platform: Platform, split: Split, limit_seconds: float, deadline: Deadline | None
    ) -> Problem:
        problem = problem_of(
            chain,
            platform,
            split.num_micro_batches,
            num_stages,
            every_stage_trains,
            every_device_trains,
            time_limit_seconds=limit_seconds,
            deadline=deadline,
        )
        problem = replace(
            problem,
            num_pipelines=split.num_pipelines,
            zero_stage=zero_stage,
            flushes=flush_sizes,
            splits_backward=split_backward,
        )
        if weight_versions != FLUSH:
            problem = never_draining(problem, weight_versions)
        return problem if isinstance(solver, PaperMadPipe) else with_recomputation(problem, recompute)

    def plan_for(split: Split, limit_seconds: float, is_one_of_many: bool) -> Plan:
        problem = problem_for(chain, split.platform, split, limit_seconds, deadline)
        problem = replace(problem, is_one_of_many=is_one_of_many)
        if not split.platform.is_alike:
            _check_on_machines(problem, recompute, period_seconds)
            return plan_on_machines(
                problem,
                solver,
                lambda chain, platform, deadline: replace(
                    problem_for(
                        chain,
                        platform,
                        split,
                        deadline.remaining_seconds() or SHORTEST_TIME_LIMIT_SECONDS,
                        deadline,
                    ),
                    is_one_of_many=True,
                ),
                _solve,
            )
        if not isinstance(solver, PaperMadPipe):
            problem = replace(
                problem, per_micro_batch=_decides_per_micro_batch(problem, solver, recompute, period_seconds)
            )
        if problem.versions is not None and problem.versions.mode == VERTICAL_SYNC:
            return _solve_in_sync(problem, solver)
        return _solve(problem, solver) if period_seconds is None else _solve_at(problem, solver, period_seconds)

    plans = _plans_of(splits, plan_for, Deadline(time_limit(time_limit_seconds), within=deadline))
    in_deepspeed = num_stages is not None or every_stage_trains

    def memory_and_time(plan: Plan) -> tuple[float, float]:
        wanted = 0 if period_seconds is None else max(plan.peak_memory_bytes)
        return wanted, seconds_of(plan, in_deepspeed=in_deepspeed)

    best = min(reversed(plans), key=memory_and_time)
    if best.is_asynchronous and num_micro_batches is not None:
        flush = problem_of(chain, best.platform, best.micro_batches_per_update, deadline=deadline)
        flush = replace(flush, num_pipelines=best.data_parallel)
        best = replace(best, flush_step_seconds=_flush_step_seconds(flush, best))
    return replace(best, planning_seconds=time.perf_counter() - started)


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


def _solve_in_sync(problem: Problem, solver: Solver) -> Plan:
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
            found.append((_solve(given, of_partitions), given))
        except (InfeasibleError, ValueError) as error:
            refusal = refusal or error
            if isinstance(error, InfeasibleError) and number > 1:
                break  # more versions take more memory
    if not found:
        if not isinstance(solver, MadPipe):
            raise refusal or AssertionError("no number of versions was tried")
        return _solve(never_draining(replace(problem, num_micro_batches=per_update), VERTICAL_SYNC), solver)
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
            free = _solve(given, solver)
        except InfeasibleError:
            break
        if free.period_seconds < best.period_seconds:
            best = free
            if best.proved_class == "any allocation":
                break
            best = replace(best, proved=False, proved_class=None, proved_of=None, class_lower_bound_seconds=None)
    return best


def _flush_step_seconds(problem: Problem, plan: Plan) -> float | None:
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


def check_split(
    split_backward: object,
    chain: Chain,
    period_seconds: float | None = None,
    in_deepspeed: object = False,
) -> None:
    """Refuse halves of backwards where nothing is known of them, or where no such plan is known."""
    if not isinstance(split_backward, bool):
        raise ValueError(f"split_backward is {shown(split_backward)}: it is True or False")
    if not split_backward:
        return
    if all(layer.backward_input_seconds is None for layer in chain.layers):
        raise ValueError(
            f"split_backward is set, and chain {chain.name!r} does not say how long halves of a backward last: "
            "give its layers backward_input_seconds and backward_weight_seconds, or leave split_backward out"
        )
    if in_deepspeed:
        raise ValueError(
            "split_backward is set, and DeepSpeed's own engine runs whole backwards: leave split_backward out, or "
            "num_stages and every_stage_trains"
        )
    if period_seconds is not None:
        raise ValueError(
            "split_backward is planned for the shortest period or step alone: leave period_seconds out, or "
            "split_backward"
        )


def _check_on_machines(problem: Problem, recompute: str, period_seconds: float | None) -> None:
    """Refuse what is not planned for devices and links that are not alike."""
    for what, value in (
        ("period_seconds", period_seconds),
        ("flushes", problem.flushes),
        ("split_backward", True if problem.splits_backward else None),
        ("num_stages or every_stage_trains", True if problem.in_deepspeed else None),
        (f"recompute={PER_MICRO_BATCH!r}", True if recompute == PER_MICRO_BATCH else None),
    ):
        if value is not None:
            raise ValueError(
                f"{what} is planned for devices and links that are alike: leave it out, or give num_devices, "
                "memory_bytes and bandwidth in the place of machines"
            )


def _check_shareable(chain: Chain) -> None:
    """Refuse to divide among pipelines what a run has said to keep for each layer."""
    for index, layer in enumerate(chain.layers):
        if layer.training_bytes is not None:
            raise ValueError(
                f"layers[{index}].training_bytes of {chain.name!r} say what a run keeps, with the ZeRO stage that "
                "it had, and not which part of it ZeRO-1 shares: leave them out, or zero_stage"
            )


def _plans_of(
    splits: Sequence[Split], plan_for: Callable[[Split, float, bool], Plan], deadline: Deadline
) -> list[Plan]:
    """Return the plans of the splits that have one, those of the shortest pipelines first.

    Args:
        plan_for: plans a split in so many seconds; it is also told whether other splits come after it.

    Raises:
        InfeasibleError, ValueError: none has one; the reason is that of the longest pipelines, and a lack of
            memory comes before any other reason.
    """
    plans: list[Plan] = []
    refusals: list[InfeasibleError | ValueError] = []
    # Start with the shortest pipelines: they take hardly any of the time, which leaves more for the others.
    for num_left, split in zip(range(len(splits), 0, -1), reversed(splits), strict=True):
        limit = max(deadline.remaining_seconds(), SHORTEST_TIME_LIMIT_SECONDS) / num_left
        try:
            plans.append(plan_for(split, limit, num_left > 1))
        except (InfeasibleError, ValueError) as refusal:
            refusals.append(refusal)
    if plans:
        return plans
    of_memory = (refusal for refusal in reversed(refusals) if isinstance(refusal, InfeasibleError))
    raise next(of_memory, refusals[-1])


def _solve(problem: Problem, solver: Solver) -> Plan:
    searched = problem
    if problem.splits_backward:
        searched = replace(problem, splits_backward=False, deadline=problem.deadline.part(WHOLE_SHARE))
    try:
        answer = with_exact_step(searched, with_best_step(searched, _answer(searched, solver)))
    except DeadlinePassed:
        raise out_of_time(solver.name) from None
    if not answer.cuts and not answer.patterns:
        if problem.deadline.stopped:
            raise out_of_time(solver.name)  # whoever stopped the search does not wait for advice
        if problem.is_one_of_many:
            memory, num_devices = format_bytes(problem.platform.memory_bytes), problem.platform.num_devices
            raise InfeasibleError(f"no plan fits into {memory} per device on {num_devices} devices")
        raise infeasible(problem, solver, _solve)
    if (problem.per_micro_batch or problem.splits_backward) and problem.num_micro_batches is None:
        faster = _plan_per_micro_batch(problem, solver, answer)
        if faster is not None:
            return faster
    too_large: list[int] = []
    for found, step in _candidates(problem, answer):
        plan, replayed = assemble(problem, solver.name, answer, found, step)
        over = max(use.total for use in replayed.memory)
        if over > problem.platform.memory_bytes:
            too_large.append(over)  # only the step shows tensors that wait for a slow link
            continue
        plans = [plan]
        if problem.per_micro_batch and plan.step is not None:
            plans.append(_step_per_micro_batch(problem, solver, answer, plan))
        if problem.splits_backward and step is not None:
            plans.append(_step_in_halves(problem, solver, answer, plan, step))
        return min(reversed(plans), key=lambda each: each.step_seconds or 0.0)
    if problem.flushes:
        raise no_room_for_flush(problem, memory_of_flush(problem))
    raise piles_up(problem, min(too_large))


def _decides_per_micro_batch(problem: Problem, solver: Solver, mode: str, period_seconds: float | None) -> bool:
    """Return whether plans may treat micro-batches differently; those of baselines treat them alike.

    Raises:
        ValueError: they are asked to, and no such plan is known of what else is asked for.
    """
    if mode != PER_MICRO_BATCH:
        return False
    for key, value in (("flushes", problem.flushes), ("period_seconds", period_seconds)):
        if value is not None:
            raise ValueError(
                f"recompute is {mode!r}, which is planned for the shortest period or step alone: leave {key} out, "
                "or use recompute='block'"
            )
    return isinstance(solver, MadPipe | Contiguous)


def _plan_per_micro_batch(problem: Problem, solver: Solver, answer: Answer) -> Plan | None:
    """Return the plan of a pattern of several micro-batches, or with halves; None where none is faster."""
    memory_bytes = problem.platform.memory_bytes
    period = Fraction(problem.longest_period)
    for found, _ in _candidates(problem, answer):
        plan, replayed = assemble(problem, solver.name, answer, found)
        if max(use.total for use in replayed.memory) <= memory_bytes:
            period = Fraction(problem.times.clock.ticks(plan.period_seconds))
            break
    pattern = best_pattern(problem, answer, period)
    if pattern is None:
        return None
    plan, replayed = assemble(problem, solver.name, answer, pattern)
    return plan if max(use.total for use in replayed.memory) <= memory_bytes else None


def _step_per_micro_batch(problem: Problem, solver: Solver, answer: Answer, plan: Plan) -> Plan:
    """Return a plan whose step keeps some micro-batches and recomputes others; ``plan`` where none is shorter."""
    assert plan.step is not None
    placements = partitions(problem, answer)
    if plan.is_contiguous:
        placements.insert(0, Placement.contiguous(tuple(plan.boundaries)))
    assert problem.num_micro_batches is not None
    ticks = problem.times.clock.ticks(plan.step.step_seconds)
    # What is kept overtakes what is recomputed: that takes more places for messages than orders do otherwise.
    roomier = max(problem.platform.comm_buffers, 2 * problem.num_micro_batches)
    for buffers in dict.fromkeys((problem.platform.comm_buffers, roomier)):
        share = 1 if buffers == roomier else FEW_BUFFERS_SHARE
        buffered = with_buffers(replace(problem, deadline=problem.deadline.part(share)), buffers)
        step = shorter_step(buffered, answer, list(dict.fromkeys(placements)), ticks)
        if step is None:
            continue
        shorter, replayed = assemble(buffered, solver.name, answer, step.steady, step)
        if max(use.total for use in replayed.memory) <= problem.platform.memory_bytes:
            plan, ticks = shorter, step.ticks
    return plan


def _step_in_halves(problem: Problem, solver: Solver, answer: Answer, plan: Plan, step: Step) -> Plan:
    """Return a plan whose step has backwards in two operations; that of ``step`` if none is shorter.

    Args:
        step: the step of ``plan``, of whole backwards.
    """
    allocation = plan.allocation
    devices = tuple(stage.device for stage in allocation.stages)
    placement = Placement(tuple(allocation.boundaries), devices, step.recomputed)
    placements = [] if answer.step_search is None else partitions(problem, answer)
    found = shorter_split_step(problem, answer, placements, step, placement)
    shorter, replayed = assemble(problem, solver.name, answer, found.steady, found)
    return shorter if max(use.total for use in replayed.memory) <= problem.platform.memory_bytes else plan


def with_recomputation(problem: Problem, mode: str) -> Problem:
    """Return a problem whose plans may recompute what the mode (``recompute`` of ``make_plan``) allows."""
    if checked_mode(mode) == "never" or (problem.in_deepspeed and mode == "auto"):
        return problem
    if problem.in_deepspeed:
        raise ValueError(
            f"recompute is {mode!r}, and DeepSpeed's own engine recomputes nothing that a plan says: use "
            "activation_checkpoint_interval, or leave recompute out"
        )
    recomputation = Recomputation(problem.times, mode)
    return replace(problem, recomputation=recomputation) if recomputation.recomputes_any else problem


def _answer(problem: Problem, solver: Solver) -> Answer:
    """Return the answer of a solver; a baseline that has none without recomputation is asked again with it."""
    answer = solver.solve(problem)
    if answer.cuts or answer.patterns or isinstance(solver, MadPipe | Contiguous):
        return answer
    for uniform in uniform_choices(problem):
        again = solver.solve(uniform.problem)
        if again.cuts:
            return again
    return answer


def _candidates(problem: Problem, answer: Answer) -> Iterator[tuple[Cuts | Pattern, Step | None]]:
    """Yield allocations, the best first, each with its step; None: without a step."""
    if problem.num_micro_batches is None:
        yield from ((pattern, None) for pattern in answer.patterns)
        yield from ((cuts, None) for cuts in answer.cuts)
    elif problem.in_deepspeed:
        yield from ((cuts, _step_in_deepspeed(problem, cuts)) for cuts in answer.cuts)
    elif answer.steps:
        yield from ((step.steady, step) for step in answer.steps)
    else:
        yield from ((cuts, fixed_step(problem, cuts)) for cuts in answer.cuts)


def _solve_at(problem: Problem, solver: Solver, period_seconds: float) -> Plan:
    """Return the plan of a chosen period that needs the least memory."""
    _check_period(problem, solver, period_seconds)
    clock, memory = problem.times.clock, problem.platform.memory_bytes
    period = min(clock.ticks(float(period_seconds)), problem.longest_period)
    roomy = problem.with_memory(LARGEST_MEMORY_BYTES)
    answer = _answer_at(problem, roomy, solver, period)
    every: tuple[Cuts | Pattern, ...] = (*answer.patterns, *answer.cuts)
    if not every:
        best = _solve(roomy, solver)
        is_exact = is_plain(problem.platform) and not problem.deadline.passed()
        raise InfeasibleError(
            f"no plan of {solver.name} has a period of {format_seconds(period_seconds)} in any memory: the "
            f"shortest {'is' if is_exact else 'found is'} {format_seconds(best.period_seconds)}"
        )
    plan, replayed = assemble(roomy, solver.name, answer, every[0], chosen_period=period)
    bound_seconds = clock.seconds(lower_bound(problem))
    proved = answer.best_period is not None and reserves_all_slots(problem.platform)
    proved &= is_plain(problem.platform)
    plan = replace(
        plan,
        platform=problem.platform,
        lower_bound_seconds=bound_seconds,
        gap=plan.period_seconds / bound_seconds - 1,
        proved=proved,
        proved_class=answer.proved_class if proved else None,
        proved_of="memory" if proved else None,
    )
    needs = max(use.total for use in replayed.memory)
    if needs > memory:
        raise InfeasibleError(
            f"a period of {format_seconds(period_seconds)} takes {exact_bytes(needs)} ({format_bytes(needs)}) per "
            f"device {'at the least' if proved else 'in the best plan found'}, {exact_bytes(needs - memory)} more "
            "than there are: choose a longer period or give more memory",
            short_bytes=needs - memory,
            smallest_memory_bytes=needs,
        )
    return plan


def _check_period(problem: Problem, solver: Solver, period_seconds: float) -> None:
    """Refuse a period that is malformed, or that this problem or solver has no plan for."""
    if problem.num_micro_batches is not None:
        raise ValueError(
            f"period_seconds is {period_seconds}: a period is of the steady state, and num_micro_batches asks for "
            "a step that drains; leave one of them out"
        )
    if isinstance(period_seconds, bool) or not isinstance(period_seconds, int | float):
        raise ValueError(f"period_seconds is {period_seconds!r}: it is a number")
    if not 0 < period_seconds <= LONGEST_PERIOD_SECONDS:
        raise ValueError(
            f"period_seconds is {shown(str(period_seconds))}: it is more than 0, and {LONGEST_PERIOD_SECONDS:.0g} "
            "at the most"
        )
    if problem.platform.port_bandwidth is not None:
        raise ValueError(
            "period_seconds asks for the least memory of a chosen period, which is known of links without ports "
            "alone: leave it out, or port_bandwidth"
        )
    if isinstance(solver, PaperMadPipe):
        raise ValueError(
            f"{solver.name} looks for the shortest period alone: leave period_seconds out, or use madpipe"
        )


def _answer_at(problem: Problem, roomy: Problem, solver: Solver, period: int) -> Answer:
    """Return the allocations of a solver that are as fast as ``period`` ticks, that of the least memory first.

    Args:
        roomy: the problem on devices with the largest memory.
    """
    if isinstance(solver, MadPipe | Contiguous):
        special = isinstance(solver, MadPipe) and problem.constraints.any_allocation
        return min_memory_allocation.answer_at(problem, period, special=special)
    answer = solver.solve(roomy)
    loads = [one_f_one_b.pseudo_stage_loads(problem.times, cuts) for cuts in answer.cuts]
    return Answer(tuple(cuts for cuts, load in zip(answer.cuts, loads, strict=True) if max(load) <= period))


def solver_of(algorithm: str | Sequence[int] | Solver) -> Solver:
    """Return the solver that a name or a list of boundaries stands for.

    Raises:
        ValueError: the name is unknown, or the list has no boundaries.
    """
    if isinstance(algorithm, str):
        text = algorithm.strip()
        if text == "madpipe":
            return MadPipe()
        if text == "contiguous":
            return Contiguous()
        if text in ("pipedream", "pipedream-blind"):
            return PipeDream(text, tests_memory=text == "pipedream")
        if text in MCAP_SEARCHES:
            return MemoryBalanced(text, MCAP_SEARCHES[text])
        if text == "madpipe-paper":
            return PaperMadPipe()
        if text == REPLICATED:
            raise ValueError(
                f"{REPLICATED} may give stages different numbers of replicas, which is no plan: `madpipe plan` "
                "and `madpipe compare` show what it does"
            )
        if text == "uniform":
            return deepspeed_partitions.FixedPartition(text, deepspeed_partitions.uniform)
        if text == "parameters":
            return deepspeed_partitions.FixedPartition(text, deepspeed_partitions.parameters)
        if text.startswith("type:"):
            pattern = text.removeprefix("type:")
            return deepspeed_partitions.FixedPartition(
                text, lambda chain, stages: deepspeed_partitions.by_type(chain, stages, pattern)
            )
        if text and set(text) <= set("0123456789, -"):
            return solver_of(_boundaries_in(text))
        raise ValueError(f"unknown algorithm {shown(algorithm)}: known are {', '.join(ALGORITHMS)}")
    if not isinstance(algorithm, Iterable) and not hasattr(algorithm, "solve"):
        raise ValueError(f"algorithm is {shown(algorithm)}: it is one of {', '.join(ALGORITHMS)}")
    if isinstance(algorithm, Iterable):
        cuts = tuple(algorithm)
        name = ",".join(map(str, cuts))
        return deepspeed_partitions.FixedPartition(name, lambda chain, stages: checked_partition(cuts, chain))
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
    every_device_trains: bool = False,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Problem:
    """Return what a solver is given, from the arguments of ``make_plan``.

    Raises:
        ValueError: an argument is malformed, or no plan could follow it.
    """
    _check_counts(chain, platform, num_micro_batches, num_stages)
    _check_trainable(chain, platform, num_stages, every_stage_trains, every_device_trains)
    times, table = _tables_of(chain, platform)
    return Problem(
        chain=chain,
        platform=platform,
        constraints=Constraints(
            max_stages=num_stages or platform.num_devices,
            exactly=num_stages is not None,
            every_stage_trains=every_stage_trains,
            every_device_trains=every_device_trains,
        ),
        times=times,
        table=table,
        num_micro_batches=num_micro_batches,
        in_deepspeed=num_micro_batches is not None and (num_stages is not None or every_stage_trains),
        deadline=Deadline(time_limit(time_limit_seconds), within=deadline),
    )


@lru_cache(maxsize=1)  # for the algorithms of a comparison, which then share bounds, too
def _tables_of(chain: Chain, platform: Platform) -> tuple[TimedChain, StageTable]:
    return TimedChain(chain, platform), StageTable(chain, platform)


def _check_counts(chain: Chain, platform: Platform, num_micro_batches: int | None, num_stages: int | None) -> None:
    """Refuse a chain that is too long, and numbers of micro-batches or stages that no plan can have."""
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
            f"use num_stages={chain.num_layers} or fewer, or split the layers more finely"
        )


def _check_trainable(
    chain: Chain, platform: Platform, num_stages: int | None, every_stage_trains: bool, every_device_trains: bool
) -> None:
    """Refuse a chain with too few layers that train, where each stage or device needs one."""
    training = sum(1 for layer in chain.layers if layer.num_trainable_parameters)
    needed, parts = num_stages or 1, "stages"
    if every_device_trains:
        needed, parts = platform.num_devices, "devices"
    if (every_stage_trains or every_device_trains) and training < needed:
        way_out = f"use num_{parts}={training} or fewer" if training else "let one train"
        raise ValueError(
            f"{needed} {parts} with trainable parameters each need as many such layers and the chain "
            f"has {training}: {way_out}"
        )


def _checked_flushes(
    flushes: Sequence[int] | None, num_micro_batches: int | None, *, others: bool
) -> tuple[int, ...] | None:
    if flushes is None:
        return None
    sizes = tuple(flushes)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"flushes is {shown(flushes)}: it is the numbers of micro-batches of batches")
    if sum(sizes) != num_micro_batches:
        raise ValueError(
            f"flushes is {shown(flushes)}, {sum(sizes)} micro-batches in all, and num_micro_batches is "
            f"{num_micro_batches}: they are the same"
        )
    if others:
        raise ValueError(
            "flushes is for an engine that overlaps transfers, in one pipeline: leave out num_stages, "
            "every_stage_trains and data_parallel"
        )
    return sizes


def time_limit(seconds: float | None) -> float:
    """Return the seconds that an argument ``time_limit_seconds`` asks for.

    Raises:
        ValueError: it is no number, or not more than 0.
    """
    if seconds is None:
        return DEFAULT_TIME_LIMIT_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"time_limit_seconds is {seconds!r}: it is a number")
    if not seconds > 0:
        raise ValueError(f"time_limit_seconds is {seconds}: it is more than 0")
    return seconds


def _step_in_deepspeed(problem: Problem, cuts: Cuts) -> Step:
    """Return the step in DeepSpeed's order, run by an engine that overlaps transfers."""
    assert problem.num_micro_batches is not None
    num_stages = len(cuts) - 1
    engine = step_engine(problem, Placement.contiguous(cuts))
    depths = [problem.deepspeed_depth(from_end) for from_end in range(num_stages, 0, -1)]
    orders = one_f_one_b_orders(engine, depths, problem.num_micro_batches)
    run = engine.run(problem.num_micro_batches, in_order(orders))
    assert run is not None
    return Step(cuts, engine.named(orders), run.ticks)
