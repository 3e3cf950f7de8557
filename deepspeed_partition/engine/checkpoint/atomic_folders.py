"""Folders that come into being whole, also in the place of others: a process may be killed at any instant.

A folder ``NAME`` is written as ``.NAME.unfinished`` beside it. When it is complete, it swaps names with the one
that had the name until now, which is then removed. Where names cannot be swapped, the old folder becomes
``.NAME.discarded``, the new one gets the name, and the old one is removed as ``.NAME.removed``. Between the first
two of these renames nobody has the name: :func:`restore` ends that, also where it is a reader that comes while
another process writes. What happens to a folder later, such as a copy that is not whole or a flipped bit, shows
by the sizes and the checksums of its files, which ``madpipe-files.json`` lists.

These names can be predicted, and others may write in a shared folder. So an unfinished folder is made
exclusively: a link that somebody puts there is never followed, and the other names are only renamed to. Its maker
holds a lock on it until it is published, so that another run does not take it for the rest of a dead one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import fnmatch
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.units import format_bytes, shown

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


@contextmanager
def room_told(folder: Path, needed: int) -> Iterator[None]:
    """Let the error of a full disk say how large a checkpoint is, and how much room there is for it.

    Args:
        folder: The checkpoint's, while it is written.
        needed: Bytes of all tensors in it.

    Raises:
        OSError: what was met, with the sizes where it is that the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(error.errno, f"{error.strerror}{sizes_in_words(folder, needed)}", error.filename) from error


FULL = (errno.ENOSPC, errno.EDQUOT)


def sizes_in_words(folder: Path, needed: int) -> str:
    """What a checkpoint takes, and what its disk has for it, with what was written already, to end a sentence."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    disk = os.statvfs(place)
    written = sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())
    size = format_bytes(disk.f_blocks * disk.f_frsize)
    room = format_bytes(disk.f_bavail * disk.f_frsize + written)
    return (
        f": its tensors take {format_bytes(needed)}, and the disk of {size} has {room} for them. What was there "
        "before stays; remove older ones, or save elsewhere"
    )


_held: dict[Path, int] = {}
"""The unfinished folders of this process, with the descriptors that have locks on them."""


def make_room(path: Path) -> None:
    """Make an empty folder that is to become ``path``, for :func:`publish` or :func:`give_up`.

    Raises:
        OSError: it cannot be made; another process may be writing it.
    """
    _let_go(path)
    restore(path)
    folder = unfinished(path)
    if folder.is_dir() and not folder.is_symlink():
        _let_go_of(_lock(folder))
        remove(folder)  # of a run that ended while it wrote
    else:
        folder.unlink(missing_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    _held[folder] = _lock(folder)


def give_up(path: Path) -> None:
    """Remove an unfinished folder that will not be complete; what stands at ``path`` stays."""
    try:
        remove(unfinished(path))
    finally:
        _let_go(path)


def _lock(folder: Path) -> int:
    """A descriptor with a lock on ``folder``, which ends with the process.

    Raises:
        OSError: another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise OSError(errno.EBUSY, "another process is writing this checkpoint", str(folder)) from None
        # else a disk without locks, as some network disks are
    return descriptor


def _let_go(path: Path) -> None:
    _let_go_of(_held.pop(unfinished(path), None))


def _let_go_of(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)


def publish(path: Path) -> None:
    """Give an unfinished folder, which is complete, its name; what had that name before goes."""
    try:
        _publish(path)
    finally:
        _let_go(path)


def _publish(path: Path) -> None:
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


@dataclass(frozen=True, slots=True)
class Listed:
    """What a complete folder consisted of."""

    sizes: dict[str, int]
    """The bytes of each file, by its name in the folder."""
    checksums: dict[str, str] | None
    """The checksum of each file, as :func:`checksum` gives it; None where none were taken."""

    def but(self, patterns: Sequence[str]) -> Listed:
        """Return the list without the files whose names are like one of ``patterns``."""

        def kept(name: str) -> bool:
            return not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

        sizes = {name: size for name, size in self.sizes.items() if kept(name)}
        checksums = self.checksums
        return Listed(sizes, checksums and {name: value for name, value in checksums.items() if kept(name)})

    def share(self, place: int, num_shares: int) -> list[str]:
        """Return the files for one of ``num_shares`` readers: each file has one reader, shares have about as many
        bytes."""
        bytes_of, shares = [0] * num_shares, [list[str]() for _ in range(num_shares)]
        for name in sorted(self.sizes, key=lambda name: (-self.sizes[name], name)):
            least = bytes_of.index(min(bytes_of))
            bytes_of[least] += self.sizes[name]
            shares[least].append(name)
        return shares[place]


