"""Timelines as text: a period of a plan, its step, a step as it ran, and the order of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.planner.report.planned_run import PlannedRun, place_of, places_of
from deepspeed_partition.planner.report.terminal import as_text, sentences
from deepspeed_partition.planner.units import format_seconds

if TYPE_CHECKING:
    from deepspeed_partition.planner.report.timeline import MeasuredTimeline, TimedOperation

COLOURS = {"F": "blue", "f": "blue", "R": "cyan", "B": "green", "I": "green", "W": "magenta", "S": "yellow"}
"""Colours of a terminal for operations, by the first letter of their names."""
BUSY = len(" 100%")
"""Columns behind each row of a timeline."""
FILL = {"F": "=", "f": "=", "R": "+", "B": "#", "I": "#", "W": "%", "S": "-"}
"""Characters of a forward, a recomputation, a backward, the gradients of weights and a transfer in a timeline;
idle time is a dot."""


def timeline(plan: Plan, width: int = 96, *, colour: bool = False) -> str:
    """Draw one period of the pattern: a row for each device and each link.

    ``F1=====`` is the forward of stage 1; ``B0+2####`` the backward of stage 0 on the micro-batch that came in
    two periods ago; what runs over the end of the period goes on at its beginning. Where the pattern has several
    micro-batches, ``F1.3=`` is the forward of stage 1 on the one of index 3, and all of them are drawn.

    Args:
        width: characters of the period.
        colour: whether to draw with the colours of a terminal.
    """
    period = plan.pattern_seconds
    rows = _Rows((f"device {device}" for device in range(plan.platform.num_devices)), width, period)
    links = [operation.link for operation in plan.operations if operation.link is not None]
    for link in dict.fromkeys(tuple(sorted(link)) for link in links):
        rows.add("link {}-{}".format(*link))
    several = plan.micro_batches_per_period > 1
    for operation in plan.operations:
        place = f"device {operation.device}"
        if operation.link is not None:
            place = "link {}-{}".format(*sorted(operation.link))
        name = operation.operation + (f".{operation.index}" if several else "")
        name += f"+{operation.shift}" if operation.shift else ""
        first = round(operation.start_seconds / period * width) if period else 0
        last = round((operation.start_seconds + operation.duration_seconds) / period * width) if period else 0
        rows.draw(place, first, min(last, first + width), name, operation.duration_seconds)
    what = f"pattern of {plan.micro_batches_per_period} micro-batches," if several else "period of"
    return rows.text(f"one {what} {format_seconds(period)}", colour)


def planned_timeline(run: PlannedRun, platform: Platform, width: int = 96, *, colour: bool = False) -> str:
    """Draw a run of a plan from fill to drain: a row for each device, and one for each direction of each link.

    Args:
        width: characters of the run.
        colour: whether to draw with the colours of a terminal.
    """
    what = "one step" if run.is_step else f"{run.num_micro_batches} micro-batches"
    rows = _Rows(places_of(run, platform), width, run.seconds)
    _draw_run(rows, run.operations, 0.0, run.seconds)
    return rows.text(f"{what}, {format_seconds(run.seconds)}", colour)


def measured_step(timeline: MeasuredTimeline, index: int = -1, width: int = 96, *, colour: bool = False) -> str:
    """Draw a training step as it ran: a row for each device, and one for each direction of each link.

    ``F1.2====`` is the forward of stage 1 on micro-batch 2, ``B1.2`` its backward. On a link, ``SF0.2-`` is the
    output of stage 0 that goes to stage 1, and ``SB0.2-`` the gradient that comes back.

    Args:
        index: number of the step among those of the timeline; -1 is the last one.
        width: characters of the step.
        colour: whether to draw with the colours of a terminal.
    """
    step = timeline.steps[index]
    first = min(operation.start_seconds for operation in step.operations)
    seconds = max(operation.end_seconds for operation in step.operations) - first
    rows = _Rows((f"device {device}" for device in sorted(set(timeline.devices))), width, seconds)
    _draw_run(rows, sorted(step.operations, key=lambda each: (each.link or (), each.operation)), first, seconds)
    return rows.text(f"step {step.step}, {format_seconds(seconds)}", colour)


def _draw_run(rows: _Rows, operations: Iterable[TimedOperation], first: float, seconds: float) -> None:
    """Draw operations of a run that begins at ``first`` and lasts so many seconds."""
    scale = rows.width / seconds if seconds else 0.0
    for operation in operations:
        begin = round((operation.start_seconds - first) * scale)
        end = max(begin + 1, round((operation.end_seconds - first) * scale))
        name = f"{operation.operation}.{operation.micro_batch}"
        rows.draw(place_of(operation), begin, min(end, rows.width), name, operation.duration_seconds)


class _Rows:
    """Rows of a timeline: characters, of each the kind of its operation, and for how long each row is busy."""

    def __init__(self, places: Iterable[str], width: int, seconds: float) -> None:
        self.width = width
        self.seconds = seconds
        self.busy: dict[str, float] = {}
        self.cells: dict[str, list[str]] = {}
        self.kinds: dict[str, list[str]] = {}
        for place in places:
            self.add(place)

    def add(self, place: str) -> None:
        """Add an empty row, if there is none of this name."""
        self.cells.setdefault(place, ["."] * self.width)
        self.kinds.setdefault(place, [" "] * self.width)

    def draw(self, place: str, begin: int, end: int, name: str, seconds: float) -> None:
        """Draw an operation from a column to before another one; what is over the end goes on at the beginning.

        A name that does not fit is left out as a whole: half a name would be that of another operation.
        """
        self.add(place)
        self.busy[place] = self.busy.get(place, 0.0) + seconds
        length = max(0, end - begin)
        label = name if len(name) <= length else ""
        for offset, cell in enumerate((label + FILL[name[0]] * length)[:length]):
            self.cells[place][(begin + offset) % self.width] = cell
            self.kinds[place][(begin + offset) % self.width] = name[0]

    def text(self, head: str, colour: bool) -> str:
        """Return the rows below a line that says what they are and what each character means.

        At the end of each row stands which part of the time it is busy: a short operation has a whole character.
        """
        kinds = {kind for row in self.kinds.values() for kind in row}
        more = (", + forward again" if "R" in kinds else "") + (", % gradients of weights" if "W" in kinds else "")
        label = max(map(len, self.cells))
        whole = self.width + label + len(" ||") + BUSY
        lines = [Text(sentences([f"{head}: = forward, # backward{more}, - transfer, . idle"], whole).rstrip())]
        for place, row in self.cells.items():
            line = Text(f"{place:<{label}} |")
            for cell, kind in zip(row, self.kinds[place], strict=True):
                line.append(cell, COLOURS.get(kind, "dim"))
            share = f"{self.busy.get(place, 0.0) / self.seconds:.0%}" if self.seconds else ""
            lines.append(line.append(f"|{share:>{BUSY}}"))
        return as_text(lines, whole, colour=colour)


def step_order(plan: Plan, width: int = 100) -> str:
    """Write the order of one step: a row for each device; ``F0.3`` is the forward of stage 0 on micro-batch 3.

    Where rows are cut it ends with where the whole order is, which stands alone if no row would say even half.
    """
    assert plan.step is not None
    rows, most_told, is_whole = [], 0.0, True
    for device, order in enumerate(plan.step.order):
        row = f"device {device} "
        for index, (operation, micro_batch) in enumerate(order):
            left = len(order) - index - 1
            ending = f" and {left} more" if left else ""
            if len(row) + len(f" {operation}.{micro_batch}{ending}") > width:
                row += f" and {left + 1} more"
                is_whole = False
                most_told = max(most_told, index / len(order))
                break
            row += f" {operation}.{micro_batch}"
        else:
            most_told = 1.0
        rows.append(row)
    told = ["order of one step:", *rows] if most_told >= 0.5 else []
    if not is_whole:
        told.append('the whole order of a step is "order" in the file of the plan')
    return "\n".join(told) + "\n"
