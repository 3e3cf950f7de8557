"""JSON files: reading with a message for what is wrong, and writing as a whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

from deepspeed_partition.planner.errors import FormatError
from deepspeed_partition.planner.io.validation import Check, Violation, compiled
from deepspeed_partition.planner.units import printable, shown

LARGEST_FILE_BYTES = 2**25
"""Largest size of a file, in bytes: no chain, plan, graph or timeline is larger."""
MOST_LAYERS = 10_000
"""Largest number of layers of a chain."""
MOST_VALUES = 10**6
"""Largest number of values (numbers, texts, lists and objects) in a JSON file; a plan for 64 devices and 1000
micro-batches has 500,000."""
LONGEST_TEXT = 2**16
"""Largest number of characters of a name, or of any other text in a file."""
LONGEST_NAME_BYTES = 255
"""Largest number of bytes of one part of a path, on the file systems of today."""
SCHEMAS = Path(__file__).parent / "schemas"


def read_text(path: str | PathLike[str], *, error: type[FormatError]) -> str:
    """Return the text of a file; refuse a file that is not text, or too large."""
    try:
        with open(path, "rb") as file:  # its size is not asked for: a device or a pipe has none
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise error(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, which no file that is read here can be")
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{path}: not text: byte {cause.start} is not UTF-8") from None
    except (OSError, ValueError) as cause:
        if isinstance(cause, error):
            raise
        raise error(f"{path}: cannot be read: {getattr(cause, 'strerror', None) or cause}") from None


def parse_json(text: str, *, where: str, error: type[FormatError]) -> Any:
    """Return the value of JSON in ``text``; refuse a text that is too large before it is parsed."""
    num_values = text.count(",") + text.count("[") + text.count("{")
    if num_values > MOST_VALUES:
        raise error(f"{where}: about {num_values} values, and at most {MOST_VALUES} are read")

    def integer(digits: str) -> int | float:
        # A longer number is larger than any float, and Python refuses to read it.
        return int(digits) if len(digits) <= 300 else math.inf

    try:
        return json.loads(text, parse_int=integer)
    except json.JSONDecodeError as cause:
        raise error(f"{where}: not JSON: {cause.msg} at line {cause.lineno}, column {cause.colno}") from None
    except RecursionError:
        raise error(f"{where}: nested too deeply") from None


def read_json(path: str | PathLike[str], *, error: type[FormatError]) -> Any:
    return parse_json(read_text(path, error=error), where=str(path), error=error)


@cache
def _checks(schema: str) -> tuple[Check, Check]:
    """Return two checks, which find the first error in a whole file and in its ``format``."""
    text = (SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8")
    whole = json.loads(text)
    kind = {key: whole[key] for key in ("$defs", "type") if key in whole}
    of_format = {"properties": {"format": whole["properties"]["format"]}}
    return compiled(whole), compiled({**kind, **of_format})


def validated(data: Any, *, schema: str, where: str, error: type[FormatError]) -> Mapping[str, Any]:
    """Return ``data`` if it follows the schema.

    Raises:
        FormatError: it does not; one sentence names the path of the first error. ``error`` is the class raised.
    """
    try:
        _check_sizes(data, where, error)
        for path, rule in _odd_values(data):
            raise error(f"{where}: {_dotted(path) or 'the file'} is {rule}")
        # Check the format first: a file of another version has other fields, too.
        for check in reversed(_checks(schema)):
            violation = check(data)
            if violation is not None:
                raise error(f"{where}: {_sentence(violation)}")
    except RecursionError:
        raise error(f"{where}: nested too deeply") from None
    return cast("Mapping[str, Any]", data)


def _check_sizes(data: Any, where: str, error: type[FormatError]) -> None:
    """Refuse data that no planner could take, before anything looks at each of its values."""
    layers = data.get("layers") if isinstance(data, dict) else None
    if isinstance(layers, list) and len(layers) > MOST_LAYERS:
        raise error(f"{where}: layers has {len(layers)} entries, and at most {MOST_LAYERS} are read: group them")


def _odd_values(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and a description of each number that is not finite and each text that is too long."""
    if isinstance(data, int | float):
        if not abs(data) <= sys.float_info.max:
            yield path, f"{shown(data)}, not a finite number"
    elif isinstance(data, str):
        if len(data) > LONGEST_TEXT:
            yield path, f"a text of {len(data)} characters, more than {LONGEST_TEXT}"
    elif isinstance(data, Mapping):
        for key, value in data.items():
            if len(str(key)) > LONGEST_TEXT:
                yield (*path, shown(str(key))), f"a key of more than {LONGEST_TEXT} characters"
            yield from _odd_values(value, (*path, str(key)))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _odd_values(value, (*path, index))


def _dotted(path: Iterable[str | int]) -> str:
    """Join the path of a field: ``layers[0].name``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
    return text.removeprefix(".")


def _sentence(violation: Violation) -> str:
    """Sentence that says what is wrong, with the path of the field and without the whole file in it."""
    path, wanted = _dotted(violation.path), violation.wanted
    if violation.keyword == "required":
        return f"{f'{path}.' if path else ''}{wanted} is missing"
    match violation.keyword:
        case "type":
            names = wanted if isinstance(wanted, list) else [wanted]
            rule = "not " + " or ".join(f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names)
        case "minimum":
            rule = f"less than {wanted}"
        case "exclusiveMinimum":
            rule = f"not more than {wanted}"
        case "maximum":
            rule = f"more than {wanted}"
        case "const":
            rule = f"not {wanted!r}"
        case "minItems":
            rule = f"with fewer than {wanted} entries"
        case "maxItems":
            rule = f"with more than {wanted} entries"
        case "pattern":
            rule = f"not of the form {wanted}"
        case _:
            rule = "not of a form that is allowed here"
    return f"{path or 'the file'} is {shown(violation.found)}, {rule}"


def write_text(path: str | PathLike[str], text: str, *, through_link: bool = True) -> None:
    """Write ``text`` to a temporary file beside ``path``, then rename it, so that nobody reads half a file.

    Args:
        through_link: Where ``path`` is a symbolic link, write what it points to. False: the link itself is
            replaced, as is right for a name that the program chose, which others may have planted a link under.

    Raises:
        OSError: the folder cannot be written to.
    """
    given = Path(path)
    try:
        if through_link and given.exists() and not given.is_file():
            # /dev/stdout, a pipe: nothing to rename over, and what its links lead to need not be a path.
            given.write_text(text, encoding="utf-8")
        else:
            with replacing(given.resolve() if through_link else given) as file:
                file.write(text.encode("utf-8"))
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from None


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file, which takes the name ``target`` when the block ends; it goes if the block raises.

    The file is created exclusively, under a name that nobody can predict: a link that somebody planted in a
    shared folder is never followed.

    Raises:
        OSError: the folder cannot be written to.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:80]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only their owner may read
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | PathLike[str], data: Any, *, through_link: bool = True) -> None:
    """Write ``data`` as JSON, as :func:`write_text` writes a text."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", through_link=through_link)


def is_plain(name: object) -> TypeGuard[str]:
    """Return whether ``name`` is a relative name that stays within the folder it is joined to.

    Files in subfolders have such names, too. Links within the folder are not looked at.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    path = Path(name)
    try:
        too_long = any(len(os.fsencode(part)) > LONGEST_NAME_BYTES for part in path.parts)
    except UnicodeEncodeError:
        return False
    return bool(path.parts) and not path.anchor and ".." not in path.parts and not too_long
