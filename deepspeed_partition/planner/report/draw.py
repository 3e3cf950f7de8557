"""Plans as text: tables of stages, comparisons, timelines."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deepspeed_partition.planner.data_parallel import bytes_sent_without_pipeline, seconds_of
from deepspeed_partition.planner.plan import Plan, PlannedStage, StepPlan
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.schedule import PlacedOperation
from deepspeed_partition.planner.solvers.contiguous.replicated import MOST_REPLICAS, REPLICATED, ReplicatedStage
from deepspeed_partition.planner.units import format_bytes, format_seconds, printable

if TYPE_CHECKING:  # these modules draw plans themselves
    from deepspeed_partition.planner.replication import Replicated
    from deepspeed_partition.planner.report.comparison import Comparison, Contender
    from deepspeed_partition.planner.report.frontier import Frontier
    from deepspeed_partition.planner.report.timeline import MeasuredTimeline

REPLICATED_ROW = "replicated*"
FILL = {"F": "=", "f": "=", "R": "+", "B": "#", "I": "#", "W": "%", "S": "-"}
"""Characters of a forward, a recomputation, a backward, the gradients of weights and a transfer in a timeline;
idle time is a dot."""


def summary(plan: Plan, width: int = 140) -> str:
    """Return the promises of a plan and the table of its stages, as text."""
    return as_text([stage_table(plan)], width) + "\n".join(promises(plan)) + "\n"


def as_text(renderables: Iterable[object], width: int = 140) -> str:
    """Return what a terminal of ``width`` columns would show, without colours."""
    buffer = io.StringIO()
    # Names are printed as they are: brackets and colons in them are no markup.
    console = Console(
        file=buffer, width=width, no_color=True, force_terminal=False, markup=False, emoji=False, highlight=False
    )
    for renderable in renderables:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def promises(plan: Plan) -> Iterator[str]:
    """Yield one line for each promise of a plan: period, lower bound, step."""
    if plan.step is not None:
        proof = "of the steady state"
    elif not plan.proved:
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
    yield (
        f"{printable(plan.algorithm)}: period {format_seconds(plan.period_seconds)} per micro-batch, "
        f"lower bound {format_seconds(plan.lower_bound_seconds)} (gap {plan.gap:.1%}, {proof})"
    )
    if plan.step is not None:
        blocking = plan.step.blocking_step_seconds
        in_deepspeed = "" if blocking is None else f"{format_seconds(blocking)} in DeepSpeed's engine, "
        yield (
            f"step of {plan.step.num_micro_batches} micro-batches: {in_deepspeed}"
            f"{format_seconds(plan.step.step_seconds)} if transfers overlap, {_step_proof(plan.step)}"
        )
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
    words = ["both directions at once"] if platform.duplex == "full" else []
    if platform.port_bandwidth is not None:
        hosts = "each device" if platform.devices_per_port == 1 else f"{platform.devices_per_port} devices"
        words.append(f"a port of {format_bytes(platform.port_bandwidth)}/s for {hosts}, one transfer each way")
    beside = []
    if platform.operation_seconds:
        beside.append(f"{format_seconds(platform.operation_seconds)} for each operation")
    if platform.copy_bandwidth is not None:
        beside.append(f"messages copied at {format_bytes(platform.copy_bandwidth)}/s")
    lines = [f"links: {'; '.join(words)}"] if words else []
    return "; ".join([*lines, *([f"beside the layers, in a step: {' and '.join(beside)}"] if beside else [])])


def _step_proof(step: StepPlan) -> str:
    """Say how near a step is to the shortest one."""
    if step.lower_bound_seconds is None or step.gap is None:
        return "the best found and not proved"
    proof = "proved shortest" if step.proved else "the best found and not proved"
    return f"lower bound {format_seconds(step.lower_bound_seconds)} (gap {step.gap:.1%}, {proof})"


def stage_table(plan: Plan) -> Table:
    """Table with a row for each stage; memory is that of its device."""
    title = f"{printable(plan.chain.name)}: {plan.chain.num_layers} layers on {plan.platform.num_devices} devices"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "device", "in flight"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    terms = ["weights", "stash", "buffers", "transient", *(["fixed"] if plan.platform.fixed_bytes else [])]
    signs = ["=", *["+"] * len(terms)]
    for name in ("forward", "backward", "memory", *map(" ".join, zip(signs, terms, strict=False))):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(len(name), len("12.34 ms")))
    table.add_column("layers", overflow="ellipsis", no_wrap=True)  # the column that shrinks
    durations: dict[str, float] = {}
    for operation in plan.operations:  # a backward that runs the forward again is longer than others of its stage
        shortest = durations.get(operation.operation, operation.duration_seconds)
        durations[operation.operation] = min(shortest, operation.duration_seconds)
    for index, stage in enumerate(plan.stages):
        use = plan.memory[stage.device]
        table.add_row(
            str(index),
            str(stage.device),
            str(stage.in_flight),
            format_seconds(durations.get(f"F{index}", durations.get(f"f{index}", 0.0))),
            format_seconds(
                durations.get(f"B{index}", durations.get(f"I{index}", 0.0) + durations.get(f"W{index}", 0.0))
            ),
            format_bytes(plan.peak_memory_bytes[stage.device]),
            *(format_bytes(getattr(use, term)) for term in terms),
            _layers(stage),
        )
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Table with a row for each algorithm; one that does not fit shows the memory with which it would."""
    chain, platform = comparison.chain, comparison.platform
    title = (
        f"{printable(chain.name)}: {chain.num_layers} layers on {platform.num_devices} devices of "
        f"{format_bytes(platform.memory_bytes)}, {_lower_bounds(comparison)}; "
        "sent: in all, and as part of what plain data parallelism would send"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("algorithm", overflow="fold", min_width=len("pipedream-blind"))
    steps = any(each.plan is not None and each.plan.step is not None for each in comparison.contenders)
    with_step = ("period", "gap", "step", "step gap", "x best", "step proved")
    times = with_step if steps else ("period", "x best", "gap", "proved")
    for name in times:
        table.add_column(
            name, justify="right", no_wrap=True, min_width=len("1.234 s") if name == "step" else len(name)
        )
    table.add_column("sent", justify="right", no_wrap=True, min_width=len("123.4 MB (100%)"))
    table.add_column("peak memory", overflow="fold", min_width=12)
    table.add_column("cut", overflow="fold", min_width=8)
    for contender in comparison.contenders:
        name, plan = printable(contender.algorithm), contender.plan
        if plan is None:
            table.add_row(name, *["-"] * (len(times) + 1), *_refusal(contender))
            continue
        table.add_row(
            name,
            *_times(comparison, contender, plan),
            _sent(comparison, contender),
            ", ".join(format_bytes(peak) for peak in plan.peak_memory_bytes),
            allocation_text(plan),
        )
    table.add_row(*_replicated_row(comparison, steps=steps))
    return table


def _lower_bounds(comparison: Comparison) -> str:
    """Say below what no period, and no step, of any allocation can be."""
    text = f"lower bound {format_seconds(comparison.lower_bound_seconds)}"
    of_step = comparison.step_lower_bound_seconds
    return text if of_step is None else f"{text} (period), {format_seconds(of_step)} (step)"


def _times(comparison: Comparison, contender: Contender, plan: Plan) -> list[str]:
    """Cells of a row: the period, and the step where there is one, each with its own gap."""
    period, gap = format_seconds(plan.period_seconds), f"{plan.gap:.1%}"
    ratio = f"{comparison.ratio_to_best(contender):.3f}"
    if plan.step is None:
        return [period, ratio, gap, "yes" if plan.proved else "no"]
    step_gap = "-" if plan.step.gap is None else f"{plan.step.gap:.1%}"
    return [period, gap, format_seconds(contender.seconds), step_gap, ratio, "yes" if plan.step.proved else "no"]


def replicated_note() -> str:
    """Note below the comparison: what the row of PipeDream's own partitioner means."""
    return f"* {REPLICATED}: no plan; layers x replicas, and PipeDream's own count of their period\n"


def _replicated_row(comparison: Comparison, *, steps: bool) -> list[str]:
    """Row of PipeDream's own partitioner; its result is no plan, since its stages are replicated."""
    found = comparison.replicated
    if found is None:
        too_many = comparison.platform.num_devices > MOST_REPLICAS
        why = f"takes {MOST_REPLICAS} devices at most" if too_many else "its time was up"
        return [REPLICATED_ROW, *["-"] * (7 if steps else 5), "refused", why]
    period, most = found.pipeline.period_seconds, max(found.fewest_bytes)
    best = min((each.seconds for each in comparison.fitting), default=period)
    over = most > comparison.platform.memory_bytes
    return [
        REPLICATED_ROW,
        format_seconds(period),
        *(["-"] * 5 if steps else [f"{period / best:.3f}", "-", "no"]),
        "-"
        if steps
        else _share(
            found.pipeline.bytes_per_micro_batch,
            bytes_sent_without_pipeline(comparison.chain, comparison.platform.num_devices, per_step=False),
        ),
        f"does not fit: needs {format_bytes(most)}" if over else f"{format_bytes(most)} or more",
        " ".join(f"{start}..{stop}x{count}" for start, stop, count in found.on_devices()),
    ]


def replicated_table(found: Replicated) -> Table:
    """Table with a row for each stage, and for each stage within its replicas."""
    chain, pipeline = found.chain, found.pipeline
    devices = ", ".join(
        f"{level.num_workers} {name} at {format_bytes(level.bandwidth)}/s"
        for level, name in zip(found.levels, ("in a machine", "machines"), strict=False)
    )
    title = f"{REPLICATED}: {printable(chain.name)}, {chain.num_layers} layers, devices: {devices}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("layers", overflow="ellipsis", no_wrap=True)
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


def frontier_table(frontier: Frontier) -> Table:
    """Table with a row for each plan, the fastest first."""
    first = frontier.plans[0]
    platform = first.platform
    title = f"{printable(first.chain.name)}: {first.chain.num_layers} layers on {platform.num_devices} devices"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("memory per device", "saved", "step" if first.step is not None else "period", "slower", "proved"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(len(name), len("123.4 MB")))
    table.add_column("cut", overflow="fold", min_width=8)
    most = frontier.memory_bytes(first)
    for plan in frontier.plans:
        memory = frontier.memory_bytes(plan)
        table.add_row(
            format_bytes(memory),
            format_bytes(most - memory),
            format_seconds(seconds_of(plan)),
            f"{frontier.slowdown(plan):.1%}",
            "yes" if (plan.proved if plan.step is None else plan.step.proved) else "no",
            allocation_text(plan),
        )
    return table


def frontier_words(frontier: Frontier) -> str:
    """Sentence or two that sum up the table of a frontier."""
    bargain, first = frontier.bargain(), frontier.plans[0]
    saved = "Nothing is saved for a few per cent of time."
    if bargain is not None:
        saved_bytes = format_bytes(frontier.memory_bytes(first) - frontier.memory_bytes(bargain))
        saved = f"{frontier.slowdown(bargain):.1%} slower saves {saved_bytes} per device."
    return saved + ("" if frontier.complete else " Less memory may do, too: the search was cut short.") + "\n"


def _sent(comparison: Comparison, contender: Contender) -> str:
    """Format the bytes sent per step or micro-batch, and their share of what data parallelism sends."""
    return _share(comparison.bytes_sent(contender), comparison.bytes_sent_without_pipeline(contender))


def _share(sent: float, plain: float) -> str:
    return format_bytes(round(sent)) + (f" ({sent / plain:.0%})" if plain else "")


def _refusal(contender: Contender) -> tuple[str, str]:
    """Texts for the columns of memory and boundaries where a contender has no plan."""
    if contender.smallest_memory_bytes is None:
        return "refused", printable(contender.reason or "")
    return f"does not fit: needs {format_bytes(contender.smallest_memory_bytes)}", ""


def allocation_text(plan: Plan) -> str:
    """Format boundaries as ``0,3,8``; with several stages on a device as ``0..3@0 3..5@1 5..8@0``."""
    if plan.is_contiguous:
        return ",".join(map(str, plan.boundaries))
    return " ".join(f"{start}..{stop}@{stage.device}" for stage in plan.stages for start, stop in (stage.layers,))


def _layers(stage: PlannedStage) -> str:
    start, stop = stage.layers
    if not stage.layer_names:
        return f"{start}..{stop}"
    first, last = printable(stage.layer_names[0]), printable(stage.layer_names[-1])
    return f"{start}..{stop} {first}" + (f" .. {last}" if stop - start > 1 else "")


def chain_table(chain: Chain) -> Table:
    """Table with a row for each layer."""
    title = f"{chain.name}: micro-batch {chain.micro_batch_size or '?'} on {chain.hardware or '?'}"
    title = printable(title)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "name", "type"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("forward", "backward", "weights", "output", "stash", "transient"):
        table.add_column(name, justify="right")
    for index, layer in enumerate(chain.layers):
        table.add_row(
            str(index),
            printable(layer.name),
            printable(layer.type or ""),
            format_seconds(layer.forward_seconds),
            format_seconds(layer.backward_seconds),
            *(
                format_bytes(size)
                for size in (
                    layer.weight_bytes,
                    layer.output_bytes,
                    chain.stash(layer),
                    layer.transient_bytes,
                )
            ),
        )
    return table


def timeline(plan: Plan, width: int = 96) -> str:
    """Draw one period of the pattern: a row for each device and each link.

    ``F1=====`` is the forward of stage 1; ``B0+2####`` the backward of stage 0 on the micro-batch that came in
    two periods ago; what runs over the end of the period goes on at its beginning. Where the pattern has several
    micro-batches, ``F1.3=`` is the forward of stage 1 on the one of index 3, and all of them are drawn.
    """
    rows: dict[str, list[str]] = {}
    for device in range(plan.platform.num_devices):
        rows[f"device {device}"] = ["."] * width
    for operation in plan.operations:
        if operation.link is not None:
            rows.setdefault("link {}-{}".format(*sorted(operation.link)), ["."] * width)
    for operation in plan.operations:
        place = f"device {operation.device}"
        if operation.link is not None:
            place = "link {}-{}".format(*sorted(operation.link))
        _place(rows[place], operation, plan)
    label = max(map(len, rows))
    number = plan.micro_batches_per_period
    what = "one period" if number == 1 else f"one pattern of {number} micro-batches,"
    of = " of" if number == 1 else ""
    kinds = {operation.operation[0] for operation in plan.operations}
    more = (", + forward again" if "R" in kinds else "") + (", % gradients of weights" if "W" in kinds else "")
    head = f"{what}{of} {format_seconds(plan.pattern_seconds)}: = forward, # backward{more}, - transfer, . idle"
    return "\n".join([head, *(f"{name:<{label}} |{''.join(row)}|" for name, row in rows.items())]) + "\n"


def measured_step(timeline: MeasuredTimeline, index: int = -1, width: int = 96) -> str:
    """Draw a training step as it ran: a row for each device, and one for each direction of each link.

    ``F1.2====`` is the forward of stage 1 on micro-batch 2, ``B1.2`` its backward. On a link, ``SF0.2-`` is the
    output of stage 0 that goes to stage 1, and ``SB0.2-`` the gradient that comes back.

    Args:
        index: number of the step among those of the timeline; -1 is the last one.
        width: characters of the step.
    """
    step = timeline.steps[index]
    first = min(operation.start_seconds for operation in step.operations)
    seconds = max(operation.end_seconds for operation in step.operations) - first
    rows: dict[str, list[str]] = {f"device {device}": ["."] * width for device in sorted(set(timeline.devices))}
    for operation in sorted(step.operations, key=lambda each: (each.link or (), each.operation)):
        place = f"device {operation.device}"
        if operation.link is not None:
            sender, receiver = operation.link if operation.operation.startswith("SF") else operation.link[::-1]
            place = f"link {sender}>{receiver}"
        row = rows.setdefault(place, ["."] * width)
        begin = round((operation.start_seconds - first) / seconds * width)
        end = max(begin + 1, round((operation.end_seconds - first) / seconds * width))
        name = f"{operation.operation}.{operation.micro_batch}"
        cells = (name + FILL[name[0]] * width) if len(name) < end - begin else FILL[name[0]] * width
        row[begin:end] = cells[: min(end, width) - begin]
    label = max(map(len, rows))
    head = f"step {step.step}, {format_seconds(seconds)}: = forward, # backward, - transfer, . idle"
    return "\n".join([head, *(f"{name:<{label}} |{''.join(row)}|" for name, row in rows.items())]) + "\n"


def _place(row: list[str], operation: PlacedOperation, plan: Plan) -> None:
    width, period = len(row), plan.pattern_seconds
    first = round(operation.start_seconds / period * width)
    last = round((operation.start_seconds + operation.duration_seconds) / period * width)
    name = operation.operation + (f".{operation.index}" if plan.micro_batches_per_period > 1 else "")
    name += f"+{operation.shift}" if operation.shift else ""
    cells = (name + FILL[operation.operation[0]] * width)[: last - first]
    for offset, cell in enumerate(cells):
        row[(first + offset) % width] = cell


def step_order(plan: Plan, most: int = 16) -> str:
    """Draw the order of one step: a row for each device; ``F0.3`` is the forward of stage 0 on micro-batch 3."""
    assert plan.step is not None
    rows = []
    for device, order in enumerate(plan.step.order):
        shown = [f"{operation}.{micro_batch}" for operation, micro_batch in order[:most]]
        rows.append(f"device {device}  {' '.join(shown)}{' ...' if len(order) > most else ''}")
    return "\n".join(["one step:", *rows]) + "\n"
