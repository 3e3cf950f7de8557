"""Plans and measured timelines as Chrome trace events, which Perfetto and chrome://tracing open.

Source: *Trace Event Format*, Google, 2016: complete events (``X``) in microseconds, and metadata (``M``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.report.planned_run import place_of, places_of, planned_run
from deepspeed_partition.planner.report.timeline import MeasuredTimeline, TimedOperation
from deepspeed_partition.planner.units import printable

PLANNED, MEASURED = 1, 2
"""Numbers of the two processes of a trace."""
CATEGORIES = {
    "F": "forward", "f": "forward", "R": "forward again", "B": "backward", "I": "backward", "W": "backward",
    "S": "transfer",
}  # fmt: skip
"""Categories of events by the first letter of an operation."""
PLUGIN_SUFFIX = ".pt.trace.json"
"""Ending of the names of files that the PyTorch plugin of TensorBoard (torch-tb-profiler) looks for."""
PLUGIN_CATEGORY = "cpu_op"
"""The category of operations whose events that plugin does not drop, as it does those of categories of our own."""


def chrome_trace(
    plan: Plan,
    chain: Chain | None = None,
    measured: MeasuredTimeline | None = None,
    *,
    for_plugin: bool = False,
) -> dict[str, Any]:
    """Return a trace with a track for each device and each direction of a link; seconds become microseconds.

    Without a measured timeline there is one run of the plan, from fill to drain. With one the plan is repeated for
    each measured step, so that both begin a step at the same instant.

    Args:
        chain: the chain of the plan, where the plan alone does not tell the instants of its step.
        for_plugin: give each event the category that the PyTorch plugin of TensorBoard reads, and its own one as
            an argument, ``kind``.

    Raises:
        PlanMismatchError: the chain or the timeline belongs to another plan.
    """
    run = planned_run(plan, chain, None if measured is None else measured.num_micro_batches)
    places = places_of(run, plan.platform)
    events = _names(PLANNED, "planned", places)
    if measured is None:
        events += _events(PLANNED, run.operations, places, 0.0, None)
    else:
        measured.compare(plan)  # refuses the timeline of another plan
        events += _names(MEASURED, "measured", places)
        begin = 0.0
        for step in measured.steps:
            first = min(each.start_seconds for each in step.operations)
            events += _events(PLANNED, run.operations, places, begin, step.step)
            events += _events(MEASURED, step.operations, places, begin - first, step.step)
            begin += max(run.seconds, max(each.end_seconds for each in step.operations) - first)
    if for_plugin:
        for event in (each for each in events if each["ph"] == "X"):
            event["args"] = {**event["args"], "kind": event["cat"]}
            event["cat"] = PLUGIN_CATEGORY
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"chain": printable(plan.chain.name), "algorithm": printable(plan.algorithm)},
    }


def _names(process: int, name: str, places: Sequence[str]) -> list[dict[str, Any]]:
    """Return the metadata that name a process and its tracks, in their order."""
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": name}),
        ("process_sort_index", 0, {"sort_index": process}),
    ]
    for track, place in enumerate(places, start=_first_track(process, places)):
        named.append(("thread_name", track, {"name": place}))
        named.append(("thread_sort_index", track, {"sort_index": track}))
    return [{"ph": "M", "pid": process, "tid": tid, "name": what, "args": args} for what, tid, args in named]


def _first_track(process: int, places: Sequence[str]) -> int:
    """Return the number of the first track of a process. No two are the same: some readers look at these alone."""
    return 1 + (process - PLANNED) * len(places)


def _events(
    process: int, operations: Iterable[TimedOperation], places: Sequence[str], begin: float, step: int | None
) -> list[dict[str, Any]]:
    tracks = {place: track for track, place in enumerate(places, start=_first_track(process, places))}
    events = []
    for each in operations:
        # Perfetto counts in nanoseconds: what ends as another begins must not lie within it by one of them.
        start, end = (round((begin + seconds) * 1e9) for seconds in (each.start_seconds, each.end_seconds))
        begins, lasts = start / 1000, (end - start) / 1000
        if begins + lasts > end / 1000:  # by rounding: TensorBoard's plugin drops what begins before another ends
            lasts = end / 1000 - begins
        args = {"operation": each.operation, "micro_batch": each.micro_batch}
        events.append({
            "ph": "X", "pid": process, "tid": tracks[place_of(each)],
            "name": f"{each.operation}.{each.micro_batch}", "cat": CATEGORIES[each.operation[0]],
            "ts": begins, "dur": lasts,
            "args": args if step is None else {**args, "step": step},
        })  # fmt: skip
    return events
