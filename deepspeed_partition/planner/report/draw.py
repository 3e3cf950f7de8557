"""Plans as text: tables of stages, of layers, of comparisons and frontiers, and what a plan promises."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from deepspeed_partition.planner.data_parallel import bytes_sent_without_pipeline, seconds_of
from deepspeed_partition.planner.machines import Machines, pipelines_of
from deepspeed_partition.planner.plan import Plan, PlannedStage, StepPlan
from deepspeed_partition.planner.problem import Chain, LayerProfile, Platform
from deepspeed_partition.planner.report.planned_run import (
    bottleneck_words,
    busy,
    memory_words,
    repeats_pattern,
)
from deepspeed_partition.planner.report.terminal import WIDTH, as_text, sentences
from deepspeed_partition.planner.solvers.contiguous.replicated import MOST_REPLICAS, REPLICATED, ReplicatedStage
from deepspeed_partition.planner.units import counted, format_bytes, format_seconds, printable

if TYPE_CHECKING:  # these modules draw plans themselves
    from deepspeed_partition.planner.cluster.scheme_choice import SchemeRanking
    from deepspeed_partition.planner.replication import Replicated
    from deepspeed_partition.planner.report.comparison import Comparison, Contender
    from deepspeed_partition.planner.report.frontier import Frontier

_PERIOD_COLUMNS = ("period", "gap", "x best", "proved", "sent", "memory")
_STEP_COLUMNS = ("step", "gap", "x best", "proved", "period", "sent", "memory")
_BELOW_STEPS = ("sent",)
"""Columns of steps that a narrow terminal has below the table."""
REPLICATED_ROW = "replicated*"


def summary(plan: Plan, width: int = WIDTH, *, colour: bool = False, shared_seconds: float | None = None) -> str:
    """Return the tables of a plan's stages and devices, and what it promises, as text.

    Where the names of layers do not fit beside the figures, they stand in a list below: no name is broken.

    Args:
        shared_seconds: of the step where messages share ports; None where nobody knows it.
    """
    stages, names = stage_table(plan), ""
    short = stage_table(plan, with_names=False)
    if _natural_width(short) <= width < _natural_width(stages):
        stages = short
        pairs = [(f"stage {index}", _layer_names(stage)) for index, stage in enumerate(plan.stages)]
        names = "\n" + _below(((label, text) for label, text in pairs if text), width)
    devices = _table_text(device_table(plan), width, colour)
    return f"{_table_text(stages, width, colour)}{names}\n{devices}\n" + sentences(
        [*promises(plan), *shared_words(plan, shared_seconds), bottleneck_words(plan), memory_words(plan)], width
    )


def shared_words(plan: Plan, shared_seconds: float | None) -> Iterator[str]:
    """Yield what a step takes where messages share ports, if it is known and longer than planned."""
    if plan.step is not None and shared_seconds is not None and shared_seconds > plan.step.step_seconds * 1.001:
        yield (
            f"messages go through a port one after the other in this plan; where they share it, as connections of "
            f"a network do, a step takes {format_seconds(shared_seconds)}"
        )


def headline(plan: Plan) -> str:
    """Return one line for a log: the cut, its devices, its time with the bound, and the most memory."""
    time, bound, what = plan.period_seconds, plan.lower_bound_seconds, "period"
    if plan.step is not None:
        time, what = plan.step.step_seconds, "step"
        bound = plan.step.lower_bound_seconds or 0.0
    devices = "" if plan.is_contiguous else f" on devices {[stage.device for stage in plan.stages]}"
    at_least = f", lower bound {format_seconds(bound)}" if bound else ""
    return (
        f"the plan ({printable(plan.algorithm)}) cuts {plan.chain.num_layers} layers at {plan.boundaries}{devices}"
        f": a {what} of {format_seconds(time)}{at_least}, at most {format_bytes(max(plan.peak_memory_bytes))} of "
        f"{format_bytes(plan.platform.memory_bytes)}"
    )


def promises(plan: Plan) -> Iterator[str]:
    """Yield one line for each promise of a plan: its step, else its period, with the lower bound of just that.

    Of a step the bound of the period is not told: the order of a step may beat it, and the step is what the search
    makes short.
    """
    if plan.step is None:
        yield f"{printable(plan.algorithm)}: {_period_words(plan)}"
    else:
        blocking = plan.step.blocking_step_seconds
        in_deepspeed = "" if blocking is None else f"{format_seconds(blocking)} in DeepSpeed's engine, "
        number = counted(plan.step.num_micro_batches, "micro-batch")
        yield (
            f"{printable(plan.algorithm)}: step of {number}: "
            f"{in_deepspeed}{format_seconds(plan.step.step_seconds)} if transfers overlap, "
            f"{_step_proof(plan.step)}"
        )
        if repeats_pattern(plan):
            yield f"steady state of the step: period {format_seconds(plan.period_seconds)} per micro-batch"
    if plan.is_asynchronous:
        yield update_words(plan)
    if not plan.treats_all_alike:
        yield recomputed_words(plan)
    links = platform_words(plan.platform)
    if links:
        yield links
    if plan.data_parallel is not None:
        longest = format_seconds(max(plan.allreduce_seconds))
        yield (
            f"data parallel: {plan.data_parallel} such pipelines, all-reduce of a stage {longest} at most"
            + ("" if plan.step is None else ", included in the step")
            + (
                f"; sharing by ZeRO-1, each keeps {plan.platform.weight_copies:.4g} copies of its weights"
                if plan.zero_stage == 1
                else ""
            )
        )


def _period_words(plan: Plan) -> str:
    """Say how long a period is, and how near to the shortest one."""
    if not plan.proved:
        proof = "not proved"
        if any(stage.blocks for stage in plan.stages):
            proof += ": not all ways to recompute so many layers are compared"
    elif plan.proved_of == "memory":
        proof = f"memory proved least at this period: {plan.proved_class}"
    else:
        proof = f"period proved best: {plan.proved_class}"
    class_bound = plan.class_lower_bound_seconds
    if class_bound is not None and class_bound < plan.period_seconds:
        gap = plan.period_seconds / class_bound - 1
        proof += f", at most {gap:.1%} above the best with one special device"
    return (
        f"period {format_seconds(plan.period_seconds)} per micro-batch, "
        f"lower bound {format_seconds(plan.lower_bound_seconds)} (gap {plan.gap:.1%}, {proof})"
    )


def update_words(plan: Plan) -> str:
    """Return how long an update takes of a pipeline that never drains, and what a synchronous step would take."""
    seconds, number = plan.update_seconds or 0.0, plan.micro_batches_per_update
    words = (
        f"weight versions {plan.weight_versions}: the pipeline never drains, an update of {number} "
        f"micro-batch{'' if number == 1 else 'es'} every {format_seconds(seconds)}"
    )
    versions = plan.versions if plan.treats_all_alike else None
    if versions is not None:
        late = max(versions.delay(stage, 1000 * number) for stage in range(len(plan.stages)))
        words += f", with weights {counted(late, 'update')} old at the most"
    step = plan.flush_step_seconds
    if step is None:
        return words
    times = f"{step / seconds:.2f} times as long"
    return f"{words}; a synchronous step of the same allocation takes {format_seconds(step)}, {times}"


def recomputed_words(plan: Plan) -> str:
    """Return how many micro-batches each stage recomputes, of those of the step, else of those of the pattern."""
    if plan.step is not None:
        number, what = plan.step.num_micro_batches, "step"
        names = [name for order in plan.step.order for name, _ in order]
    else:
        number, what = plan.micro_batches_per_period, "pattern"
        names = [operation.operation for operation in plan.operations]
    counts = ", ".join(str(names.count(f"f{index}")) for index in range(len(plan.stages)))
    return f"of {number} micro-batches of a {what}, each stage recomputes: {counts}"


def platform_words(platform: Platform) -> str:
    """Return what transfers share beyond one link for each pair of devices, and what operations take beside their
    layers; empty where nothing is said of it.
    """
    words = [machines_words(platform.machines)] if platform.machines is not None else []
    words += ["both directions at once"] if platform.duplex == "full" else []
    if platform.port_bandwidth is not None:
        hosts = "each device" if platform.devices_per_port == 1 else f"{platform.devices_per_port} devices"
        words.append(f"a port of {format_bytes(platform.port_bandwidth)}/s for {hosts}, one transfer each way")
        if platform.comm_buffers > 2:  # what is reserved where nothing is asked for
            words.append(f"room for {platform.comm_buffers} tensors at each end of a boundary")
    beside = []
    if platform.operation_seconds:
        beside.append(f"{format_seconds(platform.operation_seconds)} for each operation")
    if platform.copy_bandwidth is not None:
        beside.append(f"messages copied at {format_bytes(platform.copy_bandwidth)}/s")
    lines = [f"links: {'; '.join(words)}"] if words else []
    if platform.pipelines:
        lines.append(_pipelines_words(platform))
    return "; ".join([*lines, *([f"beside the layers, in a step: {' and '.join(beside)}"] if beside else [])])


def schemes_text(ranking: SchemeRanking, width: int = WIDTH, *, colour: bool = False) -> str:
    """Return the table of all schemes, and below it the sentence that says why the best one is."""
    chain = ranking.chain
    per = "samples" if chain.micro_batch_size else "micro-batches"
    table = _table(
        f"{printable(chain.name)}: {counted(chain.num_layers, 'layer')}, "
        f"{ranking.num_micro_batches} micro-batches per step, on {devices_words(ranking.platforms[-1])}"
    )
    table.add_column("scheme", overflow="fold")
    several = len(ranking.platforms) > 1
    priced = any(choice.price_per_million is not None for choice in ranking.choices)
    names = ["devices"] if several else []
    names += ["step", f"{per}/s", "busy", "memory", "sent"] + ([f"price of 1e6 {per}"] if priced else [])
    _add_columns(table, *names)
    table.add_column("", overflow="fold")
    for choice in ranking.choices:
        rate = ranking.samples_per_second(choice)
        note = choice.reason if not choice.fits else "" if choice.runs else "estimate"
        table.add_row(
            choice.scheme,
            *([str(choice.num_devices)] if several else []),
            "-" if choice.step_seconds is None else format_seconds(choice.step_seconds),
            "-" if rate is None else f"{rate:.4g}",
            "-" if choice.busy is None else f"{choice.busy:.0%}",
            "-" if choice.memory_bytes is None else format_bytes(choice.memory_bytes),
            "-" if choice.bytes_sent is None else format_bytes(choice.bytes_sent),
            *(["-" if choice.price_per_million is None else f"{choice.price_per_million:.4g}"] if priced else []),
            note,
        )
    return _table_text(table, width, colour) + "\n" + sentences([ranking.why()], width)


def machines_words(machines: Machines) -> str:
    """Return the bandwidths of the levels, from the inside out."""
    return ", ".join(
        f"{format_bytes(level.bandwidth)}/s {'beyond' if index else 'everywhere'}"
        if level.group is None
        else f"{format_bytes(level.bandwidth)}/s in groups of {level.group}"
        for index, level in enumerate(machines.links)
    )


def devices_words(platform: Platform) -> str:
    """Return how many devices there are, with their memory; of machines all, whatever a pipeline has of them."""
    if platform.machines is None:
        return f"{counted(platform.num_devices, 'device')} of {format_bytes(platform.memory_bytes)}"
    return " and ".join(
        f"{group.count} {printable(group.name)} of {format_bytes(group.memory_bytes)}"
        + ("" if group.speed == 1 else f" at {group.speed:g} times the speed")
        for group in platform.machines.devices
    )


def _pipelines_words(platform: Platform) -> str:
    """Say on which devices the pipelines are, and what to do where ranks do not lie so by themselves."""
    told = " | ".join(" ".join(map(str, pipeline)) for pipeline in platform.pipelines)
    grid = next(pipelines_of(platform.num_devices * len(platform.pipelines), len(platform.pipelines)))
    if platform.pipelines == grid:
        return f"devices of the pipelines: {told}"
    ranks = [pipeline[place] for place in range(platform.num_devices) for pipeline in platform.pipelines]
    return f"devices of the pipelines: {told}; start ranks 0, 1, ... on devices {' '.join(map(str, ranks))}"


def _step_proof(step: StepPlan) -> str:
    """Say how near a step is to the shortest one."""
    if step.lower_bound_seconds is None or step.gap is None:
        return "the best found and not proved"
    proof = "proved shortest" if step.proved else "the best found and not proved"
    return f"lower bound {format_seconds(step.lower_bound_seconds)} (gap {step.gap:.1%}, {proof})"


def _table(title: str | None = None) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, show_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip


def _table_text(table: Table, width: int, colour: bool) -> str:
    """Return a table that fits into a terminal, but never without digits: a narrow terminal breaks its lines.

    Its title may be wider than the table.
    """
    title, table.title = str(table.title or ""), None
    whole = as_text([table], 10**5)
    if _letters(as_text([table], width)) != _letters(whole):
        width = max(map(len, whole.splitlines()))
    head = Text(sentences([title], width).rstrip(), "bold") if title else None
    text = as_text([table] if head is None else [head, table], width, colour=colour)
    table.title = title or None
    return text


def _letters(text: str) -> Counter[str]:
    """Count what is read of a table: rules and spaces are longer in a wider one."""
    return Counter(character for character in text if character not in " \n─")


def _natural_width(table: Table) -> int:
    """Return the columns that a table takes where nothing but its title is broken."""
    title, table.title = table.title, None
    columns = max(map(len, as_text([table], 10**5).splitlines()))
    table.title = title
    return columns


def _add_columns(table: Table, *names: str) -> None:
    """Add columns of figures, which are never cut and never broken."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))


