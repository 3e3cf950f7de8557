"""The lines of a model's source that run now, or that have raised an error."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).parents[1])
_HOST = str(Path(__file__).parents[2] / "lightning_madpipe")
_TORCH = str(Path(torch.__file__).parent)


def model_line() -> str:
    """The line of the model's source that is running."""
    frame = model_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def model_frame() -> FrameType | None:
    """The innermost frame of the model's source; None where none is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _HOST, _TORCH)) and not file.startswith("<"):
            return frame
        frame = frame.f_back
    return None


def line_of(error: BaseException) -> str:
    """The innermost line of the model's source in a traceback."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, _HOST, _TORCH)) and not frame.filename.startswith("<")
    ]  # fmt: skip
    if not frames:
        return ""
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
