"""A plan as a notebook shows it: its promises, one period or its step as a picture, and its stages."""

from __future__ import annotations

from html import escape

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.report.draw import promises, stage_rows
from deepspeed_partition.planner.report.pictures import timeline_svg
from deepspeed_partition.planner.report.planned_run import bottleneck_words, memory_words
from deepspeed_partition.planner.units import counted, format_bytes, printable


def plan_html(plan: Plan) -> str:
    """Return a piece of HTML without scripts, which notebooks show also where they trust no output."""
    title = (
        f"{printable(plan.chain.name)}: {counted(plan.chain.num_layers, 'layer')} in "
        f"{counted(len(plan.stages), 'stage')} on {counted(plan.platform.num_devices, 'device')} of "
        f"{format_bytes(plan.platform.memory_bytes)}"
    )
    told = "<br>".join(map(escape, (*promises(plan), bottleneck_words(plan), memory_words(plan))))
    head, *rows = stage_rows(plan)
    first = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div><strong>{escape(title)}</strong><p>{told}</p>{timeline_svg(plan)}"
        f"<table><thead><tr>{first}</tr></thead><tbody>{cells}</tbody></table></div>"
    )
