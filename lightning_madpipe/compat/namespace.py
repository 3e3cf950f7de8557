"""Lightning's modules, of the one of its two packages that a program uses."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from deepspeed_partition.engine.runtime.environment import clear_line

NOTE = "madpipe: "
"""The beginning of each warning of this package's Lightning part."""


def show_notes_as_lines() -> None:
    """Show warnings of this package like its other lines, without the place of its code that warns."""
    shown = warnings.formatwarning
    if getattr(shown, "shows_notes", False):
        return

    def format_warning(message: Any, *arguments: Any, **options: Any) -> str:
        text = str(message)
        if text.startswith(NOTE):
            return f"{_clear_bar()}[madpipe] {text[len(NOTE) :]}\n"
        return shown(message, *arguments, **options)

    format_warning.shows_notes = True  # type: ignore[attr-defined]
    warnings.formatwarning = format_warning


def _clear_bar() -> str:
    """Return what clears the line of a bar of tqdm, behind which a warning would begin otherwise."""
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", None)
    return clear_line() if bars else ""


class Lightning:
    """``pytorch_lightning`` or ``lightning.pytorch``, whose classes are different ones.

    Args:
        namespace: The name of the package.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    @property
    def name(self) -> str:
        """Name of the package: ``pytorch_lightning`` or ``lightning.pytorch``."""
        return self._namespace

    def module(self, name: str) -> Any:
        """Return a module of the package, such as ``callbacks``."""
        return importlib.import_module(f"{self._namespace}.{name}")

    @property
    def module_class(self) -> Any:
        """The class ``LightningModule``."""
        return self.module("core.module").LightningModule

    @property
    def exception(self) -> type[Exception]:
        """The class of the errors that users make in what they configure."""
        return self.module("utilities.exceptions").MisconfigurationException

    def refusal(self, sentence: str) -> Exception:
        """Return the error that says ``sentence``."""
        return self.exception(sentence)

    def warn(self, note: str) -> None:
        """Warn of something on rank 0."""
        self.module("utilities.rank_zero").rank_zero_warn(f"{NOTE}{note}")
