"""Folders that come into being whole, also in the place of others: a process may be killed at any instant.

A folder ``NAME`` is written as ``.NAME.unfinished`` beside it. When it is complete, it swaps names with the one
that had the name until now, which is then removed. Where names cannot be swapped, the old folder becomes
``.NAME.discarded``, the new one gets the name, and the old one is removed as ``.NAME.removed``. Between the first
two of these renames nobody has the name: :func:`restore` ends that, also where it is a reader that comes while
another process writes. What happens to a folder later, such as a copy that is not whole, shows by the sizes of its
files, which ``madpipe-files.json`` lists.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from deepspeed_partition.planner import files
from deepspeed_partition.planner.errors import PlanFormatError

FILES_NAME = "madpipe-files.json"
FILES_FORMAT = "madpipe-files/1"


def unfinished(path: Path) -> Path:
    """The name of a folder while it is being written."""
    return path.with_name(f".{path.name}.unfinished")


def _discarded(path: Path) -> Path:
    """The name of a complete folder that gives its name to another."""
    return path.with_name(f".{path.name}.discarded")


def _removed(path: Path) -> Path:
    """The name of a folder that is being removed, which nobody takes for a complete one."""
    return path.with_name(f".{path.name}.removed")


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
    _remove_discarded(path)
    if path.exists() or path.is_symlink():
        if _swap(unfinished(path), path):
            remove(unfinished(path))
            return
        os.replace(path, _discarded(path))
    _rename(unfinished(path), path)
    _remove_discarded(path)


def restore(path: Path) -> None:
    """Give a folder its name where a run ended, or is, within :func:`publish`."""
    if not path.exists() and _discarded(path).exists():
        # Only a complete one has ever taken the name from another.
        _rename(unfinished(path) if unfinished(path).exists() else _discarded(path), path)


def _swap(one: Path, other: Path) -> bool:
    """Give each the other's name at one instant; False where the system or the disk cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):  # Linux has it
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, from its headers
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _rename(folder: Path, path: Path) -> None:
    """Give ``folder`` the name ``path``, which nobody has, unless another process gives it to one just now."""
    try:
        os.replace(folder, path)
    except OSError:
        if not path.exists():
            raise


def _remove_discarded(path: Path) -> None:
    remove(_removed(path))
    if _discarded(path).exists() or _discarded(path).is_symlink():
        os.replace(_discarded(path), _removed(path))
        remove(_removed(path))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def list_files(folder: Path) -> None:
    """Write down the name and the bytes of every file in a folder, whose other files are complete.

    Raises:
        OSError: the folder cannot be written.
    """
    sizes = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    files.write_json(folder / FILES_NAME, {"format": FILES_FORMAT, "bytes": sizes})


def check_files(folder: Path, *, but: Sequence[str] = ()) -> None:
    """Refuse a folder in which a file is missing or has another size than :func:`list_files` found.

    Args:
        but: Patterns of names that are not needed.

    Raises:
        PlanFormatError: there is such a file; not where no list was written.
    """
    path = folder / FILES_NAME
    if not path.exists():
        return
    listed = files.read_json(path, error=PlanFormatError)
    sizes = listed.get("bytes") if isinstance(listed, dict) and listed.get("format") == FILES_FORMAT else None
    if not isinstance(sizes, dict):
        raise PlanFormatError(f"{path}: damaged, or not of a version known here ({FILES_FORMAT})")
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size and not any(fnmatch.fnmatch(name, pattern) for pattern in but):
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise PlanFormatError(f"the checkpoint {folder} is damaged: {name} {state}; take another checkpoint")
