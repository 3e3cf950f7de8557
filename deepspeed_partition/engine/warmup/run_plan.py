"""The plan of a run: measured where the layers are, made on rank 0, the same on every rank.

Here, in ``warm_up.py`` and in ``stage_profiler.py`` the engine knows the profiler; they are imported where a plan
is to be made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import deepspeed
import torch

from deepspeed_partition.engine.pipeline.plan_engine import LossCost
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.collectives import (
    from_rank_0,
    gather_objects,
    portable,
    raised_together,
    receive_object,
    send_object,
)
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.first_failure import raised_by_all
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.engine.warmup.plan_files import save_plan
from deepspeed_partition.engine.warmup.run_platform import device_memory_bytes, header_bytes, training_bytes
from deepspeed_partition.engine.warmup.stage_profiler import Measuring, TrialReport, links_of
from deepspeed_partition.engine.warmup.training_needs import TrainingNeeds, training_needs, with_training_needs
from deepspeed_partition.options import Options
from deepspeed_partition.planner.buffers import with_more_buffers
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.memory import stage_memory
from deepspeed_partition.planner.operation_costs import operation_seconds_of
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan
from deepspeed_partition.planner.planning.problems import DEFAULT_TIME_LIMIT_SECONDS
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH
from deepspeed_partition.planner.remedies import with_remedies
from deepspeed_partition.planner.renumbering import renumbered
from deepspeed_partition.planner.simulate.replay import replay
from deepspeed_partition.planner.units import format_bytes, format_seconds
from deepspeed_partition.planner.warm_up_report import LinkUse, TrialRun
from deepspeed_partition.planner.weight_versions import FLUSH
from deepspeed_partition.profiling import Link, OperationCost, measure_links, measure_operations, measure_stage
from deepspeed_partition.profiling.boundaries import Boundary, bytes_of, describe, to_device
from deepspeed_partition.profiling.layers import measured_chain, num_samples
from deepspeed_partition.profiling.measure import MeasuredLayer
from deepspeed_partition.schedule.instructions import Compute
from deepspeed_partition.schedule.shared_ports import comparable_step_seconds

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

MIN_GAIN = 0.02
"""The share of a step that a plan must gain, once the run has made steps: for less no layer moves."""
SAID_SHARE, SAID_BYTES = 0.001, 2**16
"""How much more than planned a rank may have held in the warm-up before a line says so."""
NOTICED_SHARE = 0.01
"""The share of a device's memory from which on it is more than a detail, and said without being asked."""
BADLY_KNOWN_SHARE = 0.2
"""The part of all layers' seconds from which on it is said that they were measured with a wide spread."""
FASTEST = ("madpipe", "contiguous")
"""Algorithms that are asked for because they are fast; another one is asked for by name, whatever it takes."""
BUFFERS = 2
"""Tensors at each end of a boundary with which a plan is searched: an activation and a gradient."""
ANY_BANDWIDTH = 1e9
"""The bandwidth, in bytes per second, of the link that a pipeline of one stage does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What one rank of a pipeline found out about its layers and its device."""

    layers: list[MeasuredLayer]
    input_bytes: int
    micro_batch_size: int | None
    memory_bytes: int
    training_bytes: int
    weight_bytes: int
    workspace_bytes: int
    """What products of matrices take for themselves."""
    trial: TrialReport | None
    """What the rank saw in the warm-up, besides its layers; None where there was none."""
    error: Exception | None = None
    loss_cost: LossCost | None = None
    """What the loss of a batch costs, on the last stage, where it was tried."""
    needs: TrainingNeeds | None = None
    """What training needs for the weights; None where the rank trains nothing."""