def stage_table(plan: Plan, *, with_names: bool = True) -> Table:
    """Table with a row for each stage.

    Args:
        with_names: name the first and the last layer of each stage, too.
    """
    title = (
        f"{printable(plan.chain.name)}: {counted(plan.chain.num_layers, 'layer')} in "
        f"{counted(len(plan.stages), 'stage')} on {devices_words(plan.platform)}"
    )
    table = _table(title)
    head, *rows = stage_rows(plan, with_names=with_names)
    for name in head:
        if name in ("layers", "recomputed"):  # the columns that shrink
            table.add_column(name, overflow="fold", min_width=len(name))
        else:
            _add_columns(table, name)
    for row in rows:
        table.add_row(*row)
    return table


def stage_rows(plan: Plan, *, with_names: bool = True) -> list[list[str]]:
    """Return the names of the columns of a plan's stages, and the cells of each stage.

    Args:
        with_names: name the first and the last layer of each stage, too.
    """
    recomputes = any(stage.blocks for stage in plan.stages)
    versions = plan.versions if plan.treats_all_alike else None
    names = ["stage", "device", "forward", "backward", "in flight"]
    names += [*([] if versions is None else ["versions"]), "layers", *(["recomputed"] if recomputes else [])]
    rows = [names]
    durations: dict[str, float] = {}
    for operation in plan.operations:  # a backward that runs the forward again is longer than others of its stage
        shortest = durations.get(operation.operation, operation.duration_seconds)
        durations[operation.operation] = min(shortest, operation.duration_seconds)
    for index, stage in enumerate(plan.stages):
        halves = durations.get(f"I{index}", 0.0) + durations.get(f"W{index}", 0.0)
        rows.append([
            str(index),
            str(stage.device),
            format_seconds(durations.get(f"F{index}", durations.get(f"f{index}", 0.0))),
            format_seconds(durations.get(f"B{index}", halves)),
            str(stage.in_flight),
            *([] if versions is None else [str(versions.num_held(index))]),
            _layers(stage) if with_names else _layers(replace(stage, layer_names=())),
            *([_recomputed(stage)] if recomputes else []),
        ])  # fmt: skip
    return rows


