"""Pictures of comparisons, frontiers and plans, as SVG that any browser shows, in light and dark.

A plotting library would be ten times the size of all that planning needs; these three pictures are a few bars and
lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from html import escape
from math import ceil, floor, log, log10

from deepspeed_partition.planner.data_parallel import seconds_of
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.report.comparison import Comparison
from deepspeed_partition.planner.report.draw import devices_words, frontier_words
from deepspeed_partition.planner.report.frontier import Frontier
from deepspeed_partition.planner.report.planned_run import (
    bottleneck_words,
    place_of,
    places_of,
    planned_run,
    repeats_pattern,
)
from deepspeed_partition.planner.units import counted, format_bytes, format_seconds, printable

STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.small{font-size:11px;fill:#57606a}
.title{font-size:15px;font-weight:600}
.axis{stroke:#8c959f;stroke-width:1}.grid{stroke:#d0d7de;stroke-width:1}
.bound{stroke:#cf222e;stroke-width:2;stroke-dasharray:5 3}.halo{stroke:#fff;stroke-width:6}
.line{stroke:#0969da;stroke-width:2;fill:none}.dot{fill:#0969da}.open{fill:#fff;stroke:#0969da;stroke-width:2}
.bar{fill:#818a94}.best{fill:#0969da}.page{fill:#fff}
.F,.f{fill:#1560bd}.R{fill:#388cd6}.B,.I{fill:#d06a1c}.W{fill:#7a6400}.S{fill:#1b7f45}.rest{fill:#eef1f4}
text.label{font-size:10px;fill:#fff}text.R,text.B,text.I{fill:#0b1117}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9ea7b3}.grid{stroke:#30363d}.line{stroke:#58a6ff}.dot,.best{fill:#58a6ff}
.F,.f{fill:#4a9bff}.R{fill:#9fd0ff}.B,.I{fill:#ef8b3a}.W{fill:#d0a215}.S{fill:#3fb065}.rest{fill:#1c2129}
.open{fill:#0d1117;stroke:#58a6ff}.bound{stroke:#ff7b72}.halo{stroke:#0d1117}.page{fill:#0d1117}.bar{fill:#6e7681}
text.label{fill:#0b1117}}
"""
"""Colours with a contrast of 3:1 to their ground, 4.5:1 for text, as WCAG 2 asks; kinds differ in lightness."""
WIDTH = 760
"""Pixels of a picture."""
KINDS = {
    "F": "forward", "R": "forward again", "B": "backward", "W": "gradients of weights", "S": "transfer",
}  # fmt: skip
"""Kinds of operations that have a colour each. ``f`` has that of ``F``, and ``I`` that of ``B``."""
MOST_DRAWN = 2000
"""Most operations of a step in the picture of a notebook; the page of ``madpipe report`` draws any number."""
WIDE = 5
"""Quotient of the slowest and the fastest time from which a picture has times by their logarithm."""


IN_PAGE = """
.picture text{font:13px system-ui,sans-serif;fill:var(--text)}.picture .small{font-size:11px;fill:var(--dim)}
.picture .title{font-size:15px;font-weight:600}.picture .axis{stroke:var(--dim)}.picture .page{fill:none}
.picture .bound{stroke:var(--limit);stroke-width:2;stroke-dasharray:5 3}.picture .best{fill:var(--F)}
.picture .halo{stroke:var(--ground);stroke-width:6}.picture .bar{fill:var(--fixed)}
"""
"""The colours of a page that has variables for them."""


def _svg(height: int, title: str, description: str, parts: Sequence[str], style: str = STYLE) -> str:
    """Return a picture with the words that a screen reader reads."""
    width = WIDTH
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" class="picture" role="img"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>"
        f'<style>{style}</style><rect class="page" width="{width}" height="{height}"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, *, css: str = "", anchor: str = "start") -> str:
    name = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _rect(x: float, y: float, width: float, height: float, css: str, tip: str = "") -> str:
    told = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" class="{css}">{told}</rect>'


