"""JSON files: read with every flaw named, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, cast

from deepspeed_partition.planner.errors import FormatError
from deepspeed_partition.planner.units import printable, shown

LARGEST_FILE_BYTES = 2**28
"""A chain of a million layers is smaller; what is larger is no chain and no plan."""
SCHEMAS = Path(__file__).parent / "schemas"


def read_text(path: str | PathLike[str], *, error: type[FormatError]) -> str:
    """The text of a file, refused where it is no text."""
    try:
        with open(path, "rb") as file:  # not by its size: a device or a pipe has none
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise error(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, neither a chain nor a plan")
        return data.decode("utf-8")
    except UnicodeDecodeError as flaw:
        raise error(f"{path}: not text: byte {flaw.start} is not UTF-8") from None
    except (OSError, ValueError) as flaw:
        if isinstance(flaw, error):
            raise
        raise error(f"{path}: cannot be read: {getattr(flaw, 'strerror', None) or flaw}") from None


def parse_json(text: str, *, where: str, error: type[FormatError]) -> Any:
    """The JSON in ``text``."""

    def integer(digits: str) -> int | float:
        # Larger than any float, and longer than Python reads.
        return int(digits) if len(digits) <= 300 else math.inf

    try:
        return json.loads(text, parse_int=integer)
    except json.JSONDecodeError as flaw:
        raise error(f"{where}: not JSON: {flaw.msg} at line {flaw.lineno}, column {flaw.colno}") from None
    except RecursionError:
        raise error(f"{where}: nested too deeply") from None


def read_json(path: str | PathLike[str], *, error: type[FormatError]) -> Any:
    return parse_json(read_text(path, error=error), where=str(path), error=error)


@cache
def _validator(schema: str) -> Any:
    import jsonschema  # 0.1 s, paid only where a file is read

    text = (SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


def validated(data: Any, *, schema: str, where: str, error: type[FormatError]) -> Mapping[str, Any]:
    """``data`` if it follows the schema, otherwise one sentence that names the first flaw's path.

    Raises:
        FormatError: ``error``, of which this is the base.
    """
    try:
        unbounded = next(_not_finite(data), None)
        if unbounded is not None:
            path, value = unbounded
            raise error(f"{where}: {_dotted(path) or 'the file'} is {shown(value)}, not a finite number")
        flaws = _validator(schema).iter_errors(data)
        # The format first: a file of another version has other fields, too.
        flaw = min(flaws, key=lambda flaw: list(flaw.absolute_path) != ["format"], default=None)
        if flaw is not None:
            raise error(f"{where}: {_sentence(flaw)}")
    except RecursionError:
        raise error(f"{where}: nested too deeply") from None
    return cast("Mapping[str, Any]", data)


def _not_finite(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], float]]:
    """The numbers that are no finite float, and where they stand."""
    if isinstance(data, int | float):
        if not abs(data) <= sys.float_info.max:
            yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _not_finite(value, (*path, str(key)))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _not_finite(value, (*path, index))


def _dotted(path: Iterable[str | int]) -> str:
    """``layers[0].name``"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
    return text.removeprefix(".")


def _sentence(flaw: Any) -> str:
    """What jsonschema found, with the field's path and without the whole file in it."""
    path = _dotted(flaw.absolute_path)
    if flaw.validator == "required":
        missing = next(key for key in flaw.validator_value if key not in flaw.instance)
        return f"{f'{path}.' if path else ''}{missing} is missing"
    wanted = flaw.validator_value
    match flaw.validator:
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
    return f"{path or 'the file'} is {shown(flaw.instance)}, {rule}"


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write to a temporary file beside ``path``, then rename it: nobody reads half a file.

    Raises:
        OSError: the folder cannot be written.
    """
    target = Path(path).resolve()  # what a link points to, not the link
    try:
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe: nothing to rename over
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except OSError as flaw:
        raise OSError(flaw.errno, f"cannot be written: {flaw.strerror}", str(path)) from None


def _replace(target: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only their owner may read
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | PathLike[str], data: Any) -> None:
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