def _recomputed(stage: PlannedStage) -> str:
    """Name the layers of a stage whose forward runs again."""
    if not stage.blocks:
        return "nothing"
    return "all" if stage.rematerialize is True else " ".join(f"{first}..{last}" for first, last in stage.blocks)


def device_table(plan: Plan) -> Table:
    """Table with a row for each device: how long it is busy, and what its peak of memory consists of."""
    table = _table(f"Devices, per {'period' if plan.step is None else 'step'}, and their memory at its peak")
    terms = ["weights", "stash", "buffers", "transient", *(["fixed"] if plan.platform.fixed_bytes else [])]
    signs = ["=", *["+"] * len(terms)]
    _add_columns(table, "device", "busy", "memory", *map(" ".join, zip(signs, terms, strict=False)))
    shares = {each.place: each.share for each in busy(plan)}
    for device, use in enumerate(plan.memory):
        table.add_row(
            str(device),
            f"{shares[f'device {device}']:.0%}",
            format_bytes(plan.peak_memory_bytes[device]),
            *(format_bytes(getattr(use, term)) for term in terms),
        )
    return table


def comparison_text(comparison: Comparison, width: int = WIDTH, *, colour: bool = False) -> str:
    """Return the table of a comparison, below it what did not fit beside the figures, and what the words mean."""
    several = comparison.platform.num_devices > 1
    table = comparison_table(comparison)
    refused = dict(_refusals(comparison))
    below = refused
    if _natural_width(table) > width:
        table = comparison_table(comparison, short=True)
        below = dict(_cuts(comparison, short=True)) | refused
    rest = "\n" + _below(below.items(), width) if below else ""
    notes = ["sent: in all, and as part of what plain data parallelism would send"]
    of_step = comparison.step_lower_bound_seconds
    steps = {each.algorithm: each.plan.step for each in comparison.fitting if each.plan is not None}
    contiguous = steps.get("contiguous")
    if of_step is not None and contiguous is not None and contiguous.lower_bound_seconds != of_step:
        notes.append(
            "gap: above the lower bound; that of contiguous is above the lower bound of contiguous partitions"
        )
    if several:
        notes.append("memory: of the device that needs most; --json has all")
    notes.append(f"* {REPLICATED}: no plan; layers x replicas, and PipeDream's own count of their period")
    title = _comparison_title(comparison)
    return (
        sentences([title], width)
        + "\n"
        + _table_text(table, width, colour)
        + rest
        + "\n"
        + sentences(notes, width)
    )


