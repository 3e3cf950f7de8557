"""Files that ``torch.save`` wrote, read as data: no class is built and no function called that is not known here.

A pickle can run any code when it is loaded, and plain DeepSpeed loads all of its files as such. Nearly all of
what they hold is data that ``torch.load(weights_only=True)`` reads. It needs the names of a few harmless classes
besides, which are given here. What the script itself puts into a checkpoint (``client_state``, the state of a
scheduler) may be of any class; that stands in the files ``mp_rank_*`` alone.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import re
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_partition.planner.errors import PlanFormatError
from deepspeed_partition.planner.units import shown

WITH_OBJECTS = "mp_rank_"
"""How the names of the files begin that hold what the script itself saved."""

_of_numpy = numpy.zeros(1).__reduce__()[0]
_known: list[Any] = [
    DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address,
    argparse.Namespace, types.SimpleNamespace, collections.deque, collections.defaultdict,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    decimal.Decimal, fractions.Fraction, uuid.UUID, io.BytesIO,
    pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath,
    numpy.ndarray, numpy.dtype, _of_numpy, *{type(numpy.dtype(code)) for code in numpy.typecodes["All"]},
    numpy.float64(0).__reduce__()[0],  # of single numbers
    bytes, bytearray, complex, slice, range, frozenset, int, float, bool, str, list, dict, tuple, set,
]  # fmt: skip


def _member_of(kind: Any, name: Any) -> Any:
    """The member of an enumeration, in the place of ``getattr``, by which Python 3.11.0 to 3.11.3 pickles it."""
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"getattr of {kind!r} and {name!r}, which is no member of an enumeration")
    return kind[name]


# Older torch takes no names; what it reads was then written by a Python that needs none.
if "tuple" in str(getattr(torch.serialization.add_safe_globals, "__annotations__", "")).lower():
    _known.append((_member_of, "builtins.getattr"))


@contextmanager
def _allowed() -> Iterator[None]:
    """Let torch load objects of known classes meanwhile; classes that the user registered stay so."""
    serialization = torch.serialization
    if hasattr(serialization, "safe_globals"):
        with serialization.safe_globals(_known):
            yield
    else:  # torch 2.4
        serialization.add_safe_globals(_known)
        yield


@dataclass(slots=True)
class Reader:
    """Reads files of a checkpoint.

    Args:
        unpickle: True: as plain DeepSpeed does, whatever they hold. False: never what can run code. None: only the
            files with what the script itself saved, and only where they hold a class that is not known here.
    """

    unpickle: bool | None = None
    unpickled: dict[str, list[str]] = field(default_factory=dict)
    """The files that were loaded as pickles for ``unpickle=None``, with the classes that made it necessary."""

    def load(self, path: str | Path, **options: Any) -> Any:
        """What ``torch.load(path, **options)`` gives.

        Raises:
            PlanFormatError: the file needs a pickle, which this reader refuses.
            Exception: what ``torch.load`` raises for a damaged file.
        """
        if self.unpickle:
            return torch.load(path, **options, weights_only=False)
        try:
            with _allowed():
                return torch.load(path, **options, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "weights_only" not in str(error):
                raise
            needed, reason = _classes_in(path, str(error)), _reason(str(error))
        name = Path(path).name
        if self.unpickle is None and name.startswith(WITH_OBJECTS):
            value = torch.load(path, **options, weights_only=False)
            self.unpickled[name] = needed or ["an object of a kind that is no plain data"]
            return value
        if not needed:
            raise pickle.UnpicklingError(reason)
        raise PlanFormatError(
            f"{path} holds {_some(needed)}, for which it would have to be unpickled, and that can run any code: "
            "if you trust its source, register the class with torch.serialization.add_safe_globals, or load with "
            "the option unpickle=True"
        )

    def load_at(self, path: str | Path, map_location: Any = None) -> Any:
        """:meth:`load` with the arguments of DeepSpeed's checkpoint engine."""
        return self.load(path, map_location=map_location)

    def sentence(self) -> str:
        """What is to be said about files that were unpickled; empty if none was."""
        if not self.unpickled:
            return ""
        name, needed = next(iter(self.unpickled.items()))
        more = f" (and {len(self.unpickled) - 1} files more)" if len(self.unpickled) > 1 else ""
        return (
            f"{name}{more} holds {_some(needed)} and was unpickled, which can run any code: load only checkpoints "
            "that you trust (the option unpickle=False refuses such files, True says nothing)"
        )


def _classes_in(path: str | Path, message: str) -> list[str]:
    """What a file names that is not known, without building any of it; empty where that is not what is wrong."""
    found = set(re.findall(r"GLOBAL ([\w.]+)", message))
    if hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        try:
            with _allowed():
                found |= set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except Exception:  # of a file that is no archive, or damaged behind the first of them
            return sorted(found)
    elif not found and "Unsupported" in message:
        found.add("objects of a class unknown here")
    return sorted(found)


def _reason(message: str) -> str:
    """What torch found, without its advice."""
    found = re.search(r"WeightsUnpickler error:\s*(\S.*)", message)
    words = found[1] if found else message.split(". ")[0]
    return "no file of tensors" if "weights" in words.lower() else words[:200]


def _some(names: list[str]) -> str:
    return ", ".join(shown(name)[1:-1] for name in names[:3]) + (", ..." if len(names) > 3 else "")