def checksum(path: Path) -> str:
    """The CRC-32 of a file, as eight hexadecimal digits.

    It finds every single flipped bit, every run of up to 32 damaged bits, and of other damage all but one case in
    four thousand million. It is no protection against somebody who edits a file on purpose, and no checksum that
    lies in the same folder is.

    Raises:
        OSError: the file cannot be read.
    """
    value, block = 0, bytearray(2**20)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            value = zlib.crc32(view[:num_bytes], value)
    return f"{value:08x}"


def list_files(folder: Path, checksums: Mapping[str, str] | None = None) -> None:
    """Write down name and bytes of every file in a folder, whose other files are complete.

    Args:
        checksums: Those that were taken already, by names in the folder; the others are taken here. None: no file
            gets one.

    Raises:
        OSError: the folder cannot be read or written.
    """
    found = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file != folder / FILES_NAME
    }
    sizes = {name: file.stat().st_size for name, file in found.items()}
    data: dict[str, Any] = {"format": FILES_FORMAT, "bytes": sizes}
    if checksums is not None:
        data["crc32"] = {name: checksums.get(name) or checksum(file) for name, file in found.items()}
        data["crc32_of_this"] = _checksum_of(data)
    files.write_json(folder / FILES_NAME, data, through_link=False)


def list_again(folder: Path) -> None:
    """Bring the list up to date after files were added; those that were listed are taken as they were.

    Raises:
        OSError: the folder cannot be read or written.
    """
    listed = read_list(folder)
    list_files(folder, None if listed is None else listed.checksums)


def _checksum_of(data: Mapping[str, Any]) -> str:
    text = json.dumps({key: data[key] for key in ("bytes", "crc32")}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def read_list(folder: Path) -> Listed | None:
    """What :func:`list_files` wrote; None where there is no list.

    Raises:
        PlanFormatError: the list is damaged, of another version, or names something outside of the folder.
    """
    path = folder / FILES_NAME
    if not path.exists():
        return None
    data = files.read_json(path, error=PlanFormatError)
    damaged = PlanFormatError(f"{path}: damaged, or not of a version known here ({FILES_FORMAT})")
    if not isinstance(data, dict) or data.get("format") != FILES_FORMAT:
        raise damaged
    sizes, checksums = data.get("bytes"), data.get("crc32")
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise damaged
    for name in sizes:
        if not files.is_plain(name):
            raise PlanFormatError(f"{path}: {shown(name)} is not the name of a file in this folder")
    if "crc32_of_this" in data or checksums is not None:
        if not isinstance(checksums, dict) or checksums.keys() != sizes.keys():
            raise damaged
        if data.get("crc32_of_this") != _checksum_of(data):
            raise PlanFormatError(f"{path}: damaged, because its checksum differs; take another checkpoint")
    return Listed(sizes, checksums)


def check_sizes(folder: Path, listed: Listed) -> None:
    """Refuse a folder in which a listed file is missing or has another size.

    Raises:
        PlanFormatError: there is such a file.
    """
    for name, size in listed.sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found == size:
            continue
        if found is None:
            state = "is missing"
        elif not file.resolve().is_relative_to(folder.resolve()):
            state = "is a link to another file, outside"  # whose size is nobody's business
        else:
            state = f"has {found} bytes instead of {size}"
        raise PlanFormatError(f"the checkpoint {folder} is damaged: {name} {state}; take another checkpoint")


def check_contents(folder: Path, listed: Listed, names: Iterable[str]) -> None:
    """Refuse a folder in which one of the files ``names`` is not what was saved.

    Raises:
        PlanFormatError: there is such a file, or it cannot be read.
    """
    checksums = listed.checksums or {}
    for name in names if checksums else ():
        try:
            found = checksum(folder / name)
        except OSError as error:
            raise PlanFormatError(f"{folder / name} cannot be read: {error.strerror or error}") from None
        if found != checksums[name]:
            raise PlanFormatError(
                f"the checkpoint {folder} is damaged: {name} has the checksum {found} and was saved with "
                f"{checksums[name]}; take another checkpoint (checkpoint_checksums=False loads it as it is)"
            )