def _below(named: Iterable[tuple[str, str]], width: int) -> str:
    """Return a line for each name and what is to be said of it, broken between words."""
    pairs = list(named)
    label = max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, text in pairs:
        room = max(20, width - label - 2)
        if len(text) > room and " " not in text:
            text = text.replace(",", ", ")
        broken = textwrap.wrap(text, room, break_on_hyphens=False)
        lines += [f"{name:<{label}}  {broken[0]}", *(f"{'':<{label}}  {line}" for line in broken[1:])]
    return "\n".join(lines) + "\n"


def _comparison_title(comparison: Comparison) -> str:
    chain, platform = comparison.chain, comparison.platform
    on_devices = f"{printable(chain.name)}: {counted(chain.num_layers, 'layer')} on {devices_words(platform)}"
    return ", ".join(filter(None, (on_devices, _lower_bound(comparison))))


def _has_steps(comparison: Comparison) -> bool:
    return any(each.plan is not None and each.plan.step is not None for each in comparison.contenders)


def comparison_table(comparison: Comparison, *, short: bool = False) -> Table:
    """Table with a row for each algorithm; one that does not fit shows the memory with which it would.

    Args:
        short: leave out where each algorithm cuts the chain, and of steps what is of their period.
    """
    table = _table()
    table.add_column("algorithm", no_wrap=True)
    steps = _has_steps(comparison)
    names = _STEP_COLUMNS if steps else _PERIOD_COLUMNS
    shown = [name for name in names if not (short and steps and name in _BELOW_STEPS)]
    _add_columns(table, *shown)
    if not short:
        table.add_column("cut")
    cuts = dict(_cuts(comparison))
    for contender in comparison.contenders:
        name, plan = printable(contender.algorithm), contender.plan
        if plan is None:
            smallest = contender.smallest_memory_bytes
            cells = {"memory": "refused" if smallest is None else f"needs {format_bytes(smallest)}"}
        else:
            cells = _cells(comparison, contender, plan)
        table.add_row(name, *(cells.get(each, "-") for each in shown), *([] if short else [cuts[name]]))
    cells = _replicated_cells(comparison, steps=steps)
    row = [REPLICATED_ROW, *(cells.get(each, "-") for each in shown)]
    table.add_row(*row, *([] if short else [cuts[REPLICATED_ROW]]))
    return table