def measure_and_plan(engine: MadPipeEngine, measuring: Measuring | None = None) -> tuple[Plan, Chain]:
    """Plan, from what was measured in a warm-up or on the next micro-batch. Collective over the whole job.

    The first pipeline measures. Where its ranks have not measured all layers in training, they do so one stage
    after the other, so that each is measured by itself and hands its output on; the micro-batch stays in the data
    iterator. Once the run has made steps, the plan is that of the present cut unless another one gains
    ``MIN_GAIN``.

    Args:
        measuring: what the ranks measured in training. Where only times are known, the micro-batch tells what
            layers keep.

    Raises:
        InfeasibleError: no plan fits in memory; on every rank.
        Exception: whatever a layer, the data iterator or the planner raised on some rank; on every rank.
    """
    if measuring is not None and measuring.clock.num_steps == 0:
        measuring = None
    memory_bytes = device_memory_bytes(engine)
    reports: list[StageReport] = []
    uses: tuple[LinkUse, ...] = ()
    link: Link | None = None
    operations = OperationCost()
    splits_backward = _splits_backward(engine)
    mine = raised_together(
        lambda: _measured_here(engine, memory_bytes, measuring, splits_backward=splits_backward)
    )
    if engine.grid.data_parallel_id == 0 and measuring is not None and not splits_backward:
        reports = _measured(engine, mine, measuring) or []
    if any(gather_objects(engine.grid.data_parallel_id == 0 and not reports)):
        _peek(engine)
    with preserved_random_state():  # the micro-batch that was taken stays; what else draws, trains nothing
        if engine.grid.data_parallel_id == 0:
            reports = reports or _measure(engine, memory_bytes, measuring, splits_backward=splits_backward)
            trials = [report.trial for report in reports if report.trial is not None]
            uses = links_of([trial.parts for trial in trials], range(len(trials)))
            if not any(report.error for report in reports):
                link = _measure_link(engine, uses)
                operations = _measure_operations(engine)
        limit = engine.options.time_limit_seconds or DEFAULT_TIME_LIMIT_SECONDS
        announce(
            f"rank 0 plans, for {format_seconds(limit)} of its processor at the most, and the other ranks wait",
            logging.DEBUG,
        )
        return from_rank_0(lambda: _plan(engine, reports, uses, link, operations))


def _peek(engine: MadPipeEngine) -> None:
    """Let all ranks that read data, those of other replicas too, take a micro-batch out of it, which stays in it.

    At once, and before anything is sent: an iterator may communicate between them.

    Raises:
        StopIteration: an iterator has ended; on every rank.
        Exception: what an iterator raised; on every rank.
    """
    has_ended = False

    def peek() -> None:
        nonlocal has_ended
        try:
            engine.peek_data()
        except StopIteration:
            has_ended = True

    raised_together(peek)
    if any(gather_objects(has_ended)):
        raise raised_by_all(engine.data_ended())


def plan_for_flushes(engine: MadPipeEngine) -> Plan:
    """A plan for ``engine.flushes`` from the measurements of the plan that runs. Collective over the whole job.

    The loss of a micro-batch is in them, besides what the loss of a batch takes: memory is counted rather too
    high.

    Raises:
        InfeasibleError: no plan fits in memory; on every rank.
    """
    present, measured, flushes = engine.plan, engine.chain, engine.flushes
    assert present is not None and measured is not None and flushes is not None
    cost = engine.loss_cost and replace(engine.loss_cost, forward_seconds=0.0, backward_seconds=0.0)

    def plan() -> Plan:
        chain, recompute = _with_loss_of_batch(measured, cost, max(flushes)), _recompute(engine)

        def plan_on(platform: Platform) -> Plan:
            return make_plan(
                chain,
                platform,
                engine.options.algorithm,
                num_micro_batches=sum(flushes),
                flushes=flushes,
                every_device_trains=True,
                time_limit_seconds=engine.options.time_limit_seconds,
                recompute=recompute,
            )

        _splits_backward(engine)  # says that nothing is split
        platform = replace(present.platform, comm_buffers=BUFFERS)
        made = with_more_buffers(on_hosts(plan_on, platform, chain), chain, recompute=recompute)
        announce(made.headline())
        announce(made.summary(), logging.DEBUG)
        save_plan(engine, made, chain)
        return made

    return from_rank_0(plan)


def _recompute(engine: MadPipeEngine) -> str:
    """Return what a plan of this run may recompute: what the options say, where that can run here.

    Raises:
        ValueError: the user asks for recomputation by name, and it cannot run.
    """
    mode, why = engine.options.recompute, None
    if engine.module.activation_checkpoint_interval:
        why = "activation_checkpoint_interval is set, which recomputes layers itself"
    elif engine.device.type == "cpu" and deepspeed.__version__.startswith("0.19.0"):
        why = "DeepSpeed 0.19.0 cannot recompute on a CPU"
    if why is None and mode == PER_MICRO_BATCH and engine.flushes is not None:
        announce("the loss is that of a whole batch: recomputation is planned by block, and not by micro-batch")
        return "block"
    if why is None or mode == "never":
        return mode
    if mode != "auto":
        raise ValueError(f"madpipe option 'recompute' is {mode!r}, and {why}: leave one of the two out")
    if engine.module.activation_checkpoint_interval:
        announce(f"the plan recomputes nothing: {why}")
    return "never"


