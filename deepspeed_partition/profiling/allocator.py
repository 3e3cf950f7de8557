"""Exact counter and limit of the bytes of torch's CPU tensors, by an allocator beneath them.

``LiveBytes`` sees what operators return. The allocator sees every byte that torch asks for: what a kernel needs
for itself as well, on every thread, in backwards, optimizers and transfers. It shares nothing with the planner, so
a plan can be held against it; and it refuses beyond a limit as a GPU does, so that running out of memory can be
tried without one.

It is C++ (``counting_allocator.cpp``), which the system's compiler translates at the first use on a machine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("counting_allocator.cpp")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 300
"""A compiler that takes longer has come to a standstill: it takes a second or two."""
NO_LIMIT = -1
_limited: list[tuple[CountedMemory, int]] = []
"""Contexts of this process that have a limit, with their limits in bytes."""


class CountedMemory:
    """Bytes of the CPU tensors that this process allocates, from one instant on; made by ``counted_memory``.

    Numbers are exact: of every allocation through torch the bytes that were asked for, from the call that makes
    it to the call that frees it, whichever thread does either. What was allocated before does not count, nor does
    its end. The counter may be read on any thread, and after its context has ended; then it says what it was at
    the end.

    Not counted: memory that is not torch's, such as NumPy arrays, tensors in shared memory, and what oneDNN's
    kernels allocate by themselves.
    """

    def __init__(self, library: Any, handle: int) -> None:
        self._library = library
        self._handle: int | None = handle
        self._last = (0, 0)

    @property
    def current_bytes(self) -> int:
        """Bytes that are in use now."""
        return self._last[0] if self._handle is None else self._library.madpipe_current(self._handle)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, since the beginning or the last ``reset_peak``."""
        return self._last[1] if self._handle is None else self._library.madpipe_peak(self._handle)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are in use now."""
        if self._handle is None:
            raise RuntimeError("this counter of memory has ended: its peak is that of its whole time")
        self._library.madpipe_reset_peak(self._handle)

    @contextmanager
    def phase(self) -> Iterator[CountedMemory]:
        """Count a part of this counter's time, such as an optimizer's step, with a peak of its own.

        The part's numbers have in them what this counter counts when the part begins. This counter's own peak is
        not touched.

        Raises:
            RuntimeError: the counter has ended.
        """
        if self._handle is None:
            raise RuntimeError("this counter of memory has ended: no part of its time can begin")
        with _counter(self._library, self._handle, this_thread=False) as counted:
            yield counted

    def _end(self) -> None:
        handle = self._handle
        assert handle is not None
        self._last = self.current_bytes, self.peak_bytes
        self._handle = None
        self._library.madpipe_close(handle)


@contextmanager
def counted_memory(*, limit_bytes: int | None = None, this_thread: bool = False) -> Iterator[CountedMemory]:
    """Count the bytes of the CPU tensors that this process allocates inside the context, on all threads.

    Contexts may be nested and may overlap: each counts what is allocated from its own beginning on.

    Args:
        limit_bytes: Most bytes that may be in use at once. An allocation beyond raises ``torch.OutOfMemoryError``,
            which torch raises on a GPU, too, and says how much was asked for, in use, and allowed; nothing is
            allocated then. None: no limit.
        this_thread: Count, and limit, what this thread allocates alone, whichever thread frees it.

    Raises:
        ValueError: the limit is negative.
        RuntimeError: there is no C++ compiler, or it failed.
    """
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"limit_bytes is {limit_bytes}: it must be at least 0")
    with _counter(_library(), None, this_thread=this_thread) as counted:
        if limit_bytes is None:
            yield counted
            return
        counted._library.madpipe_limit(counted._handle, limit_bytes)
        _limited.append((counted, limit_bytes))
        try:
            yield counted
        finally:
            _limited.remove((counted, limit_bytes))


def limit_memory(limit_bytes: int) -> Any:
    """Refuse allocations of CPU tensors beyond ``limit_bytes`` inside the context, as a GPU would that is full.

    It is ``counted_memory(limit_bytes=limit_bytes)``, for who wants the limit alone.

    Raises:
        ValueError: the limit is negative.
        RuntimeError: there is no C++ compiler, or it failed.
    """
    return counted_memory(limit_bytes=limit_bytes)


def room_under_limits() -> tuple[int, int] | None:
    """Return the limit that leaves least room, and this room, in bytes; None where there is no limit."""
    rooms = [(limit, max(0, limit - counted.current_bytes)) for counted, limit in _limited]
    return min(rooms, key=lambda each: each[1], default=None)


def counter_with_limit() -> CountedMemory | None:
    """Return the counter of the outermost limit of this process, which has counted longest; None without one."""
    return _limited[0][0] if _limited else None


@contextmanager
def _counter(library: Any, parent: int | None, *, this_thread: bool) -> Iterator[CountedMemory]:
    handle = library.madpipe_open(parent, this_thread)
    if not handle:
        raise RuntimeError(
            "the memory of CPU tensors cannot be counted, because this process has set an allocator without a raw "
            "deleter: start without it"
        )
    counted = CountedMemory(library, handle)
    try:
        yield counted
    finally:
        counted._end()


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(str(_compiled()))
    for name, result, arguments in (
        ("open", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_bool]),
        ("close", None, [ctypes.c_void_p]),
        ("current", ctypes.c_int64, [ctypes.c_void_p]),
        ("peak", ctypes.c_int64, [ctypes.c_void_p]),
        ("reset_peak", None, [ctypes.c_void_p]),
        ("limit", None, [ctypes.c_void_p, ctypes.c_int64]),
    ):
        function = getattr(library, f"madpipe_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _compiled() -> Path:
    """Return the library, compiled once for each version of its source and of torch."""
    folder = Path(torch.__file__).parent
    flags = [
        "-O2", "-std=c++17", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{folder / 'include'}", f"-L{folder / 'lib'}",
    ]  # fmt: skip
    key = hashlib.sha256("\n".join([SOURCE.read_text(), torch.__version__, os.uname().machine, *flags]).encode())
    library = _cache_folder() / f"counting_allocator-{key.hexdigest()[:32]}.so"
    if not library.exists():
        _compile(flags, library)
    return library


def _compile(flags: list[str], library: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None or shutil.which(compiler) is None:
        raise RuntimeError(
            f"to count the memory of CPU tensors takes a C++ compiler, and there is no {compiler or COMPILERS[0]} "
            "here: install one (the package g++ or clang), or name yours in the environment variable CXX"
        )
    # Several ranks compile at once: each into a file of its own, which takes its name as a whole.
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        ran = subprocess.run(
            [compiler, *flags, str(SOURCE), "-o", unfinished, "-lc10"],
            capture_output=True, text=True, timeout=COMPILE_SECONDS,
        )  # fmt: skip
        if ran.returncode:
            raise RuntimeError(f"{compiler} cannot compile {SOURCE}:\n{ran.stderr[:2000]}")
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _cache_folder() -> Path:
    """Return the folder of compiled files of this user, or a new one for this process where it cannot be made."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "madpipe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="madpipe-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="madpipe-"))