def _cuts(comparison: Comparison, *, short: bool = False) -> Iterator[tuple[str, str]]:
    """Yield for each algorithm where it cuts the chain.

    Args:
        short: say what the short table leaves out, too.
    """
    for contender in comparison.contenders:
        name, text = printable(contender.algorithm), "does not fit"
        if contender.plan is not None:
            text = allocation_text(contender.plan)
            if short and contender.plan.step is not None:
                cells = _cells(comparison, contender, contender.plan)
                text = "; ".join([text, *(f"{each} {cells[each]}" for each in _BELOW_STEPS)])
        elif contender.smallest_memory_bytes is None:
            text = "see below"
        yield name, text
    found = comparison.replicated
    on_devices = () if found is None else found.on_devices()
    yield REPLICATED_ROW, " ".join(f"{start}..{stop}x{count}" for start, stop, count in on_devices) or "see below"


def _refusals(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield for each algorithm that refuses the problem why it does."""
    for contender in comparison.contenders:
        if contender.plan is None and contender.smallest_memory_bytes is None:
            yield printable(contender.algorithm), printable(contender.reason or "")
    if comparison.replicated is None:
        yield REPLICATED_ROW, _why_not_replicated(comparison.platform)


def _why_not_replicated(platform: Platform) -> str:
    if not platform.is_alike:
        return "is for devices and links that are alike"
    if platform.num_devices > MOST_REPLICAS:
        return f"takes {MOST_REPLICAS} devices at most"
    if platform.latency_seconds:
        return "counts bytes alone, and the links have a latency"
    return "its time was up"


def _lower_bound(comparison: Comparison) -> str:
    """Say below what no period of any allocation can be, or no step where steps are compared; empty where steps of
    several pipelines have no bound in common.
    """
    if not _has_steps(comparison):
        return f"lower bound {format_seconds(comparison.lower_bound_seconds)}"
    of_step = comparison.step_lower_bound_seconds
    return "" if of_step is None else f"lower bound of the step {format_seconds(of_step)}"


def _cells(comparison: Comparison, contender: Contender, plan: Plan) -> dict[str, str]:
    """Cells of a row by their columns: of a step its own gap, and the period only where the step repeats it."""
    cells = {
        "period": format_seconds(plan.period_seconds),
        "gap": f"{plan.gap:.1%}",
        "x best": f"{comparison.ratio_to_best(contender):.3f}",
        "proved": "yes" if plan.proved else "no",
        "sent": _sent(comparison, contender),
        "memory": format_bytes(max(plan.peak_memory_bytes)),
    }
    if plan.step is not None:
        cells["step"] = format_seconds(contender.seconds)
        cells["gap"] = "-" if plan.step.gap is None else f"{plan.step.gap:.1%}"
        if not repeats_pattern(plan):
            del cells["period"]
        cells["proved"] = "yes" if plan.step.proved else "no"
    return cells


def _replicated_cells(comparison: Comparison, *, steps: bool) -> dict[str, str]:
    """Cells of PipeDream's own partitioner; its result is no plan, since its stages are replicated."""
    found = comparison.replicated
    if found is None:
        return {"memory": "refused"}
    period, most = found.pipeline.period_seconds, max(found.fewest_bytes)
    too_much = most > comparison.platform.memory_bytes
    cells = {
        "period": format_seconds(period),
        "memory": f"needs {format_bytes(most)}" if too_much else f"{format_bytes(most)} +",
    }
    if steps:
        return cells
    best = min((each.seconds for each in comparison.fitting), default=period)
    plain = bytes_sent_without_pipeline(comparison.chain, comparison.platform.num_devices, per_step=False)
    sent = _share(found.pipeline.bytes_per_micro_batch, plain)
    return cells | {"x best": f"{period / best:.3f}", "proved": "no", "sent": sent}


def replicated_table(found: Replicated) -> Table:
    """Table with a row for each stage, and for each stage within its replicas."""
    chain, pipeline = found.chain, found.pipeline
    devices = ", ".join(
        f"{level.num_workers} {name} at {format_bytes(level.bandwidth)}/s"
        for level, name in zip(found.levels, ("in a machine", "machines"), strict=False)
    )
    title = f"{REPLICATED}: {printable(chain.name)}, {chain.num_layers} layers, devices: {devices}"
    table = _table(title)
    table.add_column("stage", no_wrap=True)
    table.add_column("layers", overflow="fold")
    for name in ("replicas", "compute", "weights", "memory, one in flight"):
        table.add_column(name, justify="right", no_wrap=True)

    needs = iter(found.fewest_bytes)

    def add(stages: Iterable[ReplicatedStage], above: str) -> None:
        for number, stage in enumerate(stages):
            start, stop = stage.layers
            layers = chain.layers[start:stop]
            table.add_row(
                f"{above}{number}",
                f"{start}..{stop} {printable(layers[0].name)} .. {printable(layers[-1].name)}",
                str(stage.num_replicas),
                format_seconds(sum(layer.compute_seconds for layer in layers)),
                format_bytes(sum(layer.weight_bytes for layer in layers)),
                "" if stage.inside else format_bytes(next(needs)),
            )
            add(stage.inside, f"{above}{number}.")

    add(pipeline.stages, "")
    return table


def replicated_words(found: Replicated) -> str:
    """Sentence that sums up the table of replicated stages."""
    pipeline = found.pipeline
    return (
        f"By PipeDream's own count, in which nothing waits: period {format_seconds(pipeline.period_seconds)} per "
        f"micro-batch, {pipeline.num_in_flight} in flight in each replica of the first stage, "
        f"{format_bytes(round(pipeline.bytes_per_micro_batch))} sent per micro-batch.\n"
    )


def frontier_text(frontier: Frontier, width: int = WIDTH, *, colour: bool = False) -> str:
    """Return the table of a frontier, below it what did not fit beside the figures, and what it says."""
    table, rest = frontier_table(frontier), ""
    if _natural_width(table) > width:
        table = frontier_table(frontier, with_cuts=False)
        rest = "\n" + _below(_cuts_of(frontier), width)
    return _table_text(table, width, colour) + rest + "\n" + sentences([frontier_words(frontier).rstrip()], width)


def _cuts_of(frontier: Frontier) -> Iterator[tuple[str, str]]:
    """Yield for the memory of each plan where it cuts the chain; once for plans in a row that cut it alike."""
    for text, alike in groupby(frontier.plans, allocation_text):
        sizes = [format_bytes(frontier.memory_bytes(plan)) for plan in alike]
        yield " to ".join(dict.fromkeys((sizes[0], sizes[-1]))), text


def frontier_table(frontier: Frontier, *, with_cuts: bool = True) -> Table:
    """Table with a row for each plan, the fastest first.

    Args:
        with_cuts: whether the last column says where each plan cuts the chain.
    """
    first = frontier.plans[0]
    platform = first.platform
    layers, devices = counted(first.chain.num_layers, "layer"), counted(platform.num_devices, "device")
    table = _table(f"{printable(first.chain.name)}: {layers} on {devices}")
    time = "step" if first.step is not None else "period"
    _add_columns(table, "memory per device", "saved", time, "slower", "proved")
    if with_cuts:
        table.add_column("cut")
    most = frontier.memory_bytes(first)
    for plan in frontier.plans:
        memory = frontier.memory_bytes(plan)
        table.add_row(
            format_bytes(memory),
            format_bytes(most - memory),
            format_seconds(seconds_of(plan)),
            f"{frontier.slowdown(plan):.1%}",
            "yes" if frontier.is_proved(plan) else "no",
            *([allocation_text(plan)] if with_cuts else []),
        )
    return table


def frontier_words(frontier: Frontier) -> str:
    """Sentence or two that sum up the table of a frontier."""
    bargain, first = frontier.bargain(), frontier.plans[0]
    saved = "No plan saves memory for a few per cent of time."
    if bargain is not None:
        saved_bytes = format_bytes(frontier.memory_bytes(first) - frontier.memory_bytes(bargain))
        saved = f"{frontier.slowdown(bargain):.1%} slower saves {saved_bytes} per device."
    return (
        saved + ("" if frontier.complete else " Less memory may be enough: nothing proves that it is not.") + "\n"
    )


def _sent(comparison: Comparison, contender: Contender) -> str:
    """Format the bytes sent per step or micro-batch, and their share of what data parallelism sends."""
    return _share(comparison.bytes_sent(contender), comparison.bytes_sent_without_pipeline(contender))


def _share(sent: float, plain: float) -> str:
    return format_bytes(round(sent)) + (f" ({sent / plain:.0%})" if plain else "")


def allocation_text(plan: Plan) -> str:
    """Format boundaries as ``0,3,8``; with several stages on a device as ``0..3@0 3..5@1 5..8@0``."""
    if plan.is_contiguous:
        return ",".join(map(str, plan.boundaries))
    return " ".join(f"{start}..{stop}@{stage.device}" for stage in plan.stages for start, stop in (stage.layers,))


def _layers(stage: PlannedStage) -> str:
    return " ".join(["{}..{}".format(*stage.layers), _layer_names(stage)]).rstrip()


def _layer_names(stage: PlannedStage) -> str:
    """Return the names of the first and the last layer; empty where the plan has no names."""
    if not stage.layer_names:
        return ""
    first, last = printable(stage.layer_names[0]), printable(stage.layer_names[-1])
    return first + (f" .. {last}" if stage.layers[1] - stage.layers[0] > 1 else "")


def chain_text(chain: Chain, width: int = WIDTH, *, colour: bool = False) -> str:
    """Return the table of a chain's layers and their sums, as text."""
    table = chain_table(chain)
    left_out = []
    if not any(layer.transient_bytes for layer in chain.layers):
        table = chain_table(chain, leave_out=("transient",))
        left_out.append("transient")
    types = {layer.type for layer in chain.layers} - {None}
    too_wide = _natural_width(table) > width
    if not types or too_wide:
        table = chain_table(chain, leave_out=(*left_out, "type"))
    lines = []
    if left_out:
        lines.append("transient: 0 B in every layer")
    if types and too_wide:
        counts = Counter(printable(layer.type or "?") for layer in chain.layers)
        lines.append("types: " + ", ".join(f"{number} {name}" for name, number in counts.most_common()))
    forward = sum(layer.forward_seconds for layer in chain.layers)
    backward = sum(layer.backward_seconds for layer in chain.layers)
    lines.append(
        f"in all: forward {format_seconds(forward)}, backward {format_seconds(backward)}, weights "
        f"{format_bytes(sum(layer.weight_bytes for layer in chain.layers))}, stash "
        f"{format_bytes(sum(chain.stash(layer) for layer in chain.layers))} per micro-batch"
    )
    return _table_text(table, width, colour) + "\n" + sentences(lines, width)


def chain_table(chain: Chain, *, leave_out: Sequence[str] = ()) -> Table:
    """Table with a row for each layer.

    Args:
        leave_out: names of columns.
    """
    table = _table(
        printable(f"{chain.name}: micro-batch {chain.micro_batch_size or '?'} on {chain.hardware or '?'}")
    )
    columns: dict[str, Callable[[LayerProfile], str]] = {
        "forward": lambda layer: format_seconds(layer.forward_seconds),
        "backward": lambda layer: format_seconds(layer.backward_seconds),
        "weights": lambda layer: format_bytes(layer.weight_bytes),
        "output": lambda layer: format_bytes(layer.output_bytes),
        "stash": lambda layer: format_bytes(chain.stash(layer)),
        "transient": lambda layer: format_bytes(layer.transient_bytes),
    }
    shown = {name: cell for name, cell in columns.items() if name not in leave_out}
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("name", overflow="fold")
    if "type" not in leave_out:
        table.add_column("type", no_wrap=True)
    _add_columns(table, *shown)
    for index, layer in enumerate(chain.layers):
        kind = [] if "type" in leave_out else [printable(layer.type or "")]
        cells = (cell(layer) for cell in shown.values())
        table.add_row(str(index), printable(layer.name), *kind, *cells)
    return table