def _splits_backward(engine: MadPipeEngine) -> bool:
    """Return whether a plan of this run may have backwards in two halves: what the options say, if that runs.

    Raises:
        ValueError: the user asks for it, and it cannot run.
    """
    if not engine.options.split_backward:
        return False
    why = None
    if not engine.runs_lists:
        why = "DeepSpeed's own schedule runs here, with whole backwards"
    elif not engine.divides_backwards:
        why = f"torch {torch.__version__} or DeepSpeed {deepspeed.__version__} is too old for it"
    elif engine.module.activation_checkpoint_interval:
        why = "activation_checkpoint_interval is set, whose layers run again within a backward"
    if why is not None:
        raise ValueError(f"madpipe option 'split_backward' is true, and {why}: leave one of the two out")
    if engine.flushes is not None:
        announce("the loss is that of a whole batch: backwards are planned as one operation each")
        return False
    return True


def _weight_versions(engine: MadPipeEngine) -> str:
    """Return what becomes of the weights in a plan of this run: what the options say, if that runs.

    Raises:
        ValueError: the user asks for a pipeline that never drains, and it cannot run.
    """
    mode, why = engine.options.weight_versions or FLUSH, None
    if mode == FLUSH:
        return mode
    if not engine.runs_lists:
        why = "DeepSpeed's own schedule runs here, which drains at every step"
    elif engine.flushes is not None:
        why = "the loss is that of a whole batch, so every forward of a batch comes before its first backward"
    if why is not None:
        raise ValueError(f"madpipe option 'weight_versions' is {mode!r}, and {why}: leave weight_versions out")
    return mode


def _measured_here(
    engine: MadPipeEngine, memory_bytes: int, measuring: Measuring | None, *, splits_backward: bool
) -> StageReport | None:
    """The report of what this rank measured in training; None where it did not, or of not all of its layers."""
    if measuring is None or engine.grid.data_parallel_id != 0:
        return None
    if splits_backward:
        announce("a micro-batch runs through all layers one by one, to measure the halves of their backwards")
        return None
    layers = measuring.layers()
    if layers is None:
        return None
    first = measuring.first_input
    num_bytes, num_samples = sum(first.input_tensor_bytes), first.num_samples
    return _report(engine, memory_bytes, measuring, layers, num_bytes, num_samples)


def _measured(engine: MadPipeEngine, report: StageReport | None, measuring: Measuring) -> list[StageReport] | None:
    """Gather the reports of all stages of this pipeline on each of its ranks; None where one lacks something."""
    reports = gather_objects((report, measuring.why_no_bytes), engine.grid.get_pipe_parallel_group())
    complete = [report for report, _ in reports if report is not None]
    if len(complete) == len(reports):
        return complete
    reason = next(
        (why for report, why in reports if report is None and why), "some layer did not run, or not on tensors"
    )
    announce(f"not all layers were measured in training ({reason}): a micro-batch runs through them one by one")
    return None


def _report(
    engine: MadPipeEngine,
    memory_bytes: int,
    measuring: Measuring | None,
    layers: list[MeasuredLayer],
    input_bytes: int,
    micro_batch_size: int | None,
    error: Exception | None = None,
) -> StageReport:
    training, weights = training_bytes(engine)
    return StageReport(
        layers=layers,
        input_bytes=input_bytes,
        micro_batch_size=micro_batch_size,
        memory_bytes=memory_bytes,
        training_bytes=training,
        weight_bytes=weights,
        workspace_bytes=accelerator.workspace_bytes(),
        trial=None if measuring is None else measuring.report(),
        error=error,
        loss_cost=engine.loss_cost,
        needs=training_needs(engine),
    )


