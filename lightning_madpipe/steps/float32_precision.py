"""The precision in which a GPU multiplies float32: read, and full for a while.

Torch sets it in two ways: by ``set_float32_matmul_precision`` and ``allow_tf32``, and since 2.9 by the
``fp32_precision`` of each library. Where a program has set the new ones, asking for the old ones may raise; where
it has not, the old ones raise as soon as the new ones say something else. So the old ones are set where all of
them answer, and the new ones elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def float32_precisions() -> list[Any]:
    """The precisions of products and convolutions, comparable with those of another time."""
    if not _has_new():
        return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    found = (operation.fp32_precision for operation, _ in [*_of_cuda(), _of_cpu()])
    return ["ieee" if precision == "none" else precision for precision in found]


@contextmanager
def full_precision() -> Iterator[None]:
    """Let all threads of this process compute float32 in full on a GPU: TF32 rounds to 10 bits."""
    with ExitStack() as after:
        if _old_ones_answer():
            _widen(after)
        else:
            _widen_each(after)
        yield


def _old_ones_answer() -> bool:
    cudnn: Any = torch.backends.cudnn
    try:
        _ = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        return False
    # Where TF32 is not allowed to convolutions, they follow their library.
    return not _has_new() or cudnn.fp32_precision != "tf32"


def _widen(after: ExitStack) -> None:
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    if precision != "highest":
        if _has_new():  # this sets that of a CPU, too, which need not have been alike
            after.callback(_back(*_of_cpu()))
        after.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
    if cudnn.allow_tf32:
        after.callback(setattr, cudnn, "allow_tf32", True)
        cudnn.allow_tf32 = False


def _widen_each(after: ExitStack) -> None:
    for operation, library in _of_cuda():
        if operation.fp32_precision == "tf32":
            after.callback(_back(operation, library))
            operation.fp32_precision = "ieee"


def _back(operation: Any, library: Any) -> Callable[[], None]:
    """What sets the precision of an operation to what it is now; where the library has it, to that one's."""
    before = operation.fp32_precision
    if library.fp32_precision == before:
        before = "none"
    return lambda: setattr(operation, "fp32_precision", before)


def _has_new() -> bool:
    return hasattr(torch.backends, "fp32_precision")


def _of_cuda() -> list[tuple[Any, Any]]:
    """What has a precision of its own on a GPU, each with the library that gives it one else."""
    cudnn: Any = torch.backends.cudnn
    return [(torch.backends.cuda.matmul, cudnn), (cudnn.conv, cudnn), (cudnn.rnn, cudnn)]


def _of_cpu() -> tuple[Any, Any]:
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul, mkldnn
