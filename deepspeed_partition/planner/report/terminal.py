"""Text as a terminal shows it: of a width, with colours or without."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable

from rich.console import Console

WIDTH = 80
"""Columns of a text that goes to no terminal."""


def as_text(renderables: Iterable[object], width: int = WIDTH, *, colour: bool = False) -> str:
    """Return what a terminal of ``width`` columns would show, with its colours or as plain text."""
    buffer = io.StringIO()
    # Names are printed as they are: brackets and colons in them are no markup.
    console = Console(
        force_jupyter=False,  # where it would show what it is asked to write
        file=buffer, width=width, no_color=not colour, force_terminal=colour, markup=False, emoji=False,
        highlight=False, color_system="standard" if colour else None, legacy_windows=False,
    )  # fmt: skip
    for renderable in renderables:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def sentences(lines: Iterable[str], width: int = WIDTH) -> str:
    """Return lines that are broken between words where they are longer than a terminal is wide."""
    return "".join(
        textwrap.fill(line, max(20, width), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        + "\n"
        for line in lines
    )
