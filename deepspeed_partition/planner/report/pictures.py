"""Pictures of comparisons, frontiers and plans, as SVG that any browser shows, in light and dark.

A plotting library would be ten times the size of all that planning needs; these three pictures are a few bars and
lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deepspeed_partition.planner.data_parallel import seconds_of
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.report.comparison import Comparison
from deepspeed_partition.planner.report.frontier import Frontier
from deepspeed_partition.planner.report.planned_run import bottleneck_words
from deepspeed_partition.planner.units import format_bytes, format_seconds, printable

STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.small{font-size:11px;fill:#57606a}
.title{font-size:15px;font-weight:600}
.axis{stroke:#8c959f;stroke-width:1}.grid{stroke:#d0d7de;stroke-width:1}
.bound{stroke:#cf222e;stroke-width:2;stroke-dasharray:5 3}
.line{stroke:#0969da;stroke-width:2;fill:none}.dot{fill:#0969da}.open{fill:#fff;stroke:#0969da;stroke-width:2}
.bar{fill:#8c959f}.best{fill:#0969da}.page{fill:#fff}
.F,.f{fill:#54aeff}.R{fill:#a5d6ff}.B,.I{fill:#f69d50}.W{fill:#d4a72c}.S{fill:#4ac26b}.rest{fill:#eaeef2}.label{font-size:10px;fill:#0b1117}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9ea7b3}.grid{stroke:#30363d}.line{stroke:#58a6ff}.dot,.best{fill:#58a6ff}
.open{fill:#0d1117;stroke:#58a6ff}.bound{stroke:#ff7b72}.page{fill:#0d1117}.bar{fill:#6e7681}.rest{fill:#21262d}
.label{fill:#0b1117}}
"""
"""Colours with a contrast of 3:1 to their ground, 4.5:1 for text; kinds differ in lightness, too."""
WIDTH = 760
"""Pixels of a picture."""


IN_PAGE = """
.picture text{font:13px system-ui,sans-serif;fill:var(--text)}.picture .small{font-size:11px;fill:var(--dim)}
.picture .title{font-size:15px;font-weight:600}.picture .axis{stroke:var(--dim)}.picture .page{fill:none}
.picture .bound{stroke:var(--limit);stroke-width:2;stroke-dasharray:5 3}.picture .best{fill:var(--F)}
.picture .bar{fill:var(--fixed)}
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
    where = f"{printable(chain.name)}, {platform.num_devices} devices of {format_bytes(platform.memory_bytes)}"
    parts = [_text(12, 26, title, css="title"), _text(12, 46, where, css="small")]
    best = min((each.seconds for each in fitting), default=0.0)
    told = []
    for index, contender in enumerate(comparison.contenders):
        y, name = top + index * row, printable(contender.algorithm)
        parts.append(_text(left - 8, y + 15, name if len(name) < 21 else f"{name[:19]}…", anchor="end"))
        if contender.plan is None:
            smallest = contender.smallest_memory_bytes
            says = "refused" if smallest is None else f"does not fit, needs {format_bytes(smallest)}"
            says = "left out: too little time" if contender.is_left_out else says
            parts.append(_text(left + 6, y + 15, says, css="small"))
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
        parts.append(_line(x, top - 6, x, bottom, "bound"))
        parts.append(_text(x, bottom + 16, f"lower bound {format_seconds(bound)}", css="small", anchor="middle"))
    return _svg(bottom + 28, title, f"{where}. {'; '.join(told)}", parts, IN_PAGE if in_page else STYLE)


def frontier_svg(frontier: Frontier) -> str:
    """Draw the time over the memory of each device; a filled dot is proved."""
    first = frontier.plans[0]
    what = "step" if first.step is not None else "period"
    points = [(frontier.memory_bytes(plan), seconds_of(plan), plan) for plan in frontier.plans]
    most_bytes, most_seconds = max(each[0] for each in points), max(each[1] for each in points) or 1.0
    left, top, width, height = 84, 62, WIDTH - 84 - 40, 300
    title = f"{what.capitalize()} against memory per device"
    where = f"{printable(first.chain.name)}, {first.platform.num_devices} devices; filled dots are proved"
    parts = [_text(12, 26, title, css="title"), _text(12, 46, where, css="small")]
    for part in range(5):
        y, x = top + height * (1 - part / 4), left + width * part / 4
        parts.append(_line(left, y, left + width, y, "grid"))
        parts.append(_text(left - 8, y + 4, format_seconds(most_seconds * part / 4), css="small", anchor="end"))
        parts.append(
            _text(x, top + height + 18, format_bytes(most_bytes * part / 4), css="small", anchor="middle")
        )
    parts.append(_text(left + width / 2, top + height + 38, "memory per device", css="small", anchor="middle"))

    def place(memory: float, seconds: float) -> tuple[float, float]:
        return left + width * memory / most_bytes, top + height * (1 - seconds / most_seconds)

    path, told = "", []
    for memory, seconds, _ in points:  # from right to left: with less memory nothing faster is known
        x, y = place(memory, seconds)
        path += f"L{x:.1f} {y:.1f}" if not path else f"V{y:.1f}H{x:.1f}"
    begin = f"M{left + width:.1f} {place(*points[0][:2])[1]:.1f}"
    parts.append(f'<path class="line" d="{begin}{path}"/>')
    for memory, seconds, plan in points:
        x, y = place(memory, seconds)
        proved = plan.proved if plan.step is None else plan.step.proved
        tip = f"{format_bytes(memory)}: {format_seconds(seconds)}{', proved' if proved else ''}"
        css = "dot" if proved else "open"
        parts.append(
            f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(tip)}</title></circle>'
        )
        told.append(tip)
    return _svg(top + height + 52, title, f"{where}. {'; '.join(told)}", parts)


def timeline_svg(plan: Plan) -> str:
    """Draw one period of the pattern: a row for each device and each link."""
    links = {tuple(sorted(operation.link)) for operation in plan.operations if operation.link is not None}
    rows = [f"device {device}" for device in range(plan.platform.num_devices)]
    rows += ["link {}-{}".format(*link) for link in sorted(links)]
    left, top, row = 84, 10, 20
    seconds = plan.pattern_seconds or 1.0
    scale = (WIDTH - left - 12) / seconds
    parts = []
    for index, name in enumerate(rows):
        parts.append(_text(left - 8, top + index * row + 14, name, css="small", anchor="end"))
        parts.append(_rect(left, top + index * row, seconds * scale, row - 3, "rest"))
    for operation in plan.operations:
        place = f"device {operation.device}"
        if operation.link is not None:
            place = "link {}-{}".format(*sorted(operation.link))
        y = top + rows.index(place) * row
        name = operation.operation + (f"+{operation.shift}" if operation.shift else "")
        tip = (
            f"{name}: {format_seconds(operation.duration_seconds)} from {format_seconds(operation.start_seconds)}"
        )
        begin, end = operation.start_seconds, operation.start_seconds + operation.duration_seconds
        while end > begin:  # what runs over the end of the period goes on at its beginning
            until = min(end, seconds)
            width = (until - begin) * scale
            parts.append(_rect(left + begin * scale, y, max(width, 0.5), row - 3, operation.operation[0], tip))
            if width > 7 * len(name) + 4:
                parts.append(_text(left + begin * scale + 3, y + 12.5, name, css="label"))
            begin, end = 0.0, end - until if until < end else 0.0
    title = f"One {'period' if plan.micro_batches_per_period == 1 else 'pattern'} of {format_seconds(seconds)}"
    return _svg(top + len(rows) * row + 6, title, bottleneck_words(plan), parts)