def _measure(
    engine: MadPipeEngine, memory_bytes: int, measuring: Measuring | None, *, splits_backward: bool
) -> list[StageReport]:
    """Measure one more micro-batch: return the reports of all stages of this pipeline, on each of its ranks."""
    grid = engine.grid
    stage = grid.get_stage_id()
    inputs: Any = None
    error: Exception | None = None
    if not engine.is_first_stage():
        inputs, error = receive_object(grid.stage_to_global(stage_id=stage - 1))
    layers: list[MeasuredLayer] = []
    outputs = None
    times = {} if measuring is None else measuring.clock.times()
    only_sizes: dict[str, Any] = {"warm_up": 1, "repeats": 3 if splits_backward else 1} if times else {}
    if error is None:
        try:
            loaded, labels = engine.peek_micro_batch()
            inputs = loaded if engine.is_first_stage() else to_device(inputs, engine.device)
            layers, outputs = measure_stage(
                engine.module.forward_funcs,
                inputs,
                labels,
                engine.module.loss_fn if engine.is_last_stage() else None,
                device=engine.device,
                first_stage=engine.is_first_stage(),
                first_index=engine.module._local_start,
                autocast_dtype=engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None,
                halves=splits_backward,
                **only_sizes,
            )
            layers = [
                replace(layer, forward=found.forward, backward=found.backward)
                if (found := times.get(engine.module._local_start + place)) is not None
                else layer
                for place, layer in enumerate(layers)
            ]
            if engine.is_last_stage() and engine.module.loss_fn is None:
                _check_loss(outputs)
        except Exception as raised:  # every rank must hear of it: those that wait would wait for ever
            error = portable(raised)
    if not engine.is_last_stage():
        handed_on = None if outputs is None else to_device(outputs, torch.device("cpu"))
        send_object((handed_on, error), grid.stage_to_global(stage_id=stage + 1))
    num_bytes, batch_size = (0, None) if error else (bytes_of(inputs), num_samples(inputs))
    report = _report(engine, memory_bytes, measuring, layers, num_bytes, batch_size, error)
    return gather_objects(report, grid.get_pipe_parallel_group())


def _check_loss(outputs: Boundary) -> None:
    """Refuse outputs that are no loss: without a ``loss_fn`` DeepSpeed takes the last layer's output for it."""
    if not isinstance(outputs, torch.Tensor) or outputs.numel() != 1:
        raise ValueError(
            f"the pipeline module has no loss_fn and its last layer returns {describe(outputs)}: give it one, "
            "or let the last layer return the loss, a tensor of one number"
        )


def _measure_link(engine: MadPipeEngine, uses: tuple[LinkUse, ...]) -> Link | None:
    """Bandwidth and latency between the stages, where options and training leave one of them open."""
    bandwidth = engine.options.bandwidth or (
        all(use.bandwidth for use in uses) and len(uses) + 1 == engine.num_stages
    )
    if engine.num_stages == 1 or (bandwidth and engine.options.latency_seconds is not None):
        return None
    return measure_links(engine.grid.get_pipe_parallel_group(), engine.device)


def _measure_operations(engine: MadPipeEngine) -> OperationCost:
    """What the engine takes for an operation of a stage: what options say, else measured."""
    seconds, bandwidth = engine.options.operation_seconds, engine.options.copy_bandwidth
    if seconds is not None and bandwidth is not None:
        return OperationCost(operation_seconds=seconds, copy_bandwidth=bandwidth)
    measured = measure_operations(engine.grid.get_pipe_parallel_group(), engine.device)
    return OperationCost(
        operation_seconds=measured.operation_seconds if seconds is None else seconds,
        copy_bandwidth=measured.copy_bandwidth if bandwidth is None else bandwidth,
    )