def comparison_svg(comparison: Comparison, *, in_page: bool = False) -> str:
    """Draw the time of each algorithm as a bar, with its memory beside it and the lower bound as a line.

    Args:
        in_page: use the colours of the page that the picture is part of.
    """
    chain, platform = comparison.chain, comparison.platform
    fitting = comparison.fitting
    steps = any(each.plan is not None and each.plan.step is not None for each in fitting)
    bound = comparison.step_lower_bound_seconds if steps else comparison.lower_bound_seconds
    longest = max((each.seconds for each in fitting), default=0.0) or 1.0
    left, top, row, right = 150, 66, 28, 170
    scale = (WIDTH - left - right) / longest
    what = "step" if steps else "period"
    title = f"{what.capitalize()} of each algorithm"
    where = f"{printable(chain.name)}, {devices_words(platform)}; in blue the shortest {what}"
    parts = [_text(12, 26, title, css="title"), _text(12, 46, where, css="small")]
    best = min((each.seconds for each in fitting), default=0.0)
    told = []
    for index, contender in enumerate(comparison.contenders):
        y, name = top + index * row, printable(contender.algorithm)
        parts.append(_text(left - 8, y + 15, name if len(name) < 21 else f"{name[:19]}…", anchor="end"))
        if contender.plan is None:
            smallest = contender.smallest_memory_bytes
            says = "refused" if smallest is None else f"needs {format_bytes(smallest)}"
            says = "left out: too little time" if contender.is_left_out else says
            # Beside the line of the bound, not across it.
            parts.append(_text(left + (bound or 0.0) * scale + 8, y + 15, says, css="small"))
        else:
            memory = format_bytes(max(contender.plan.peak_memory_bytes))
            says = f"{format_seconds(contender.seconds)}, {memory}"
            width = contender.seconds * scale
            css = "best" if contender.seconds == best else "bar"
            parts.append(_rect(left, y, width, row - 9, css, f"{name}: {says}"))
            parts.append(_text(left + width + 6, y + 15, says, css="small"))
        told.append(f"{name}: {says}")
    bottom = top + len(comparison.contenders) * row
    parts.append(_line(left, top - 6, left, bottom, "axis"))
    if bound:
        x = left + bound * scale
        parts.append(_line(x, top - 6, x, bottom, "halo"))  # else it would not be seen on all bars
        parts.append(_line(x, top - 6, x, bottom, "bound"))
        parts.append(_text(x, bottom + 16, f"lower bound {format_seconds(bound)}", css="small", anchor="middle"))
    return _svg(bottom + 28, title, f"{where}. {'; '.join(told)}", parts, IN_PAGE if in_page else STYLE)


def frontier_svg(frontier: Frontier) -> str:
    """Draw the time over the memory of each device; a filled dot is proved.

    Where the slowest plan takes more than ``WIDE`` times as long as the fastest one, times are drawn by their
    logarithm: else all but the slowest would lie on one line.
    """
    first = frontier.plans[0]
    what = "step" if first.step is not None else "period"
    points = [(frontier.memory_bytes(plan), seconds_of(plan), plan) for plan in frontier.plans]
    all_bytes, all_seconds = [each[0] for each in points], [each[1] for each in points]
    is_wide = 0 < min(all_seconds) * WIDE < max(all_seconds)
    sizes = _ticks(min(all_bytes), max(all_bytes))
    times = _powers(min(all_seconds), max(all_seconds)) if is_wide else _ticks(0.0, max(all_seconds))
    left, top, width, height = 84, 82, WIDTH - 84 - 40, 300

    def right_of(memory: float) -> float:
        return left + width * (memory - sizes[0]) / (sizes[-1] - sizes[0])

    def below(seconds: float) -> float:
        part = seconds / times[-1]
        if is_wide:
            part = 1 + log(part) / log(times[-1] / times[0])
        return top + height * (1 - part)

    title = f"{what.capitalize()} against memory per device"
    devices = counted(first.platform.num_devices, "device")
    where = f"{printable(first.chain.name)}, {devices}; filled dots are proved"
    where += "; times are drawn by their logarithm" if is_wide else ""
    words = frontier_words(frontier).strip()
    parts = [_text(12, 26, title, css="title")]
    parts += [_text(12, 46, where, css="small"), _text(12, 64, words, css="small")]
    for seconds in times:
        parts.append(_line(left, below(seconds), left + width, below(seconds), "grid"))
        parts.append(_text(left - 8, below(seconds) + 4, format_seconds(seconds), css="small", anchor="end"))
    for memory in sizes:
        parts.append(_line(right_of(memory), top + height, right_of(memory), top + height + 5, "axis"))
        parts.append(
            _text(right_of(memory), top + height + 18, format_bytes(memory), css="small", anchor="middle")
        )
    parts.append(_text(left + width / 2, top + height + 38, "memory per device", css="small", anchor="middle"))
    path = f"M{left + width} {below(all_seconds[0]):.1f}"
    for memory, seconds, _ in points:  # from right to left: with less memory nothing faster is known
        path += f"V{below(seconds):.1f}H{right_of(memory):.1f}"
    parts.append(f'<path class="line" d="{path}"/>')
    told = []
    for memory, seconds, plan in points:
        proved = frontier.is_proved(plan)
        tip = f"{format_bytes(memory)}: {format_seconds(seconds)}{', proved' if proved else ''}"
        css = "dot" if proved else "open"
        parts.append(
            f'<circle class="{css}" cx="{right_of(memory):.1f}" cy="{below(seconds):.1f}" r="4.5">'
            f"<title>{escape(tip)}</title></circle>"
        )
        told.append(tip)
    return _svg(top + height + 52, title, f"{where}. {words} {'; '.join(told)}", parts)


