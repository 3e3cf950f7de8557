"""Folders that come into being whole, also in the place of others: a process may be killed at any instant.

A folder ``NAME`` is written as ``.NAME.unfinished`` beside it. When it is complete, what had the name until now
becomes ``.NAME.discarded``, the new folder gets the name, and the old one is removed. Between the two renames
nobody has the name: :func:`restore` ends that.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def unfinished(path: Path) -> Path:
    """The name of a folder while it is being written."""
    return path.with_name(f".{path.name}.unfinished")


def _discarded(path: Path) -> Path:
    return path.with_name(f".{path.name}.discarded")


def make_room(path: Path) -> None:
    """Make an empty folder that is to become ``path``.

    Raises:
        OSError: it cannot be made.
    """
    restore(path)
    remove(unfinished(path))  # of a run that ended while it wrote
    unfinished(path).mkdir(parents=True)


def publish(path: Path) -> None:
    """Give an unfinished folder, which is complete, its name; what had that name before goes."""
    remove(_discarded(path))
    if path.exists() or path.is_symlink():
        os.replace(path, _discarded(path))
    os.replace(unfinished(path), path)
    remove(_discarded(path))


def restore(path: Path) -> None:
    """Give a folder its name where a run ended within :func:`publish`."""
    if not path.exists() and _discarded(path).exists():
        # Only a complete one has ever taken the name from another.
        os.replace(unfinished(path) if unfinished(path).exists() else _discarded(path), path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