def _plan(
    engine: MadPipeEngine,
    reports: list[StageReport],
    uses: tuple[LinkUse, ...],
    link: Link | None,
    operations: OperationCost,
) -> tuple[Plan, Chain]:
    """Make the plan from the reports of the pipeline, on rank 0."""
    for report in reports:
        if report.error is not None:
            raise report.error
    options = engine.options
    chain = measured_chain(
        [layer for report in reports for layer in report.layers],
        name=getattr(engine.module, "model_name", type(engine.module).__name__),
        input_bytes=reports[0].input_bytes,
        micro_batch_size=reports[0].micro_batch_size,
        device=engine.device,
        warn=lambda sentence: announce(sentence, logging.WARNING),
        least_share=BADLY_KNOWN_SHARE,
        in_a_run=True,
    )
    needs = [report.needs for report in reports if report.needs is not None]
    if needs and options.weight_copies is None:
        measured = [layer for report in reports for layer in report.layers]
        chain = with_training_needs(chain, measured, needs, engine.module._layer_specs)
    if engine.flushes is not None:
        chain = _with_loss_of_batch(chain, reports[-1].loss_cost, max(engine.flushes))
    platform = replace(
        _platform(options, reports, uses, link),
        operation_seconds=operations.operation_seconds,
        copy_bandwidth=operations.copy_bandwidth,
    )
    trials = [report.trial for report in reports if report.trial is not None]
    if trials:
        trial_run = _trial_run(engine, chain, platform, trials, uses)
        chain = replace(chain, warm_up=trial_run)
        _tell(trial_run)
        platform = _corrected(platform, trial_run)
        if options.operation_seconds is None:
            platform = _with_operations_of(trial_run, engine, chain, platform)
    deadline = Deadline()
    how: dict[str, Any] = {
        "num_micro_batches": engine.micro_batches,
        "flushes": engine.flushes,
        # DeepSpeed's own schedule has one stage per rank.
        "num_stages": None if engine.runs_lists else engine.num_stages,
        "every_stage_trains": not engine.runs_lists,
        "every_device_trains": engine.runs_lists,
        "recompute": _recompute(engine),
        "split_backward": _splits_backward(engine) and _has_halves(chain),
        "weight_versions": _weight_versions(engine),
    }
    seconds = options.time_limit_seconds

    def make(platform: Platform, algorithm: str | Sequence[int]) -> Plan:
        return make_plan(chain, platform, algorithm, deadline=deadline, time_limit_seconds=seconds, **how)

    def roomier(plan: Plan) -> Plan:
        recompute, split_backward = how["recompute"], how["split_backward"]
        return with_more_buffers(plan, chain, recompute=recompute, split_backward=split_backward)

    try:
        plan = on_hosts(lambda platform: make(platform, options.algorithm), platform, chain)
    except InfeasibleError as error:
        if engine.flushes is not None:  # a smaller micro-batch changes them, too
            raise
        raise with_remedies(
            error, make_plan, chain, platform, deadline, seconds, algorithm=options.algorithm, **how
        ) from None
    gain = ""
    idle = _idle_stage(chain, engine.module.parts)
    if engine.global_steps and options.algorithm in FASTEST and engine.runs_lists and idle is not None:
        announce(
            f"stage {idle} of the present cut {list(engine.module.parts)} has nothing to train now, because its "
            "layers have been frozen since: the plan gives every rank some"
        )
    elif engine.global_steps and options.algorithm in FASTEST and engine.runs_lists:
        platform = replace(plan.platform, comm_buffers=BUFFERS)
        plan, gain = _unless_present_is_as_good(
            roomier(plan), lambda: roomier(make(platform, engine.module.parts))
        )
    plan = roomier(plan) if engine.runs_lists else plan
    announce(plan.headline() + gain)
    announce(plan.summary(), logging.DEBUG)
    if deadline.starved:
        announce(
            "rank 0 had less than a thirtieth of a processor to plan with, so its search was cut short: a plan "
            "that an idle machine makes may be better (option plan)",
            logging.WARNING,
        )
    if plan.algorithm == "madpipe" and not engine.runs_lists:
        announce("each rank runs one stage: this is the best plan of those that are contiguous")
    save_plan(engine, plan, chain)
    return plan, chain


def _has_halves(chain: Chain) -> bool:
    """Return whether a backward of the chain can be divided; say so where none can."""
    found = any(layer.backward_input_seconds is not None for layer in chain.layers)
    if not found:
        announce("no backward is planned in two halves: that of no layer can be divided", logging.WARNING)
    return found


