"""Planning: from a chain and a platform to a plan that has been replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from deepspeed_partition.planner.data_parallel import Split, check_zero_stage, seconds_of, splits_of
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.machine_planning import plan_on_machines
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.algorithms import solver_of
from deepspeed_partition.planner.planning.asynchronous import (
    check_asynchronous,
    flush_step_seconds,
    never_draining,
    solve_in_sync,
)
from deepspeed_partition.planner.planning.chosen_period import solve_at
from deepspeed_partition.planner.planning.problems import (
    SHORTEST_TIME_LIMIT_SECONDS,
    checked_flushes,
    problem_of,
    time_limit,
    with_recomputation,
)
from deepspeed_partition.planner.planning.solving import decides_per_micro_batch, solve
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH, checked_mode
from deepspeed_partition.planner.solvers.interface import Problem, Solver
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.units import shown
from deepspeed_partition.planner.weight_versions import FLUSH, VERTICAL_SYNC
from deepspeed_partition.planner.weight_versions import checked_mode as checked_weight_versions
from deepspeed_partition.schedule.shared_ports import comparable_step_seconds


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
    is_one_of_many: bool = False,
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
        is_one_of_many: whether others are planned as well, so that where nothing fits nobody asks what would help:
            the error then comes sooner, and says less.

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
    flush_sizes = checked_flushes(
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

    def plan_for(split: Split, limit_seconds: float, is_one_of_several: bool) -> Plan:
        problem = problem_for(chain, split.platform, split, limit_seconds, deadline)
        problem = replace(problem, is_one_of_many=is_one_of_many or is_one_of_several)
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
                solve,
            )
        if not isinstance(solver, PaperMadPipe):
            problem = replace(
                problem, per_micro_batch=decides_per_micro_batch(problem, solver, recompute, period_seconds)
            )
        if problem.versions is not None and problem.versions.mode == VERTICAL_SYNC:
            return solve_in_sync(problem, solver)
        return solve(problem, solver) if period_seconds is None else solve_at(problem, solver, period_seconds)

    plans = _plans_of(splits, plan_for, Deadline(time_limit(time_limit_seconds), within=deadline))
    in_deepspeed = num_stages is not None or every_stage_trains

    seconds = [seconds_of(plan, in_deepspeed=in_deepspeed) for plan in plans]
    if not in_deepspeed and len(plans) > 1:
        where_shared = comparable_step_seconds(plans)
        seconds = [each or planned for each, planned in zip(where_shared, seconds, strict=True)]

    def memory_and_time(index: int) -> tuple[float, float]:
        wanted = 0 if period_seconds is None else max(plans[index].peak_memory_bytes)
        return wanted, seconds[index]

    best = plans[min(reversed(range(len(plans))), key=memory_and_time)]
    if best.is_asynchronous and num_micro_batches is not None:
        flush = problem_of(chain, best.platform, best.micro_batches_per_update, deadline=deadline)
        flush = replace(flush, num_pipelines=best.data_parallel)
        best = replace(best, flush_step_seconds=flush_step_seconds(flush, best))
    return replace(best, planning_seconds=time.perf_counter() - started)


def check_split(
    split_backward: object,
    chain: Chain,
    period_seconds: float | None = None,
    in_deepspeed: object = False,
) -> None:
    """Refuse halves of backwards where nothing is known of them, or where no such plan is known."""
    if not isinstance(split_backward, bool):
        raise ValueError(f"split_backward is {shown(split_backward)}: it must be True or False")
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
            raise not_on_machines(what)


def not_on_machines(what: str) -> ValueError:
    """Return the refusal of an option on devices or links that are not alike."""
    return ValueError(
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