def _ticks(least: float, most: float) -> list[float]:
    """Return round numbers at equal distances that have two numbers between the first and the last of them."""
    if least >= most:
        least = 0.0
    apart = _round_up((most - least) / 6 or 1.0)
    first, last = floor(least / apart), ceil(most / apart * (1 - 1e-9))
    return [place * apart for place in range(first, max(last, first + 1) + 1)]


def _powers(least: float, most: float) -> list[float]:
    """Return 1, 2, 5, 10, ... times a power of ten around two numbers above 0; in a wide range powers alone."""
    first, last = floor(log10(least)), ceil(log10(most))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
    low, high = max(each for each in ticks if each <= least), min(each for each in ticks if each >= most)
    return [each for each in ticks if low <= each <= high]


def _round_up(number: float) -> float:
    """Return the least of 1, 2, 5 and 10 times a power of ten that is not below a number."""
    power = 10.0 ** floor(log10(number))
    return power * next(digit for digit in (1, 2, 5, 10) if digit * power >= number * (1 - 1e-9))


def shown_kinds(kinds: Set[str]) -> list[tuple[str, str]]:
    """Return the letters and the words of those colours that operations of these kinds have."""
    coloured = {{"f": "F", "I": "B"}.get(kind, kind) for kind in kinds}
    return [(kind, words) for kind, words in KINDS.items() if kind in coloured]


def timeline_svg(plan: Plan) -> str:
    """Draw one period of the pattern: a row for each device and each link.

    Of a step that does not repeat the pattern the step is drawn. Empty where it has more than ``MOST_DRAWN``
    operations, or where the plan alone does not tell when they begin.
    """
    if not repeats_pattern(plan):
        run = planned_run(plan)
        if not run.is_step or len(run.operations) > MOST_DRAWN:
            return ""
        drawn = [
            (place_of(each), f"{each.operation}.{each.micro_batch}", each.start_seconds, each.duration_seconds)
            for each in run.operations
        ]
        return _timeline(plan, places_of(run, plan.platform), drawn, run.seconds, "One step")
    links = {tuple(sorted(operation.link)) for operation in plan.operations if operation.link is not None}
    rows = [f"device {device}" for device in range(plan.platform.num_devices)]
    rows += ["link {}-{}".format(*link) for link in sorted(links)]
    drawn = []
    for operation in plan.operations:
        place = f"device {operation.device}"
        if operation.link is not None:
            place = "link {}-{}".format(*sorted(operation.link))
        name = operation.operation + (f"+{operation.shift}" if operation.shift else "")
        drawn.append((place, name, operation.start_seconds, operation.duration_seconds))
    what = "One period" if plan.micro_batches_per_period == 1 else "One pattern"
    return _timeline(plan, rows, drawn, plan.pattern_seconds, what)


def _timeline(
    plan: Plan, rows: Sequence[str], drawn: Iterable[tuple[str, str, float, float]], seconds: float, what: str
) -> str:
    """Draw operations, each given by its row, its name, its start and its duration in seconds."""
    left, top, row = 84, 30, 20
    drawn = list(drawn)
    whole = seconds or 1.0
    scale = (WIDTH - left - 12) / whole
    title = f"{what} of {format_seconds(whole)}"
    parts = [_text(left, 15, title, css="small")]
    x = left + 7.0 * len(title)
    for kind, words in shown_kinds({name[0] for _, name, _, _ in drawn}):
        parts += [_rect(x, 6, 11, 11, kind), _text(x + 16, 15, words, css="small")]
        x += 32 + 6.2 * len(words)
    for index, name in enumerate(rows):
        parts.append(_text(left - 8, top + index * row + 14, name, css="small", anchor="end"))
        parts.append(_rect(left, top + index * row, whole * scale, row - 3, "rest"))
    for place, name, begin, duration in drawn:
        y = top + rows.index(place) * row
        tip = f"{name}: {format_seconds(duration)} from {format_seconds(begin)}"
        end = begin + duration
        while end > begin:  # what runs over the end of the period goes on at its beginning
            until = min(end, whole)
            width = (until - begin) * scale
            kind, gap = name[0], 1 if width > 3 else 0  # between two operations the ground is seen
            parts.append(_rect(left + begin * scale, y, max(width - gap, 0.5), row - 3, kind, tip))
            if width > 7 * len(name) + 4:
                parts.append(_text(left + begin * scale + 3, y + 12.5, name, css=f"label {kind}"))
            begin, end = 0.0, end - until if until < end else 0.0
    return _svg(top + len(rows) * row + 6, title, bottleneck_words(plan), parts)
