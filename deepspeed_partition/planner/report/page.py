"""A plan as one page for a browser: timeline, memory over time, layers, algorithms, and what was measured.

The page needs no network and no other file. It draws on canvases that show only what is seen, so that tens of
thousands of operations stay fluid: a plotting library that does this is some megabytes in each page, and what is
needed of it is a few hundred lines (``page_parts/page.js``). Beside each picture stands a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from deepspeed_partition.planner.plan import Plan, PlannedStage
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.report.comparison import Comparison
from deepspeed_partition.planner.report.draw import allocation_text, promises
from deepspeed_partition.planner.report.pictures import comparison_svg, shown_kinds
from deepspeed_partition.planner.report.planned_run import (
    PlannedRun,
    bottleneck_words,
    busy,
    memory_words,
    place_of,
    places_of,
    planned_run,
    repeats_pattern,
)
from deepspeed_partition.planner.report.timeline import MeasuredTimeline, TimedOperation, TimelineComparison
from deepspeed_partition.planner.simulate.replay import clock_of, timeline_of
from deepspeed_partition.planner.simulate.replay_memory import Moments, costs_of
from deepspeed_partition.planner.simulate.replay_step import Timeline
from deepspeed_partition.planner.units import format_bytes, format_seconds, printable

UNITS = 10**7
"""Units of time in which a page counts: so many are the whole run."""
TERMS = ("weights", "stash", "buffers", "transient", "fixed")


def plan_page(
    plan: Plan,
    chain: Chain | None = None,
    measured: MeasuredTimeline | None = None,
    comparison: Comparison | None = None,
) -> str:
    """Return the page of a plan, as HTML.

    Args:
        chain: the chain of the plan. Without it there are no layers, and of the memory only the peaks.
        measured: what was measured in a run of the plan; it is laid beside the plan.
        comparison: other algorithms on the same problem.

    Raises:
        PlanMismatchError: the chain or the timeline belongs to another plan.
    """
    number = None if measured is None else measured.num_micro_batches
    compared = None if measured is None else measured.compare(plan)
    memory = replayed = None
    if chain is not None:
        plan.check_chain(chain)
        replayed = timeline_of(plan, chain)
        memory, in_memory = _memory(plan, chain, replayed)
        number = in_memory if number is None else number
    run = planned_run(plan, chain, number, replayed=replayed)
    if memory is not None and run.num_micro_batches != in_memory:
        memory = None  # of another number of micro-batches than those of the timeline
    places = places_of(run, plan.platform)
    steps = [] if measured is None else measured.steps
    unit = (run.seconds or 1.0) / UNITS
    names = list(dict.fromkeys(each.operation for each in run.operations))
    data: dict[str, Any] = {
        "lanes": places,
        "names": names,
        "unit": unit,
        "run": _packed(run.operations, run.seconds, places, names, unit),
        "phases": list(run.phases),
        "stages": [
            {"layers": list(stage.layers), "device": stage.device, "words": _stage_words(stage)}
            for stage in plan.stages
        ],
        "memory_bytes": plan.platform.memory_bytes,
    }
    if steps:
        data["measured"] = []
        for step in steps:
            first = min(each.start_seconds for each in step.operations)
            operations = [replace(each, start_seconds=each.start_seconds - first) for each in step.operations]
            seconds = max(each.end_seconds for each in operations)
            data["measured"].append(_packed(operations, seconds, places, names, unit))
    if memory is not None:
        data["memory"] = memory(unit)
        data["peaks"] = [format_bytes(use.total) for use in plan.memory]
    if chain is not None:
        data["layers"] = [
            {
                "name": printable(layer.name), "type": printable(layer.type or ""),
                "forward": layer.forward_seconds, "backward": layer.backward_seconds,
                "weights": layer.weight_bytes, "stash": chain.stash(layer),
                "output": layer.output_bytes, "transient": layer.transient_bytes,
            }
            for layer in chain.layers
        ]  # fmt: skip
    sections = [
        _head(plan, run),
        _timeline_section(run, [f"step {step.step}" for step in steps], measured is not None and not run.is_step),
        _memory_section(plan, memory is not None, chain is not None),
        _layers_section(plan, chain),
        _stages_section(plan),
    ]
    if comparison is not None:
        sections.append(_comparison_section(comparison, plan))
    if compared is not None:
        sections.append(_measured_section(compared, plan))
    parts = files("deepspeed_partition.planner.report") / "page_parts"
    style, script = ((parts / name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = f"{printable(plan.chain.name)}: plan"
    # "<" is escaped, so that no name ends the script element.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n{''.join(sections)}"
        "</main>\n<footer>Made by <code>madpipe report</code>. Ctrl and the wheel zoom, Shift and the wheel or "
        "dragging move. On the keyboard + and - zoom, 0 shows all, arrows go from one operation to the next."
        '</footer>\n<div id="tip" class="tip" aria-hidden="true"></div>\n'
        f'<script id="data" type="application/json">{packed}</script>\n'
        f"<script>\n{script}</script>\n</body></html>\n"
    )


def _packed(
    operations: Iterable[TimedOperation], seconds: float, places: Sequence[str], names: Sequence[str], unit: float
) -> dict[str, Any]:
    """Return operations by lane: starts as differences, in units, so that a page of many stays small."""
    number, lanes = {name: place for place, name in enumerate(names)}, {place: [] for place in places}  # type: ignore[var-annotated]
    for each in operations:
        lanes.setdefault(place_of(each), []).append(each)
    packed = []
    for place in places:
        mine = sorted(lanes[place], key=lambda each: each.start_seconds)
        starts = [round(each.start_seconds / unit) for each in mine]
        ends = [round(each.end_seconds / unit) for each in mine]
        packed.append({
            "n": [number[each.operation] for each in mine],
            "m": [each.micro_batch for each in mine],
            "s": np.diff(starts, prepend=0).tolist() if starts else [],
            "d": [end - start for start, end in zip(starts, ends, strict=True)],
        })  # fmt: skip
    return {"seconds": seconds, "unit": unit, "lanes": packed}


def _memory(plan: Plan, chain: Chain, timeline: Timeline | str) -> tuple[Any, int]:
    """Return what gives, for a unit of time, the memory of each device over time, and the number of micro-batches.

    Args:
        timeline: the instants of the plan's step or pattern on the chain.

    Raises:
        ValueError: the order of the plan's step cannot be run.
    """
    if isinstance(timeline, str):
        raise ValueError(timeline)
    timeline.window = (0, float("inf"))
    clock, costs = clock_of(plan, chain), costs_of(plan, chain, in_step=plan.step is not None)

    def of_device(device: int, unit: float) -> dict[str, Any]:
        instants, terms = Moments(plan, chain, costs, timeline, device, ends=True).over_time()
        levels, number = np.unique(terms, axis=1, return_inverse=True)
        changed = np.flatnonzero(np.diff(number, prepend=-1))
        times = [round(clock.seconds(int(instants[place])) / unit) for place in changed]
        fixed = plan.platform.fixed_bytes
        return {
            "t": np.diff(times, prepend=0).tolist() if times else [],
            "l": number[changed].tolist(),
            "levels": [[*level, fixed] for level in levels.T.tolist()],
        }

    def packed(unit: float) -> list[dict[str, Any]]:
        return [of_device(device, unit) for device in range(plan.platform.num_devices)]

    return packed, len(timeline.micro_batches)


def _stage_words(stage: PlannedStage) -> str:
    names = [printable(name) for name in (stage.layer_names[:1] + stage.layer_names[1:][-1:])]
    return _layer_words(stage.layers) + (f", {' to '.join(names)}" if names else "")


def _layer_words(layers: tuple[int, int]) -> str:
    """Name layers that are given half-open."""
    start, stop = layers
    return f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return a table; the columns ``left`` are words, the others figures."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=left' if place in left else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in rows)
    first = f"<thead><tr>{cells(head, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{first}\n<tbody>{body}</tbody></table></div>'


def _legend(names: Iterable[tuple[str, str]]) -> str:
    marks = "".join(
        f'<span><i style="background:var(--{colour})"></i>{escape(name)}</span>' for colour, name in names
    )
    return f'<span class="legend">{marks}</span>'


def _head(plan: Plan, run: PlannedRun) -> str:
    sentences = [*promises(plan), bottleneck_words(plan), memory_words(plan)]
    if not run.is_exact:
        sentences.append("The instants of the step are not exact: the plan's chain would tell them.")
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    title = (
        f"{printable(plan.chain.name)}: {plan.chain.num_layers} layers in {len(plan.stages)} stages on "
        f"{plan.platform.num_devices} devices of {format_bytes(plan.platform.memory_bytes)}"
    )
    button = '<button id="theme">light / dark</button>'
    return f"<header><div><h1>{escape(title)}</h1>{words}</div>{button}</header>\n<main>"


def _timeline_section(run: PlannedRun, steps: Sequence[str], from_pattern: bool) -> str:
    kinds = {each.operation[0] for each in run.operations}
    legend = _legend(shown_kinds(kinds))
    fill, drain = run.phases
    what = "one step" if run.is_step else f"the pattern for {run.num_micro_batches} micro-batches"
    words = (
        f"{what[0].upper()}{what[1:]}: {format_seconds(run.seconds)}. Fill until {format_seconds(fill)}, "
        + (f"then steady state until {format_seconds(drain)}, " if drain > fill else "")
        + "then drain; the dashed lines are these instants."
    )
    if steps:
        words += " In each row the plan is above, and below it what was measured."
    if from_pattern:
        words += " The plan has no step of so many micro-batches: its pattern is shown."
    choices = "".join(f"<option value={place}>{escape(step)}</option>" for place, step in enumerate(steps))
    measured = f'<label>measured <select id="step">{choices}</select></label>' if steps else ""
    controls = (
        '<div class="controls"><button id="closer">zoom in</button><button id="farther">zoom out</button>'
        '<button id="all">show all</button><label><input type="checkbox" id="links" checked> links</label>'
        f"{measured}{legend}</div>"
    )
    label = (
        "Timeline: a row for each device and each direction of a link. Arrow keys go from operation to operation."
    )
    return _section(
        "Timeline",
        f'<p class="dim">{escape(words)}</p>{controls}',
        '<p class="told" id="told" role="status" aria-live="polite"></p>',  # above: the view may fill the window
        f'<div class="view" id="timeline" tabindex="0" role="application" aria-label="{label}" '
        'aria-describedby="told"><canvas aria-hidden="true"></canvas><div class="spacer"></div></div>',
        '<details id="operations-of"><summary>Table of all operations</summary>'
        '<div id="operations"></div></details>',
    )


def _memory_section(plan: Plan, over_time: bool, has_chain: bool) -> str:
    terms = [*TERMS] if plan.platform.fixed_bytes else [*TERMS[:-1]]
    rows = [
        [f"device {device}", format_bytes(use.total), f"{use.total / plan.platform.memory_bytes:.1%}",
         *(format_bytes(getattr(use, term)) for term in terms)]
        for device, use in enumerate(plan.memory)
    ]  # fmt: skip
    table = _table(["peaks", "memory", "of the limit", *terms], rows)
    if not over_time:
        why = "the chain is not given (--chain)"
        if has_chain:
            why = "the measured steps have another number of micro-batches than the plan"
        return _section("Memory", f'<p class="dim">Only the peaks: {why}.</p>', table)
    words = f"The limit of each device is {format_bytes(plan.platform.memory_bytes)}"
    most = max(plan.peak_memory_bytes)
    if plan.platform.memory_bytes > 3 * most:
        words += f", far above all that is shown: rows are as high as the largest peak, {format_bytes(most)}."
    else:
        words += ", the dashed line."
    words += " Below the name of each device stands its peak."
    label = "Memory of each device over time. Arrow keys move, plus and minus zoom."
    return _section(
        "Memory over time",
        f'<p class="dim">{escape(words)}</p><div class="controls">{_legend((term, term) for term in terms)}</div>',
        f'<div class="view" id="memory" tabindex="0" role="application" aria-label="{label}">'
        '<canvas aria-hidden="true"></canvas><div class="spacer"></div></div>',
        f"<details><summary>Table of the peaks</summary>{table}</details>",
    )


def _layers_section(plan: Plan, chain: Chain | None) -> str:
    if chain is None:
        return _section("Layers", '<p class="dim">The chain is not given (--chain): the stages are below.</p>')
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in range(*stage.layers)}
    rows = [
        [str(index), printable(layer.name), printable(layer.type or ""), str(stage_of[index]),
         format_seconds(layer.forward_seconds), format_seconds(layer.backward_seconds),
         *map(format_bytes, (layer.weight_bytes, layer.output_bytes, chain.stash(layer), layer.transient_bytes))]
        for index, layer in enumerate(chain.layers)
    ]  # fmt: skip
    head = ["layer", "name", "type", "stage", "forward", "backward", "weights", "output", "stash", "transient"]
    names = [("F", "forward"), ("B", "backward"), ("weights", "weights"), ("stash", "stash per micro-batch")]
    return _section(
        "Layers and where the plan cuts",
        f'<div class="controls">{_legend(names)}</div>',
        '<div><canvas id="layers" tabindex="0" role="img" aria-describedby="layer-told" aria-label="Time above, '
        "weights and stash below, of each layer; dashed lines are the cuts. Left and right go from layer to layer."
        '"></canvas></div>',
        '<p class="told" id="layer-told" role="status" aria-live="polite"></p>',
        f"<details><summary>Table of all {chain.num_layers} layers</summary>{_table(head, rows, (1, 2))}"
        "</details>",
    )


def _stages_section(plan: Plan) -> str:
    durations = {each.operation: each.duration_seconds for each in plan.operations}
    rows = []
    for index, stage in enumerate(plan.stages):
        halves = durations.get(f"I{index}", 0.0) + durations.get(f"W{index}", 0.0)
        blocks = ", ".join(map(_layer_words, stage.blocks))
        rows.append([
            str(index), str(stage.device), _stage_words(stage),
            format_seconds(durations.get(f"F{index}", durations.get(f"f{index}", 0.0))),
            format_seconds(durations.get(f"B{index}", halves)),
            str(stage.in_flight), "all" if stage.rematerialize is True else blocks or "nothing",
        ])  # fmt: skip
    head = ["stage", "device", "layers", "forward", "backward", "in flight", "recomputed"]
    loads = [[each.place, format_seconds(each.seconds), f"{each.share:.1%}"] for each in busy(plan)]
    whole = "step" if plan.step is not None else "period"
    return _section(
        "Stages",
        _table(head, rows, (2, 6)),
        "<details><summary>How long each device and link is busy</summary>"
        f"{_table(['', f'per {whole}', 'busy'], loads)}</details>",
    )


def _comparison_section(comparison: Comparison, plan: Plan) -> str:
    rows = []
    for each in comparison.contenders:
        made, name = each.plan, printable(each.algorithm)
        if made is None:
            smallest = each.smallest_memory_bytes
            says = each.reason or "" if smallest is None else f"does not fit: needs {format_bytes(smallest)}"
            rows.append([name, "-", "-", "-", printable(says)])
            continue
        rows.append([
            f"{name} (this plan)" if made is plan else name,
            format_seconds(each.seconds), f"{comparison.ratio_to_best(each):.3f}",
            format_bytes(max(made.peak_memory_bytes)), allocation_text(made),
        ])  # fmt: skip
    table = _table(["algorithm", "time", "x best", "memory", "cut"], rows, (0, 4))
    # The picture is drawn with the colours of the page, whichever theme is chosen.
    picture = comparison_svg(comparison, in_page=True)
    left_out = [each for each in comparison.contenders if each.is_left_out]
    words = ""
    if left_out:
        names = ", ".join(printable(each.algorithm) for each in left_out)
        words = f'<p class="dim">For lack of time (<code>--time-limit</code>) without {escape(names)}.</p>'
    return _section(
        "Algorithms compared",
        words,
        f'<div class="scroll">{picture}</div>',
        f"<details><summary>Table</summary>{table}</details>",
    )


def _measured_section(compared: TimelineComparison, plan: Plan) -> str:
    def row(name: str, planned: float | None, measured: float | None) -> list[str]:
        ratio = "" if not planned or measured is None else f"{measured / planned:.2f}"
        return [name, *("-" if each is None else format_seconds(each) for each in (planned, measured)), ratio]

    rows = []
    if repeats_pattern(plan):  # otherwise the step has no such period
        rows.append(row("period", compared.planned_period_seconds, compared.measured_period_seconds))
    if compared.planned_step_seconds is not None:
        rows.append(row("step", compared.planned_step_seconds, compared.measured_step_seconds))
    rows += [row(each.operation, each.planned_seconds, each.measured_seconds) for each in compared.operations]
    table = _table(["", "planned", "measured (median)", "measured / planned"], rows)
    return _section("Planned and measured", table)