def _with_loss_of_batch(chain: Chain, cost: LossCost | None, num_micro_batches: int) -> Chain:
    """``chain`` whose last layer has its share of what is computed once on all outputs of a batch.

    All micro-batches are in flight on the last stage when that runs, so that its bytes are there in full.
    """
    if cost is None:
        return chain
    *layers, last = chain.layers
    share = -(-cost.peak_bytes // num_micro_batches)
    more = cost.backward_seconds / num_micro_batches
    first_half = last.backward_input_seconds
    last = replace(
        last,
        forward_seconds=last.forward_seconds + cost.forward_seconds / num_micro_batches,
        backward_seconds=last.backward_seconds + more,
        backward_input_seconds=None if first_half is None else first_half + more,
        stash_bytes=(last.stash_bytes or 0) + share,
        running_bytes=None if last.running_bytes is None else last.running_bytes + share,
    )
    return replace(chain, layers=(*layers, last))


def _idle_stage(chain: Chain, boundaries: Sequence[int]) -> int | None:
    """The first stage whose layers are all frozen."""
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        if not any(layer.num_trainable_parameters for layer in chain.layers[start:stop]):
            return stage
    return None


def _unless_present_is_as_good(plan: Plan, make_present: Callable[[], Plan]) -> tuple[Plan, str]:
    """``plan``, or one for the cut that the run has, where layers would move for less than ``MIN_GAIN``.

    Returns:
        The plan, and what to add to its headline.
    """
    try:
        present = make_present()
    except InfeasibleError as error:
        announce(f"the present cut does not fit in memory, the plan does: {error}")
        return plan, ""
    planned, now = (
        seconds or each.update_seconds
        for seconds, each in zip(comparable_step_seconds((plan, present)), (plan, present), strict=True)
    )
    assert planned is not None and now is not None, "both are for a step, or for an update"
    gain = 1 - planned / now
    took = f"{format_seconds(now)} per step at the present cut {present.boundaries}"
    if gain >= MIN_GAIN:
        announce(f"the plan takes {format_seconds(planned)} instead of {took}: {gain:.0%} less", logging.DEBUG)
        return plan, f"; {gain:.0%} less than now"
    announce(
        f"no layer moves: the best plan found would take {gain:.1%} less than {took}, and {MIN_GAIN:.0%} is "
        "the least that a move is made for"
    )
    return present, ""


def _trial_run(
    engine: MadPipeEngine, chain: Chain, platform: Platform, trials: list[TrialReport], uses: tuple[LinkUse, ...]
) -> TrialRun:
    """The warm-up in figures, with what the planner would have said of the trial cut."""
    cuts = engine.module.parts
    planned = [
        stage_memory(chain, platform, cuts[rank], cuts[rank + 1], trial.num_in_flight).total
        for rank, trial in enumerate(trials)
    ]
    return TrialRun(
        boundaries=tuple(cuts),
        num_steps=min(trial.num_steps for trial in trials),
        optimizer_seconds=tuple(trial.optimizer_seconds for trial in trials),
        peak_bytes=tuple(trial.peak_bytes for trial in trials),
        planned_peak_bytes=tuple(planned),
        step_seconds=trials[0].pipeline_seconds,
        links=uses,
    )


def _tell(run: TrialRun) -> None:
    in_steps = [seconds for seconds in run.optimizer_seconds if seconds is not None]
    if in_steps:
        announce(
            f"the warm-up timed the layers in training; an optimizer step took {format_seconds(max(in_steps))}, "
            "which comes on top of a planned step",
            logging.DEBUG,
        )
    peaks = [peak for peak in run.peak_bytes if peak is not None]
    if len(peaks) == len(run.peak_bytes):
        held, counted = (", ".join(map(format_bytes, each)) for each in (peaks, run.planned_peak_bytes))
        shares = zip(run.planned_peak_bytes, peaks, strict=True)
        off = ", ".join(f"{planned / max(peak, 1) - 1:+.1%}" for planned, peak in shares)
        announce(
            f"on the trial cut the ranks held at most {held}; the planner counts {counted} for it, "
            f"which is off by {off}",
            logging.DEBUG,
        )
    bandwidths = [use.bandwidth for use in run.links if use.bandwidth is not None]
    if bandwidths:
        announce(f"in training the slowest link moved {format_bytes(min(bandwidths))} per second", logging.DEBUG)


def _corrected(platform: Platform, run: TrialRun) -> Platform:
    """Return the platform with what the planner counted too little on the trial cut added to ``fixed_bytes``.

    The most of any rank counts: its layers may come to any other. A little is added without a word.
    """
    missing = [
        0 if peak is None else peak - planned
        for peak, planned in zip(run.peak_bytes, run.planned_peak_bytes, strict=True)
    ]
    most = max(missing, default=0)
    if most <= 0:
        return platform
    rank = missing.index(most)
    if most > max(SAID_BYTES, SAID_SHARE * run.planned_peak_bytes[rank]):
        announce(
            f"rank {rank} held {format_bytes(most)} more than the planner counts, so that much is "
            "added to what each device is planned to hold (fixed_bytes of the plan's platform)",
            logging.INFO if most > NOTICED_SHARE * platform.memory_bytes else logging.DEBUG,
        )
    return replace(platform, fixed_bytes=platform.fixed_bytes + most)


def _with_operations_of(run: TrialRun, engine: MadPipeEngine, chain: Chain, platform: Platform) -> Platform:
    """Return the platform with the seconds of an operation that a step of the warm-up tells."""
    if run.step_seconds is None:
        return platform
    lists = engine.program(engine.micro_batches, trains=True).lists
    orders = [
        tuple((f"{each.kind}{each.stage}", each.micro_batch) for each in mine if isinstance(each, Compute))
        for mine in lists
    ]
    seconds = operation_seconds_of(chain, platform, run.boundaries, orders, run.step_seconds, engine.flushes)
    if seconds > platform.operation_seconds:
        announce(
            f"a step of the warm-up took {format_seconds(run.step_seconds)}, so that a plan counts "
            f"{format_seconds(seconds)} for each forward and backward of a stage beside its layers "
            "(operation_seconds of the plan's platform)",
            logging.DEBUG,
        )
    return replace(platform, operation_seconds=seconds)


def on_hosts(plan_on: Callable[[Platform], Plan], platform: Platform, chain: Chain) -> Plan:
    """Return a plan for a platform, on the ranks to which scripts give data.

    Which devices share a host changes with their numbers. Where the plan does not run so, it is made without
    ports, which is said.
    """
    plan = on_ranks_with_data(plan_on(platform))
    if platform.devices_per_port == 1 or not replay(plan, chain).violations:
        return plan
    announce(
        "the plan does not count that links of one host share its port: it has several stages on a device, and "
        "data comes to other hosts than the plan's"
    )
    return on_ranks_with_data(plan_on(replace(platform, port_bandwidth=None, devices_per_port=1)))


def on_ranks_with_data(plan: Plan) -> Plan:
    """Return the plan with its first stage on the first rank, and its last one there or on the last rank.

    Scripts give data to these two; devices are alike.
    """
    devices = list(dict.fromkeys(stage.device for stage in plan.stages))
    last = plan.stages[-1].device
    if last != devices[0]:
        devices.remove(last)
        devices.append(last)
    devices += [device for device in range(plan.platform.num_devices) if device not in devices]
    return plan if devices == sorted(devices) else renumbered(plan, devices)


def _platform(
    options: Options, reports: list[StageReport], uses: tuple[LinkUse, ...], link: Link | None
) -> Platform:
    """The options where they say something, else what was measured: of bandwidths the least."""
    measured = [use.bandwidth for use in uses if use.bandwidth is not None]
    if link is not None and len(measured) + 1 < len(reports):  # of some link training does not tell
        measured.append(link.bandwidth)
    link = link or Link(bandwidth=ANY_BANDWIDTH, latency_seconds=0.0)
    kept = sum(report.training_bytes for report in reports)
    weights = sum(report.weight_bytes for report in reports)
    latency = options.latency_seconds
    needs = [report.needs for report in reports if report.needs is not None]
    return Platform(
        num_devices=len(reports),
        memory_bytes=options.memory or min(report.memory_bytes for report in reports),
        bandwidth=options.bandwidth or min(measured, default=ANY_BANDWIDTH),
        latency_seconds=link.latency_seconds if latency is None else latency,
        # Where the pipeline never drains, two versions of the weights are among them.
        weight_copies=options.weight_copies or kept / weights + (options.weight_versions not in (None, FLUSH)),
        optimizer_step="sum" if any(each.at_once for each in needs) else "largest",
        fixed_bytes=(header_bytes() if needs and options.weight_copies is None else 0)
        + max(report.workspace_bytes for report in reports),
        duplex=options.duplex or link.duplex,
        port_bandwidth=options.port_bandwidth or link.port_bandwidth,
        devices_per_port=_devices_per_port(options, link),
    )


def _devices_per_port(options: Options, link: Link) -> int:
    """Return the option where it is given, else what was measured with the ports; 1 where there are none."""
    if options.devices_per_port is not None:
        return options.devices_per_port
    return 1 if link.port_bandwidth is None else link.devices_per_port
