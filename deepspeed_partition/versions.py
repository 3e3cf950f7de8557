"""Versions of the hosts that this package works with.

Both hosts use methods of DeepSpeed and Lightning that are no public interface, so versions matter. The
hosts' tests ran on a CPU, under Python 3.11, with three sets: the newest of all; the oldest DeepSpeed and
Lightning with the newest torch; the oldest torch with the newest hosts, of the callbacks' tests only those of
optimizers (``.ci/versions``). Versions between the ends, and all the oldest together, were not run.
``pyproject.toml`` has the same lower ends.

The planner needs none of them, so an installation can be without: :func:`require` says it where one is missing.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class Range:
    """Versions of a package, from the oldest to the newest tested, both included."""

    oldest: str
    newest_tested: str
    """Newest version that was tested; newer ones are tried, with a warning."""


RANGES = {
    "torch": Range("2.4.1", "2.13.0"),
    "deepspeed": Range("0.19.0", "0.19.8"),
    "pytorch-lightning": Range("2.5.0", "2.6.6"),
    "lightning": Range("2.5.0", "2.6.6"),
}


class HostError(ImportError):
    """A package that training or measuring needs is missing, or too old. The message says what to type."""


def require(what: str, extra: str, *packages: str) -> None:
    """Check that ``packages`` are installed, in versions that this package works with.

    Args:
        what: what needs them, the subject of the sentence.
        extra: the extra of this distribution that brings them.
        packages: names in :data:`RANGES`, whose modules have the same names.

    Raises:
        HostError: one is missing or older than its range.
    """
    missing = [package for package in packages if find_spec(package.replace("-", "_")) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise HostError(
            f"{what} needs {' and '.join(missing)}, which {are} not installed: pip install 'madpipe[{extra}]'",
            name=missing[0],
        )
    check_versions(*packages)


def check_versions(*packages: str) -> None:
    """Check the installed versions of ``packages``, names in :data:`RANGES`; skip what is not installed.

    Raises:
        HostError: one is older than its range; the sentence says what to type.
    """
    for package in packages:
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        supported = RANGES[package]
        if _numbers(installed) < _numbers(supported.oldest):
            raise HostError(
                f"MadPipe works with {package} {supported.oldest} to {supported.newest_tested} and {installed} is "
                f"installed: pip install '{package}>={supported.oldest}'"
            )
        if _numbers(installed) > _numbers(supported.newest_tested):
            warnings.warn(
                f"{package} {installed} is newer than MadPipe was tested with: if it fails, "
                f"pip install '{package}<={supported.newest_tested}'",
                RuntimeWarning,
                stacklevel=2,
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version: ``"2.13.0+cpu"`` gives (2, 13, 0)."""
    found = [int(number) for number in re.split(r"[^\d.]", version)[0].split(".") if number]
    return tuple([*found, 0, 0, 0][:3])
