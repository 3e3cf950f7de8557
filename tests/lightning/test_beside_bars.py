"""What is said beside progress bars begins on a line of its own."""

from __future__ import annotations

import io
import sys
import warnings

import pytest

pytest.importorskip("pytorch_lightning")
import tqdm

from lightning_madpipe.compat.namespace import show_notes_as_lines


def test_a_line_does_not_begin_behind_a_bar_of_another_process_or_of_tqdm(monkeypatch):
    """``[madpipe]`` once stood behind the bar: Python's warnings, and other ranks, know of none."""
    show_notes_as_lines()

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def line() -> str:
        return warnings.formatwarning(UserWarning("madpipe: so it is"), UserWarning, "file", 1)

    for stream, cleared in ((io.StringIO(), ""), (Terminal(), "\r\x1b[K")):
        monkeypatch.setattr(sys, "stderr", stream)
        assert line() == "[madpipe] so it is\n"
        with tqdm.tqdm(total=1, file=stream):
            assert line() == f"{cleared}[madpipe] so it is\n"
